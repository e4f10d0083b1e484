"""The house: no circle of imports, rooms of a size that fits in the head, and no module that is found by a string alone."""

from __future__ import annotations

import ast
import re

import grimp
import networkx

from peerlane.common.version import PACKAGE
from peerlane.solutions import files

# Strings that look like modules and are none.
NO_MODULES = {"peerlane.lock"}


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
