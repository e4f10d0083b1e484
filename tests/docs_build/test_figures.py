"""Pictures that are made with the site: pages name all of them, in comments, and they agree with the committed results."""

from __future__ import annotations

import posixpath
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from docs.build.evidence import read_evidence
from docs.build.figures import COMMENTED, PANELS, headroom, pictures

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def text_of(svg: Path) -> str:
    return " ".join("".join(element.itertext()) for element in ElementTree.parse(svg).iter(f"{SVG}text"))


def test_every_picture_has_a_page_and_is_not_committed() -> None:
    named = [
        posixpath.normpath(page.parent.relative_to(ROOT) / target)
        for page in (ROOT / "docs").rglob("*.md")
        for _, target in COMMENTED.findall(page.read_text(encoding="utf-8"))
    ]
    drawn = sorted(str(path) for path in pictures(ROOT))
    assert sorted(named) == drawn and len(drawn) > 90
    assert [path for path in drawn if (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("docs/images/references.svg", "% of the bound"),
        ("docs/images/solutions.svg", "geometric mean"),
        ("docs/images/launch-modes.svg", "times as fast in a graph"),
        ("docs/images/sweep_h100x2.svg", "us per call"),
        ("docs/device/sweep_of_two.svg", "8 alltoall, 2 ranks"),
        ("docs/problems/p001_allreduce.svg", "Messages that the answers need"),
    ],
)
def test_pictures_show_the_committed_results(path: str, word: str, tmp_path: Path) -> None:
    pictures(ROOT)[Path(path)](tmp_path / "picture.svg")
    assert word in text_of(tmp_path / "picture.svg")


def test_the_histogram_counts_references_below_their_bounds(tmp_path: Path) -> None:
    nearest = headroom(read_evidence(ROOT), *PANELS["pkb on 4x H200"])
    pictures(ROOT)[Path("docs/images/references.svg")](tmp_path / "picture.svg")
    assert f"{sum(item.utilisation < 0.1 for item in nearest.values())} below 10 %" in text_of(tmp_path / "picture.svg")
