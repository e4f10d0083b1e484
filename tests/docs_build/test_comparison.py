"""Kernels beside their references: one row a problem, nothing that is the same in every row, and a reason for every empty cell."""

import statistics
from typing import Any

from docs.build.comparison import NONE, comparison_report, comparison_table, summary
from docs.build.libraries import NONE_KNOWN, REFERENCES, best_library, candidates
from peerlane import problems
from peerlane.results.result import CandidateInfo, ProblemInfo, Result
from peerlane.results.speed_record import NotMeasured
from peerlane.results.verdict import NotRun
from sample_results import measured, result

SECOND = ProblemInfo(id=2, slug="allgather", variant="default")
WHY = NotMeasured(mode="graph", why="the reference cannot be captured: the host must know")


def test_both_modes_stand_in_one_row() -> None:
    table = comparison_table([result(), result(problem=SECOND, speed=(measured("eager", 90.0, 30.0), WHY))])
    assert table.columns[0] == "problem" and "preset" not in table.columns and "kernel" not in table.columns
    assert table.rows == [
        ("1 allreduce", "6.99", "30.0", "29.8", "1.01 (noise)", "40.0", "20.0", "2.00", "35%"),
        ("2 allgather", "14", NONE, NONE, NONE, "90.0", "30.0", "3.00", "47%"),
    ]


def test_presets_and_kernels_are_named_where_they_differ() -> None:
    sizes = [result(preset=f"sweep_{size}") for size in (16384, 1024)]
    assert [row[1] for row in comparison_table(sizes).rows] == ["1024", "16384"]
    other = CandidateInfo(name="1_other_cuda", path="1_other_cuda.py", sha256="1" * 64, backend="cuda")
    assert [row[1] for row in comparison_table([result(), result(candidate=other)]).rows] == ["1_allreduce_cuda", "1_other_cuda"]


def test_empty_cells_have_their_reasons() -> None:
    found = [result(speed=(measured("eager", 40.0, 20.0), WHY)), result(problem=SECOND, verdict=NotRun(missing="no GPU."), speed=())]
    text = comparison_report(found)
    assert "* The reference cannot be captured in a graph: 1." in text
    assert "* 2 allgather: not_run: no GPU." in text


def test_the_summary_says_what_its_mean_is_of() -> None:
    lines = summary([result(), result(problem=SECOND, speed=(measured("eager", 80.0, 10.0), WHY))])
    assert lines[0] == "* 2 problems correct."
    assert "* eager: 2 problems timed, 2 faster; geometric mean of those timed 4.00." in lines
    assert lines[-1].startswith("* largest speedup: 8.00, of 2 allgather in eager mode; nearest to its bound: 2 allgather, at ")


def test_the_fastest_library_stands_beside_the_kernel() -> None:
    def library(name: str, kernel_us: float, **fields: Any) -> Result:
        known = CandidateInfo(name=name, path=f"{name}.py", sha256="2" * 64, backend="pytorch")
        speeds = {"speed": (measured("eager", 40.0, 40.0), measured("graph", 40.0, kernel_us))}
        return result(candidate=known, **speeds | fields)

    rivals = [
        library("1_allreduce_one_shot_pytorch", 32.0),
        library("1_allreduce_two_shot_pytorch", 25.0),
        library("1_allreduce_wrong_pytorch", 1.0, verdict=NotRun(missing="no GPU"), speed=()),
        library("1_allreduce_large_pytorch", 2.0, preset="sweep_1024"),
        library("2_allgather_other_pytorch", 3.0, problem=SECOND),
    ]
    table = comparison_table([result()], rivals)
    assert table.columns[-1] == "best library" and table.rows[0][-1] == "two_shot 1.60"
    assert "best library" not in comparison_table([result()]).columns


def test_without_a_measurement_the_column_names_a_library() -> None:
    declared = {*REFERENCES, *candidates(), *NONE_KNOWN}
    assert len(declared) == len(REFERENCES) + len(candidates()) + len(NONE_KNOWN)
    other = min(set(problems.numbers()) - declared)
    said = [best_library(result(problem=ProblemInfo(id=n, slug="reducescatter", variant="default")), []) for n in (7, 59, 64, other)]
    assert said == ["low_contention, one_kernel: not measured", "the reference (cuFFT, NCCL)", "none known", "none written"]
    assert declared < set(problems.numbers())


def test_speedups_of_blocks_with_large_copies_are_left_out() -> None:
    plain, copied = measured("eager", 40.0, 20.0), measured("eager", 90.0, 10.0)
    block_us = statistics.median(copied.candidate_blocks_us)
    copied = copied.model_copy(update={"copies_us": 0.3 * block_us})
    assert copied.copies_matter and not copied.model_copy(update={"copies_us": 0.2 * block_us}).copies_matter
    results = [result(speed=(plain,), modes=("eager",)), result(problem=SECOND, speed=(copied,), modes=("eager",))]
    assert "geometric mean of the 1 without (copies) 2.00." in " ".join(summary(results))
    assert "9.00 (copies)" in comparison_report(results)
