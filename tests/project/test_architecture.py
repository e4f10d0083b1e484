"""The house: no circle of imports, no module that is found by a string alone, files of strangers opened in one place."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx

from floors import SLOW
from peerlane.common.version import PACKAGE
from peerlane.solutions import files

# Strings that look like modules and are none.
NO_MODULES = {"peerlane.lock", "peerlane.all_reduce.default"}


def test_no_circle_of_imports() -> None:
    """Imports in functions and those for types alone count too."""
    graph = grimp.build_graph("peerlane", cache_dir=None)
    arrows = [(module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module)]
    circles = [sorted(circle) for circle in networkx.strongly_connected_components(networkx.DiGraph(arrows)) if len(circle) > 1]
    assert circles == []


def test_no_solution_uses_another_one() -> None:
    """Solutions are out of a candidate's reach, of theirs too; what they share belongs into the kit, or into families."""
    other = re.compile(r"peerlane\.solutions(?!\.families\.)")
    assert [number for number, path in files().items() if other.search(path.read_text())] == []


def test_inline_assembly_of_kernels_is_below_ptx() -> None:
    """That of the emulator is for the CPU; a message and a prompt show some, and helpers of the public benchmark have it."""
    apart = ("emulator/", "generate/prompts/", "evaluate/ranks/public_helpers/", "device/host/standard_headers.py")
    sources = [path for ending in ("py", "cu", "cuh", "h") for path in PACKAGE.rglob(f"*.{ending}")]
    found = [path.relative_to(PACKAGE).as_posix() for path in sources if re.search(r"\basm\s+volatile\b|\basm\(", path.read_text())]
    assert found and [name for name in found if not name.startswith(("device/include/peerlane/ptx/", *apart))] == []


def test_the_kit_has_at_most_five_modules_outside_its_rooms() -> None:
    assert len(list((PACKAGE / "device").glob("*.py"))) <= 5


def is_module(name: str) -> bool:
    """Looks at files: other tests of this process may have blocked imports."""
    place = PACKAGE.parent.joinpath(*name.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def test_modules_named_in_strings_exist() -> None:
    """A move that orphans such a string would go unnoticed otherwise."""
    nowhere = []
    for path in sorted(PACKAGE.rglob("*.py")):
        strings = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        named = {text for text in strings if isinstance(text, str) and re.fullmatch(r"peerlane(\.\w+)+", text)} - NO_MODULES
        nowhere += [f"{path.relative_to(PACKAGE)}: {name}" for name in sorted(named) if not is_module(name)]
    assert nowhere == []


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


def test_every_entry_of_the_slow_tests_is_there() -> None:
    for entry in SLOW:
        file, _, test = entry.partition("::")
        path = Path(__file__).parents[1] / file
        assert path.is_file() and (not test or f"def {test}(" in path.read_text(encoding="utf-8")), f"tests/floors.py names {entry}"
