"""Tables and figures in documents come from the committed results, and say so when they do not."""

import json
from pathlib import Path

import pytest

from docs.build import production, sections
from docs.build.findings import gains, rungs_table
from docs.build.generated import stale, write
from docs.build.production import (
    NO_RUN,
    changes_lines,
    far_lines,
    last_of_newest_protocol,
    production_section,
    public_protocol_section,
    slower_lines,
)
from docs.build.published import problems_table, read_verdicts, shown
from docs.build.sentences import below_half, figures_by_hand, headline
from peerlane.errors import UsageError
from peerlane.evaluate.selftest.table import load
from peerlane.hardware.ceilings import Ceilings
from peerlane.results.reader import last_right, read_results
from peerlane.results.result import ProblemInfo
from peerlane.results.speed_record import NotMeasured
from peerlane.results.store import ResultsStore
from peerlane.results.verdict import NotRun
from sample_results import measured, result, text_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one result per file and documents with empty sections."""
    for source, _ in sections.SECTIONS.values():
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_text(text_of(result()))
    for path in sections.DOCUMENTS:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(
            "before\n<!-- fused_production_of_two:begin -->\n<!-- fused_production_of_two:end -->\nafter\n<!-- other:begin -->\nkept\n"
        )
    return tmp_path


def test_documents_show_the_committed_results() -> None:
    assert stale(ROOT, sections.documents(ROOT)) == [], "run `make docs`"


def test_writing_fills_known_sections_and_leaves_the_rest(checkout: Path) -> None:
    assert len(stale(checkout, sections.documents(checkout))) == len(sections.DOCUMENTS)
    write(checkout, sections.documents(checkout))
    text = (checkout / "docs/measurements.md").read_text()
    assert "| 1 allreduce | 6.99 | 30.0 | 29.8 | 1.01 (noise) | 40.0 | 20.0 | 2.00 |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n<!-- other:begin -->\nkept\n")
    assert stale(checkout, sections.documents(checkout)) == []
    write(checkout, sections.documents(checkout))
    assert (checkout / "docs/measurements.md").read_text() == text


def test_a_changed_result_makes_documents_stale(checkout: Path) -> None:
    write(checkout, sections.documents(checkout))
    source = checkout / sections.SECTIONS["fused_production_of_two"][0]
    source.write_text(text_of(result(speed=(measured("eager", 40.0, 10.0), measured("graph", 30.0, 29.8)))))
    assert stale(checkout, sections.documents(checkout)) == [f"{path}: differs from its source" for path in sections.DOCUMENTS]


def test_a_section_without_an_end_is_an_error(checkout: Path) -> None:
    with pytest.raises(UsageError, match="no end"):
        sections.filled("<!-- accuracy:begin -->\n", checkout)


def test_every_rule_of_the_corpus_has_its_page() -> None:
    assert tuple(load().rules) == sections.RULES


SECOND = ProblemInfo(id=2, slug="allgather", variant="default")


def test_the_gain_of_graphs_is_the_references_alone() -> None:
    """Of two candidates beside one reference the median counts; a reference that was timed in one mode has no gain."""
    found = [
        result(speed=(measured("eager", 80.0, 10.0), measured("graph", 20.0, 10.0))),
        result(speed=(measured("eager", 120.0, 10.0), measured("graph", 30.0, 10.0))),
        result(problem=SECOND, speed=(measured("eager", 90.0, 10.0), NotMeasured(mode="graph", why="cannot be captured"))),
    ]
    (gain,) = gains(found)
    assert gain.problem == 1 and gain.eager_us == pytest.approx(100.0) and gain.graph_us == pytest.approx(25.0)
    assert gain.ratio == pytest.approx(4.0)


def test_rungs_are_told_apart_by_the_committed_outcomes() -> None:
    rows = {line.split("|")[3].strip(" `"): line.split("|")[4:6] for line in rungs_table(ROOT / "results").splitlines()[2:] if line}
    virtual, node = rows["b05_one_buffer"]
    assert set(virtual.split("`")[1::2]) == {"correct"} and set(node.split("`")[1::2]) == {"unstable"}
    assert len(rows) >= 8


UNTIMED = NotRun(missing="memory")


def test_a_later_failure_does_not_replace_what_was_right() -> None:
    right, wrong = result(), result(verdict=UNTIMED, speed=())
    assert last_right([wrong, right, wrong]) == [right]
    assert last_right([wrong]) == [wrong]


def test_slow_kernels_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = result(problem=SECOND, speed=(measured("eager", 60.0, 30.0), measured("graph", 30.0, 60.0)))
    (head, _, line) = slower_lines([result(), slow])
    assert head.startswith("Slower than 0.95") and line == "* 2 allgather: 0.50 in graph mode. Reason: not known yet."
    monkeypatch.setattr(production, "REASONS", {slow.node.kind: {2: "the wire is full"}})
    assert slower_lines([slow])[-1].endswith("Reason: the wire is full.")
    assert slower_lines([result()]) == []


def test_missing_runs_say_so_and_others_count_verdicts(tmp_path: Path) -> None:
    assert production_section(tmp_path / "none.jsonl") == NO_RUN
    store = ResultsStore(tmp_path)
    for item in (result(), result(problem=SECOND, verdict=UNTIMED, speed=())):
        store.append(item)
    text = production_section(store.path)
    assert "* 1 problem without a speed: 1 not_run." in text and "best library" in text and "* 2 allgather: not_run: memory." in text


def test_kernels_that_became_quicker_are_listed_with_both_times() -> None:
    before, now = (result(speed=(measured("eager", 60.0, us), measured("graph", 60.0, us))) for us in (50.0, 20.0))
    lines = changes_lines([before, now])
    assert lines[1].startswith("Kernels that became quicker") and "| graph | 60 | 50 | 20 | 2.50 |" in lines[-1].replace(".0", "")
    assert changes_lines([before, before]) == [] and changes_lines([now, before]) == []


def test_the_table_of_problems_has_every_verdict() -> None:
    path = ROOT / "results" / "published" / "verdicts.jsonl"
    assert problems_table(path).count("`") == 2 * sum(map(len, shown(read_verdicts(path)).values()))


TWO_GPUS = ROOT / "results" / "h200x2" / "production_solutions.jsonl"
CEILINGS = Ceilings.from_json(json.loads(TWO_GPUS.with_name("ceilings.json").read_text()))


def test_the_headline_changes_with_the_results(tmp_path: Path) -> None:
    fewer = tmp_path / "results.jsonl"
    fewer.write_text("".join(TWO_GPUS.read_text().splitlines(keepends=True)[:8]))
    newest = sum(result.timing_protocol == 2 for result in last_right(read_results(TWO_GPUS)))
    assert headline(fewer) != headline(TWO_GPUS) and f"{newest} of {newest} kernels are right" in headline(TWO_GPUS)
    assert below_half(fewer) != below_half(TWO_GPUS)


def test_kernels_that_are_far_from_their_bounds_have_a_reason() -> None:
    (_, head, _, *lines), whole = (
        far_lines(last_of_newest_protocol(read_results(TWO_GPUS)), CEILINGS),
        "kernels take at most twice the bound",
    )
    assert whole in head and lines and not any("Not known yet" in line for line in lines)
    assert any("10 embedding_lookup: The host works or waits for" in line for line in lines)


def test_figures_by_hand_are_found_outside_of_sections_and_code(tmp_path: Path) -> None:
    (tmp_path / "docs" / "device").mkdir(parents=True)
    (tmp_path / "README.md").write_text(
        "It is 3.1 times as fast.\n<!-- a:begin -->\n9 times\n<!-- a:end -->\n`95 %` in code\n```\n7 of 8 are right\n```\n"
    )
    (tmp_path / "docs" / "device" / "one.md").write_text("Fine.\n7 of 8 kernels are right, with 40 % more.\n")
    found = [line.partition(": a figure")[0] for line in figures_by_hand(tmp_path)]
    assert found == ["README.md:1", "docs/device/one.md:2", "docs/device/one.md:2"]
    assert figures_by_hand(ROOT) == []


def test_figures_of_the_public_protocol_have_their_own_table(tmp_path: Path) -> None:
    assert public_protocol_section(tmp_path / "none.jsonl") == NO_RUN
    store = ResultsStore(tmp_path)
    for item in (result(), result(problem=SECOND, timing_protocol="kittens")):
        store.append(item)
    assert "allgather" not in production_section(store.path) and "timing protocol kittens" in public_protocol_section(store.path)
