"""The time limit of a group's waits for other ranks, and the end of all of them.

A kernel's wait ends early if the group's time limit has passed, or if the group's stop word is set. A wait that runs out of time sets the
word. Then all waits of the group end, also those of later kernels. Ranks that are processes of one machine share the word. Otherwise each
has its own, and the group's watch (``watch.py``) tells the other ranks. A stopped group cannot be used any more: its launches raise the
error of :meth:`Waits.check`.
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
"""The same as NCCL's."""
LONGEST_LIMIT_S = 12 * 3600.0
"""The longest limit. Waits inside a block have none, and trap after twice as long."""
_HOST_PATIENCE_S = 300.0
"""The shortest time, in seconds, that host code waits for other ranks' host code where waits trap."""
ENDED_AT = 4
"""The offset in an arena of the word that says that a wait has ended early, as in arena.cuh."""
ROLES = ("block", "loader", "consumer", "storer", "communicator")
"""Names of ``peerlane::Role``, in order."""
OUT_OF_TIME, TOLD_TO_STOP = 1, 2
_log = logging.getLogger("peerlane.device")


class WaitRecord(ctypes.Structure):
    """The settings of an arena's waits, and the report of one that ran out of time. Mirrors ``peerlane::FaultRecord``."""

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

    ``traps``: a wait that runs out of time traps, as candidates of the evaluator need it."""

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
        """Makes ``words[0]`` the stop word, which kernels find at ``address``."""
        self._words, self.stop_address = words, address

    def add(self, arena: Waiting, limit_s: float | None) -> None:
        """Adds an arena of the group; ``limit_s`` is its own limit, if it has one."""
        arena.record.traps = int(self.traps)
        arena.record.limit_ns = int((self.limit_s if limit_s is None else limit_s) * 1e9)
        with self._lock:
            self._arenas.add(arena)

    def set_limit(self, seconds: float) -> None:
        """Lets waits end after ``seconds``, those under way too."""
        if not 0 < seconds <= LONGEST_LIMIT_S:
            raise UsageError(f"a time limit of {seconds:g} s: expected more than 0 and at most {LONGEST_LIMIT_S:g} s")
        self.limit_s = seconds
        for arena in self._all():
            if arena.follows:
                arena.record.limit_ns = int(seconds * 1e9)

    @property
    def host_limit_s(self) -> float:
        """The seconds for which host code waits for other ranks' host code, which may have something to compile."""
        return max(self.limit_s, _HOST_PATIENCE_S) if self.traps else self.limit_s

    @property
    def stopped(self) -> bool:
        """Returns whether waits have ended early, or have to."""
        return bool(self._words[0])

    def stop(self, reason: str) -> None:
        """Ends all waits of the group, now and later, at least on this rank."""
        with self._lock:
            first, self.reason = not self.reason, self.reason or reason
        self._words[0] = 1
        for arena in self._all():
            arena.record.stop = 1
        if first:
            _log.error("%s", reason)

    def faults(self) -> list[str]:
        """Returns the reports of this rank's waits that ran out of time."""
        return [message for arena in self._all() if (message := describe_fault(arena.record, arena.name))]

    def _all(self) -> list[Waiting]:
        with self._lock:  # the group's watch asks too
            return list(self._arenas)

    def why(self) -> str:
        """Returns why the group has stopped."""
        if reason := self.known():
            self.tell(reason)
        return reason or self.told() or "a rank of the group has ended its waits"

    def known(self) -> str:
        """Returns what this rank itself knows about the stop."""
        return self.reason or "; ".join(self.faults())

    def check(self) -> None:
        """Raises DeviceTimeout if the group has stopped, with the reason and the waits of this rank's kernels."""
        if not self._words[0]:
            return
        waited = [
            f"{_waited(arena.record, arena.name)} {_missing(arena.record)}" for arena in self._all() if arena.record.set == TOLD_TO_STOP
        ]
        message = "; ".join([self.why(), *waited])
        raise DeviceTimeout(f"{message}; this group can not be used any more: destroy it and make a new one, on all ranks")


def describe_fault(record: WaitRecord | Sequence[int], kernel: str = "") -> str:
    """Returns the message of a record of a wait that ran out of time, or an empty string. ``record`` may be its 32-bit words."""
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
    """Returns the record in a tensor of the host, which the caller keeps alive."""
    return WaitRecord.from_address(words.data_ptr())
