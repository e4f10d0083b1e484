"""Sessions whose ranks share GPUs: what ranks are told, and what happens after a fault, which ends all clients of an MPS server."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerlane.errors import HarnessError
from peerlane.evaluate.processes.rank_group import GroupFailure, RankGroup
from peerlane.evaluate.processes.session import Session
from peerlane.hardware.virtual_node import MpsDaemon, VirtualNode
from peerlane.settings import Deadlines, PoolSettings

MPS, SLICES = VirtualNode(8, 2, "mps"), VirtualNode(8, 2, "time_slices", baseline="nccl")


def test_ranks_are_told_their_gpu_their_environment_and_their_backend() -> None:
    daemon, shared = MpsDaemon(), Session("cuda", 8, Deadlines(), node=MPS)
    shared._daemon = daemon
    told = shared._config()
    assert told["backend"] == "peerlane" and told["gpu_of_rank"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert told["writable"] == [str(daemon.folder)]
    assert all("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in item for item in told["rank_environment"]), "kernels locked up"
    assert len({item["NCCL_HOSTID"] for item in told["rank_environment"]}) == 8
    in_turns = Session("cuda", 8, Deadlines(), node=SLICES)._config()
    assert in_turns["backend"] == "nccl" and "writable" not in in_turns and "CUDA_MPS_PIPE_DIRECTORY" not in in_turns["rank_environment"][0]
    assert Session("cuda", 2, Deadlines())._config() == {"device": "cuda", "backend": "nccl"}
    assert Session("cpu", 2, Deadlines())._config() == {"device": "cpu", "backend": "gloo"}


def test_a_session_keeps_within_the_clients_of_a_server_and_waits_longer_in_time_slices() -> None:
    crowded = Session("cuda", 8, Deadlines(calls=10), PoolSettings(warm_groups=20), node=VirtualNode(8, 1, "mps"))
    assert crowded.pool_settings.warm_groups == 4 and crowded.deadlines.calls == 10
    assert Session("cuda", 8, Deadlines(calls=10), node=SLICES).deadlines.calls == 40


class StandIn:
    """A group that uses its device, or has lost it; and a daemon."""

    def __init__(self, log: list[str], name: str, *, lost: bool = False) -> None:
        self.log, self.name, self.lost, self.busy, self.role = log, name, lost, False, name
        self.alive, self.running = True, tuple[int, ...]()

    def ask(self, request: Any, phase: str, deadline_s: float, **_: Any) -> list[Any]:
        if self.lost:
            raise GroupFailure("cuda_error", phase, "an illegal memory access was encountered")
        return [{}]

    def begin(self, *_: Any, **__: Any) -> None: ...

    def kill(self) -> None:
        self.log.append(f"killed {self.name}")

    def terminate(self, pids: tuple[int, ...]) -> None:
        self.log.append(f"terminated {pids}")

    def await_ready(self) -> None:
        self.log.append("server ready")


@pytest.mark.parametrize("lost", [False, True])
def test_after_a_fault_all_groups_start_anew_once_the_server_is_ready(lost: bool) -> None:
    log, notes = list[str](), list[str]()
    session = Session("cuda", 4, Deadlines(), note=notes.append, node=VirtualNode(4, 1, "mps"))
    session._daemon = cast(MpsDaemon, StandIn(log, "daemon"))
    session._trusted = cast(RankGroup, StandIn(log, "trusted", lost=lost))
    session._pool._waiting.append(cast(RankGroup, StandIn(log, "warm")))
    session.recover_from_fault()
    assert log == (["killed trusted", "killed warm", "server ready"] if lost else [])
    assert len(notes) == lost and session.shares_faults


@pytest.mark.parametrize("running", [(), (1, 2)])
def test_what_a_group_runs_on_the_gpu_is_ended_before_its_processes(running: tuple[int, ...]) -> None:
    log: list[str] = []
    session = Session("cuda", 4, Deadlines(), node=VirtualNode(4, 1, "mps"))
    session._daemon = cast(MpsDaemon, StandIn(log, "daemon"))
    group = StandIn(log, "candidate")
    group.running = running
    session.end(cast(RankGroup, group))
    assert log == [*(["terminated (1, 2)"] if running else []), "killed candidate"]


def test_ranks_that_share_nothing_but_time_are_left_alone() -> None:
    log: list[str] = []
    session = Session("cuda", 4, Deadlines(), node=VirtualNode(4, 1, "time_slices"))
    session._trusted = cast(RankGroup, StandIn(log, "trusted", lost=True))
    session.recover_from_fault()
    assert not log and not session.shares_faults


def test_a_daemon_that_cannot_start_ends_the_session_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: MpsDaemon) -> MpsDaemon:
        raise HarnessError("no daemon")

    monkeypatch.setattr(MpsDaemon, "__enter__", fails)
    with pytest.raises(HarnessError, match="no daemon"), Session("cuda", 4, Deadlines(), node=VirtualNode(4, 1, "mps")):
        pass


def test_candidates_ranks_start_after_the_trusted_ones_have_filled_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    for node in (None, VirtualNode(4, 1, "mps")):
        session = Session("cuda", 4, Deadlines(), node=node)
        session._fork_server = cast(Any, SimpleNamespace(spawn=lambda role, *_: log.append(role) or StandIn(log, role)))
        monkeypatch.setattr(Session, "trusted", property(lambda _: log.append("trusted")))
        session._spawn_candidate()
    assert log == ["candidate", "trusted", "candidate"]


def test_a_session_beside_another_has_an_mps_daemon_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault ends all clients of one server, and must not end another evaluation."""
    made: list[MpsDaemon] = []

    @contextlib.contextmanager
    def daemon(_: VirtualNode) -> Iterator[MpsDaemon]:
        made.append(MpsDaemon())
        yield made[-1]
        made.remove(made[-1])

    monkeypatch.setattr(VirtualNode, "daemon", daemon)
    first = Session("cuda", 8, Deadlines(), node=MPS)
    first._fork_server = cast(Any, SimpleNamespace())
    with Session("cuda", 8, Deadlines(), node=MPS, beside=first) as second:
        assert second._daemon is made[0] and second.shares_faults and not first.shares_faults
    assert not made
