"""Faults at message boundaries: every request of the supervisor is seen, and something breaks just before or behind a chosen one."""

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest

from e2e.runs import EXAMPLES, Heard, wait_for
from peerlane.evaluate.messages import Request
from peerlane.evaluate.processes.fork_client import ForkServer
from peerlane.evaluate.processes.rank_group import RankGroup
from peerlane.sandbox.process_tree import children
from peerlane.settings import PoolSettings, StressRules

GOOD = EXAMPLES / "pytorch" / "8_alltoall_pytorch.py"  # of the problem with the fewest cases
POOL_SETTINGS = PoolSettings(warm_groups=1, builds=0, judged_at_a_time=1, back_off_s=0.01)
ONE_PASS = StressRules(
    calls=3, budget_s=0.0, overtime_s=0.0, min_slots=3, max_slots=3
)  # so that every evaluation has the same few messages


@dataclass(frozen=True)
class Message:
    """A request to the ranks of a group: the ``ordinal``-th of its kind in an evaluation, which was in ``phase``."""

    role: str
    op: str
    ordinal: int
    phase: str = field(default="", compare=False)


Fault: TypeAlias = "Callable[[Switchboard, RankGroup], None]"


@dataclass
class Switchboard:
    """Counts the requests of an evaluation, and calls ``fault`` with the group that is asked ``at``: just before that is sent to any of its
    ranks or, with ``sent``, when they all have it and no answer has been read.

    ``groups`` holds the latest group of every role; ``heard`` must be told what happens.
    """

    leaders: dict[int, int] = field(default_factory=dict)
    groups: dict[str, RankGroup] = field(default_factory=dict)
    heard: Heard = field(default_factory=Heard)
    seen: list[Message] = field(default_factory=list)
    at: Message | None = None
    fault: "Fault | None" = None
    sent: bool = False
    struck: bool = False

    def arm(self, at: Message | None, fault: "Fault | None", *, sent: bool = False) -> None:
        """For the next evaluation."""
        self.at, self.fault, self.sent, self.seen, self.struck = at, fault, sent, [], False

    @contextmanager
    def sending(self, group: RankGroup, op: str) -> Iterator[None]:
        """Around the sending of a request."""
        ordinal = sum((item.role, item.op) == (group.role, op) for item in self.seen)
        message = Message(group.role, op, ordinal, self.heard.phases[-1])
        self.seen.append(message)
        if message == self.at and not self.sent:
            self._strike(group)
        yield
        if message == self.at and self.sent:
            self._strike(group)

    def _strike(self, group: RankGroup) -> None:
        assert self.fault is not None
        self.struck = True
        self.fault(self, group)

    def leader(self, group: RankGroup) -> int:
        """The process that guards the group."""
        return self.leaders[id(group)]


def ranks_of(leader: int) -> set[int]:
    """A leader's children that stay: the parent of the ranks is one of them for some milliseconds."""
    before = children(leader)
    time.sleep(0.1)
    return before & children(leader)


def kill_rank(board: Switchboard, group: RankGroup) -> None:
    """SIGKILL for the last rank."""
    wait_for(lambda: len(ranks_of(board.leader(group))) == group.world_size, 10, "the start of the ranks")
    os.kill(max(ranks_of(board.leader(group))), signal.SIGKILL)
    select.select([group._leader.channel], [], [], 10)  # the leader has noticed


def kill_leader(board: Switchboard, group: RankGroup) -> None:
    """SIGKILL for the process that guards the ranks."""
    os.kill(board.leader(group), signal.SIGKILL)
    select.select([group._leader.channel], [], [], 10)  # its socket has closed


def close_channel(board: Switchboard, group: RankGroup) -> None:
    """The end of the last rank's stream, though its process lives."""
    group._ranks[-1].socket.shutdown(socket.SHUT_RDWR)


def garble(board: Switchboard, group: RankGroup) -> None:
    """Bytes that are no message, before the last rank's answer."""
    group._ranks[-1]._buffer += b"\xff" * 64


def leads_session(pid: int) -> bool:
    """True of leaders, and not of orphans that the fork server has adopted."""
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


@contextmanager
def switchboard() -> Iterator[Switchboard]:
    """Sees everything that is asked of any rank group meanwhile."""
    board = Switchboard()
    begin, spawn = RankGroup.begin, ForkServer.spawn

    def seen_begin(group: RankGroup, requests: Any, phase: str, deadline_s: float, *, calls: bool = True) -> None:
        with board.sending(group, (requests if isinstance(requests, Request) else requests[0]).op):
            begin(group, requests, phase, deadline_s, calls=calls)

    def seen_spawn(fork_server: ForkServer, *arguments: Any) -> RankGroup:
        before = children(fork_server.pid)
        group = spawn(fork_server, *arguments)
        found: set[int] = set()

        def started() -> bool:
            found.update(filter(leads_session, children(fork_server.pid) - before))
            return bool(found)

        wait_for(started, 10, "the start of a leader")
        (board.leaders[id(group)],) = found
        board.groups[group.role] = group
        return group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankGroup, "begin", seen_begin)
        patch.setattr(ForkServer, "spawn", seen_spawn)
        yield board


class LentForkServer(ForkServer):
    """Serves session after session, and the processes that are forked from this one."""

    owner = os.getpid()

    @property
    def alive(self) -> bool:
        return os.getpid() != self.owner or super().alive

    def clear(self) -> bool:
        return False  # it is lent, not kept

    def close(self) -> None:
        self.end_groups()
