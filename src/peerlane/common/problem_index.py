"""The index of the suite: what lists of problems show, read from one file that `make docs` writes. No problem is imported for it."""

from __future__ import annotations

import json
from typing import Any

from peerlane.common.problem_files import OWN_FOLDER, problem_files

INDEX = OWN_FOLDER / "index.json"


def index_entries() -> list[dict[str, Any]] | None:
    """Returns an entry for each problem, by number; None if there are problems that the index does not describe."""
    if not INDEX.is_file():
        return None
    entries: list[dict[str, Any]] = json.loads(INDEX.read_text(encoding="utf-8"))
    described = [(entry["id"], entry["slug"]) for entry in entries]
    return entries if described == [(file.number, file.slug) for file in problem_files().values()] else None
