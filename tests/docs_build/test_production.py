"""The page of production sizes: the last right result of a question, verdicts counted, slow kernels with their reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.build import production
from docs.build.production import NO_RUN, changes_lines, production_section, slower_lines
from peerlane.results.reader import last_right
from peerlane.results.result import ProblemInfo
from peerlane.results.store import ResultsStore
from peerlane.results.verdict import NotRun
from sample_results import measured, result

SECOND = ProblemInfo(id=2, slug="allgather", variant="default")
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
