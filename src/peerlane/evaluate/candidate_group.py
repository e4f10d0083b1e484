"""The rank group that an evaluation has for its candidate, and what is known of it."""

from collections.abc import Callable
from dataclasses import dataclass

from peerlane.evaluate.messages import Request
from peerlane.evaluate.processes.limit import Limit
from peerlane.evaluate.processes.rank_group import BuildTime, RankGroup
from peerlane.evaluate.processes.session import Session
from peerlane.evaluate.rank_interface import RankInterface


@dataclass
class CandidateGroup:
    """One rank group after the other, each fresh, but for one that an earlier evaluation of the reference has left. ``ranks`` is the
    present one, or the last one after it was ended."""

    session: Session
    limit: Limit | None = None
    ranks: RankGroup | None = None
    loaded: bool = False
    """True once candidate code is loaded; later failures are its own"""
    healthy: bool = True
    """the ranks answer"""
    reusable: bool = True
    """nothing has happened that leaves the ranks in an unknown state"""
    no_ranks: bool = False
    """rank groups do not come up on this machine"""
    tell_wait: Callable[[str, float], None] | None = None
    """see :class:`RankGroup`"""

    def __post_init__(self) -> None:
        if self.ranks is not None:
            self._adopt(self.ranks)

    def _adopt(self, ranks: RankGroup) -> None:
        """Has a group end with this evaluation, and not with the one that started it."""
        ranks.limit, ranks.tell_wait = self.limit, self.tell_wait
        self.session.mark_core_time(ranks)
        ranks.building = BuildTime(self.session.deadlines.build)

    @property
    def present(self) -> RankGroup:
        """The group; there must be one."""
        assert self.ranks is not None, "take a group first"
        return self.ranks

    def take(self) -> None:
        """Takes a fresh group from the session; raises HarnessError."""
        self.loaded, self.healthy, self.reusable, self.ranks = False, True, True, None
        self.ranks = self.session.take_group()
        self._adopt(self.ranks)

    def load(self, request: Request[None]) -> None:
        """Loads what is judged; raises GroupFailure."""
        self.loaded = True
        self.present.ask(request, "import", self.session.deadlines.load, counts_cpu=True)

    def leave(self) -> tuple[int, ...]:
        """Has the processes end by themselves; returns the ranks that have not."""
        deadline_s = self.session.deadlines.exit
        self.present.ask(Request(RankInterface.exit), "exit", deadline_s, calls=False)  # its exit handlers run behind the answer
        return self.present.await_end(deadline_s)

    def end(self) -> None:
        """Kills the group, if there is one."""
        if self.ranks is not None:
            self.session.end(self.ranks)
