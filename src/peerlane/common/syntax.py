"""Python's parser, made safe for several threads."""

import ast

UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError, SystemError)
"""what :func:`parse` raises for a text: ValueError for null bytes, the last three for one that is too deep"""

_TRIES = 5


def parse(source: str | bytes) -> ast.Module:
    """Returns the syntax tree of a Python source, or raises one of :data:`UNREADABLE`.

    The parser of CPython 3.11 keeps its depth for all threads in one place: where two parse at once, as when one formats a traceback,
    it raises SystemError for a good text (https://github.com/python/cpython/issues/106905). Such a text is read again.
    """
    for _ in range(_TRIES - 1):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)
