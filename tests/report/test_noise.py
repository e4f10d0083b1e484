"""The A/A table and the accuracy that it is held to."""

from __future__ import annotations

from docs.build.sections import acceptance_table
from peerlane.report.noise import acceptance_lines, deviation, noise_table
from peerlane.results.result import CandidateInfo, ProblemInfo, Result
from peerlane.results.speed_record import ModeSpeed
from sample_results import measured, result


def reference_result(problem: int, speedup: float, mode: str = "graph") -> Result:
    """The reference as its own candidate, with this speedup."""
    return result(
        candidate=CandidateInfo(name="reference", sha256="1" * 64, backend="reference"),
        problem=ProblemInfo(id=problem, slug="allreduce", variant="default"),
        modes=(mode,),
        speed=(measured(mode, 40.0 * speedup, 40.0),),
    )


def speed_of(one: Result) -> ModeSpeed:
    speed = one.speed[0]
    assert isinstance(speed, ModeSpeed)
    return speed


def test_deviation_is_the_same_both_ways() -> None:
    assert deviation(speed_of(reference_result(1, 1.05))) == deviation(speed_of(reference_result(1, 1 / 1.05)))


def test_table_has_the_references_alone() -> None:
    results = [reference_result(1, 1.01), result(), reference_result(2, 0.97)]
    table = noise_table(results)
    assert [row[0].split()[0] for row in table.rows] == ["1", "2"]
    assert table.rows[1][6] == "3.1%"


def test_acceptance_needs_both_bounds() -> None:
    good = [reference_result(number, 1.01) for number in range(1, 20)]
    assert "20 of 20 within 2%" in acceptance_lines([*good, reference_result(20, 1.019)])[0]
    assert acceptance_lines([*good, reference_result(20, 1.039)])[0].endswith(": met.")
    assert acceptance_lines([*good, reference_result(20, 1.041)])[0].endswith(": not met.")
    assert acceptance_lines([*good[:-1], reference_result(19, 1.03), reference_result(20, 1.03)])[0].endswith(": not met.")


def test_modes_are_held_to_their_own_bounds() -> None:
    lines = acceptance_lines([reference_result(1, 1.035, "eager"), reference_result(1, 1.035, "graph")])
    assert [line.split(":")[0] for line in lines] == ["eager", "graph"]
    assert lines[0].endswith(": met.")
    assert lines[1].endswith(": not met.")


def test_runs_side_by_side_say_what_was_promised_and_met() -> None:
    good, bad = reference_result(1, 1.0), reference_result(2, 1.3)
    lines = acceptance_table({"good": [good], "bad": [good, bad]}).splitlines()[2:]
    first, second = (line.strip("| ").split(" | ") for line in lines)
    assert first == ["good", "graph", "1", "100% within 2%", "95%", "0.0%", "4%", "yes", str(int(speed_of(good).faster))]
    assert second[2:4] == ["2", "50% within 2%"] and second[5] == "30.0%" and second[7] == "no"
