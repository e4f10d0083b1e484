"""Takes the candidate out of a model's reply.

The last complete fenced block of Python that defines ``solution`` counts: by a function (``async`` too, so that its author learns what is
wrong) or by an assignment. A block that imports ``solution`` shows its use, and is passed over. Without any block the whole reply counts,
if it is Python that defines ``solution``. A block that never ends is no block. Blocks in another language are passed over. What a model
wrote between ``<think>`` and ``</think>`` is no part of its reply.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

Status = Literal["code", "no_code", "truncated"]

_OPENING = re.compile(r"^(?P<indent>[ \t>]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^`\r\n]*?)[ \t]*$")
_PYTHON = re.compile(r"(?:python|py|python3|py3)?", re.IGNORECASE)
_DEFINES = re.compile(r"^(?:async[ \t]+)?def[ \t]+solution\b|^solution\b[^=\n]*=(?!=)", re.MULTILINE)
_REASONING = re.compile(r"^.*</think(?:ing)?>", re.DOTALL)
_CUT_REASONING = re.compile(r"<think(?:ing)?>")
CUT = ("max_tokens", "model_length", "length")
"""Stop reasons of a reply that a limit cut."""


class Extracted(NamedTuple):
    """A candidate's source with a newline at its end, or None; ``status`` says why there is none."""

    source: str | None
    status: Status


class _Block(NamedTuple):
    text: str
    language: str
    closed: bool


def extract(reply: str, stop_reason: str = "") -> Extracted:
    """Takes the candidate out of a reply, which is ``truncated`` if it holds none and was cut.

    A reply was cut if the provider says so (``stop_reason``, in inspect_ai's or OpenAI's words), or if it ends within a block or a thought.
    """
    text = _REASONING.sub("", reply.replace("\r\n", "\n"), count=1)
    blocks = list(_blocks(text))
    python = [block.text for block in blocks if block.closed and _PYTHON.fullmatch(block.language)]
    defining = [block for block in python if defines_solution(block)]
    whole = [block for block in defining if not _is_sketch(block)]
    if defining:
        return Extracted(_finished((whole or defining)[-1]), "code")
    if not blocks and _is_python(text) and defines_solution(text):
        return Extracted(_finished(text), "code")
    cut = stop_reason in CUT or bool(blocks and not blocks[-1].closed) or _CUT_REASONING.search(text) is not None
    return Extracted(None, "truncated" if cut else "no_code")


def extract_code(reply: str) -> str | None:
    """Returns the candidate's source with a newline at its end, or None if the reply holds none."""
    return extract(reply).source


def defines_solution(source: str) -> bool:
    """Tells whether a module binds ``solution`` by a function or an assignment; of what Python cannot read, whether it looks like that."""
    text = textwrap.dedent(source)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: null bytes
        return _DEFINES.search(text) is not None
    return any(_binds(statement) for statement in _module_level(tree.body))


def _module_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields statements that run at import, those within ``if``, ``try`` and ``with`` included."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            inner = [*statement.body, *getattr(statement, "orelse", ()), *getattr(statement, "finalbody", ())]
            yield from _module_level(inner + [item for handler in getattr(statement, "handlers", ()) for item in handler.body])


def _binds(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return statement.name == "solution"
    if isinstance(statement, ast.AnnAssign):
        targets: list[ast.expr] = [statement.target] if statement.value is not None else []
    else:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(
        isinstance(node, ast.Name) and node.id == "solution" and isinstance(node.ctx, ast.Store)
        for target in targets
        for node in ast.walk(target)
    )


def _is_sketch(source: str) -> bool:
    """Tells whether the only ``solution`` is a signature whose body is ``...`` or ``pass``."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    found = [statement for statement in _module_level(tree.body) if _binds(statement)]
    return all(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and all(map(_says_nothing, item.body)) for item in found)


def _says_nothing(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


def _blocks(text: str) -> Iterator[_Block]:
    """Yields the fenced blocks in order, without the indent of their fences; the last one may lack its end."""
    lines = iter(text.split("\n"))
    for line in lines:
        opening = _OPENING.match(line)
        if opening is None:
            continue
        fence, inside, closed = opening["fence"], [], False
        closing = re.compile(rf"^[ \t>]*{re.escape(fence[0])}{{{len(fence)},}}[ \t]*$")
        for line in lines:
            if closing.match(line):
                closed = True
                break
            inside.append(line.removeprefix(opening["indent"]))
        yield _Block("\n".join(inside), opening["language"].split("{")[0].split(":")[0].split(" ")[0].strip(), closed)


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _finished(source: str) -> str:
    return textwrap.dedent(source).strip("\n") + "\n"
