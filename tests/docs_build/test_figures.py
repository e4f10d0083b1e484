"""Pictures: pages name all of them, they agree with the committed results, and that of the architecture has every room."""

import posixpath
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from docs.build import architecture
from docs.build.evidence import read_evidence
from docs.build.figures import COMMENTED, PANELS, headroom, pictures
from peerlane.errors import UsageError

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


SOURCE = ROOT / architecture.PACKAGE
NO_ROOMS = {"include", "__pycache__"}
LETTER_WIDTHS = {"name": 22 * 0.71, "purpose": 14.5 * 0.64}
"""Mean width of a letter in DejaVu Sans, the widest of the fonts that the picture may use."""


@pytest.mark.parametrize(("package", "folder"), [("peerlane", ""), ("peerlane.evaluate", "evaluate"), ("peerlane.device", "device")])
def test_every_folder_is_a_room(package: str, folder: str) -> None:
    floors = architecture.read_floors((ROOT / "pyproject.toml").read_text(), package)
    rooms = {room.removeprefix(f"{package}.") for floor in floors for room in floor}
    folders = {path.name for path in (SOURCE / folder).iterdir() if path.is_dir()} - NO_ROOMS
    assert folders <= rooms
    assert [room for room in rooms - folders if not (SOURCE / folder / f"{room}.py").is_file()] == []


def test_the_picture_is_drawn_from_the_contracts() -> None:
    assert (ROOT / architecture.PICTURE).read_text() == architecture.architecture(ROOT), "run `make docs`"


def test_texts_fit_into_their_boxes() -> None:
    too_long, box = [], ElementTree.Element("rect")
    for element in ElementTree.fromstring((ROOT / architecture.PICTURE).read_text()).iter():
        if element.tag == f"{SVG}rect":
            box = element
        width = LETTER_WIDTHS.get(element.get("class", ""))
        if element.tag == f"{SVG}text" and width and width * len(element.text or "") > float(box.get("width", 0)):
            too_long.append(element.text)
    assert too_long == []


def test_a_room_without_purpose_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text().replace('"report"', '"attic"'))
    with pytest.raises(UsageError, match=r"peerlane\.attic"):
        architecture.architecture(tmp_path)


def test_files_named_on_the_page_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`([\w./]+(?:\.py|\.cuh|\.toml|/))`", page))
    assert len(named) >= 25
    assert sorted(name for name in named if not (SOURCE / name).exists() and not (ROOT / name).exists()) == []
