"""Which of peerlane's own files are answers to problems, and where they lie: no candidate may read them. No torch here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import peerlane

PACKAGES = ("peerlane.solutions", "peerlane.ops")
"""Candidates cannot import these. The device kit is no answer: it is a backend."""


def answer_folders() -> list[str]:
    """The folders of those packages, without links in their paths."""
    home = Path(peerlane.__file__).resolve().parent
    found = (home / name.rpartition(".")[2] for name in PACKAGES)
    return [str(folder) for folder in found if folder.is_dir()]


def everything_but(hidden: list[str]) -> Iterator[str]:
    """Files and folders that together hold all files there are, except those below the ``hidden`` folders.

    Links are left out, for what they point to has a path of its own. So are files made later beside a folder that holds a hidden one.
    """
    above = {str(parent) for folder in hidden for parent in Path(folder).parents}
    for folder in sorted(above):
        with os.scandir(folder) as entries:
            yield from (entry.path for entry in entries if not (entry.is_symlink() or entry.path in above or entry.path in hidden))
