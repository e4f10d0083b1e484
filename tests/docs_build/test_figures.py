"""The pictures of the suite count every problem, and agree with the committed results."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from peerlane import problems
from peerlane.report import evidence, figures

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def text_of(svg: str) -> str:
    return " ".join("".join(element.itertext()) for element in ElementTree.fromstring(svg).iter(f"{SVG}text"))


def test_every_problem_has_one_place_in_the_taxonomy() -> None:
    suite = problems.suite()
    columns = set(figures.COLUMNS.values())
    placed = [item.id for part in figures.PARTS for column in columns for item in figures.in_cell(suite, part, column)]
    placed += [number for numbers in figures.BEYOND.values() for number in numbers]
    assert Counter(placed) == dict.fromkeys((item.id for item in suite), 1)
    for part in figures.PARTS:
        assert set(part.sharded) == {column for column in columns if figures.in_cell(suite, part, column)}, part.title


def test_every_origin_names_a_source() -> None:
    suite = problems.suite()
    assert [item.id for item in suite if not figures.sources_of(item)] == []
    assert {name for item in suite for name in figures.sources_of(item)} == set(figures.SOURCES)


def test_the_pictures_are_those_of_the_committed_results(tmp_path: Path) -> None:
    measured = evidence.read_evidence(ROOT)
    pictures = figures.figures(problems.suite(), measured, ROOT)
    assert figures.stale(ROOT, pictures) == [], "run `make docs`"
    assert len(figures.write(tmp_path, pictures)) == 5 and figures.stale(tmp_path, pictures) == []
    found = figures.headroom(measured, "pkb", 4)
    below = sum(item.utilisation < 0.1 for item in found.values())
    assert f"{below} below 10 %" in text_of(pictures[figures.FOLDER / "references.svg"])
    assert "geometric mean" in text_of(pictures[figures.FOLDER / "solutions.svg"])
    assert "send/recv" in text_of(pictures[figures.FOLDER / "taxonomy.svg"])
