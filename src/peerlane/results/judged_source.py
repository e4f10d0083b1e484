"""Hashes the code that judges and times a problem: what its reference, inputs, oracle, error model, cost and cases are made of.

The walk starts at ``PROBLEM`` and at the contract's judging functions, and follows names through the contract, the families and the
problem's own package. Each definition enters the hash as a syntax tree, in which other definitions are numbers in order of first mention.
So comments, formatting, docstrings, notes and wrong answers do not count. It does not matter either in which module a definition lies, nor
how it is imported. A method counts if an attribute of its name is mentioned anywhere.
"""

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from peerlane.results.definitions import Definition, Packages, bound_names, dotted_name

_CONTRACT = "peerlane.problems.contract"
_JUDGING = {
    "draw": ("BlockGenerators", "Draw"),
    "judge": ("any_differs", "digests", "expected_leaves", "rounded", "same_bits", "score", "type_mismatch"),
    "tree": ("describe", "leaves", "map_leaves", "rebuild", "resolve_groups", "tensor_descriptions"),
}
"""what the evaluator uses of the contract for every problem"""
_JUDGING_METHODS = ("accepting", "answer", "begin", "cases", "changeable", "fixed", "is_replicated", "reference_of")
_WORDS = frozenset(["category", "graph_reason", "notes", "origin", "parallelism", "speed_note", "summary", "title"])
_NOT_JUDGING = _WORDS | {"alternative_solutions", "attainable", "excused", "known_wrong_answers"}
"""fields of a problem that decide on no verdict and on no time"""
_SIGNED = ("reference", "variant_references")
"""fields of functions whose annotations are part of the interface"""
_PROBLEM = Definition(f"{_CONTRACT}.spec", "Problem")
_PRESETS = (Definition(f"{_CONTRACT}.spec", "preset"), Definition(f"{_CONTRACT}.spec", "Preset"))
_SKIPPED_FIELDS = frozenset(("annotation", "ctx", "kind", "returns", "simple", "type_comment"))
_Definition = ast.FunctionDef | ast.AsyncFunctionDef


class _Attribute(str):
    """An attribute's name, which may be that of a method."""


_Token = str | _Attribute | Definition


@dataclass(frozen=True)
class _Written:
    """A definition as text with its mentions of others.

    Attributes:
        tokens: in order.
        methods: left out until they are mentioned; of a class.
        signed: functions whose annotations count.
    """

    tokens: Sequence[_Token]
    methods: Set[Definition]
    signed: Set[Definition]


class JudgedSource:
    """Hashes problems whose code lies in the same packages."""

    def __init__(self, packages: Packages) -> None:
        self._packages = packages
        self._written = functools.cache(self._write)

    def hash(self, module: str) -> str:
        """The SHA-256 of what judges the problem that a module declares."""
        judging = [Definition(f"{_CONTRACT}.{place}", name) for place, names in _JUDGING.items() for name in names]
        first = [Definition(module, "PROBLEM"), *judging]
        numbers = dict(zip(first, range(len(first)), strict=True))
        mentioned, signed, methods = set(_JUDGING_METHODS), set[Definition](), set[Definition]()
        digest, done = hashlib.sha256(), 0
        while done < len(numbers):
            for definition in list(numbers)[done:]:
                written = self._written(definition, definition in signed, definition == first[0])
                for token in written.tokens:
                    if isinstance(token, Definition):
                        token = f"#{numbers.setdefault(token, len(numbers))}"
                    elif isinstance(token, _Attribute):
                        mentioned.add(token)
                    digest.update(f"{token} ".encode())
                signed |= written.signed
                methods |= written.methods
                done += 1
            if done == len(numbers):
                for method in sorted(methods):
                    if method.method in mentioned:
                        numbers.setdefault(method, len(numbers))
        return digest.hexdigest()

    def _write(self, definition: Definition, signed: bool, root: bool) -> _Written:
        return _Writer(self._packages, definition, root).written(signed)


class _Writer:
    """Writes one definition."""

    def __init__(self, packages: Packages, definition: Definition, root: bool) -> None:
        self._packages = packages
        self._definition = definition
        module = packages.module(definition.module)
        self._imports = {} if module is None else module.imports
        statements = {} if module is None else module.statements
        self._statements = statements.get(definition.name, ())
        self._calls = [Definition(definition.module, "")] if "" in statements and definition.name else []
        self._root = root
        self._methods: set[Definition] = set()
        self._signed: set[Definition] = set()

    def written(self, signed: bool) -> _Written:
        """The definition; ``signed``: with annotations, if it is a function."""
        tokens: list[_Token] = [f"\n{self._definition.method}", *self._calls]
        for statement in self._statements:
            if isinstance(statement, ast.ClassDef):
                tokens += self._method(statement) if self._definition.method else self._top_class(statement)
            elif isinstance(statement, _Definition):
                tokens += self._function(statement, frozenset(), signed=signed)
            else:
                tokens += self._tree(statement, frozenset())
        return _Written(tokens, self._methods, self._signed)

    def _tree(self, node: ast.AST, local: frozenset[str]) -> Iterator[_Token]:
        """A syntax tree; ``local``: the names that functions around it bind."""
        match node:
            case ast.Name() | ast.Attribute() if (names := dotted_name(node)) and names[0] not in local:
                yield from self._name(names)
            case ast.Name(id=name):
                yield name
            case ast.Constant(value=value):
                yield f"{type(value).__name__}:{value!r}"
            case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal():
                return
            case ast.Attribute(value=value, attr=attribute):
                yield from [*self._tree(value, local), ".", _Attribute(attribute)]
            case ast.Call():
                yield from self._call(node, local)
            case ast.AnnAssign(value=None, target=target):
                yield from self._group("declare", [target], local)
            case ast.AnnAssign(value=ast.expr() as value, target=target):
                yield from self._tree(ast.Assign([target], value), local)
            case ast.JoinedStr(values=values):
                yield from self._group("JoinedStr", _merged(values), local)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from self._function(node, local)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                yield from self._fields(node, local | bound_names([item.target for item in node.generators]))
            case ast.ClassDef():
                yield from self._fields(node, local | bound_names(node.body))
            case _:
                yield from self._fields(node, local)

    def _name(self, names: Sequence[str]) -> Iterator[_Token]:
        found = self._packages.find(".".join([self._definition.module, *names]))
        if found is None:
            name = ".".join([self._imports.get(names[0], names[0]), *names[1:]])
            yield name.replace("peerlane.common.", "peerlane.", 1)  # where these lay when results were stored
            return
        yield found[0]
        for attribute in found[1]:
            yield from [".", _Attribute(attribute)]

    def _function(self, node: _Definition | ast.Lambda, local: frozenset[str], *, signed: bool = False) -> Iterator[_Token]:
        """Its decorators and defaults in the scope around it, its body in its own."""
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        named += [item for item in (arguments.vararg, arguments.kwarg) if item is not None]
        body: Sequence[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else node.body
        if not isinstance(node, ast.Lambda):
            yield f"{type(node).__name__} {node.name if node.name in local else ''}"
            yield from self._group("decorators", node.decorator_list, local)
            if signed:
                annotations = [*(item.annotation for item in named), node.returns]
                yield from self._group("annotations", [item for item in annotations if item is not None], local)
        yield from self._tree(arguments, local)
        yield from self._group("body", body, local | {item.arg for item in named} | bound_names(body))

    def _top_class(self, node: ast.ClassDef) -> Iterator[_Token]:
        """A class at the top level: its fields and special methods."""
        kept: list[ast.stmt] = []
        for item in node.body:
            if isinstance(item, _Definition) and not item.name.startswith("__"):
                self._methods.add(self._definition._replace(method=item.name))
            elif not (self._definition == _PROBLEM and isinstance(item, ast.AnnAssign) and dotted_name(item.target)[0] in _NOT_JUDGING):
                kept.append(item)
        yield from self._group("class", [*node.decorator_list, *node.bases, *node.keywords], frozenset())
        own = bound_names([item for item in kept if not isinstance(item, _Definition)])
        for item in kept:
            if isinstance(item, _Definition):
                yield from [item.name, *self._function(item, frozenset())]
            else:
                yield from self._tree(item, own)

    def _method(self, node: ast.ClassDef) -> Iterator[_Token]:
        yield self._definition._replace(method="")
        for item in node.body:
            if isinstance(item, _Definition) and item.name == self._definition.method:
                yield from self._function(item, frozenset())

    def _call(self, node: ast.Call, local: frozenset[str]) -> Iterator[_Token]:
        target, arguments = self._target(node.func, local), node.args
        named = [(item.arg, item.value) for item in node.keywords]
        if target in _PRESETS:  # a name, a line about it, cases
            arguments = arguments[:1] + arguments[2:]
            named = [(name, value) for name, value in named if name != "about"]
        elif target == _PROBLEM or (self._root and any(getattr(item, "value", None) is node for item in self._statements)):
            named = [(name, value) for pair in named for name, value in _flat(*pair) if name not in _NOT_JUDGING]
            signed = (self._target(item, local) for name, value in named if name in _SIGNED for item in ast.walk(value))
            self._signed.update(item for item in signed if item is not None)
        yield from self._group("Call", [node.func, *arguments], local)
        for name, value in sorted(named, key=lambda pair: pair[0] or ""):
            yield from self._group(f"{name}=", [value], local)

    def _target(self, node: ast.AST, local: frozenset[str]) -> Definition | None:
        """The definition that a name stands for."""
        names = dotted_name(node)
        found = self._packages.find(".".join([self._definition.module, *names])) if names and names[0] not in local else None
        return found[0] if found is not None and not found[1] else None

    def _fields(self, node: ast.AST, local: frozenset[str]) -> Iterator[_Token]:
        """A node field by field; which empty ones it has depends on the version of Python."""
        yield f"({type(node).__name__}"
        for name, value in sorted(ast.iter_fields(node), key=lambda field: field[0]):
            if name not in _SKIPPED_FIELDS and value is not None and value != []:
                yield f"{name}="
                for item in value if isinstance(value, list) else [value]:
                    yield from self._tree(item, local) if isinstance(item, ast.AST) else [repr(item)]
        yield ")"

    def _group(self, name: str, nodes: Iterable[ast.AST], local: frozenset[str]) -> Iterator[_Token]:
        yield f"({name}"
        for node in nodes:
            yield from self._tree(node, local)
        yield ")"


def _flat(name: str | None, value: ast.expr) -> Iterator[tuple[str | None, ast.expr]]:
    """An argument by its name; ``**{...}`` as the arguments in it."""
    if name is not None or not isinstance(value, ast.Dict):
        yield name, value
        return
    for key, item in zip(value.keys, value.values, strict=True):
        yield str(key.value) if isinstance(key, ast.Constant) else None, item


def _merged(values: Sequence[ast.expr]) -> list[ast.expr]:
    """Parts of an f-string with neighbouring texts as one: versions of Python split them differently."""
    parts: list[ast.expr] = []
    for value in values:
        match parts, value:
            case [*_, ast.Constant(value=str(before))], ast.Constant(value=str(text)):
                parts[-1] = ast.Constant(before + text)
            case _, ast.Constant(value=""):
                pass
            case _:
                parts.append(value)
    return parts
