"""The files that no candidate may read: answers to problems, the history and results that hold them, tokens, and what the run writes.

No torch here."""

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath

from peerlane.common.version import PACKAGE

PACKAGES = ("peerlane.solutions", "peerlane.ops")
"""Candidates cannot import these. The device kit is no answer: it is a backend."""


def answer_folders() -> list[str]:
    """Returns the folders of those packages, without links in their paths."""
    found = (PACKAGE / name.rpartition(".")[2] for name in PACKAGES)
    return [str(folder) for folder in found if folder.is_dir()]


_kept_secret: set[str] = set()


def keep_from_candidates(path: Path) -> None:
    """Hides a file or folder from the candidates of groups that this process starts from now on, under isolation L1 and above."""
    _kept_secret.add(str(path.resolve()))


def holds_program(folder: Path) -> bool:
    """Tells whether a folder cannot be hidden, because peerlane or the Python that runs it lies below."""
    return any(Path(place).resolve().is_relative_to(folder.resolve()) for place in (PACKAGE, sys.prefix, sys.base_prefix))


def hidden_paths() -> list[str]:
    """Returns every file and folder that candidates may not read now, without links in their paths."""
    checkout = PACKAGE.parents[1]
    found = {*answer_folders(), *_kept_secret, *_histories(checkout), *_histories(Path.cwd())}
    if (checkout / "pyproject.toml").is_file() and (checkout / "results").is_dir():
        found.add(str(checkout / "results"))
    with open("/proc/self/mountinfo") as mounts:
        return sorted(with_other_paths([path for path in found if os.path.exists(path)], mounts.read()))


def with_other_paths(paths: Iterable[str], mountinfo: str) -> set[str]:
    """Returns these paths, and those that the same files have because their file system is mounted elsewhere too, whole or in part."""
    found = set(paths)
    fields = [[_unescape(field) for field in line.split()[2:5]] for line in mountinfo.splitlines()]
    mounts = [(device, PurePath(root), PurePath(place)) for device, root, place in fields]
    for path in map(PurePath, tuple(found)):
        holders = [mount for mount in mounts if path.is_relative_to(mount[2])]
        if not holders:  # in a chroot
            continue
        device, root, place = max(reversed(holders), key=lambda mount: len(mount[2].parts))  # of two at one place, the later
        inside = root / path.relative_to(place)
        for other, root, place in mounts:
            if other == device and inside.is_relative_to(root):
                found.add(str(place / inside.relative_to(root)))
            elif other == device and root.is_relative_to(inside):
                found.add(str(place))
    return found


def _unescape(field: str) -> str:
    """Returns a field of mountinfo, where spaces are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _histories(folder: Path) -> Iterator[str]:
    """Yields the ``.git`` of a folder and of those above it; a worktree's is a file that names the folder of the history."""
    for place in (folder, *folder.parents):
        git = place / ".git"
        history = git
        with contextlib.suppress(OSError, ValueError):
            if git.is_file():
                yield str(git)
                history = place / git.read_text().removeprefix("gitdir:").strip()
                if (common := history / "commondir").is_file():
                    history /= common.read_text().strip()
            yield str(history.resolve())
            objects = history / "objects"
            for borrowed in (objects / "info" / "alternates").read_text().splitlines():  # of a clone with --shared or --reference
                yield str((objects / borrowed).resolve())


def is_answer_file(path: Path | None) -> bool:
    """Tells whether a file is of those packages: peerlane's own solutions, which are judged like candidates."""
    return path is not None and any(str(path).startswith(f"{folder}/") for folder in answer_folders())


def family_sources(path: Path | None) -> dict[str, str]:
    """Returns what a solution at ``path`` imports from beside it, by module, for ranks cannot read it. Empty for other candidates."""
    if not is_answer_file(path):
        return {}
    files = sorted((PACKAGE / "solutions" / "families").glob("[!_]*.py"))
    modules = {f"peerlane.solutions.families.{file.stem}": file.read_text() for file in files}
    return {"peerlane.solutions": "", "peerlane.solutions.families": "", **modules}


def everything_but(hidden: Sequence[str]) -> Iterator[str]:
    """Files and folders that together hold all files there are, except those below the ``hidden`` folders.

    Links are left out, for what they point to has a path of its own. So are files made later beside a folder that holds a hidden one.
    """
    # A hidden folder within another one must not have that one listed.
    outermost = [folder for folder in map(Path, hidden) if not any(str(parent) in hidden for parent in folder.parents)]
    above = {str(parent) for folder in outermost for parent in folder.parents}
    for folder in sorted(above):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:  # it has gone, or may be passed and not listed
            yield from (entry.path for entry in entries if not (entry.is_symlink() or entry.path in above or entry.path in hidden))
