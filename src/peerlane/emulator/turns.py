"""Ranks as threads of this process that take turns: one runs until it has to wait for others, so a run is the same every time."""

import threading
from collections.abc import Callable, Sequence
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

    def wait(self, rank: int, what: str) -> None:
        """Lets others run until one of them calls ``wake``."""
        with self._changed:
            self._waits[rank] = what
            self._pass_on(rank)
            self._wait_for_turn(rank)

    def wake(self, ranks: Sequence[int]) -> None:
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
        if ready:
            self._turn = ready[0]
        elif able:
            waits = [f"rank {other} waits for the others in {self._waits[other]}" for other in sorted(able)]
            gone = [f"rank {other} has returned" for other in range(count) if self._ended[other]]
            self._fail(able[0], RankMismatch(f"no rank can go on: {'; '.join(waits + gone)}"))
        self._changed.notify_all()

    def _fail(self, rank: int, error: BaseException) -> None:
        if self.failure is None:
            self.failure = (rank, error)


class Meeting:
    """The calls that all members of a group make together."""

    def __init__(self, turns: Turns, members: Sequence[int]) -> None:
        self.turns, self.members = turns, tuple(members)
        self._arrived: dict[int, tuple[str, Any]] = {}
        self._result: Any = None

    def meet(self, rank: int, what: str, value: Any, act: Callable[[list[Any]], Any] = lambda values: values) -> Any:
        """Returns ``act`` of all members' values, in their order, to every member. ``what`` is the same on all, in words."""
        self._arrived[rank] = (what, value)
        if len(self._arrived) < len(self.members):
            self.turns.wait(rank, what)
            return self._result
        arrived, self._arrived = self._arrived, {}
        if len({said for said, _ in arrived.values()}) > 1:
            calls = "; ".join(f"rank {member}: {arrived[member][0]}" for member in self.members)
            raise RankMismatch(f"the ranks of a group do different things: {calls}; all must make the same calls in the same order")
        self._result = act([arrived[member][1] for member in self.members])
        self.turns.wake(self.members)
        return self._result
