"""What a trusted rank found, and the verdict that follows from it: tables with made-up answers, no ranks."""

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from peerlane import problems
from peerlane.evaluate import wire
from peerlane.evaluate.correctness.case_runner import CaseRunner, Rejected, verdict_of
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.results.verdict import Phase, Unstable, Verdict, WrongResult, WrongType
from peerlane.settings import Deadlines

PROBLEM = dataclasses.replace(problems.get(1), replicated=True)
PHASES = get_args(Phase)
ABOVE = math.nextafter(1.0, 2.0)
BESIDE = wire.OutOfBounds(1, "argument tensor", "0 bytes behind its end")


def score(ratio: float = 0.0, slot: int = 0, digest: int = 7, **more: Any) -> wire.SlotScore:
    return wire.SlotScore(slot, ratio=ratio, output="output", digests=(("output", digest),), **more)


def found(*slots: wire.SlotScore, changed: tuple[str, ...] = (), beside: wire.OutOfBounds | None = None) -> wire.Judgement:
    return wire.Judgement(list(slots or (score(),)), list(changed), beside)


def verdict(
    *answers: wire.Judgement | wire.OutputComparison, phase: str = "correctness", replicated: bool | tuple[str, ...] = True
) -> Verdict | None:
    """What is said of a candidate whose ranks were found to be so; None: nothing is wrong."""
    again = isinstance(answers[0], wire.OutputComparison)
    told = {"compare_output" if again else "judge_outputs": list(answers)}
    trusted = SimpleNamespace(ask=lambda request, *_, **__: told.get((request[0] if isinstance(request, list) else request).op, []))
    session = SimpleNamespace(trusted=trusted, deadlines=Deadlines(), place=SimpleNamespace(shares_gpus=False))
    problem = dataclasses.replace(PROBLEM, replicated=replicated)
    group: Any = SimpleNamespace(ask=lambda *_, **__: [])
    runner = CaseRunner(session, group, problem, problem.cases("small", 2)[0], "check", 4)  # type: ignore[arg-type]
    runner._waiting = ["random"]
    try:
        runner.recheck_output(0, phase, 0.0) if again else runner.judge(phase)  # type: ignore[arg-type, func-returns-value]
    except Rejected as rejected:
        return rejected.verdict
    return None


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("ratio", "right"), [(0.0, True), (1.0, True), (ABOVE, False), (1.5, False), (2.0, False), (math.inf, False)])
def test_the_tolerance_is_the_bound_and_nothing_beyond_it(ratio: float, right: bool, phase: str) -> None:
    said = verdict(found(), found(score(ratio)), phase=phase)
    assert (said is None) == right
    if said is not None:
        assert isinstance(said, Unstable if phase == "stress" else WrongResult) and said.rank == 1


@pytest.mark.parametrize(
    ("phase", "wrong", "counts"),
    [("timing", 1, (1, 3)), ("timing", 3, None), ("stress", 1, (1, 3)), ("stress", 3, (3, 3)), ("audit", 1, None)],
)
def test_what_is_wrong_in_a_part_of_the_slots_is_unstable(phase: str, wrong: int, counts: tuple[int, int] | None) -> None:
    """Calls at rest were right before. In a timed block that is wrong throughout, it is the result that is wrong."""
    said = verdict(
        found(*(score(2.0 * (slot < wrong), slot) for slot in range(3))), found(*(score(0.0, slot) for slot in range(3))), phase=phase
    )
    if counts is None:
        assert isinstance(said, WrongResult) and said.wrong_ranks == (0,) and said.error_over_tolerance == 2.0
    else:
        assert isinstance(said, Unstable) and (said.wrong_slots, said.compared_slots) == counts


FAULTS = {
    "changed argument": (found(changed=("tensor",)), WrongResult, "argument `tensor`"),
    "out of bounds": (found(beside=BESIDE), WrongResult, "argument tensor"),
    "other bits": (found(score(digest=8)), WrongResult, "output"),
    "other shape": (found(score(mismatch="shape (3,), expected (4,)")), WrongType, ""),
}


@pytest.mark.parametrize("phase", ["correctness", "first_call", "timing", "stress"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_every_fault_of_any_rank_is_told_in_every_phase(fault: str, rank: int, phase: str) -> None:
    answer, kind, output = FAULTS[fault]
    said = verdict(*((answer, found()) if rank == 0 else (found(), answer)), phase=phase)
    differing = fault == "other bits"  # from rank 0, so it is always another rank that differs
    assert isinstance(said, Unstable if differing and phase == "stress" else kind)
    assert said.rank == (1 if differing else rank) and getattr(said, "output", "") == output


@pytest.mark.parametrize(("replicated", "same"), [(False, False), (True, True)])
def test_ranks_have_to_agree_where_the_problem_says_so(replicated: bool, same: bool) -> None:
    said = verdict(found(score(digest=7)), found(score(digest=8)), found(score(digest=7)), replicated=replicated)
    assert (said is not None) == same and (said is None or getattr(said, "rank", None) == 1)


@pytest.mark.parametrize("phase", ["timing", "stress"])
@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        (wire.OutputComparison(None, None), type(None), ""),
        (wire.OutputComparison(0, None), Unstable, "output 0 .*still changing"),
        (wire.OutputComparison(3, None), Unstable, "output 3 .*still changing"),
        (wire.OutputComparison(None, BESIDE), WrongResult, "argument tensor .*0 bytes behind its end"),
    ],
)
def test_the_last_output_is_looked_at_again(answer: wire.OutputComparison, kind: type, reason: str, phase: str) -> None:
    for rank, answers in enumerate(((answer, wire.OutputComparison(None, None)), (wire.OutputComparison(None, None), answer))):
        said = verdict(*answers, phase=phase)
        assert isinstance(said, kind)
        assert said is None or (getattr(said, "rank", None) == rank and re.search(reason, said.reason) is not None)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        ("hang", "hang"), ("garbage", "integrity_failure"), ("exit", "runtime_error"), ("runtime_error", "runtime_error"),
        ("import_error", "import_error"), ("cuda_error", "cuda_error"), ("out_of_memory", "out_of_memory"), ("build_error", "build_error"),
    ],
)  # fmt: skip
def test_what_a_group_failed_by_is_its_verdict(failure: str, kind: str) -> None:
    """A message that no rank writes by itself is a forged one."""
    said = verdict_of(
        GroupFailure(failure, "correctness", "what it said", rank=1, ranks=(1,), deadline_s=2.0), PROBLEM.cases("small", 2)[0]
    )
    assert said.kind == kind and said.phase == "correctness"  # type: ignore[union-attr]
