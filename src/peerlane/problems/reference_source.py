"""The source of a problem's reference as one self-contained file: what it needs from other modules of peerlane is copied in."""

import ast
import builtins
import functools
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from peerlane.common.syntax import parse
from peerlane.problems import Problem

_PACKAGE = "peerlane"


class Definition(NamedTuple):
    """A function, class or constant at the top level of one of peerlane's modules."""

    module: str
    name: str


@dataclass(frozen=True)
class _External:
    """A name that an import of a foreign module binds: ``import a.b as name`` or ``from a import b as name``."""

    module: str
    attribute: str | None
    alias: str | None

    @property
    def renaming(self) -> str:
        """`` as alias``, or nothing."""
        return f" as {self.alias}" if self.alias is not None else ""


@dataclass(frozen=True)
class _Reference:
    """A place in a definition's source that names something global; ``shadows``: local names there, that the new name must not have."""

    start: tuple[int, int]
    end: tuple[int, int]
    target: Definition | _External
    shadows: frozenset[str]


@dataclass(frozen=True)
class _Module:
    name: str
    lines: list[str]
    definitions: Mapping[str, ast.stmt]
    imports: Mapping[str, Definition | _External | str]
    """what an imported name stands for; a text is the name of one of peerlane's modules"""


@dataclass
class _Inlined:
    order: list[Definition] = field(default_factory=list)
    references: dict[Definition, list[_Reference]] = field(default_factory=dict)


def reference_source(problem: Problem, variant: str = "default") -> str:
    """Python source that defines ``reference``, the problem's own, and imports nothing of peerlane.

    Helpers keep their text, comments and docstrings. A helper is renamed only where two modules use one name for different things.
    """
    function = inspect.unwrap(problem.reference_of(variant))
    return _source_of(Definition(function.__module__, function.__name__))


@functools.cache
def _source_of(root: Definition) -> str:
    """Returns the source of a function and of everything that it names."""
    inlined = _Inlined()
    _collect(root, inlined)
    names = _choose_names(root, inlined)
    blocks: list[str] = []
    for definition in inlined.order:
        text = _rewritten(definition, inlined.references[definition], names)
        if text not in blocks:  # the same constant in two modules
            blocks.append(text)
    return "".join([*_imports(inlined), *_spaced(blocks)])


def _imports(inlined: _Inlined) -> Iterator[str]:
    """The lines of imports, with one for every foreign module that names are taken from."""
    if any(isinstance(_module(definition.module).definitions[definition.name], ast.ClassDef) for definition in inlined.order):
        yield "from __future__ import annotations\n\n"  # methods may name their own class
    externals = {ref.target for refs in inlined.references.values() for ref in refs if isinstance(ref.target, _External)}
    yield from sorted(f"import {item.module}{item.renaming}\n" for item in externals if item.attribute is None)
    for module in sorted({item.module for item in externals if item.attribute is not None}):
        names = sorted(f"{item.attribute}{item.renaming}" for item in externals if item.module == module and item.attribute is not None)
        yield f"from {module} import {', '.join(names)}\n"


def _spaced(blocks: list[str]) -> Iterator[str]:
    """Constants stand together; functions and classes have two blank lines around them."""
    before = None
    for block in blocks:
        constant = "\n" not in block
        yield "" if constant and before else "\n" if constant and before is None else "\n\n"
        yield f"{block}\n"
        before = constant


def _collect(definition: Definition, inlined: _Inlined) -> None:
    """Adds a definition after everything that it names."""
    if definition in inlined.references:
        return
    module = _module(definition.module)
    references = list(_references(module, module.definitions[definition.name]))
    inlined.references[definition] = references
    for reference in references:
        if isinstance(reference.target, Definition):
            _collect(reference.target, inlined)
    inlined.order.append(definition)


def _choose_names(root: Definition, inlined: _Inlined) -> dict[Definition, str]:
    """The name that every definition gets: its own; with its module's in front where that is taken or hidden by a local name."""
    shadows: dict[Definition, set[str]] = {}
    for references in inlined.references.values():
        for reference in references:
            if isinstance(reference.target, Definition):
                shadows.setdefault(reference.target, set()).update(reference.shadows)
    taken: dict[str, str] = {"reference": ""}
    taken |= {
        external.alias or external.attribute or external.module: repr(external)
        for references in inlined.references.values()
        for external in (reference.target for reference in references)
        if isinstance(external, _External)
    }
    names = {root: "reference"}
    for definition in inlined.order:
        if definition == root:
            continue
        text = _text(definition)
        stem = definition.module.rpartition(".")[2].lstrip("_")
        for name in (definition.name, f"{stem}_{definition.name.lstrip('_')}", f"{stem}__{definition.name}"):
            if name not in shadows.get(definition, ()) and taken.get(name, text) == text:
                break
        taken[name] = text
        names[definition] = name
    return names


def _rewritten(definition: Definition, references: list[_Reference], names: Mapping[Definition, str]) -> str:
    """A definition's source with the new names in place of the old ones."""
    module = _module(definition.module)
    node = module.definitions[definition.name]
    first = _first_line(node)
    lines = [line.encode() for line in module.lines[first - 1 : node.end_lineno]]  # columns of ast count bytes
    edits = [(ref.start, ref.end, names[ref.target]) for ref in references if isinstance(ref.target, Definition)]
    edits += _own_name(module, node, names[definition])
    for (line, column), (end_line, end_column), name in sorted(edits, reverse=True):
        assert line == end_line, "a name does not span lines"
        text = lines[line - first]
        lines[line - first] = text[:column] + name.encode() + text[end_column:]
    return "\n".join(line.decode() for line in lines).rstrip()


def _own_name(module: _Module, node: ast.stmt, name: str) -> list[tuple[tuple[int, int], tuple[int, int], str]]:
    """The edit that gives a definition its name."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        keyword = "class " if isinstance(node, ast.ClassDef) else "def "
        column = node.col_offset + len(keyword)
        return [((node.lineno, column), (node.lineno, column + len(node.name.encode())), name)]
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
    assert isinstance(target, ast.Name), f"{module.name}: only assignments to one name can be copied"
    return [((target.lineno, target.col_offset), (target.lineno, target.col_offset + len(target.id.encode())), name)]


def _text(definition: Definition) -> str:
    module = _module(definition.module)
    node = module.definitions[definition.name]
    return "\n".join(module.lines[_first_line(node) - 1 : node.end_lineno])


def _first_line(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
    return min([node.lineno, *(item.lineno for item in decorators)])


# --- modules ----------------------------------------------------------------------------------------------------------------


@functools.cache
def _module(name: str) -> _Module:
    path = importlib.import_module(name).__file__
    assert path is not None, name
    source = _one_constant_a_line(Path(path).read_text())
    definitions: dict[str, ast.stmt] = {}
    imports: dict[str, Definition | _External | str] = {}
    for node in _top_level(parse(source).body):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                definitions[node.name] = node
            case ast.Assign(targets=[ast.Name(id=target)]) | ast.AnnAssign(target=ast.Name(id=target)):
                definitions[target] = node
            case ast.Import():
                for item in node.names:
                    imports[item.asname or item.name.partition(".")[0]] = _External(item.name, None, item.asname)
            case ast.ImportFrom(module=str(origin)) if origin != "__future__":
                for item in node.names:
                    imports[item.asname or item.name] = _imported(origin, item)
            case _:
                pass
    return _Module(name, source.splitlines(), definitions, imports)


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under ``if TYPE_CHECKING`` included."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _top_level(node.body)
        else:
            yield node


def _imported(origin: str, item: ast.alias) -> Definition | _External | str:
    if origin.partition(".")[0] != _PACKAGE:
        return _External(origin, item.name, item.asname)
    value = getattr(importlib.import_module(origin), item.name, None)
    if inspect.ismodule(value):
        return value.__name__
    try:
        return importlib.import_module(f"{origin}.{item.name}").__name__
    except ModuleNotFoundError:
        return Definition(origin, item.name)


def _one_constant_a_line(source: str) -> str:
    """The source with ``A, B = x, y`` at its top level as two statements, so that each can be copied alone."""
    lines = source.splitlines()
    for node in reversed(parse(source).body):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                lines[node.lineno - 1 : node.end_lineno] = [
                    f"{ast.unparse(target)} = {ast.unparse(value)}" for target, value in zip(targets, values, strict=True)
                ]
            case _:
                pass
    return "\n".join(lines)


def _home(definition: Definition) -> Definition:
    """Where a name is defined that a module may only pass on."""
    module = _module(definition.module)
    if definition.name in module.definitions:
        return definition
    passed_on = module.imports.get(definition.name)
    if isinstance(passed_on, Definition):
        return _home(passed_on)
    raise AssertionError(f"{definition.module} does not define {definition.name}")


# --- names in a definition -------------------------------------------------------------------------------------------------


def _references(module: _Module, definition: ast.stmt) -> Iterator[_Reference]:
    """Every place in a definition where it names something at the top level of its module, or imported there."""

    def visit(node: ast.AST, local: frozenset[str]) -> Iterator[_Reference]:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in local:
            target = module.imports.get(node.value.id)
            if isinstance(target, str) and node.value.id not in module.definitions:
                yield _Reference(_start(node), _end(node), _home(Definition(target, node.attr)), local)
                return
        if isinstance(node, ast.Name):
            found = _resolve(module, node.id) if isinstance(node.ctx, ast.Load) and node.id not in local else None
            if found is not None:
                yield _Reference(_start(node), _end(node), found, local)
            return
        inside = local | _locals(node) if isinstance(node, ast.FunctionDef | ast.Lambda) and node is not definition else local
        if node is definition and isinstance(node, ast.FunctionDef):
            inside = _locals(node)
        for name, value in ast.iter_fields(node):
            # Decorators, defaults and annotations belong to the scope around a function.
            outer = name in ("decorator_list", "returns") and isinstance(node, ast.FunctionDef)
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.arguments):
                    yield from _visit_arguments(child, local)
                elif isinstance(child, ast.AST):
                    yield from visit(child, local if outer else inside)

    def _visit_arguments(arguments: ast.arguments, local: frozenset[str]) -> Iterator[_Reference]:
        for child in ast.iter_child_nodes(arguments):
            yield from visit(child, local)

    yield from visit(definition, frozenset())


def _resolve(module: _Module, name: str) -> Definition | _External | None:
    if name in module.definitions:
        return Definition(module.name, name)
    target = module.imports.get(name)
    if isinstance(target, Definition):
        return _home(target)
    if isinstance(target, str):
        raise AssertionError(f"{module.name} uses the module {target} as a value, which cannot be copied")
    if target is None and not hasattr(builtins, name):
        raise AssertionError(f"{module.name} uses {name}, which is defined nowhere")
    return target


def _locals(function: ast.FunctionDef | ast.Lambda) -> frozenset[str]:
    """Names that a function binds: parameters and what it assigns; those of comprehensions count as its own."""
    arguments = function.args
    names = {item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    names |= {item.arg for item in (arguments.vararg, arguments.kwarg) if item is not None}
    pending: list[Any] = list(function.body) if isinstance(function, ast.FunctionDef) else [function.body]
    while pending:
        node = pending.pop()
        match node:
            case ast.Name(ctx=ast.Store(), id=name):
                names.add(name)
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
                continue
            case ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.Lambda():
                continue
            case _:
                pass
        pending.extend(ast.iter_child_nodes(node))
    return frozenset(names)


def _start(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.expr) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset
