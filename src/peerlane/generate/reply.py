"""Takes the candidate out of a model's reply.

The last complete fenced block of Python that defines ``solution`` counts; without one the last complete block of Python; without any block
the whole reply, if it is Python that defines ``solution``. A block that never ends, as in a reply that was cut, is no block. Blocks in
another language are passed over. What a model wrote between ``<think>`` and ``</think>`` is no part of its reply.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

_OPENING = re.compile(r"^(?P<indent>[ \t>]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^`\r\n]*?)[ \t]*$")
_PYTHON = re.compile(r"(?:python|py|python3|py3)?", re.IGNORECASE)
_DEFINES = re.compile(r"^(?:async[ \t]+)?def[ \t]+solution\b|^solution\b[^=\n]*=(?!=)|^from\b.*\bimport\b.*\bsolution\b", re.MULTILINE)
_REASONING = re.compile(r"^.*</think(?:ing)?>", re.DOTALL)


def extract_code(reply: str) -> str | None:
    """Returns the candidate's source with a newline at its end, or None if the reply holds none."""
    text = _REASONING.sub("", reply.replace("\r\n", "\n"), count=1)
    blocks = [block for block in _python_blocks(text) if block.strip()]
    for block in reversed(blocks):
        if _DEFINES.search(block):
            return _finished(block)
    if blocks:
        return _finished(blocks[-1])
    return _finished(text) if _DEFINES.search(text) and _is_python(text) else None


def _python_blocks(text: str) -> Iterator[str]:
    """Yields the insides of complete fenced blocks, of Python or of no language, in order, without the indent of their fences."""
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
        language = opening["language"].split("{")[0].split(":")[0].split(" ")[0].strip()
        if closed and _PYTHON.fullmatch(language):
            yield "\n".join(inside)


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):  # ValueError: null bytes
        return False
    return True


def _finished(source: str) -> str:
    return textwrap.dedent(source).strip("\n") + "\n"
