"""Which paths candidates may not read. Whether the kernel keeps to it is tried in tests/adversarial."""

import os
import sys
from pathlib import Path

import pytest

from peerlane.common.version import PACKAGE
from peerlane.sandbox.hidden_files import everything_but, hidden_paths, holds_program, with_other_paths

MOUNTS = r"""
22 1 254:0 / / rw - ext4 /dev/vda rw
23 22 254:0 /data /mnt rw - ext4 /dev/vda rw
24 22 254:0 /data/main/.git/objects /srv/two\040words rw - ext4 /dev/vda rw
25 22 254:0 /home /copies/home rw - ext4 /dev/vda rw
26 22 254:1 / /other rw - ext4 /dev/vdb rw
27 26 254:1 /tokens /data/tokens rw - ext4 /dev/vdb rw
""".strip()


def test_a_file_is_hidden_under_every_mount() -> None:
    assert with_other_paths(["/data/main/.git"], MOUNTS) == {"/data/main/.git", "/mnt/main/.git", "/srv/two words"}
    assert with_other_paths(["/data/tokens/one"], MOUNTS) == {"/data/tokens/one", "/other/tokens/one"}


def test_objects_borrowed_from_elsewhere_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info, lender = tmp_path / "checkout" / ".git" / "objects" / "info", tmp_path / "lender" / "objects"
    info.mkdir(parents=True)
    lender.mkdir(parents=True)
    (info / "alternates").write_text(f"{lender}\n")
    monkeypatch.chdir(tmp_path / "checkout")
    assert {str(lender), str(info.parents[1])} <= set(hidden_paths())


def test_what_is_shown_holds_no_hidden_file(tmp_path: Path) -> None:
    for name in ("a/hidden/file", "a/shown", "b"):
        (tmp_path / name).mkdir(parents=True)
    shown = list(everything_but([str(tmp_path / "a" / "hidden")]))
    assert {str(tmp_path / "a" / "shown"), str(tmp_path / "b")} <= set(shown)
    assert not any(os.path.commonpath([path, tmp_path / "a" / "hidden"]) == path for path in shown)


def test_a_folder_that_cannot_be_listed_hides_all_beside(tmp_path: Path) -> None:
    shown = list(everything_but([str(tmp_path / "gone" / "hidden")]))
    assert shown and str(tmp_path / "gone") not in shown


def test_a_folder_that_holds_the_program_stays_readable(tmp_path: Path) -> None:
    assert holds_program(PACKAGE.parent) and holds_program(Path(sys.prefix)) and not holds_program(tmp_path)


def test_a_hidden_folder_within_another_shows_nothing_of_it(tmp_path: Path) -> None:
    """Such as an --out below the checkout's results."""
    outer, inner = tmp_path / "results", tmp_path / "results" / "mine"
    inner.mkdir(parents=True)
    (outer / "secret").write_text("an answer")
    readable = set(everything_but([str(inner), str(outer)]))
    assert not [path for path in readable if Path(path).is_relative_to(outer)]
