"""Finds the extensions that a candidate compiles when it is called, by its syntax tree: most published files compile inside a function."""

import ast
import builtins
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from peerlane.common.syntax import UNREADABLE, parse

_MODULES = ("torch.utils.cpp_extension", "utils.cuda_helpers")
_FUNCTIONS = ("load_inline", "load", "compile_cuda_extension")
_METHODS = {"strip", "lstrip", "rstrip", "format", "replace", "join", "dedent", "get", "getenv", "dirname", "abspath", "realpath", "copy"}
"""the only calls in an argument: they take constants to constants"""
_PLAIN = (
    *(ast.Constant, ast.JoinedStr, ast.FormattedValue, ast.List, ast.Tuple, ast.Dict, ast.BinOp, ast.operator, ast.IfExp, ast.Compare),
    *(ast.cmpop, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Call),
    *(ast.keyword, ast.Starred, ast.expr_context),
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class ExtensionCall:
    """A call of one of torch's functions that compile, or of the public benchmark's."""

    function: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _Unknown(Exception):
    """An argument is no constant."""


def find_extension_calls(source: str | bytes, module: Mapping[str, Any] | None = None) -> list[ExtensionCall]:
    """Returns the calls in a source whose arguments are constants, each once, in their order.

    Constants are literals, names that a module or the calling function gives one constant, and what string methods make of these.
    ``module`` holds the names of the module, if it could be imported. Nothing of the source is run but such expressions.
    """
    try:
        tree = parse(source)
    except UNREADABLE:
        return []
    names, modules = _imports(tree)
    known = dict(module) if module is not None else {}
    for name, value in _constants(tree, known).items():
        known.setdefault(name, value)
    found: list[ExtensionCall] = []
    for call, scope in _calls(tree, known):
        if (function := _function(call.func, names, modules)) is None:
            continue
        try:
            made = ExtensionCall(function, tuple(_values(call.args, scope)), _keywords(call.keywords, scope))
        except _Unknown:
            continue
        if made not in found:
            found.append(made)
    return found


def _imports(tree: ast.Module) -> tuple[dict[str, str], set[str]]:
    """The names under which a source has the functions, and the modules that hold them, wherever it imports them."""
    names, modules = dict[str, str](), set(_MODULES)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for item in node.names:
                if node.module in _MODULES and item.name in _FUNCTIONS:
                    names[item.asname or item.name] = item.name
                elif f"{node.module}.{item.name}" in _MODULES:
                    modules.add(item.asname or item.name)
        elif isinstance(node, ast.Import):
            modules |= {item.asname for item in node.names if item.name in _MODULES and item.asname}
    return names, modules


def _function(node: ast.expr, names: Mapping[str, str], modules: set[str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and node.attr in _FUNCTIONS and ast.unparse(node.value) in modules:
        return node.attr
    return None


def _calls(node: ast.AST, scope: Mapping[str, Any]) -> Iterator[tuple[ast.Call, Mapping[str, Any]]]:
    """All calls below a node, each with the constants that its function sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, scope
        if isinstance(child, _Function):
            yield from _calls(child, _inside(child, scope))
        else:
            yield from _calls(child, scope)


def _inside(function: _Function, outside: Mapping[str, Any]) -> Mapping[str, Any]:
    """The constants in a function: its own names hide those outside."""
    arguments = function.args
    own = {item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg) if item}
    shared = {name for node in _statements(function) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
    own |= {node.id for node in _statements(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    seen = {name: value for name, value in outside.items() if name not in own - shared}
    return {**seen, **_constants(function, seen)}


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """Everything in a scope but what is in functions and classes below it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, (*_Function.__args__, ast.ClassDef)):
            yield from _statements(child)


def _constants(scope: ast.AST, outside: Mapping[str, Any]) -> dict[str, Any]:
    """The names that a scope gives one constant."""
    found: dict[str, Any] = {}
    lost: set[str] = set()
    for node in _statements(scope):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            name, value = node.target.id, node.value
        else:
            continue
        try:
            constant = _value(value, {**outside, **found})
        except _Unknown:
            lost.add(name)
            continue
        if name in found and found[name] != constant:
            lost.add(name)
        found[name] = constant
    lost |= {node.target.id for node in _statements(scope) if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)}
    return {name: value for name, value in found.items() if name not in lost}


def _values(nodes: list[ast.expr], scope: Mapping[str, Any]) -> Iterator[Any]:
    for node in nodes:
        if isinstance(node, ast.Starred):
            yield from _value(node.value, scope)
        else:
            yield _value(node, scope)


def _keywords(nodes: list[ast.keyword], scope: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in nodes:
        found |= _value(node.value, scope) if node.arg is None else {node.arg: _value(node.value, scope)}
    return found


def _value(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    """The value of an expression of constants; raises :class:`_Unknown` for any other."""
    for part in ast.walk(node):
        if not isinstance(part, _PLAIN) or (isinstance(part, ast.Call) and not _is_harmless(part.func)):
            raise _Unknown
    try:
        code = compile(ast.Expression(node), "<argument>", "eval")
        return eval(code, {"__builtins__": {"str": builtins.str}}, dict(scope))
    except Exception:
        raise _Unknown from None


def _is_harmless(function: ast.expr) -> bool:
    return (isinstance(function, ast.Attribute) and function.attr in _METHODS) or (isinstance(function, ast.Name) and function.id == "str")
