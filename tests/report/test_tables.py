"""The table of results: one source of rows for the terminal and for Markdown."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from peerlane.errors import UsageError
from peerlane.evaluate.results.reader import read_results
from peerlane.evaluate.results.result import Mechanism
from peerlane.report.tables import RESULT_COLUMNS, TextTable, environment_lines, mechanism_lines, reasons, result_table
from sample_results import hung, measured, on_cpu, own_audit, result, wrong


def test_one_row_per_measured_mode() -> None:
    assert result_table([result()]).rows == [
        (
            "1_allreduce_cuda",
            "1 allreduce",
            "pkb",
            "4",
            "correct",
            "eager",
            "40.0",
            "20.0",
            "2.00 [1.96, 2.04]",
            "yes",
            "50% of nvlink (measured)",
        ),
        (
            "1_allreduce_cuda",
            "1 allreduce",
            "pkb",
            "4",
            "correct",
            "graph",
            "30.0",
            "29.8",
            "1.01 [0.99, 1.03]",
            "no",
            "50% of nvlink (measured)",
        ),
    ]


def test_faster_needs_more_than_the_noise() -> None:
    (row,) = result_table([result(modes=("graph",), speed=(measured("graph", 110.0, 100.0, noise_floor=0.1),))]).rows
    assert row[RESULT_COLUMNS.index("speedup [95 %]")] == "1.10 [1.08, 1.12]"
    assert row[RESULT_COLUMNS.index("faster")] == "no"


def test_on_cpu_nothing_is_measured() -> None:
    (row,) = result_table([on_cpu()]).rows
    assert row[4:] == ("correct", "eager, graph", *["not measured"] * 5)
    assert reasons([on_cpu()]) == [
        "eager not measured: device times need CUDA GPUs",
        "graph not measured: device times need CUDA GPUs",
    ]


def test_a_failure_has_one_row_without_figures_and_one_reason() -> None:
    (row,) = result_table([hung()]).rows
    assert row[4:] == ("hang", *["-"] * 6)
    assert reasons([hung(), result(), wrong()]) == [
        "1_allreduce_cuda, problem 1 allreduce, pkb, W=4: hang: first_call: rank(s) 1 not done after 20 s",
        "1_allreduce_cuda, problem 1 allreduce, pkb, W=4: wrong_result: sum is wrong on rank 2 (case 1/small/ragged_bf16/w4, slot 3); "
        "elementwise: error 3, allowed 0.1 at [0, 7]: got 1, expected 4",
    ]


def test_flags_and_variant_are_named() -> None:
    sample = result(flags=("aliased_output",))
    sample = sample.model_copy(update={"problem": sample.problem.model_copy(update={"variant": "pkb"})})
    row = result_table([sample]).rows[0]
    assert row[1] == "1 allreduce (pkb)" and row[4] == "correct (aliased_output)"


def test_the_custom_track_is_named() -> None:
    (row, _) = result_table([result(track="custom", audit=own_audit(), flags=("aliased_output",))]).rows
    assert row[RESULT_COLUMNS.index("verdict")] == "correct (custom track, aliased_output)"


def test_mechanisms_are_told_of_audited_results() -> None:
    push = Mechanism(name="tma", confidence="seen", evidence="instructions in peerlane.device kernel push")
    signal = Mechanism(name="sm_load_store", confidence="possible", evidence="instructions in peerlane.device kernel push")
    assert mechanism_lines([result(audit=own_audit(), mechanisms=(signal, push)), result(), result(audit=own_audit())]) == [
        "1_allreduce_cuda, problem 1 allreduce, pkb, W=4 moves data by: sm_load_store (possible), tma (seen)",
        "1_allreduce_cuda, problem 1 allreduce, pkb, W=4 moves data by: nothing that was recognised",
    ]


def test_markdown_and_terminal_show_the_same_cells() -> None:
    table = result_table([result(), wrong()])
    markdown = table.markdown().splitlines()
    assert len(markdown) == 2 + len(table.rows) and markdown[1].count("---:") == 3
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(table.rich())
    text = console.export_text()
    for row in table.rows:
        assert all(cell in text for cell in row)
        assert f"| {' | '.join(row)} |" in markdown


def test_markdown_escapes_bars_and_line_breaks() -> None:
    table = TextTable(("a",))
    table.add("x|y\nz")
    assert table.markdown().splitlines()[-1] == "| x\\|y z |"


def test_a_row_needs_every_cell() -> None:
    with pytest.raises(ValueError, match="got 1 cells"):
        TextTable(("a", "b")).add("x")


def test_environment_is_named_once() -> None:
    assert environment_lines([result(), wrong(), on_cpu(environment={})]) == [
        "Node: 4x NVIDIA H200, NVLink, driver 580; torch 2.11.0, nccl 2.28.9; evaluator 0.1.0.",
        "Node: unknown; software unknown; evaluator 0.1.0.",
    ]


def test_results_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text("\n".join(item.model_dump_json() for item in (result(), wrong())) + "\n")
    assert read_results(file) == [result(), wrong()]


def test_a_last_line_that_a_killed_run_left_unfinished_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    lines = [item.model_dump_json() for item in (result(), wrong())]
    file.write_text("\n".join(lines))
    assert read_results(file) == [result(), wrong()], "a last line that lacks its end alone is whole"
    file.write_text("\n".join([*lines, lines[0][:500]]))
    assert read_results(file) == [result(), wrong()]
    for other in ("my notes", lines[0][:500] + "\n"):
        file.write_text("\n".join([*lines, other]))
        with pytest.raises(UsageError, match="line 3 is not a result"):
            read_results(file)


def test_another_kind_of_file_is_told_in_one_line(tmp_path: Path) -> None:
    calibrations = Path(__file__).parents[2] / "results" / "h200x2" / "calibration.jsonl"
    with pytest.raises(UsageError, match=r"line 1 is not a result \(run_id: Field required\): expected a results.jsonl that"):
        read_results(calibrations)
    (tmp_path / "latin.jsonl").write_bytes(b"caf\xe9\n")
    with pytest.raises(UsageError, match="line 1 is not a result"):
        read_results(tmp_path / "latin.jsonl")


def test_a_damaged_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(result().model_dump_json() + "\n{}\n")
    with pytest.raises(UsageError, match=r"results\.jsonl, line 2 is not a result"):
        read_results(file)
    with pytest.raises(UsageError, match=r"there is no file"):
        read_results(tmp_path / "absent.jsonl")


@pytest.mark.parametrize("room", [200, 110, 80, 60])
def test_a_narrow_terminal_is_shown_what_matters(room: int) -> None:
    """Every word of what is left fits on its line, and what is left out is named; first what says nothing anyway."""
    results = [on_cpu(), wrong()]
    screen = Console(width=room, record=True, file=io.StringIO())
    screen.print(result_table(results).rich(screen.width))
    shown = screen.export_text()
    header, table = shown.splitlines()[1], shown.split("for ")[0]
    left_out = [name for name in RESULT_COLUMNS if name not in header]
    assert all(word in table for word in ("1_allreduce_cuda", "wrong_result", "correct"))
    assert bool(left_out) == (room < 150) == ("--json" in shown)
    assert all(name in " ".join(shown.split()) for name in left_out)
    if room == 110:
        assert "utilisation" in left_out and "problem" not in left_out and "preset" not in left_out


def test_what_says_something_is_left_out_after_what_does_not() -> None:
    screen = Console(width=100, record=True, file=io.StringIO())
    screen.print(result_table([result()]).rich(100))
    header = screen.export_text().splitlines()[1]
    assert "utilisation" not in header and "reference us" not in header and "speedup" in header and "mode" in header
