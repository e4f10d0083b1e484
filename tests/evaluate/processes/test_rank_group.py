"""The supervisor's side of a rank group, with the test as the ranks and their leader."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from peerlane.errors import HarnessError, ProtocolError
from peerlane.evaluate.correctness.case_runner import verdict_of
from peerlane.evaluate.messages import Request
from peerlane.evaluate.processes import leader
from peerlane.evaluate.processes.group_failure import GroupFailure, root_cause
from peerlane.evaluate.processes.limit import Limit, OutOfTime
from peerlane.evaluate.processes.protocol import MAX_MESSAGE_BYTES, Channel
from peerlane.evaluate.processes.rank_group import BuildTime, EmulatedRankGroup, RankGroup
from peerlane.evaluate.rank_interface import BlockInterface, CandidateInterface, LoadingInterface, RankInterface, TrustedInterface


@dataclass
class Far:
    """The other ends of a group's sockets."""

    leader: Channel
    ranks: list[Channel]

    def all_send(self, *messages: dict[str, Any]) -> None:
        """Has every rank send these."""
        for channel in self.ranks:
            for message in messages:
                channel.send(message)


def both_ends(kind: type[RankGroup], ranks: int) -> Iterator[tuple[RankGroup, Far]]:
    sockets = [socket.socketpair() for _ in range(1 + ranks)]
    near, far = [Channel(here) for here, _ in sockets], [Channel(there) for _, there in sockets]
    yield kind("candidate", near[0], near[1:], [], []), Far(far[0], far[1:])
    for channel in [*near, *far]:
        channel.close()


@pytest.fixture
def pair() -> Iterator[tuple[RankGroup, Far]]:
    yield from both_ends(RankGroup, 2)


@pytest.fixture
def group(pair: tuple[RankGroup, Far]) -> RankGroup:
    return pair[0]


@pytest.fixture
def far(pair: tuple[RankGroup, Far]) -> Far:
    return pair[1]


USE_DEVICE = Request(BlockInterface.use_device)


def failure_of(group: RankGroup, match: str | None = None) -> GroupFailure:
    with pytest.raises(GroupFailure, match=match) as caught:
        group.finish()
    return caught.value


def test_answers_come_back_in_the_order_of_the_ranks(group: RankGroup, far: Far) -> None:
    group.begin(Request(RankInterface.initialize), "spawn", 5)
    for rank in (1, 0):
        assert far.ranks[rank].receive() == {"op": "initialize"}
        far.ranks[rank].send({"ok": True, "answer": rank})
    assert group.finish() == [0, 1]


def test_an_answer_counts_that_comes_between_the_selector_s_look_and_the_report_of_the_end(
    group: RankGroup, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader tells in one breath that both ranks have ended; rank 1 answered after the selector had looked."""
    group.begin(Request(RankInterface.initialize), "spawn", 5)
    far.ranks[0].send({"ok": True, "answer": 0})
    far.leader.send({"exited": 0, "status": 0})
    read_control = group._leader.read

    def answered_meanwhile(phase: str) -> GroupFailure | None:
        if not group._leader.exits:
            far.ranks[1].send({"ok": True, "answer": 1})
            far.leader.send({"exited": 1, "status": 0})
        return read_control(phase)

    monkeypatch.setattr(group._leader, "read", answered_meanwhile)
    assert group.finish() == [0, 1]


def test_answers_that_waited_longer_than_the_deadline_count(group: RankGroup, far: Far) -> None:
    """A warm group comes up in seconds and may be collected minutes later."""
    group.begin(USE_DEVICE, "spawn", 0.05)
    far.all_send({"ok": True})
    time.sleep(0.1)
    assert len(group.finish()) == 2


def test_a_rank_that_does_not_answer_hangs_and_is_named(group: RankGroup, far: Far) -> None:
    group.begin(USE_DEVICE, "first_call", 0.1)
    far.ranks[0].send({"ok": True})
    failure = failure_of(group)
    assert (failure.kind, failure.phase, failure.ranks, failure.deadline_s) == ("hang", "first_call", (1,), 0.1)


@pytest.mark.parametrize(
    ("had", "answered"),
    [((0.1, 0.2, 0.1, 0.2), True), ((0.3, 0.0, 0.3, 0.0), False), ((0.01, 0.01, 0.01, 0.01), False), (None, False)],
    ids=["kept_from_cores", "had_its_seconds", "sleeps", "not_told"],
)
def test_a_busy_import_has_its_cpu_seconds(
    had: tuple[float, ...] | None, answered: bool, group: RankGroup, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that others keep from its core is waited for beyond the deadline; one that sleeps, or has had its share, is not."""
    monkeypatch.setattr(leader, "_ANSWER_S", 10.0 if had else 0.1)

    def lead() -> None:
        assert far.leader.receive() == {"core_time": "tell"}
        if had:
            far.leader.send({"core_time": had})
        if answered:
            far.all_send({"ok": True})

    thread = threading.Thread(target=lead)
    thread.start()
    with contextlib.nullcontext() if answered else pytest.raises(GroupFailure, match="no answer"):
        assert len(group.ask(USE_DEVICE, "import", 0.3, counts_cpu=True)) == 2
    thread.join(10)


def test_only_code_of_the_candidate_can_hang(group: RankGroup, far: Far) -> None:
    group.begin(Request(CandidateInterface.recopy_output, "case", 0), "stress", 0.1, calls=False)
    far.ranks[0].send({"ok": True})
    failure = failure_of(group)
    assert (failure.kind, failure.ranks) == ("no_answer", (1,))
    verdict = verdict_of(failure)
    assert verdict.kind == "runtime_error" and "rank(s) 1 for 0.1 s to recopy_output" in verdict.reason


@pytest.mark.parametrize(("earlier_s", "named"), [(0.0, (0, 1)), (60.0, ())], ids=["one_call", "many_calls"])
def test_a_limit_names_ranks_whose_one_call_took_half_of_all(earlier_s: float, named: tuple[int, ...], group: RankGroup) -> None:
    """Else other calls returned, and one that had just begun is no hang."""
    group.limit = Limit(0.3)
    group.limit.start()
    group.limit.called_s = earlier_s
    with pytest.raises(OutOfTime) as caught:
        group.ask(Request(CandidateInterface.call, "case", "candidate", [0]), "first_call", 60)
    assert caught.value.ranks == named and (caught.value.call_s > 0) == bool(named) and caught.value.called_s >= 0.3 + earlier_s - 0.1
    group.limit.close()


def test_a_limit_blames_no_rank_for_what_is_not_its_code(group: RankGroup) -> None:
    group.limit = Limit(0.2)
    group.limit.start()
    with pytest.raises(OutOfTime) as caught:
        group.ask(Request(LoadingInterface.detach_case, "case"), "spawn", 60, calls=False)
    assert caught.value.ranks == ()
    group.limit.close()


def test_time_to_compile_is_taken_from_no_call_and_no_time_limit(group: RankGroup, far: Far) -> None:
    group.building, group.limit = BuildTime(60), Limit(0.2)
    group.limit.start()
    group.begin(USE_DEVICE, "first_call", 0.1)

    far.all_send({"building": True})
    built = threading.Timer(0.4, far.all_send, [{"building": False}, {"ok": True}])
    built.start()
    assert len(group.finish()) == 2
    built.join()
    assert 59 < group.building.left_s < 59.8


def test_who_compiles_for_too_long_hangs_in_the_build(group: RankGroup, far: Far) -> None:
    """Also who only says that it does, and again and again."""
    group.building = BuildTime(0.2)
    for _ in range(2):
        group.begin(USE_DEVICE, "first_call", 0.1)
        far.ranks[1].send({"building": True})
        far.ranks[0].send({"ok": True})
        failure = failure_of(group)
        assert (failure.kind, failure.phase, failure.ranks, failure.deadline_s) == ("hang", "build", (1,), 0.2)
    assert group.building.left_s == 0


def test_a_failure_ends_the_wait_for_the_others(group: RankGroup, far: Far) -> None:
    group.begin(USE_DEVICE, "correctness", 60)
    far.ranks[1].send({"ok": False, "error": {"kind": "cuda_error", "message": "illegal address"}})
    begin = time.monotonic()
    failure = failure_of(group, "illegal address")
    assert (failure.kind, failure.rank) == ("cuda_error", 1)
    assert time.monotonic() - begin < 5


def test_an_exit_is_reported_with_its_status_though_children_keep_the_socket_open(group: RankGroup, far: Far) -> None:
    group.begin(USE_DEVICE, "correctness", 60)
    far.leader.send({"exited": 0, "status": 3})
    assert failure_of(group, "exited with status 3").rank == 0


def test_a_group_is_asked_one_thing_at_a_time(group: RankGroup) -> None:
    group.begin(USE_DEVICE, "correctness", 5)
    assert group.busy
    with pytest.raises(HarnessError, match="busy with correctness"):
        group.ask(USE_DEVICE, "timing", 5)


def test_a_rank_that_ended_explains_the_error_of_one_that_waited_for_it(group: RankGroup, far: Far) -> None:
    group.begin(USE_DEVICE, "correctness", 60)
    far.ranks[0].send({"ok": False, "error": {"kind": "runtime_error", "message": "connection closed by peer"}})
    far.leader.send({"exited": 1, "status": -9})
    failure = failure_of(group, "SIGKILL")
    assert (failure.kind, failure.rank) == ("exit", 1)


GAVE_UP = """loading
terminate called after throwing an instance of 'c10::AcceleratorError'
  what():  CUDA error: an illegal address
Exception raised from query at CUDAEvent.h:107
"""


@pytest.mark.parametrize(
    ("told", "how"),
    [({"ending": 1}, "died, and waits for its device to be freed"), ({"exited": 1, "status": -6}, "was ended by signal SIGABRT")],
    ids=["its end takes long", "it has ended"],
)  # fmt: skip
def test_a_rank_that_gives_up_while_others_wait_is_named_with_its_words(
    group: RankGroup, far: Far, tmp_path: Path, told: dict[str, int], how: str
) -> None:
    logs = [tmp_path / f"log{rank}" for rank in range(2)]
    logs[0].write_text("terminate called by somebody else")
    logs[1].write_text(GAVE_UP)
    group._logs = [os.open(log, os.O_RDONLY) for log in logs]
    group.begin(USE_DEVICE, "correctness", 60)
    far.leader.send(told)
    failure = failure_of(group)
    said = "terminate called after throwing an instance of 'c10::AcceleratorError' what(): CUDA error: an illegal address"
    assert (failure.kind, failure.rank, failure.message) == ("exit", 1, f"rank 1 {how}: {said}")
    assert verdict_of(failure).kind == "runtime_error"


@pytest.mark.parametrize(
    "error", [None, "runtime_error", {}, *({"kind": kind, "message": "x"} for kind in ([], {}, None, 7, "hang", "exit"))]
)
def test_an_error_of_no_known_kind_is_garbage(error: Any, group: RankGroup, far: Far) -> None:
    group.begin(USE_DEVICE, "correctness", 5)
    far.all_send({"ok": False, "error": error})
    assert failure_of(group, "neither ok nor an error").kind == "garbage"


@pytest.mark.parametrize("kind", ["long", "deep"])
def test_a_request_that_cannot_be_encoded_reaches_no_rank(kind: str, group: RankGroup, far: Far) -> None:
    """What a hostile rank wrote as UTF-8 may be three times as long when it is passed on."""
    value: Any = "\u00e9" * (MAX_MESSAGE_BYTES // 6 + 1)
    if kind == "deep":
        value = []
        for _ in range(100_000):
            value = [value]
    with pytest.raises(ProtocolError):
        group.ask(
            [Request(TrustedInterface.collect_outputs, "case", [0], [0], [described], []) for described in ({}, value)], "correctness", 5
        )
    assert not group.busy
    group.begin(Request(RankInterface.exit), "exit", 5)
    assert [channel.receive() for channel in far.ranks] == [{"op": "exit"}] * 2


@pytest.mark.parametrize(
    "answer",
    [
        {"ok": True}, {"ok": True, "answer": -1}, {"ok": True, "answer": None}, {"ok": True, "answer": 1, "more": 2},
        {"ok": True, "more": 1}, {"ok": 1, "answer": 1}, {"answer": 1}, {"ok": True, "answer": "1"}, {"ok": True, "ranks": [1]},
    ],
)  # fmt: skip
def test_an_answer_to_another_request_is_garbage(answer: dict[str, Any], group: RankGroup, far: Far) -> None:
    group.begin(Request(RankInterface.initialize), "spawn", 5)
    far.ranks[0].send({"ok": True, "answer": 1})
    far.ranks[1].send(answer)
    failure = failure_of(group)
    assert (failure.kind, failure.phase, failure.rank) == ("garbage", "spawn", 1)


@pytest.fixture
def emulated() -> Iterator[tuple[EmulatedRankGroup, Far]]:
    """Three ranks in one process."""
    for group, far in both_ends(EmulatedRankGroup, 1):
        group.emulated_ranks = 3
        yield group, far


def test_emulated_ranks_are_asked_and_answer_in_one_message(emulated: tuple[EmulatedRankGroup, Far]) -> None:
    group, far = emulated
    group.begin([Request(LoadingInterface.detach_case, space) for space in "abc"], "spawn", 5)
    assert far.ranks[0].receive() == {"op": "detach_case", "ranks": [{"space": "a"}, {"space": "b"}, {"space": "c"}]}
    far.ranks[0].send({"ok": True})
    assert group.finish() == [None] * 3
    group.begin(Request(RankInterface.initialize), "spawn", 5)
    assert far.ranks[0].receive() == {"op": "initialize"}
    far.ranks[0].send({"ok": True, "ranks": [{"answer": pid} for pid in range(3)]})
    assert group.finish() == [0, 1, 2]


@pytest.mark.parametrize("ranks", [None, {}, [], [{"answer": 1}] * 2, [{"answer": 1}, {"answer": 1}, {}], [{"answer": 1}] * 2 + [3]])
def test_every_emulated_rank_must_answer(ranks: Any, emulated: tuple[EmulatedRankGroup, Far]) -> None:
    group, far = emulated
    group.begin(Request(RankInterface.initialize), "spawn", 5)
    far.ranks[0].send({"ok": True, "ranks": ranks})
    assert failure_of(group, "malformed").kind == "garbage"


def test_of_ranks_that_lost_a_shared_gpu_the_one_that_knows_why_is_named() -> None:
    lost = GroupFailure("cuda_error", "first_call", "unspecified launch failure", rank=1)
    told = GroupFailure("cuda_error", "first_call", "unspecified launch failure\nmoe_up: rank 0 (storer) waited for rank 2", rank=0)
    assert root_cause(lost, told) is told and root_cause(told, lost) is told


def test_a_long_call_tells_how_long_it_is_waited_for(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluator's own requests do not: no candidate hangs there."""
    monkeypatch.setattr("peerlane.evaluate.processes.rank_group._LONG_CALL_S", 0.0)
    monkeypatch.setattr("peerlane.evaluate.processes.rank_group._REPORT_EVERY_S", 0.05)
    told: list[tuple[str, float]] = []
    group.tell_wait = lambda phase, left_s: told.append((phase, left_s))
    with pytest.raises(GroupFailure, match="no answer"):
        group.ask(Request(RankInterface.exit), "exit", 0.1, calls=False)
    assert told == []
    with pytest.raises(GroupFailure, match="no answer from rank"):
        group.ask(Request(RankInterface.exit), "first_call", 2.0)
    left = [seconds for _, seconds in told]
    assert left and {phase for phase, _ in told} == {"first_call"}
    assert left == sorted(left, reverse=True) and 0 < left[-1] <= left[0] <= 2.0


def test_ranks_that_make_no_progress_hang_long_before_the_deadline(group: RankGroup, far: Far) -> None:
    """What the leader saw before the request says nothing about it."""
    far.leader.send({"still_s": 60})
    begin = time.monotonic()
    telling = threading.Timer(0.3, far.leader.send, [{"still_s": 61}])
    telling.start()
    with pytest.raises(GroupFailure) as caught:
        group.ask(Request(CandidateInterface.call, "case", "candidate", [0]), "first_call", 60, quiet_s=0.2)
    assert (caught.value.kind, caught.value.ranks, caught.value.deadline_s, caught.value.stuck) == ("hang", (0, 1), 0.2, True)
    assert 0.2 <= time.monotonic() - begin < 10
    telling.join()
