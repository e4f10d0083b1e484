"""Compares the lines of each room with its ceiling in AGENTS.md: ``python -m docs.build.budget``, which ``make check`` runs."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOTAL = "total"
_COUNTED = (".py", ".cuh", ".h", ".cpp", ".cu")
_ROW = re.compile(r"^\| `?([\w/]+)`? \| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE)


def ceilings(page: str) -> dict[str, int]:
    """Returns the ceilings in the table of AGENTS.md: folder -> lines."""
    return {room: int(ceiling.replace(",", "")) for room, _, ceiling in _ROW.findall(page)}


def lines_of(root: Path, rooms: Mapping[str, int]) -> dict[str, int]:
    """Returns the lines of tracked and new source files below each of the folders, and their total."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    counted = dict.fromkeys(rooms, 0)
    for name in filter(lambda name: name.endswith(_COUNTED), listed.splitlines()):
        room = next((room for room in rooms if name.startswith(f"{room}/")), None)
        if room is not None and (root / name).is_file():
            lines = (root / name).read_bytes().count(b"\n")
            counted[room] += lines
            counted[TOTAL] += lines
    return counted


def over(lines: Mapping[str, int], limits: Mapping[str, int]) -> list[str]:
    """Returns a sentence for each room that is over its ceiling."""
    return [
        f"{room} has {lines[room]:,} lines, {lines[room] - limit:,} over its ceiling of {limit:,}"
        for room, limit in limits.items()
        if lines[room] > limit
    ]


def main() -> None:
    limits = ceilings((ROOT / "AGENTS.md").read_text(encoding="utf-8"))
    for sentence in over(lines_of(ROOT, limits), limits) or ["every room is within its ceiling"]:
        print(f"budget of lines: {sentence}")


if __name__ == "__main__":
    main()
