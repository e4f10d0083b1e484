"""Figures on the pages that strangers read first come from results, and one that is written by hand is found."""

from __future__ import annotations

from pathlib import Path

from docs.build.sentences import below_half, figures_by_hand, headline

ROOT = Path(__file__).parents[2]
TWO_GPUS = ROOT / "results" / "h200x2" / "production_solutions.jsonl"


def test_the_headline_changes_with_the_results(tmp_path: Path) -> None:
    fewer = tmp_path / "results.jsonl"
    fewer.write_text("".join(TWO_GPUS.read_text().splitlines(keepends=True)[:8]))
    assert headline(fewer) != headline(TWO_GPUS) and "85 of 85" in headline(TWO_GPUS)
    assert below_half(fewer) != below_half(TWO_GPUS)


def test_figures_by_hand_are_found_outside_of_sections_and_code(tmp_path: Path) -> None:
    (tmp_path / "docs" / "device").mkdir(parents=True)
    (tmp_path / "README.md").write_text(
        "It is 3.1 times as fast.\n<!-- a:begin -->\n9 times\n<!-- a:end -->\n`95 %` in code\n```\n7 of 8 are right\n```\n"
    )
    (tmp_path / "docs" / "device" / "one.md").write_text("Fine.\n7 of 8 kernels are right, with 40 % more.\n")
    found = [line.partition(": a figure")[0] for line in figures_by_hand(tmp_path)]
    assert found == ["README.md:1", "docs/device/one.md:2", "docs/device/one.md:2"]
    assert figures_by_hand(ROOT) == []
