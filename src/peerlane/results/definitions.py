"""Finds the definitions that names stand for, in the source of packages, without importing them."""

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from peerlane.common.syntax import parse


class Definition(NamedTuple):
    """A name at the top level of a module, or a method of a class there; an empty name stands for the module's calls."""

    module: str
    name: str
    method: str = ""


@dataclass(frozen=True)
class Module:
    """A module's top level.

    Attributes:
        statements: by name, those that bind it or change its contents.
        imports: by name, the dotted name that it stands for.
        stars: modules all of whose names are imported.
    """

    statements: Mapping[str, Sequence[ast.stmt]]
    imports: Mapping[str, str]
    stars: Sequence[str]


class Packages:
    """The sources of packages, given by their folders; each file is read once."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = folders
        self.find = functools.cache(self._find)
        self.module = functools.cache(self._module)

    def _find(self, dotted: str) -> tuple[Definition, tuple[str, ...]] | None:
        """The definition that a dotted name leads to, and the attributes behind it; None outside of the packages."""
        names = dotted.split(".")
        if self.module(dotted) is not None:
            return None
        for count in range(len(names) - 1, 0, -1):
            name, first, rest = ".".join(names[:count]), names[count], names[count + 1 :]
            if (module := self.module(name)) is None:
                continue
            if first in module.statements:
                return Definition(name, first), tuple(rest)
            if first in module.imports:
                return self.find(".".join([module.imports[first], *rest]))
            found = (self.find(".".join([star, first, *rest])) for star in module.stars)
            return next((item for item in found if item is not None), None)
        return None

    def _module(self, name: str) -> Module | None:
        for package, folder in self._folders.items():
            if name == package or name.startswith(f"{package}."):
                path = folder.joinpath(*name[len(package) :].split("."))
                for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
                    if file.is_file():
                        return _parse(file.read_bytes(), name if file.name == "__init__.py" else name.rpartition(".")[0])
        return None


def dotted_name(node: ast.AST) -> list[str]:
    """``a.b.c`` as its names; empty for anything else."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=attribute) if names := dotted_name(value):
            return [*names, attribute]
    return []


def bound_names(nodes: Sequence[ast.AST]) -> frozenset[str]:
    """Names that these nodes bind in the scope they stand in."""
    names: set[str] = set()
    outer: set[str] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Name(ctx=ast.Store() | ast.Del(), id=name):
                names.add(name)
                continue
            case ast.Name() | ast.Constant() | ast.Lambda():
                continue
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
                continue
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                names.add(name)
            case ast.MatchMapping(rest=str(name)):
                names.add(name)
            case ast.Global(names=declared):
                outer.update(declared)
            case ast.comprehension(iter=iterated, ifs=conditions):
                waiting += [iterated, *conditions]
                continue
            case _:
                pass
        waiting.extend(ast.iter_child_nodes(node))
    return frozenset(names - outer)


@functools.lru_cache(maxsize=512)
def _parse(source: bytes, package: str) -> Module:
    """The top level of a source text, once for all packages that hold it; nobody changes its trees."""
    tree = parse(source)
    imports: dict[str, str] = {}
    stars: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                first = item.name.partition(".")[0]
                imports[item.asname or first] = item.name if item.asname else first
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, [above, node.module]))
            stars += [base for item in node.names if item.name == "*"]
            imports |= {item.asname or item.name: f"{base}.{item.name}" for item in node.names if item.name != "*"}
    statements: dict[str, list[ast.stmt]] = {}
    for statement in _top_level(tree.body):
        for name in _changed(statement):
            statements.setdefault(name, []).append(statement)
    return Module(statements, imports, stars)


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, with ``A, B = x, y`` as two."""
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if len(targets) == len(values):
                yield from (ast.Assign([target], value) for target, value in zip(targets, values, strict=True))
            case _:
                yield node


def _changed(statement: ast.stmt) -> frozenset[str]:
    """Names that a statement of the top level binds, or whose contents it changes; an empty one if it is a call."""
    if isinstance(statement, ast.Expr):
        return frozenset() if isinstance(statement.value, ast.Constant) else frozenset([""])
    names = set(bound_names([statement]))
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        for node in ast.walk(statement):
            if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
                target: ast.expr = node
                while isinstance(target, ast.Subscript | ast.Attribute):
                    target = target.value
                names |= {target.id} if isinstance(target, ast.Name) else set()
    return frozenset(names)
