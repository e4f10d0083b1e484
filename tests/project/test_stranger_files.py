"""Files below the folder of a run, which strangers may have made, are opened in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "peerlane"
ROOMS = ("cli", "generate", "publish", "results", "selftest", "service")
"""rooms that handle folders of runs"""
ELSEWHERE = {
    "cli/new.py": "a file that the user names",
    "generate/export.py": "a folder that was empty",
    "generate/paper.py": "a folder that the user names",
    "generate/prompt.py": "files of the package",
    "publish/dataset.py": "a folder that the user names",
    "publish/page/render.py": "a file that the user names",
    "results/definitions.py": "modules of the package",
    "service/adapters/harbor.py": "a folder that the user names",
}
"""modules whose files are never below the folder of a run, and what they are"""


def direct_accesses(module: ast.AST) -> Iterator[int]:
    """Line numbers of calls that follow links, cut files, or read whatever is there to its end."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        modes = [item.value for item in (*node.args, *(word.value for word in node.keywords)) if isinstance(item, ast.Constant)]
        writes = name == "open" and any(isinstance(mode, str) and set(mode) & set("wax") and len(mode) <= 3 for mode in modes)
        if writes or name in ("write_text", "write_bytes", "read_bytes"):
            yield node.lineno


def test_nothing_in_a_run_is_opened_but_by_files() -> None:
    found = {}
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            name = path.relative_to(PACKAGE).as_posix()
            if lines := list(direct_accesses(ast.parse(path.read_text(encoding="utf-8")))):
                found[name] = lines
    assert found.keys() == ELSEWHERE.keys(), f"use peerlane.common.files in {found.keys() - ELSEWHERE.keys()}: {found}"


def test_direct_accesses_are_seen() -> None:
    text = 'open(p, "w")\np.open("ab")\np.write_text(t)\np.read_bytes()\nopen(p)\np.open("rb")\nRunFolder.open(path)\n'
    assert list(direct_accesses(ast.parse(text))) == [1, 2, 3, 4]
