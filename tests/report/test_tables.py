"""The table of results: one source of rows for the terminal and for Markdown."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from peerlane.report.tables import (
    RESULT_COLUMNS,
    TextTable,
    environment_lines,
    mechanism_lines,
    percent,
    reasons,
    result_table,
    results_report,
)
from peerlane.results.result import Mechanism
from sample_results import ENVIRONMENT, hung, measured, on_cpu, own_audit, result, wrong


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
    """Said once, not in five columns."""
    table = result_table([on_cpu(), wrong()])
    assert table.rows[0][4:] == ("correct", "eager, graph", *["not measured"] * 5)
    assert table.markdown().splitlines()[0] == "| candidate | problem | preset | W | verdict | mode |"
    assert reasons([on_cpu(), on_cpu(preset="small")]) == ["eager, graph not measured: device times need CUDA GPUs"]


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
        "Node: 4x NVIDIA H200, NVLink, driver 580; torch 2.11.0, nccl 2.28.9; evaluator 0.1.0; timing protocol 1.",
        "Node: CPU ranks; software unknown; evaluator 0.1.0; timing protocol 1.",
    ]


def test_virtual_nodes_are_never_in_one_table_with_others() -> None:
    shared = {**ENVIRONMENT, "virtual_node": {"node_kind": "virtual", "ranks_per_gpu": 4, "sharing": "time_slices", "baseline": "nccl"}}
    told = results_report([result(), result(environment=shared), wrong(preset="small")])
    assert told.count("| candidate |") == 2
    real, virtual = told.split("Results of virtual node of 4 ranks per GPU by time slices, on nccl baseline, 4x NVIDIA H200")
    assert real.count("| 1_allreduce_cuda |") == 3 and virtual.count("| 1_allreduce_cuda |") == 2
    assert results_report([result()]).startswith("| candidate |")


def test_a_later_result_replaces_an_earlier_one() -> None:
    """Of the same candidate: equal sources under two names keep a row each."""
    other = result(candidate=result().candidate.model_copy(update={"name": "sample1/1_allreduce_cuda"}))
    rerun = wrong(run_id="later")
    assert results_report([result(), other, rerun]).count("| pkb |") == 1 + 2


@pytest.mark.parametrize("room", [200, 110, 80, 60])
def test_a_narrow_terminal_is_shown_what_matters(room: int) -> None:
    """Every word of what is left fits on its line, and what is left out is named."""
    results = [result(), wrong()]
    screen = Console(width=room, record=True, file=io.StringIO())
    screen.print(result_table(results).rich(screen.width))
    shown = screen.export_text()
    header, table = shown.splitlines()[1], shown.split("for ")[0]
    left_out = [name for name in RESULT_COLUMNS if name not in (header if room >= 80 else shown)]
    assert all(word in table for word in ("1_allreduce_cuda", "wrong_result", "correct"))
    assert bool(left_out) == (80 <= room < 170) == ("no room for the columns" in shown)
    assert all(name in " ".join(shown.split()) for name in left_out)
    if room == 110:
        assert "problem" in left_out and "of bound" not in left_out and "in every row: problem 1 allreduce, W 4, preset pkb" in shown


def test_what_says_something_is_left_out_after_what_does_not() -> None:
    screen = Console(width=100, record=True, file=io.StringIO())
    screen.print(result_table([result(), result(preset="small", world_size=2)]).rich(100))
    shown = screen.export_text()
    header = shown.splitlines()[1]
    assert "problem" not in header and "of bound" not in header and "preset" in header and "W" in header and "speedup" in header
    assert "in every row: problem 1 allreduce, of bound 50% of nvlink (measured)" in shown


def screen(table: TextTable, room: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=room).print(table.rich(room))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_table_without_room_becomes_blocks_with_every_cell() -> None:
    table = TextTable(("name", "where", "time us"), right={"time us"}, spare=("where",))
    table.add("kernel_of_long_name", "nowhere", "12.5")
    table.add("short", "here", "3.0")
    assert "nowhere" in " ".join(screen(table, 60))
    narrower = " ".join(screen(table, 35))
    assert "nowhere" not in narrower and "no room for the columns where" in narrower
    assert screen(table, 28) == [
        "",
        "name:    kernel_of_long_name",
        "where:   nowhere",
        "time us: 12.5",
        "",
        "name:    short",
        "where:   here",
        "time us: 3.0",
        "",
    ]


@pytest.mark.parametrize("room", [40, 60, 80, 120])
def test_no_line_is_wider_than_its_terminal_and_no_word_breaks(room: int) -> None:
    table = TextTable(("status", "check", "found"))
    table.add("absent", "shared memory", "a sentence of many short words that says what is missing here, and what it would be for")
    lines = screen(table, room)
    assert max(map(len, lines)) <= room
    assert {word for line in lines for word in line.split()} >= {"absent", "sentence", "missing", "for"}


@pytest.mark.parametrize(("share", "text"), [(0.649, "65%"), (0.062, "6.2%"), (0.0043, "0.43%"), (0.0996, "10%"), (1.02, "102%")])
def test_small_shares_keep_two_digits(share: float, text: str) -> None:
    assert percent(share) == text
