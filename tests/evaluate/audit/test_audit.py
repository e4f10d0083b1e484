"""What the auditor makes of the ranks' reports, which may be lies, and what the custom track says to it."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from peerlane import problems
from peerlane.common.place import CPU, GPUS, Place
from peerlane.evaluate import wire
from peerlane.evaluate.audit.audit import Auditor
from peerlane.evaluate.candidates import reference_candidate
from peerlane.evaluate.correctness.case_runner import Rejected
from peerlane.evaluate.node import Node
from peerlane.evaluate.pipeline import EvaluationPipeline
from peerlane.evaluate.plan import Job
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.processes.session import Session
from peerlane.problems.contract import Case
from peerlane.results.record import Track
from peerlane.settings import Deadlines, TimingRules

NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def recorded(device: dict[str, int] | None = None, **changes: Any) -> wire.Recording:
    counts = {"two_shot": 1} if device is None else device
    return replace(wire.Recording({"cuLaunchKernel": 1}, counts, ["begin", "end"], 0, 10_000, [], None, None), **changes)


def with_marker(recording: wire.Recording, marker: str) -> wire.Recording:
    """The recording whose marks have this secret in front."""
    return replace(recording, marks=[f"{marker}:{name}" for name in recording.marks])


class Answers:
    """Stands in for a trial or a speed trial of four slots on two ranks, which answer with these recordings."""

    slots, samples_ranks = 4, False
    calls: ClassVar = {"graph": 4}

    def __init__(self, recording: wire.Recording, *, collectives: int = 0, rank_1: wire.Recording | None = None) -> None:
        self.of_ranks = (recording, recording if rank_1 is None else rank_1)
        self.collectives = collectives
        self.session = SimpleNamespace(deadlines=SimpleNamespace(first_call=1.0))
        self.discard = lambda: None
        self.case = SimpleNamespace(world_size=2)
        self.runner = self
        self.checked: list[int] = []

    def refresh_inputs(self, slots: int, *, mixed: bool) -> None: ...

    def check(self, phase: str, deadline_s: float, slots: Sequence[int], marker: str | None = None) -> list[wire.Called]:
        self.checked += slots
        return [
            wire.Called([{}], False, [with_marker(recording, marker)] if marker else [], self.collectives) for recording in self.of_ranks
        ]

    def profile_block(self, mode: str, marker: str) -> list[wire.Recording]:
        return [with_marker(recording, marker) for recording in self.of_ranks]


def auditor(recording: wire.Recording, place: Place = GPUS, **more: Any) -> Auditor:
    made = Auditor(place)
    runner: Any = Answers(recording, **more)
    made.audit_calls(runner)
    return made


def objection(made: Auditor, *, must_move: bool = True) -> tuple[str, str] | None:
    found = made.violation(must_move=must_move)
    return None if found is None else (found.kind, found.what)


def test_own_kernels_pass() -> None:
    made = auditor(recorded())
    record = made.record()
    assert objection(made) is None
    assert record is not None and record.own_communication
    assert record.kernels == {"own": 1} and record.kernel_names == ("two_shot",) and 1 <= record.calls <= 3


def test_one_rank_s_nccl_is_enough() -> None:
    made = auditor(recorded(), rank_1=recorded({NCCL: 1}))
    kind, what = objection(made) or ("", "")
    assert kind == "track_violation" and NCCL in what and "audited call" in what


def test_a_block_that_replays_nccl() -> None:
    made = auditor(recorded())
    speed: Any = Answers(recorded({NCCL: 4, "two_shot": 4}))
    made.audit_block(speed, "graph")
    record = made.record()
    assert (objection(made) or ("", ""))[0] == "track_violation"
    assert record is not None and record.block_modes == ("graph",) and record.kernels == {"nccl": 1, "own": 1}


def test_collectives_behind_the_recordings() -> None:
    kind, what = objection(auditor(recorded(), collectives=3)) or ("", "")
    assert kind == "track_violation" and "12 collectives" in what  # in four calls


def test_collectives_of_timed_blocks() -> None:
    made = auditor(recorded())
    made.count_timed(8)
    assert (objection(made) or ("", ""))[0] == "track_violation"


def test_nothing_seen_is_no_proof() -> None:
    blind = auditor(recorded({}))
    assert blind.saw_nothing and (objection(blind) or ("", ""))[0] == "track_violation"
    assert objection(blind, must_move=False) is None
    assert not auditor(recorded({}), place=CPU).saw_nothing
    assert auditor(recorded({}, host={}), place=CPU).saw_nothing


@pytest.mark.parametrize(
    "change",
    [
        {"marks": []},
        {"marks": ["begin"]},
        {"marks": ["begin", "end", "end"]},
        {"marks": ["begin", "over"]},
        {"functions": 0},
        {"replaced": ["torch.profiler.profile"]},
    ],
)
def test_a_profiler_that_was_interfered_with(change: dict[str, Any]) -> None:
    made = auditor(recorded(**change))
    record = made.record()
    assert (objection(made) or ("", ""))[0] == "integrity_failure"
    assert record is not None and not record.complete and not record.own_communication


def test_the_evaluators_own_functions_may_be_replaced_in_no_track() -> None:
    assert (
        auditor(recorded()).integrity_failure is None and auditor(recorded(replaced=["torch.profiler.profile"])).integrity_failure is None
    )
    found = auditor(recorded(replaced=["torch.profiler.profile", "peerlane.evaluate.ranks.timed_block._elapsed"])).integrity_failure
    assert found is not None and found.what.endswith(": peerlane.evaluate.ranks.timed_block._elapsed, torch.profiler.profile")


def test_a_list_of_functions_that_was_emptied_is_allowed_in_no_track() -> None:
    found = auditor(recorded(functions=3)).integrity_failure
    assert found is not None and "compared 3 functions of the evaluator" in found.what


def test_a_record_names_the_most_frequent_operators_only() -> None:
    record = auditor(recorded(host={f"c10d::made_up_{number}": 1 + number for number in range(100)})).record()
    assert record is not None and len(record.operators) == 32 and "c10d::made_up_99" in record.operators


@pytest.mark.parametrize(("samples_ranks", "called", "checked"), [(False, 4, 8), (True, 1, 4), (True, 2, 2)])
def test_few_calls_are_audited_where_comparing_takes_long(samples_ranks: bool, called: int, checked: int) -> None:
    runner: Any = Answers(recorded())
    runner.samples_ranks = samples_ranks
    made = Auditor(GPUS)
    made.audit_calls(runner, called=called)
    assert len(runner.checked) == checked and made.audited >= 1


def test_no_calls_no_record() -> None:
    assert Auditor(GPUS).record() is None and Auditor(GPUS).mechanisms() == ()


class BrokenAudit(EvaluationPipeline):
    """An examination whose audit loses the ranks."""

    def _audit_calls(self, case: Case, speed: Any) -> None:
        self.auditor = Auditor(GPUS)
        raise GroupFailure("runtime_error", "audit", "killed", rank=1)


def pipeline(track: Track, *, healthy: bool = True) -> BrokenAudit:
    problem = problems.get(1)
    job = Job(reference_candidate(), problem, "small", 2, ("eager",), track=track)
    made = BrokenAudit(Session("cpu", 2, Deadlines()), job, cast(Node, None), TimingRules(), lambda _: None)
    made.group.healthy = healthy
    return made


CASE = problems.get(1).cases("small", 2)[0]


def test_an_audit_that_fails_is_a_flag_in_the_open_track() -> None:
    made = pipeline("open")
    made._audit(CASE, None)
    assert made.flags == {"audit_failed"} and made.auditor is None and not made.group.healthy


def test_an_audit_that_fails_is_the_candidate_s_failure_in_the_custom_track() -> None:
    with pytest.raises(GroupFailure, match="killed"):
        pipeline("custom")._audit(CASE, None)


def test_ranks_that_are_lost_before_the_audit_do_not_pass_the_custom_track() -> None:
    with pytest.raises(Rejected) as rejected:
        pipeline("custom", healthy=False)._audit(CASE, None)
    assert rejected.value.verdict.kind == "track_violation" and "before the audit" in rejected.value.verdict.reason
    made = pipeline("open", healthy=False)
    made._audit(CASE, None)
    assert made.flags == set()
