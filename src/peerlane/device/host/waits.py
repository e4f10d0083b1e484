"""How long kernels of a group wait for other ranks, and how all of these waits are ended.

A kernel's wait ends early for one of two reasons: the group's time limit has passed, or somebody has set the group's stop word. A wait that
runs out of time sets the word itself, so that all waits of the group end, in all kernels that follow too. Where ranks are processes of one
machine they share the word; else each has its own, and the group's watch (``watch.py``) passes the news on. Behind that the group is of no
use: launches raise what :meth:`Waits.check` says.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch

from peerlane.errors import DeviceTimeout, UsageError

DEFAULT_LIMIT_S = 600.0
"""As NCCL's."""
LONGEST_LIMIT_S = 12 * 3600.0
"""Waits inside a block, which know no limit, trap after twice as long."""
_HOST_PATIENCE_S = 300.0
"""The time limit of a wait, in seconds, unless the job has its own."""
ENDED_AT = 4
"""Where in an arena the word lies that says so; of arena.cuh."""
ROLES = ("block", "loader", "consumer", "storer", "communicator")
"""Names of ``peerlane::Role``, in order."""
OUT_OF_TIME, TOLD_TO_STOP = 1, 2
_log = logging.getLogger("peerlane.device")


class WaitRecord(ctypes.Structure):
    """What the waits of an arena's kernels ask of the host, and what they leave behind. Mirrors ``peerlane::FaultRecord``."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("set", "rank", "role", "source", "block", "slot", "expected", "seen")),
        ("limit_ns", ctypes.c_uint64),
        ("traps", ctypes.c_uint32),
        ("stop", ctypes.c_uint32),
    )


RECORD_WORDS = ctypes.sizeof(WaitRecord) // 4


class Waiting(Protocol):
    """An arena: kernels wait with it."""

    name: str
    record: WaitRecord
    follows: bool
    """Whether the arena has no limit of its own and takes the group's."""


class Waits:
    """The waits of one group's kernels, on one of its ranks.

    ``traps``: a wait that runs out of time traps, as it did before there was anybody to tell: for candidates of the evaluator."""

    def __init__(self, limit_s: float = DEFAULT_LIMIT_S, *, traps: bool = False) -> None:
        self.limit_s, self.traps = limit_s, traps
        self.stop_address = 0
        """The address of the group's stop word on the device; 0 if every arena has its own, in its record."""
        self.reason = ""
        """The reason why the group has stopped; empty while it runs or the reason is unknown."""
        self.told: Callable[[], str] = str
        """Returns what other ranks reported about the stop; may take two seconds."""
        self.tell: Callable[[str], object] = str
        """Reports a stop to the other ranks."""
        self._word = (ctypes.c_uint32 * 1)()
        self._words: Any = self._word
        self._arenas: WeakSet[Waiting] = WeakSet()
        self._lock = threading.Lock()

    def share(self, words: Any, address: int) -> None:
        """From now on ``words[0]`` is the stop word, which kernels find at ``address``."""
        self._words, self.stop_address = words, address

    def add(self, arena: Waiting, limit_s: float | None) -> None:
        """An arena of the group has been made; ``limit_s`` is its own limit, if it has one."""
        arena.record.traps = int(self.traps)
        arena.record.limit_ns = int((self.limit_s if limit_s is None else limit_s) * 1e9)
        with self._lock:
            self._arenas.add(arena)

    def set_limit(self, seconds: float) -> None:
        """From now on waits end after ``seconds``, those under way too."""
        if not 0 < seconds <= LONGEST_LIMIT_S:
            raise UsageError(f"a time limit of {seconds:g} s: expected more than 0 and at most {LONGEST_LIMIT_S:g} s")
        self.limit_s = seconds
        for arena in self._all():
            if arena.follows:
                arena.record.limit_ns = int(seconds * 1e9)

    @property
    def host_limit_s(self) -> float:
        """How long host code waits for other ranks' host code, which may have something to compile: as long as the job allows."""
        return max(self.limit_s, _HOST_PATIENCE_S) if self.traps else self.limit_s

    @property
    def stopped(self) -> bool:
        """Whether waits have ended early, or are to."""
        return bool(self._words[0])

    def stop(self, reason: str) -> None:
        """End all waits of the group, now and from now on, on this rank at least."""
        with self._lock:
            first, self.reason = not self.reason, self.reason or reason
        self._words[0] = 1
        for arena in self._all():
            arena.record.stop = 1
        if first:
            _log.error("%s", reason)

    def faults(self) -> list[str]:
        """What waits of this rank that ran out of time have reported."""
        return [message for arena in self._all() if (message := describe_fault(arena.record, arena.name))]

    def _all(self) -> list[Waiting]:
        with self._lock:  # the group's watch asks too
            return list(self._arenas)

    def why(self) -> str:
        """Why the group has stopped."""
        if known := self.known():
            self.tell(known)
        return known or self.told() or "a rank of the group has ended its waits"

    def known(self) -> str:
        """What this rank knows of it by itself."""
        return self.reason or "; ".join(self.faults())

    def check(self) -> None:
        """Raise DeviceTimeout if the group has stopped: why, and what kernels of this rank waited for."""
        if not self._words[0]:
            return
        waited = [
            f"{_waited(arena.record, arena.name)} {_missing(arena.record)}" for arena in self._all() if arena.record.set == TOLD_TO_STOP
        ]
        said = "; ".join([self.why(), *waited])
        raise DeviceTimeout(f"{said}; this group can not be used any more: destroy it and make a new one, on all ranks")


def describe_fault(record: WaitRecord | Sequence[int], kernel: str = "") -> str:
    """What a record says of a wait that ran out of time, or an empty string. ``record`` may be its 32-bit words."""
    if not isinstance(record, WaitRecord):
        record = WaitRecord.from_buffer_copy((ctypes.c_uint32 * RECORD_WORDS)(*(word & 0xFFFFFFFF for word in record)))
    if record.set != OUT_OF_TIME:
        return ""
    return (
        f"{_waited(record, kernel)} longer than {record.limit_ns / 1e9:g} s {_missing(record)}; "
        f"see what rank {record.source} does meanwhile: has it launched the same kernel, with the same grid, on one stream?"
    )


def _waited(record: WaitRecord, kernel: str) -> str:
    role = ROLES[record.role] if record.role < len(ROLES) else f"role {record.role}"
    return f"{f'{kernel}: ' if kernel else ''}rank {record.rank} ({role}) waited for rank {record.source}"


def _missing(record: WaitRecord) -> str:
    return f"(block {record.block}, slot {record.slot}, expected {record.expected}, seen {record.seen})"


def record_in(words: torch.Tensor) -> WaitRecord:
    """The record that lies in a tensor of the host, which has to be kept."""
    return WaitRecord.from_address(words.data_ptr())
