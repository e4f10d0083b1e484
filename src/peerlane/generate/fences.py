"""Reads the fenced blocks of a Markdown text as its author meant them, with its thoughts left out.

A block of Python ends at the first closing line after which Python can read it, so that a fence within a docstring does not end it. A fence
may also stand at the end of a line of code. A ``</think>`` outside of blocks ends a thought; what stood in the thought is a draft.
"""

import bisect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import NamedTuple

from peerlane.common.syntax import UNREADABLE, parse

INVISIBLE = "\ufeff\u200b\u2060"
"""byte-order mark, zero-width space and word joiner, which models write before a fence"""
PYTHON = ("python", "py", "ipython", "", "text", "txt", "plaintext", "code")
_MARKDOWN = ("markdown", "md")
_OPENING = re.compile(rf"^(?P<indent>[ \t>{INVISIBLE}]*)(?P<fence>`{{3,}}|~{{3,}})(?P<info>[^`]*)$")
_MID_LINE = re.compile(
    r"^(?P<indent>).*?[^`~](?P<fence>`{3,}|~{3,})(?P<info>[ \t]*(?:python|py)\b[^`]*|[ \t]*python[\d.]+[ \t]*)$", re.IGNORECASE
)
_CLOSING = re.compile(rf"[ \t>{INVISIBLE}]*(?:`{{3,}}|~{{3,}})[ \t]*")
_LANGUAGE = re.compile(r"[a-z+#-]*")
_THOUGHT = re.compile(r"^[ \t]*<(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
END_OF_THOUGHT = re.compile(r"(?<![`'\"])</(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_MOST_PARSED = 4 << 20
"""characters that are parsed to find the ends of blocks in one text: a hostile one must not take long"""
_COST_OF_PARSING = 4000  # characters, of a short text
_MOST_DRAFTS = 20  # whose thought ends within them


class Block(NamedTuple):
    """One fenced block; ``closed`` is False if the text ends within it."""

    text: str
    language: str
    closed: bool


class Reading(NamedTuple):
    """The blocks of a text outside of thoughts, and the text around them; ``thinking``: the text ends within a thought."""

    blocks: list[Block]
    prose: str
    thinking: bool


def is_python(text: str) -> bool:
    """Tells whether Python can read the text as a module."""
    try:
        parse(text)
    except UNREADABLE:
        return False
    return True


def read_blocks(text: str, is_answer: Callable[[str], bool], mid_line: bool = False) -> Reading:
    """Reads a text with ``\\n`` at its line ends. ``is_answer`` tells whether code may end in the middle of a line.

    ``mid_line``: fences with the name of Python open behind other text too.
    """
    reader = _Reader(text.split("\n"), is_answer)
    lines, blocks, prose = reader.lines, list[Block](), list[str]()
    thought: tuple[int, int] | None = None
    wrappers: list[str] = []  # fences of Markdown that holds blocks of its own
    at, drafts = 0, _MOST_DRAFTS
    while at < len(lines):
        line = lines[at]
        if tag := _THOUGHT.match(line):
            thought, lines[at] = (len(blocks), len(prose)), line[tag.end() :]
            continue
        if tag := END_OF_THOUGHT.search(line):
            keep = thought or (0, 0)
            thought, lines[at] = None, line[tag.end() :]
            del blocks[keep[0] :], prose[keep[1] :]
            continue
        at += 1
        opening = _OPENING.match(line) or (_MID_LINE.match(line) if mid_line else None)
        if opening is None:
            prose.append(line)
        elif wrappers and not opening["info"].strip() and opening["fence"].startswith(wrappers[-1]):
            wrappers.pop()
        elif _language(opening["info"]) in _MARKDOWN:
            wrappers.append(opening["fence"])
        else:
            block, end = reader.block(at, opening)
            ended = next((number for number in range(at, end) if END_OF_THOUGHT.search(lines[number])), None)
            if ended is not None and drafts and not reader.parses(block.text):
                drafts, at = drafts - 1, ended  # the thought ended within a draft that has no end
            else:
                blocks.append(block)
                at = end
    said = prose if thought is None else prose[: thought[1]]
    return Reading(blocks, "\n".join(said), thought is not None)


def _language(info: str) -> str:
    """Returns the first word behind a fence: ``python`` for python3.12, py,linenos and {.python}; ``py`` for a file's name."""
    first = info.strip().lstrip("{.").split(" ")[0].lower()
    if re.match(r"[\w./-]+\.py\b", first):
        return "py"
    found = _LANGUAGE.match(first)
    return found[0] if found else ""


class _Reader:
    """The lines of a text, and how much of them may still be parsed."""

    def __init__(self, lines: list[str], is_answer: Callable[[str], bool]) -> None:
        self.lines, self._is_answer, self._left = lines, is_answer, _MOST_PARSED
        self._fences = [number for number, line in enumerate(lines) if "```" in line or "~~~" in line]
        self._closings = [number for number in self._fences if _CLOSING.fullmatch(lines[number])]

    def parses(self, text: str) -> bool:
        """Tells whether a text is Python; False once too much was parsed."""
        self._left -= len(text) + _COST_OF_PARSING
        return self._left > 0 and is_python(text)

    def block(self, start: int, opening: re.Match[str]) -> tuple[Block, int]:
        """Returns the block that begins at a line, and the number of the line behind it."""
        fence, language, indent = opening["fence"], _language(opening["info"]), opening["indent"].lstrip(INVISIBLE)

        def code(end: int, *more: str) -> str:
            return _code([_without(indent, line) for line in [*self.lines[start:end], *more]])

        first: int | None = None
        for end in _from(self._closings, start):
            if fence not in self.lines[end]:
                continue
            first = end if first is None else first
            if language not in PYTHON or self._left <= 0:
                break
            if self.parses(text := code(end)):
                return Block(text, language, True), end + 1
        for end in _from(self._fences, start) if language in PYTHON else ():
            if self._left <= 0:
                break
            before, found, behind = self.lines[end].partition(fence)
            opens = bool(found and not before.strip() and behind.strip(fence[0]).strip())  # perhaps the next block
            text = code(end, *([before] if before.strip() else []))
            if found and self.parses(text) and (opens or self._is_answer(text)):
                return Block(text, language, True), end if opens else end + 1
        if first is None:
            return Block(code(len(self.lines) - (not self.lines[-1])), language, False), len(self.lines)
        return Block(code(first), language, True), first + 1


def _from(numbers: list[int], start: int) -> Iterator[int]:
    """Yields those of ascending numbers that are not below ``start``."""
    return (numbers[at] for at in range(bisect.bisect_left(numbers, start), len(numbers)))


def _without(indent: str, line: str) -> str:
    """Returns a line without the indent of its block. A blank line may have lost the end of it."""
    if not indent or line.startswith(indent):
        return line[len(indent) :]
    return "" if indent.startswith(line) else line


def _code(lines: list[str]) -> str:
    """Returns lines as a module, which ends with a newline. A common indent goes if Python cannot read it otherwise."""
    text = "".join(f"{line}\n" for line in lines).lstrip(INVISIBLE)
    return textwrap.dedent(text) if text.lstrip("\n")[:1] in (" ", "\t") and not is_python(text) else text
