"""Ranks as threads of this process that take turns: one runs until it has to wait for others, so a run is the same every time."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from peerlane.errors import PeerlaneError


class RankMismatch(PeerlaneError):
    """The ranks of a group do different things where all have to do the same."""


class Abandoned(BaseException):
    """The end of a rank because another one has failed. Not an Exception, so that no solution catches it."""


class Turns:
    """The turns of ``count`` ranks: which one runs, and what each of the others waits for."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._turn = 0
        self._waits: list[str | None] = [None] * count
        self._able_alone: set[int] = set()
        self._ended = [False] * count
        self.failure: tuple[int, BaseException] | None = None
        """the first rank that failed, and how"""

    def restart(self) -> None:
        """Makes all ranks, which have ended, begin once more."""
        self._turn, self._waits, self._ended = 0, [None] * len(self._waits), [False] * len(self._ended)

    def begin(self, rank: int) -> None:
        """Waits for the rank's first turn."""
        with self._changed:
            self._wait_for_turn(rank)

    def end(self, rank: int, error: BaseException | None = None) -> None:
        """Ends the rank, by an error or as it should."""
        with self._changed:
            self._ended[rank] = True
            if error is not None and not isinstance(error, Abandoned):
                self._fail(rank, error)
            self._pass_on(rank)

    def wait(self, rank: int, what: str, able_alone: bool = False) -> bool:
        """Lets others run until one of them calls ``wake``: returns True. If ``able_alone``, returns False where no rank can go on."""
        with self._changed:
            self._waits[rank] = what
            if able_alone:
                self._able_alone.add(rank)
            self._pass_on(rank)
            self._wait_for_turn(rank)
            self._able_alone.discard(rank)
            return self._waits[rank] is None

    def wake(self, ranks: Collection[int]) -> None:
        """Allows these ranks to go on, when it is their turn."""
        for rank in ranks:
            self._waits[rank] = None

    def _wait_for_turn(self, rank: int) -> None:
        self._changed.wait_for(lambda: self._turn == rank or self.failure is not None)
        if self.failure is not None:
            raise Abandoned

    def _pass_on(self, rank: int) -> None:
        count = len(self._waits)
        able = [other % count for other in range(rank + 1, rank + 1 + count) if not self._ended[other % count]]
        ready = [other for other in able if self._waits[other] is None]
        ready = ready or [other for other in able if other in self._able_alone]
        if ready:
            self._turn = ready[0]
        elif able:
            self._fail(able[0], self.mismatch())
        self._changed.notify_all()

    def mismatch(self) -> RankMismatch:
        """Returns the error that no rank can go on."""
        waits = [f"rank {rank} waits for the others in {what}" for rank, what in enumerate(self._waits) if not self._ended[rank]]
        gone = [f"rank {rank} has returned" for rank, ended in enumerate(self._ended) if ended]
        return RankMismatch(f"no rank can go on: {'; '.join(waits + gone)}")

    def _fail(self, rank: int, error: BaseException) -> None:
        if self.failure is None:
            self.failure = (rank, error)


_ActAlone = Callable[[Mapping[int, Any]], Collection[int]]


class Meeting:
    """The calls that all members of a group make together."""

    def __init__(self, turns: Turns, members: Sequence[int]) -> None:
        self.turns, self.members = turns, tuple(members)
        self._arrived: dict[int, tuple[str, Any, _ActAlone | None]] = {}
        self._result: Any = None

    def meet(
        self,
        rank: int,
        what: str,
        value: Any,
        act: Callable[[list[Any]], Any] = lambda values: values,
        act_alone: _ActAlone | None = None,
    ) -> Any:
        """Returns ``act`` of all members' values, in their order, to every member. ``what`` is the same on all, in words.

        Where no rank can go on, ``act_alone`` does what it can of the values of some members, and returns whose these are.
        """
        self._arrived[rank] = (what, value, act_alone)
        if len(self._arrived) == len(self.members):
            if len({said for said, _, _ in self._arrived.values()}) == 1:
                arrived, self._arrived = self._arrived, {}
                self._result = act([arrived[member][1] for member in self.members])
                self.turns.wake(self.members)
                return self._result
            if not any(alone for _, _, alone in self._arrived.values()):
                raise self._mismatch()
        while rank in self._arrived and not self.turns.wait(rank, what, act_alone is not None):
            assert act_alone is not None, "only such a rank is asked to go on"
            done = act_alone({member: value for member, (_, value, alone) in sorted(self._arrived.items()) if alone})
            if not done:
                raise self._mismatch()
            for member in done:
                del self._arrived[member]
            self.turns.wake(done)
        return self._result

    def _mismatch(self) -> RankMismatch:
        if len(self._arrived) < len(self.members):
            return self.turns.mismatch()
        calls = "; ".join(f"rank {member}: {self._arrived[member][0]}" for member in self.members)
        return RankMismatch(f"the ranks of a group do different things: {calls}; all must make the same calls in the same order")
