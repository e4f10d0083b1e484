"""Takes the candidate out of a model's reply.

A reply that is a Python file as a whole is the candidate. Otherwise the last complete fenced block of Python that defines ``solution``
counts: by a function (``async`` too, so that its author learns what is wrong) or by an assignment. Passed over are a bare signature, a use
of ``solution`` by an import, and an excerpt, which uses names that only an earlier block binds. :mod:`peerlane.generate.fences` says where
blocks end. Without a block, bare code behind a thought counts, and then code among the arguments of a tool.
"""

import ast
import builtins
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from peerlane.common.syntax import UNREADABLE, parse
from peerlane.evaluate.candidates import MOST_BYTES
from peerlane.generate.fences import END_OF_THOUGHT, INVISIBLE, PYTHON, Block, Reading, is_python, read_blocks

Status = Literal["code", "no_code", "truncated", "refused", "empty"]
"""``code``: there is a candidate. Otherwise why there is none; see :func:`extract`."""

_DEFINES = re.compile(r"^(?:async[ \t]+)?def[ \t]+solution\b|^solution\b[^=\n]*=(?!=)", re.MULTILINE)
_REFUSAL = re.compile(
    r"(?:i['\u2019]?m (?:very |really )?sorry|i am sorry|sorry|i (?:can['\u2019]?t|can ?not|won['\u2019]t|will not|must decline|decline to)"
    r"|i['\u2019]m (?:not able|unable)|i am (?:not able|unable)|as an ai\b)",
    re.IGNORECASE,
)
_MOST_ENDS = 20  # of thoughts, behind which bare code is looked for
_MOST_OF_A_REFUSAL = 600  # characters: longer texts explain something
CUT = ("max_tokens", "model_length", "length")
"""Stop reasons of a reply that a limit cut."""
COMPLETE = ("stop", "end_turn", "stop_sequence", "tool_calls", "tool_use")
"""Stop reasons of a reply that its model ended."""
FILTERED = ("content_filter", "refusal")
"""Stop reasons of a reply that the provider or the model refused."""


class Extracted(NamedTuple):
    """A candidate's source with a newline at its end, or None; ``status`` says why there is none."""

    source: str | None
    status: Status


def extract(reply: str, stop_reason: str = "", arguments: Sequence[str] = ()) -> Extracted:
    """Takes the candidate out of a reply, or out of the arguments that its calls of tools have.

    ``stop_reason`` is the provider's, in inspect_ai's or OpenAI's words; empty if it is not known. A reply without a candidate is

    * ``truncated`` if the provider says that a limit cut it; if nothing is known, if it ends within a block or a thought;
    * ``refused`` if the provider says so, or if it is short and begins as a refusal does, such as "I cannot";
    * ``empty`` if nothing is said outside of thoughts;
    * ``no_code`` otherwise.
    """
    text = reply.replace("\r\n", "\n").lstrip(INVISIBLE)
    reading = read_blocks(text, defines_solution)
    source = _bare(text) if stop_reason not in CUT else None
    if source is None:
        source = _chosen(reading, text, stop_reason)
    if source is None:
        source = next((found.source for argument in arguments if (found := extract(argument, stop_reason)).source is not None), None)
    if source is None or len(source.encode(errors="replace")) > MOST_BYTES:
        return Extracted(None, _status_without_code(reading, stop_reason))
    return Extracted(_finished(source), "code")


def extract_code(reply: str) -> str | None:
    """Returns the candidate's source with a newline at its end, or None if the reply holds none."""
    return extract(reply).source


def _bare(text: str) -> str | None:
    """Returns a reply, or what stands behind a thought in it, if all of that is a candidate without a fence around it."""
    ends = [0, *(found.end() for found in itertools.islice(END_OF_THOUGHT.finditer(text), _MOST_ENDS))]
    for bare in (text[end:].lstrip("\n") for end in ends):
        if not bare.lstrip().startswith(("```", "~~~")) and is_python(bare) and defines_solution(bare):
            return bare
    return None


def _chosen(reading: Reading, text: str, stop_reason: str) -> str | None:
    """Returns the block that counts; one that Python can read, if there is any.

    An open block or thought counts if the provider says that the reply is complete.
    """
    complete = stop_reason in COMPLETE
    if reading.thinking and not complete:
        return None
    last = _last_files(reading, complete)
    if not last or not is_python(last[0]):
        last += _last_files(read_blocks(text, defines_solution, mid_line=True), complete)
    return next((source for source in last if is_python(source)), last[0] if last else None)


def _last_files(reading: Reading, complete: bool) -> list[str]:
    """Returns the last file among the closed blocks, and in a complete reply the last of all blocks."""
    closed = [block for block in reading.blocks if block.closed]
    return [*_files(closed)[-1:], *(_files(reading.blocks)[-1:] if complete else ())]


def _files(blocks: Sequence[Block]) -> list[str]:
    """Returns the blocks that may be the candidate, in order."""
    defining = [block.text for block in blocks if block.language in PYTHON and defines_solution(block.text)]
    files, bound = list[str](), set[str]()
    for text in [text for text in defining if not _is_sketch(text)] or defining:
        names = _names(text)
        if not names.unbound & bound:
            files.append(text)
        bound |= names.bound
    return files


def _status_without_code(reading: Reading, stop_reason: str) -> Status:
    said = reading.prose.strip(INVISIBLE + " \t\n")
    open_end = reading.thinking or any(not block.closed for block in reading.blocks)
    if stop_reason in CUT or (open_end and stop_reason not in (*COMPLETE, *FILTERED)):
        return "truncated"
    if stop_reason in FILTERED or (not reading.blocks and len(said) <= _MOST_OF_A_REFUSAL and _REFUSAL.match(said)):
        return "refused"
    return "no_code" if said or reading.blocks else "empty"


class _Names(NamedTuple):
    bound: set[str]
    unbound: set[str]
    """used, and neither bound nor built in"""


def _names(source: str) -> _Names:
    """Returns the names that a module binds anywhere, and those that it lacks."""
    try:
        nodes = list(ast.walk(parse(source)))
    except UNREADABLE:
        return _Names(set(), set())
    bound, used = set[str](), set[str]()
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound.add(name)
            case ast.alias(name=name, asname=other):
                bound.add(other or name.split(".")[0])
    star = "*" in bound
    return _Names(bound, set() if star else used - bound - set(dir(builtins)))


def defines_solution(source: str) -> bool:
    """Tells whether a module binds ``solution`` by a function or an assignment; of what Python cannot read, whether it looks like that."""
    text = textwrap.dedent(source)
    try:
        tree = parse(text)
    except UNREADABLE:
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
        tree = parse(textwrap.dedent(source))
    except UNREADABLE:
        return False
    found = [statement for statement in _module_level(tree.body) if _binds(statement)]
    return all(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and all(map(_says_nothing, item.body)) for item in found)


def _says_nothing(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


def _finished(source: str) -> str:
    return source if source.endswith("\n") else source + "\n"
