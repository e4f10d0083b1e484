"""Whose fault a failure is that shows in both groups, and how long a candidate may take."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerlane import problems
from peerlane.errors import HarnessError
from peerlane.evaluate import wire
from peerlane.evaluate.correctness import case_runner
from peerlane.evaluate.correctness.case_runner import CaseRunner
from peerlane.evaluate.messages import Request
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.rank_interface import CandidateInterface
from peerlane.evaluate.requirements import missing_on_virtual_node
from peerlane.settings import Deadlines

FAULT = GroupFailure("cuda_error", "correctness", "an illegal memory access was encountered")


class Ranks:
    """A group that fails whenever it is asked, or never does."""

    world_size = 2

    def __init__(self, failure: GroupFailure | None) -> None:
        self._failure = failure
        self.spaces: set[str] = set()
        self.asked: list[tuple[str, bool]] = []
        """every operation, and whether it runs code of the candidate"""

    def begin(self, *_: Any, **__: Any) -> None:
        pass

    def finish(self) -> list[Any]:
        if self._failure is not None:
            raise self._failure
        return [None]

    def ask(self, request: Any, *_: Any, calls: bool = True, **__: Any) -> list[Any]:
        self.asked.append(((request[0] if isinstance(request, list) else request).op, calls))
        return self.finish()

    def log_tail(self) -> str:
        return ""


def runner(ours: GroupFailure | None, theirs: GroupFailure | None) -> tuple[CaseRunner, list[str]]:
    dropped: list[str] = []
    session = SimpleNamespace(
        trusted=Ranks(ours), deadlines=Deadlines(), shares_faults=False, drop_trusted=lambda: dropped.append("trusted")
    )
    problem = problems.get(1)
    made = CaseRunner(session, Ranks(theirs), problem, problem.cases("small", 2)[0], "check", 4)  # type: ignore[arg-type]
    return made, dropped


def test_a_fault_that_takes_our_ranks_along_is_the_candidates() -> None:
    theirs = GroupFailure("cuda_error", "stress", "theirs")
    made, dropped = runner(FAULT, theirs)
    with pytest.raises(GroupFailure, match="theirs"), made.trusted.keeping_device_busy([0.0]):
        raise theirs
    assert dropped == ["trusted"]


def test_a_fault_of_our_ranks_alone_is_ours() -> None:
    made, dropped = runner(FAULT, None)
    with pytest.raises(HarnessError, match="trusted ranks failed at judge_outputs"):
        made.judge("correctness")
    assert dropped == ["trusted"]


def test_a_slow_reference_gives_a_candidate_more_time() -> None:
    made, _ = runner(None, None)
    assert made.deadline(30, calls=10) == 30
    made.reference_s = 0.5
    assert made.deadline(30, calls=1) == 30
    assert made.deadline(30, calls=10) > 100


def test_the_requests_that_run_code_of_the_candidate() -> None:
    """Only those can hang."""
    made, _ = runner(None, None)
    candidate, plan = made.candidate, wire.BlockPlan(1, ())
    candidate.attach_case(made.case, [{}])  # type: ignore[list-item]
    candidate.call([0], "first_call", 1.0)
    candidate.call_under_stress([Request(CandidateInterface.call_under_stress, "check", [], [], [], [], ())], 1.0)
    candidate.prepare_block("eager", "candidate", plan, 1.0)
    candidate.warm_up_block(1.0)
    candidate.ready_block(0)
    candidate.run_block(1.0)
    candidate.describe_outputs(1)
    candidate.recopy_output(0, "stress")
    candidate.profile_block(1, "", 1.0, timeline=False)
    candidate.list_loaded_code()
    candidate.detach_case()
    asked = made.group.asked  # type: ignore[attr-defined]
    assert {op for op, calls in asked if calls} == {
        *("call", "call_under_stress", "prepare_block", "warm_up_block", "run_block", "profile_block")
    }
    assert len(asked) == 12


@pytest.mark.parametrize(
    ("message", "missing"),
    [
        ("RuntimeError: CUDA error: invalid device ordinal", "a GPU for every rank"),
        ("DistBackendError: NCCL error in init.cc, invalid argument (run with NCCL_DEBUG=WARN)", "a GPU for every rank"),
        ("DistBackendError: ncclSystemError: ncclSocketInit: connecting to address with family 1 is neither AF_INET(2) nor ...", "NCCL"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", None),
        ("TypeError: invalid argument for all_reduce", None),
    ],
)
def test_what_ranks_that_share_a_gpu_cannot_do(message: str, missing: str | None) -> None:
    found = missing_on_virtual_node(message)
    assert found is None if missing is None else missing in str(found)


class Comparing(Ranks):
    """Trusted ranks that take ``seconds`` for a comparison on the clock of a test."""

    def __init__(self, clock: list[float], seconds: list[float]) -> None:
        super().__init__(None)
        self._clock, self._seconds, self.judges = clock, seconds, list[list[int]]()

    def ask(self, request: Any, *_: Any, **__: Any) -> Any:
        self._clock[0] += self._seconds.pop(0)
        self.judges.append(request.arguments["judges"])
        return [wire.Judgement([wire.SlotScore(0)], [], None)] * 4


@pytest.mark.parametrize(
    ("shares_gpus", "seconds", "sampled"),
    [(True, [1.5, 0.4, 0.4], False), (True, [7.6, 0.4, 0.4], True), (True, [1.5, 0.9, 0.3], True), (False, [7.6, 7.6, 7.6], False)],
)
def test_one_rank_is_compared_where_comparing_takes_long_on_a_shared_gpu(
    shares_gpus: bool, seconds: list[float], sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(case_runner, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    made, _ = runner(None, None)
    trusted, session = Comparing(clock, seconds), cast(Any, made.session)
    session.trusted, session.place, made.layouts = trusted, SimpleNamespace(shares_gpus=shares_gpus), [cast(Any, None)] * 4
    for phase in ("first_call", "correctness", "stress"):
        made._waiting = ["random"]
        made.judge(cast(Any, phase))
    assert trusted.judges[0] == [] and made.samples_ranks is sampled
    assert [len(judges) for judges in trusted.judges[2:]] == [int(sampled)]
    assert all(judge in range(4) for judges in trusted.judges for judge in judges)


def test_every_rank_has_its_turn_to_be_compared() -> None:
    made, _ = runner(None, None)
    made.layouts = [cast(Any, None)] * 4
    turns = [[made._next_judge() for _ in range(4)] for _ in range(30)]
    assert all({*turn} == {0, 1, 2, 3} for turn in turns) and len({*map(tuple, turns)}) > 1
