"""Worker slots, in which candidates are judged. Each has a session of its own. On GPUs there is one slot, or as many as a setting says;
elsewhere there are as many as the cores allow.

A slow evaluation does not count as running: another one begins beside it, so a hang holds up nobody.
"""

import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from peerlane.evaluate.plan import Job
from peerlane.evaluate.processes.limit import Cancelled, Limit
from peerlane.evaluate.processes.rank_group import RankGroup
from peerlane.evaluate.processes.session import Session
from peerlane.evaluate.ranks.builds import Builds, builds_at_a_time
from peerlane.results.result import Result
from peerlane.sandbox.holdings import available_memory

_PATIENCE_S = 3.0  # seconds after which an evaluation counts as slow, as long as none has ended
_SLOW_FACTOR, _MIN_SLOW_S, _MAX_SLOW_S = 2.0, 1.0, 30.0
"""An evaluation counts as slow after this many times the median of the last ones, within these limits in seconds."""
_REMEMBERED = 16  # finished evaluations whose median duration is taken
_BUSY_CORES = 0.67  # cores that one rank keeps busy on average: it waits for a third of its time
_SESSION_BYTES = 1 << 30  # memory that the processes of one session need
_MAX_SLOTS = 16
_POLL_S = 0.1  # seconds between two looks at the running evaluations
_END_S = 15.0  # seconds in which cancelled evaluations have to end


@dataclass
class WorkerSlot:
    """A session, and the state that its last evaluation left."""

    session: Session
    reference_group: RankGroup | None = None
    """The ranks that ran the reference; they serve all of its problems."""
    after_failure: bool = False
    """Whether the last evaluation here left ranks that had to be killed."""
    begun: float = 0.0
    """The time at which the running evaluation began."""
    slow: bool = False
    """Whether the running evaluation counts as slow."""
    alone: bool = False
    """Whether nothing else may be judged while it runs."""


class WorkerSlots:
    """The worker slots of one number of ranks, and the builds of all. ``open_beside`` opens one more session, which shares the first one's
    fork server. The condition ``changed`` guards all state, and is notified when a slot or a build is free."""

    def __init__(self, first: Session, open_beside: Callable[[], Session], usual: int, maximum: int) -> None:
        self.world_size, self.usual, self.maximum = first.world_size, usual, maximum
        self.first = first
        self.changed = threading.Condition()
        self.builds = Builds(first, builds_at_a_time(first), self._tell)
        first.fork_server.sharers = usual if maximum > 1 else 1
        self._open_beside = open_beside
        self._idle, self._busy = [WorkerSlot(first)], list[WorkerSlot]()
        self._sessions = [first]
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)  # durations of the last evaluations

    @classmethod
    def of(cls, first: Session, open_beside: Callable[[], Session]) -> "WorkerSlots":
        """Returns the slots that the machine has room for."""
        setting = first.pool_settings.judged_at_a_time
        if first.place.has_gpus:
            setting = setting or 1
        if setting is not None:
            return cls(first, open_beside, setting, setting)
        cores, room = len(os.sched_getaffinity(0)), max(1, min(_MAX_SLOTS, available_memory() // _SESSION_BYTES))
        if first.place.emulated:  # one process each, whose hangs are noticed at once: a slow one is at work
            return cls(first, open_beside, min(cores, room), min(cores, room))
        usual = max(1, math.ceil(cores / (_BUSY_CORES * first.world_size)))
        return cls(first, open_beside, min(usual, room), room)

    @property
    def capacity(self) -> int:
        """The number of evaluations that are judged, and of those that are compiled meanwhile."""
        with self.changed:
            slow = len(self._busy) - self._at_work() if self.maximum > 1 else 0
            return min(self.maximum, self.usual + slow) + max(1, self.builds.at_a_time)

    def _at_work(self) -> int:
        """Returns the number of evaluations that are not slow. The slow ones leave the cores to them."""
        if self.maximum == 1:
            return len(self._busy)
        now, patience_s = time.monotonic(), _PATIENCE_S
        if self._seconds:
            patience_s = min(_MAX_SLOW_S, max(_MIN_SLOW_S, _SLOW_FACTOR * statistics.median(self._seconds)))
        for slot in self._busy:
            if not slot.slow and now - slot.begun >= patience_s:
                slot.slow = True
                slot.session.let_others_go_first()
        return sum(not slot.slow for slot in self._busy)

    @property
    def idle(self) -> bool:
        """Returns whether no evaluation is running."""
        return not self._busy

    def take(self, *, alone: bool = False) -> WorkerSlot | None:
        """Returns an idle slot, if another evaluation may begin now. ``alone``: it is timed, so nothing else is judged meanwhile."""
        with self.changed:
            if self._busy and (alone or any(slot.alone for slot in self._busy)):
                return None
            if self._at_work() >= self.usual or len(self._busy) >= self.maximum:
                return None
            if not self._idle:
                self._sessions.append(self._open_beside())
                self._idle.append(WorkerSlot(self._sessions[-1]))
            slot = self._idle.pop()
            if alone:
                for session in self._sessions:
                    if session is not slot.session:
                        session.wait_for_starts()  # starts take GPUs and cores from the timed evaluation
            slot.begun, slot.slow, slot.alone = time.monotonic(), False, alone
            self._busy.append(slot)
            return slot

    def give(self, slot: WorkerSlot) -> None:
        """Frees a slot whose evaluation has ended."""
        with self.changed:
            self._seconds.append(time.monotonic() - slot.begun)
            self._busy.remove(slot)
            self._idle.append(slot)
            self.changed.notify_all()

    def close(self) -> None:
        """Ends every process."""
        self.builds.close()
        for session in reversed(self._sessions):
            session.__exit__(None, None, None)

    def _tell(self) -> None:
        with self.changed:
            self.changed.notify_all()


Ended: TypeAlias = list[tuple[Job, "Result | BaseException"]]
"""Jobs that have ended, each with its result or what it raised."""
Judge: TypeAlias = Callable[[Limit | None], Result]
"""Judges one job under a limit."""


class OneByOne:
    """Judges in the thread of the caller. ``limit`` is for all of its jobs together."""

    def __init__(self, slots: WorkerSlots, limit: Limit | None) -> None:
        self._slots, self._limit = slots, limit
        self._ended: Ended = []

    @property
    def any_ended(self) -> bool:
        """Returns whether a job has ended that :meth:`ended` has not returned yet."""
        return bool(self._ended)

    @property
    def running(self) -> bool:
        """Returns whether a job has begun that :meth:`ended` has not returned yet."""
        return self.any_ended

    def begin(self, job: Job, slot: WorkerSlot, judge: Judge) -> None:
        """Judges a job; raises what that raises."""
        try:
            if self._limit is not None and job.timeout is not None:
                self._limit.seconds = job.timeout
                self._limit.start()
            self._ended.append((job, judge(self._limit)))
        finally:
            self._slots.give(slot)

    def ended(self) -> Ended:
        """Returns the jobs that have ended since the last call; waits for a moment if there is none. Raises :class:`Cancelled`."""
        with self._slots.changed:
            if not self._ended:
                self._slots.changed.wait(_POLL_S)
            if self._limit is not None and self._limit.cancelled and not self._ended:
                raise Cancelled
            ended, self._ended = self._ended, []
            return ended

    def stop(self) -> bool:
        """Cancels all running jobs. Returns whether they have ended in time: nothing runs between two calls."""
        return True


class SideBySide(OneByOne):
    """Judges every job in a thread of its own."""

    def __init__(self, slots: WorkerSlots, limit: Limit | None) -> None:
        super().__init__(slots, limit)
        self._limits: dict[threading.Thread, Limit] = {}

    @property
    def running(self) -> bool:
        with self._slots.changed:
            return bool(self._limits or self._ended)

    def begin(self, job: Job, slot: WorkerSlot, judge: Judge) -> None:
        limit = Limit(job.timeout)

        def run() -> None:
            outcome: Result | BaseException
            try:
                limit.start()
                outcome = judge(limit)
            except BaseException as error:
                outcome = error
            with self._slots.changed:
                limit.close()
                del self._limits[thread]
                self._ended.append((job, outcome))
                self._slots.give(slot)

        thread = threading.Thread(target=run, name="peerlane-judge", daemon=True)
        with self._slots.changed:
            self._limits[thread] = limit
            thread.start()

    def stop(self) -> bool:
        with self._slots.changed:
            for limit in self._limits.values():
                limit.cancel()
            return self._slots.changed.wait_for(lambda: not self._limits, _END_S)
