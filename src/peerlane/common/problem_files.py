"""Finds the files of problems, without importing them: peerlane's own, those of installed packages, and those of folders that a user names.

A package offers problems by an entry point of the group ``peerlane.problems``, whose value is a package with files ``pNNN_slug.py``. A user
names folders of such files by ``--problems``, or in PEERLANE_PROBLEMS. See docs/your-own-problems.md.
"""

import difflib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerlane.errors import UnknownProblem, UsageError
from peerlane.settings import problem_folders

ENTRY_POINTS = "peerlane.problems"
OWN_PACKAGE = "peerlane.problems"
OWN_FOLDER = Path(__file__).parents[1] / "problems"
INTERNODE = "internode"
"""The package within peerlane's own that holds problems which run on several nodes."""
_NAME = re.compile(r"p(\d{3,})_(\w+)\.py")


@dataclass(frozen=True)
class ProblemFile:
    """The place of a problem's file.

    Attributes:
        number: of the problem, in the file's name.
        slug: likewise.
        package: the package that holds the file's module; for a folder, one that has to be made.
        path: of the file.
    """

    number: int
    slug: str
    package: str
    path: Path


def problem_files() -> Mapping[int, ProblemFile]:
    """Returns the files of all problems, by number, ascending.

    Raises :class:`UsageError` for a folder that does not exist or holds no problem, for an entry point whose package cannot be found, and
    for two files of one number.
    """
    return _find(problem_folders())


def slugs() -> Mapping[int, str]:
    """Returns the slugs of all problems, by number."""
    return {number: file.slug for number, file in problem_files().items()}


def number_named(text: str) -> int:
    """Returns the number of the problem with this number or slug; raises :class:`UnknownProblem`, with the closest slugs."""
    known = slugs()
    if text.isdecimal() and int(text) in known:
        return int(text)
    by_slug = {slug: number for number, slug in known.items()}
    if text in by_slug:
        return by_slug[text]
    close = [] if text.isdecimal() else difflib.get_close_matches(text, by_slug, n=3, cutoff=0.5)
    hint = f", perhaps {' or '.join(close)} is meant" if close else ""
    raise UnknownProblem(f"there is no problem {text if text.isdecimal() else repr(text)}{hint}; `peerlane list` prints those there are")


def folder_package(folder: Path) -> str:
    """Returns the name of the package that stands for a folder which is none."""
    return f"peerlane_problems_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


@functools.cache
def _find(folders: tuple[Path, ...]) -> Mapping[int, ProblemFile]:
    by_number: dict[int, ProblemFile] = {}
    for package, folder in _places(folders):
        inside = [(match, path) for path in folder.glob("p*.py") if (match := _NAME.fullmatch(path.name)) and not _is_proof(path)]
        if not inside:
            raise UsageError(f"there are no problems in {folder}: expected files named pNNN_slug.py, such as p1001_my_gather.py")
        for match, path in inside:
            file = ProblemFile(int(match[1]), match[2], package, path)
            if (other := by_number.get(file.number)) is not None:
                raise UsageError(f"problem {file.number} is both {other.path} and {path}: give one of them another number")
            by_number[file.number] = file
    return dict(sorted(by_number.items()))


def _is_proof(path: Path) -> bool:
    """Returns whether a file holds the wrong answers of the problem beside it; see :class:`peerlane.problems.contract.FromProof`."""
    return path.stem.endswith("_proof") and path.with_name(f"{path.stem.removesuffix('_proof')}.py").exists()


def _places(folders: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """Packages and their folders, in the order in which they are searched."""
    yield OWN_PACKAGE, OWN_FOLDER
    yield f"{OWN_PACKAGE}.{INTERNODE}", OWN_FOLDER / INTERNODE
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda item: item.value):
        try:
            spec = importlib.util.find_spec(entry.value)
        except ModuleNotFoundError:
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise UsageError(f"the entry point {entry.name} of {ENTRY_POINTS} names {entry.value!r}: expected a package that is installed")
        yield entry.value, Path(next(iter(spec.submodule_search_locations)))
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"there is no folder of problems {str(folder)!r}: expected one with files named pNNN_slug.py")
        yield folder_package(folder), folder


INDEX = OWN_FOLDER / "index.json"
"""The entries of lists of problems, as `make docs` writes them: no problem is imported for a list."""


def index_entries() -> list[dict[str, Any]] | None:
    """Returns an entry for each problem, by number; None if there are problems that the index does not describe."""
    if not INDEX.is_file():
        return None
    entries: list[dict[str, Any]] = json.loads(INDEX.read_text(encoding="utf-8"))
    described = [(entry["id"], entry["slug"]) for entry in entries]
    return entries if described == [(file.number, file.slug) for file in problem_files().values()] else None
