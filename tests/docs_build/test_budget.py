"""The budget of lines: AGENTS.md names every room, and what is over its ceiling is named."""

from __future__ import annotations

from pathlib import Path

from docs.build.budget import ROOT, TOTAL, ceilings, lines_of, over

LIMITS = ceilings((ROOT / "AGENTS.md").read_text(encoding="utf-8"))


def test_every_room_has_a_ceiling() -> None:
    package = Path("src/peerlane")
    rooms = {str(package / path.name) for path in (ROOT / package).iterdir() if (path / "__init__.py").is_file()}
    assert set(LIMITS) == rooms | {"src", "tests", "docs/build", TOTAL}


def test_a_room_over_its_ceiling_is_named() -> None:
    lines = lines_of(ROOT, LIMITS)
    assert lines[TOTAL] == sum(lines.values()) - lines[TOTAL] and lines["tests"] > 1000
    assert over({"tests": 1100}, {"tests": 1000}) == ["tests has 1,100 lines, 100 over its ceiling of 1,000"]
    assert over({"tests": 1000}, {"tests": 1000}) == []
