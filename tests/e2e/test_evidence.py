"""What stands behind a verdict: fresh inputs everywhere, known wrong answers refused, no speed where none was measured."""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from e2e.runs import GOOD, PATIENT, judge
from peerlane import problems
from peerlane.evaluate.pipeline import CHECKED_SLOTS
from peerlane.sandbox.isolation import choose

AUDITED_SLOTS = 2 * CHECKED_SLOTS
"""of the timed case: every slot once more, then again, some of them recorded"""

DIARY = '''
"""Right, and notes down what it is given."""

import hashlib
import os

import torch.distributed as dist


def solution(tensor):
    with open("{folder}/" + os.environ["RANK"], "a") as diary:
        contents = hashlib.sha256(bytes(tensor.clone().untyped_storage())).hexdigest()
        diary.write(f"{{tensor.numel()}} {{contents}}\\n")
    total = tensor.clone()
    dist.all_reduce(total)
    return total
'''

# Wrong answers in the problem's own shapes: what a candidate may return that does no work, or no communication.
WRONG_ANSWERS = {
    "1_zeros": "torch.zeros_like(tensor)",
    "1_uninitialised": "torch.empty_like(tensor)",
    "8_blocks_reversed": "torch.cat(tensor.chunk(dist.get_world_size())[::-1])",
    "13_no_communication": "A_local @ B_local",
    "18_local_statistics": "(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + variance_epsilon)).to(local_weight.dtype) * local_weight",
}


def null_candidate(name: str, folder: Path) -> Path:
    problem = problems.get(int(name.partition("_")[0]))
    path = folder / f"{name}_pytorch.py"
    lines = ["import torch", "import torch.distributed as dist", "", f"def solution({', '.join(problem.parameters)}):"]
    if "(x " in WRONG_ANSWERS[name]:
        lines.append("    x = local_hidden_states.float()")
    path.write_text("\n".join([*lines, f"    return {WRONG_ANSWERS[name]}", ""]))
    return path


def test_null_answers_are_wrong_results(tmp_path: Path) -> None:
    results = judge(*(null_candidate(name, tmp_path) for name in WRONG_ANSWERS))
    assert {result.candidate.name: result.verdict.kind for result in results} == {
        f"{name}_pytorch": "wrong_result" for name in WRONG_ANSWERS
    }


def test_inputs_are_never_the_same_twice(tmp_path: Path) -> None:
    """Other contents on every rank, in every slot, in every case and in every run; at rest and under stress."""
    runs, stressed = 2, 0
    for run in range(runs):
        (tmp_path / str(run)).mkdir()
        candidate = tmp_path / f"1_diary{run}_pytorch.py"
        candidate.write_text(DIARY.format(folder=tmp_path / str(run)))
        (result,) = judge(candidate, isolation="L0", deadlines=PATIENT)  # what is confined keeps no diary; its audit must end, too
        assert result.correct, result.verdict
        stressed += sum(item.stressed_calls for item in result.correctness)
    seen: Counter[str] = Counter()
    calls, at_rest = 0, 0
    for run, rank in itertools.product(range(runs), range(2)):
        entries = [line.split() for line in (tmp_path / str(run) / str(rank)).read_text().splitlines()]
        at_rest += CHECKED_SLOTS * len(problems.get(1).cases("small", 2)) + AUDITED_SLOTS
        calls += len(entries)
        long = [contents for numel, contents in entries if int(numel) > 64]  # few elements may well repeat by chance
        seen.update(long)
    assert calls == at_rest + 2 * stressed and stressed > 0
    assert set(seen.values()) == {1} and seen.total() > calls / 2


@pytest.mark.parametrize("world_size", [2, 4])
def test_evidence_of_a_correct_result(world_size: int) -> None:
    (result,) = judge(GOOD, world_sizes=(world_size,))
    assert result.correct, result.verdict
    assert [item.case for item in result.correctness] == [case.key for case in problems.get(1).cases("small", world_size)]
    for number, item in enumerate(result.correctness):
        at_rest = CHECKED_SLOTS + (AUDITED_SLOTS if number == 0 else 0)
        assert (item.slots - item.stressed_slots, item.timed_slots) == (at_rest, 0)
        assert (item.stressed_slots > 0) == (item.stressed_calls > 0) and item.stressed_slots <= item.stressed_calls
        assert 1 <= item.integer_slots <= item.slots
        assert 0 <= item.max_error_over_tolerance <= 1
    assert result.correctness[0].stressed_calls > 0
    assert [item.mode for item in result.speed] == ["eager", "graph"]
    assert all(item.status == "not_measured" and "no GPU" in item.why for item in result.speed)
    assert result.speed_in("eager") is None
    assert (result.device, result.isolation, result.log_tail) == ("cpu", choose(None, "cpu").tier, "")
    assert set(result.stage_seconds) == {"spawn", "import", "first_call", "correctness", "stress", "audit", "exit"}
    assert result.environment["software"]["torch"]


def test_reference_is_its_own_candidate() -> None:
    results = judge("reference", problems="1,7,13")
    assert [(result.problem.id, result.verdict.kind) for result in results] == [(1, "correct"), (7, "correct"), (13, "correct")]
    assert all(result.candidate.backend == "reference" and result.candidate.path is None for result in results)


def test_modules_beside_a_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules beside a candidate do not replace the ones that it, or the evaluator, means; in the working directory neither."""
    monkeypatch.chdir(tmp_path)
    for name in ("torch.py", "sitecustomize.py", "json.py", "peerlane.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')\n")
    candidate = tmp_path / GOOD.name
    candidate.write_bytes(GOOD.read_bytes())
    (result,) = judge(candidate)
    assert result.correct, result.verdict
