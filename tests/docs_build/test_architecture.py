"""The architecture page: its picture has every room, its texts fit, and every file that the page names exists."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from docs.build import architecture
from peerlane.errors import UsageError

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / architecture.PACKAGE
SVG = "{http://www.w3.org/2000/svg}"
NO_ROOMS = {"include", "__pycache__"}
LETTER_WIDTHS = {"name": 22 * 0.71, "purpose": 14.5 * 0.64}
"""Mean width of a letter in DejaVu Sans, the widest of the fonts that the picture may use."""


@pytest.mark.parametrize(("package", "folder"), [("peerlane", ""), ("peerlane.evaluate", "evaluate"), ("peerlane.device", "device")])
def test_every_folder_is_a_room(package: str, folder: str) -> None:
    floors = architecture.read_floors((ROOT / "pyproject.toml").read_text(), package)
    rooms = {room.removeprefix(f"{package}.") for floor in floors for room in floor.rooms}
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
