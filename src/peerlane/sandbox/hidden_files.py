"""The files that no candidate may read: answers to problems, the history and results that hold them, tokens, and what the run writes.

No torch here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from peerlane.version import PACKAGE

PACKAGES = ("peerlane.solutions", "peerlane.ops")
"""Candidates cannot import these. The device kit is no answer: it is a backend."""


def answer_folders() -> list[str]:
    """The folders of those packages, without links in their paths."""
    home = PACKAGE
    found = (home / name.rpartition(".")[2] for name in PACKAGES)
    return [str(folder) for folder in found if folder.is_dir()]


_kept_secret: set[str] = set()


def keep_from_candidates(path: Path) -> None:
    """Hides a file or folder from the candidates of groups that this process starts from now on, under isolation L1 and above."""
    _kept_secret.add(str(path.resolve()))


def hidden_paths() -> list[str]:
    """Every file and folder that candidates may not read now, without links in their paths."""
    checkout = PACKAGE.parents[1]
    found = {*answer_folders(), *_kept_secret, *_histories(checkout), *_histories(Path.cwd())}
    if (checkout / "pyproject.toml").is_file() and (checkout / "results").is_dir():
        found.add(str(checkout / "results"))
    return sorted(path for path in found if os.path.exists(path))


def _histories(folder: Path) -> Iterator[str]:
    """The ``.git`` of a folder and of those above it; a worktree's is a file that names the folder of the history."""
    for place in (folder, *folder.parents):
        git = place / ".git"
        if git.is_dir():
            yield str(git.resolve())
        elif git.is_file():
            yield str(git)
            with contextlib.suppress(OSError, ValueError):
                own = place / git.read_text().removeprefix("gitdir:").strip()
                common = own / "commondir"
                yield str((own / common.read_text().strip() if common.is_file() else own).resolve())


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


def everything_but(hidden: Sequence[str]) -> Iterator[str]:
    """Files and folders that together hold all files there are, except those below the ``hidden`` folders.

    Links are left out, for what they point to has a path of its own. So are files made later beside a folder that holds a hidden one.
    """
    above = {str(parent) for folder in hidden for parent in Path(folder).parents}
    for folder in sorted(above):
        with os.scandir(folder) as entries:
            yield from (entry.path for entry in entries if not (entry.is_symlink() or entry.path in above or entry.path in hidden))
