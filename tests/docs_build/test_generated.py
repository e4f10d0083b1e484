"""Files that are made say so, stale ones are named, and AGENTS.md names every room with its ceiling."""

from pathlib import Path

import pytest

from docs.build import __main__ as command
from docs.build import generated, pages
from docs.build.budget import ROOT, TOTAL, ceilings, lines_of, over
from docs.build.evidence import PACKAGED, packaged
from peerlane import problems
from peerlane.report.evidence import packaged_evidence


def test_changed_measurements_are_found_and_written(tmp_path: Path) -> None:
    evidence = packaged_evidence()
    files = packaged(evidence)
    assert generated.stale(tmp_path, files) == generated.write(tmp_path, files) == [f"{PACKAGED}: missing"]
    assert (tmp_path / PACKAGED).read_text() == (ROOT / PACKAGED).read_text()
    assert generated.stale(tmp_path, files) == []
    assert generated.stale(tmp_path, packaged({1: evidence[1]})) == [f"{PACKAGED}: differs from its source"]


def test_pages_are_written_checked_and_found_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "generated", lambda root: pages.pages((problems.get(1),), {}))
    assert command.main(["--write"]) == 0 and command.main(["--check"]) == 0
    folder = tmp_path / pages.FOLDER
    page = folder / "p001_allreduce.md"
    page.write_text(page.read_text() + "by hand\n")
    (folder / "p000_old.md").write_text("")
    capsys.readouterr()
    assert command.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert "p001_allreduce.md: differs from its source" in out and "p000_old.md: belongs to no problem" in out and "make docs" in out
    assert command.main(["--write"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "p001_allreduce.md"]


def test_the_command_wants_exactly_one_thing_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words in ([], ["--write", "--check"]):
        with pytest.raises(SystemExit):
            command.main(words)
    (tmp_path / "thesis.txt").write_text("years of work")
    assert command.main(["--site", str(tmp_path)]) == 2 and "may be replaced" in capsys.readouterr().err


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
