"""The table of results: one source of rows for the terminal and for Markdown."""

import io
import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from docs.build.sections import acceptance_table
from peerlane import problems
from peerlane.generate.samples import Setting
from peerlane.report.markdown import for_terminal
from peerlane.report.noise import acceptance_lines, deviation, noise_table
from peerlane.report.tables import (
    RESULT_COLUMNS,
    TextTable,
    by_node,
    environment_lines,
    mechanism_lines,
    percent,
    reasons,
    result_table,
    results_report,
)
from peerlane.report.tiers import TIERS_FILE, TIERS_SOURCE, bound_us, regime, tiers, tiers_of
from peerlane.results.reader import last_right, read_results
from peerlane.results.result import CandidateInfo, Mechanism, ProblemInfo, Result
from peerlane.results.speed_record import ModeSpeed
from peerlane.settings import TIMING_PROTOCOL
from sample_results import ENVIRONMENT, hung, measured, on_cpu, own_audit, result, wrong


def test_one_row_per_measured_mode() -> None:
    assert [" | ".join(row) for row in result_table([result()]).rows] == [
        "1_allreduce_cuda | 1 allreduce | pkb | 4 | correct | eager | 40.0 | 20.0 | 2.00 [1.96, 2.04] | yes | 50% of nvlink (measured)",
        "1_allreduce_cuda | 1 allreduce | pkb | 4 | correct | graph | 30.0 | 29.8 | 1.01 [0.99, 1.03] | no | 50% of nvlink (measured)",
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


ROOT = Path(__file__).parents[2]


def test_tiers_are_those_of_the_committed_results() -> None:
    made = {str(number): tier for number, tier in tiers_of(read_results(ROOT / TIERS_SOURCE)).items()}
    assert json.loads(TIERS_FILE.read_text()) == {"source": TIERS_SOURCE, "tiers": made}
    assert set(tiers()) == {problem.id for problem in problems.suite()} and set(tiers().values()) == {"easy", "medium", "hard"}


@pytest.mark.parametrize(("preset", "latency"), [("pkb", True), ("bandwidth", False)])
def test_small_shapes_are_bound_by_latency(preset: str, latency: bool) -> None:
    problem = problems.get(1)
    assert (regime(bound_us(problem, problem.family(preset)[0].name if problem.family(preset) else preset, 4)) == "latency") == latency


PAGE = """# Title

See [the glossary](../glossary.md#slot).

| case | us |
| --- | ---: |
| `a\\|b` | 1.5 |

```mermaid
flowchart LR
    in(["arguments, on each of 4 ranks"])
    s0{{"all-reduce<br/>1 MB out"}}
    in --> s0
```
"""


def test_a_page_becomes_text_tables_and_lists() -> None:
    above, table, below = for_terminal(PAGE)
    assert isinstance(above, str) and "See the glossary." in above
    assert isinstance(table, TextTable) and table.rows == [("a|b", "1.5")] and table.right == {"us"}
    assert isinstance(below, str) and "1. arguments, on each of 4 ranks\n2. all-reduce, 1 MB out\n" in below
    assert "mermaid" not in below


def test_an_empty_page_has_no_parts() -> None:
    assert for_terminal("") == []


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


def test_results_of_the_public_protocol_stay_apart() -> None:
    own = result(timing_protocol=TIMING_PROTOCOL)
    public = result(timing_protocol="kittens", rules_hash="another")
    stored = Result.model_validate_json(public.model_dump_json())
    assert own.other_protocol is None and public.other_protocol == stored.other_protocol == "kittens"
    assert [name.endswith("timing protocol kittens") for name in by_node([own, public])] == [False, True]
    assert last_right([public, own, public]) == [own]
    assert Setting.of(own) != Setting.of(public) and str(Setting.of(public)).endswith("timing protocol kittens")
    assert "timing protocol kittens." in environment_lines([public])[0]
    with pytest.raises(ValidationError):
        result(timing_protocol="cats")
