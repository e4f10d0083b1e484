"""Tables in documents come from the committed results, and say so when they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.build import sections
from docs.build.generated import stale, write
from peerlane.errors import UsageError
from peerlane.evaluate.selftest.table import load
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
        (tmp_path / path).write_text("before\n<!-- examples:begin -->\n<!-- examples:end -->\nafter\n<!-- other:begin -->\nkept\n")
    return tmp_path


def test_documents_show_the_committed_results() -> None:
    assert stale(ROOT, sections.documents(ROOT)) == [], "run `make docs`"


def test_writing_fills_known_sections_and_leaves_the_rest(checkout: Path) -> None:
    assert len(stale(checkout, sections.documents(checkout))) == len(sections.DOCUMENTS)
    write(checkout, sections.documents(checkout))
    text = (checkout / "docs/measurements.md").read_text()
    assert "| 1 allreduce | 7 | 30.0 | 29.8 | 1.01 (noise) | 40.0 | 20.0 | 2.00 |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n<!-- other:begin -->\nkept\n")
    assert stale(checkout, sections.documents(checkout)) == []
    write(checkout, sections.documents(checkout))
    assert (checkout / "docs/measurements.md").read_text() == text


def test_a_changed_result_makes_documents_stale(checkout: Path) -> None:
    write(checkout, sections.documents(checkout))
    source = checkout / sections.SECTIONS["examples"][0]
    source.write_text(text_of(result(speed=(measured("eager", 40.0, 10.0), measured("graph", 30.0, 29.8)))))
    assert stale(checkout, sections.documents(checkout)) == [f"{path}: differs from its source" for path in sections.DOCUMENTS]


def test_a_section_without_an_end_is_an_error(checkout: Path) -> None:
    with pytest.raises(UsageError, match="no end"):
        sections.filled("<!-- accuracy:begin -->\n", checkout)


def test_every_rule_of_the_corpus_has_its_page() -> None:
    assert tuple(load().rules) == sections.RULES
