"""Whole solutions on emulated ranks: right ones are right and clean, and a bug in host or device code is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from device.judged import cases, judge, require_correct
from peerlane import problems, solutions
from peerlane.results.verdict import WrongResult

EXAMPLES = Path(__file__).parents[2] / "examples" / "cuda"
FILES = {**solutions.files(), "1_allreduce": EXAMPLES / "1_allreduce_cuda.py", "13_gemm_allreduce": EXAMPLES / "13_gemm_allreduce_cuda.py"}
QUICK = (1, 8, 16, "1_allreduce")
LONG = (39, 54, 55, 56)
"""Solutions with attention, which take seconds a case: two of them, and more in tests of their own."""


def number_of(path: Path) -> int:
    match = re.match(r"p?(\d+)_", path.name)
    assert match
    return int(match[1])


@pytest.mark.parametrize("name", QUICK)
def test_a_solution_is_right_and_clean(name: int | str) -> None:
    number = number_of(FILES[name])
    require_correct(judge(FILES[name], number, cases(problems.get(number), 2)[0]))


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", FILES)
def test_a_solution_is_right_in_every_small_case(name: int | str, world_size: int) -> None:
    number = number_of(FILES[name])
    tried = cases(problems.get(number), world_size)
    for case in tried if number not in LONG else tried[: 2 if world_size == 2 else 0]:
        require_correct(judge(FILES[name], number, case))


def twin(tmp_path: Path, number: int, old: str, new: str) -> Path:
    """A solution with one thing changed."""
    text = solutions.files()[number].read_text()
    assert text.count(old) == 1
    path = tmp_path / f"{number}_twin_cuda.py"
    path.write_text(text.replace(old, new))
    return path


def test_a_bug_in_host_code_is_a_wrong_result(tmp_path: Path) -> None:
    path = twin(tmp_path, 2, "all_gather(tensor)", "all_gather(tensor).flip(0)")
    judged = judge(path, 2, cases(problems.get(2), 2)[0])
    assert judged.outcome.failure is None and isinstance(judged.wrong, WrongResult) and judged.wrong.wrong_ranks == (0, 1)
    assert re.search(r"^wrong result: gathered is wrong on rank 0 .*at \[.*\]: got .*, expected ", str(judged))


def test_results_that_do_not_last_are_said_to(tmp_path: Path) -> None:
    path = twin(tmp_path, 43, "The next call overwrites the results, which lie in the arena.", "")
    judged = judge(path, 43, problems.get(43).case("small", "fp32", 2), schedules=1)
    assert judged.correct and judged.outcome.aliased
    with pytest.raises(AssertionError, match="memory that its next call overwrites, and does not say so"):
        require_correct(judged)


def test_an_argument_that_a_call_changes_is_told(tmp_path: Path) -> None:
    path = twin(
        tmp_path,
        2,
        "return communicator().all_gather(tensor)",
        "out = communicator().all_gather(tensor)\n    tensor.zero_()\n    return out",
    )
    judged = judge(path, 2, cases(problems.get(2), 2)[0])
    assert "argument `tensor` was changed, which the problem does not allow (rank 0" in str(judged)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "    received = torch",
            "    if communicator().member.rank == 1:\n        return tensor\n    received = torch",
            "rank 0: a launch of exchange_packets; rank 1: the end of call 0",
        ),
        (
            "communicator().all_to_all",
            "communicator().arena.group.exchange(0) if communicator().member.rank else 0\n    communicator().all_to_all",
            "rank 0: a launch of exchange_packets; rank 1: an exchange",
        ),
    ],
    ids=["returns_early", "exchanges_alone"],
)
def test_ranks_that_do_different_things_are_told(tmp_path: Path, old: str, new: str, says: str) -> None:
    case = next(case for case in cases(problems.get(8), 2) if case.label == "block_bf16")
    judged = judge(twin(tmp_path, 8, old, new), 8, case)
    assert judged.outcome.failure is not None and says in str(judged.outcome.failure[1])


def test_a_rank_that_another_group_s_ranks_wait_for_is_told(tmp_path: Path) -> None:
    path = tmp_path / "1_stuck_cuda.py"
    path.write_text(
        "from peerlane.device import group_of\ndef solution(tensor):\n"
        "    if group_of().rank == 0:\n        raise SystemExit\n    group_of().exchange(1)\n"
    )
    outcome = judge(path, 1, cases(problems.get(1), 2)[0]).outcome
    assert outcome.failure is not None and isinstance(outcome.failure[1], SystemExit)
