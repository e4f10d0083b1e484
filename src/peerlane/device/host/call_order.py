"""Comparison of the order of calls on all ranks, for debugging: ``PEERLANE_CHECK=1``.

Kernels that wait for peers run one after the other on each rank, so a rank that calls A, then B beside one that calls B, then A waits for
ever. Before every call each rank says in the store where it is, and waits for the others of the call's group. One of them that waits in
another call, which this rank has not come to, is the breach: both say so, with both places in the program.
"""

import json
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from peerlane import settings
from peerlane.errors import DeviceTimeout, UsageError

LOOK_S = 0.5
"""After so long it is looked where the others are."""
_SKIPPED = tuple(str(Path(module.__file__ or "").parent) for module in (settings, torch))


@dataclass(frozen=True)
class Call:
    """A call on one rank: number ``number`` of ``group``, whose ranks are ``members``."""

    group: str
    number: int
    what: str
    place: str
    members: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.what} at {self.place} (call {self.number} of ranks {list(self.members)})"


class CallOrder:
    """The calls of one process, which is rank ``rank`` of all."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._lock = threading.RLock()
        self._counts: dict[str, int] = {}

    def enter(self, group: str, members: Sequence[int], what: str, limit_s: float) -> None:
        """Return once all ``members`` make their next call of ``group``. Raises UsageError if they call something else, in this group or
        in another one that waits for this rank, and DeviceTimeout after ``limit_s``."""
        with self._lock:
            number = self._counts.get(group, 0)
            call = Call(group, number, what, caller_place(), tuple(members))
            own = json.dumps(asdict(call))
            self._store.set(self._key(group, number, self._rank), own)
            self._store.set(f"order/at/{self._rank}", own)
            begin = time.monotonic()
            for member in members:
                if member != self._rank:
                    self._wait(call, member, begin, limit_s)
            self._counts[group] = number + 1
            calls = {member: self._call(self._key(group, number, member)) for member in members}
            if len({other.what for other in calls.values()}) > 1:
                listed = "\n".join(f"  rank {member}: {other}" for member, other in calls.items())
                raise UsageError(f"the ranks of a group made different calls:\n{listed}\nexpected the same calls in one order on all ranks")
            if number >= 2:
                self._store.delete_key(self._key(group, number - 2, self._rank))

    def _wait(self, call: Call, member: int, begin: float, limit_s: float) -> None:
        key, pause = self._key(call.group, call.number, member), 1e-4
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            waited = time.monotonic() - begin
            if waited < LOOK_S:
                continue
            there = self._call(f"order/at/{member}") if self._store.check([f"order/at/{member}"]) else None
            # Looked at again, for it may have come meanwhile.
            if there is not None and self._rank in there.members and self._not_made(there) and not self._store.check([key]):
                raise UsageError(
                    f"ranks {self._rank} and {member} wait for each other in different calls:\n  rank {self._rank}: {call}\n"
                    f"  rank {member}: {there}\nexpected the calls of all groups and threads in one order on all ranks"
                )
            if waited > limit_s:
                last = "none so far" if there is None else str(there)
                raise DeviceTimeout(
                    f"rank {member} did not come to {call} of rank {self._rank} within {limit_s:g} s; its last call: {last}"
                )

    def _not_made(self, there: Call) -> bool:
        return there.number >= self._counts.get(there.group, 0)

    def _call(self, key: str) -> Call:
        fields = json.loads(self._store.get(key))
        return Call(**{**fields, "members": tuple(fields["members"])})

    @staticmethod
    def _key(group: str, number: int, rank: int) -> str:
        return f"order/{group}/{number}/{rank}"


@cache
def call_order() -> CallOrder:
    """The calls of this process. Needs an initialised process group."""
    store = dist.distributed_c10d._get_default_store()
    return CallOrder(store.clone() if hasattr(store, "clone") else store, dist.get_rank())


def caller_place() -> str:
    """The innermost line of the caller's own code."""
    own = [frame for frame in traceback.extract_stack() if not frame.filename.startswith((*_SKIPPED, "<"))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "an unknown place"
