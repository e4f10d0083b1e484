"""Which of peerlane's own files are answers to problems, and where they lie: no candidate may read them. No torch here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from peerlane.version import PACKAGE

PACKAGES = ("peerlane.solutions", "peerlane.ops")
"""Candidates cannot import these. The device kit is no answer: it is a backend."""


def answer_folders() -> list[str]:
    """The folders of those packages, without links in their paths."""
    home = PACKAGE
    found = (home / name.rpartition(".")[2] for name in PACKAGES)
    return [str(folder) for folder in found if folder.is_dir()]


def is_answer_file(path: Path | None) -> bool:
    """True for a file of those packages: peerlane's own solutions, which are judged like candidates."""
    return path is not None and any(str(path).startswith(f"{folder}/") for folder in answer_folders())


def family_sources(path: Path | None) -> dict[str, str]:
    """What a solution at ``path`` imports from beside it, by module: ranks cannot read those files. Empty for other candidates."""
    if not is_answer_file(path):
        return {}
    home = PACKAGE / "solutions"
    modules = {f"peerlane.solutions.families.{file.stem}": file.read_text() for file in sorted((home / "families").glob("[!_]*.py"))}
    return {"peerlane.solutions": "", "peerlane.solutions.families": "", **modules}


def everything_but(hidden: list[str]) -> Iterator[str]:
    """Files and folders that together hold all files there are, except those below the ``hidden`` folders.

    Links are left out, for what they point to has a path of its own. So are files made later beside a folder that holds a hidden one.
    """
    above = {str(parent) for folder in hidden for parent in Path(folder).parents}
    for folder in sorted(above):
        with os.scandir(folder) as entries:
            yield from (entry.path for entry in entries if not (entry.is_symlink() or entry.path in above or entry.path in hidden))
