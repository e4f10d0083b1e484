"""Text that may be a candidate's, as records keep it: of bounded length, and without characters that a terminal obeys or hides."""

from typing import Any

LINE_CHARACTERS = 1_000
TEXT_CHARACTERS = 40_000
"""The most characters that are kept of a text of several lines, from its end."""


def printable(text: str, kept: str = "") -> str:
    """The text with escapes, such as ``\\x1b`` or ``\\u202e``, in place of all that is not printed; what is in ``kept`` stays."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in kept else char.encode("unicode_escape").decode() for char in text)


def one_line(text: str) -> str:
    """Its begin, on one line."""
    text = printable(text[: LINE_CHARACTERS + 1])
    return text if len(text) <= LINE_CHARACTERS else f"{text[: LINE_CHARACTERS - 3]}..."


def several_lines(text: str) -> str:
    """Its end; lines and tabs stay."""
    return printable(text[-TEXT_CHARACTERS:], kept="\n\t")[-TEXT_CHARACTERS:]


def sanitize(value: Any, *, lines: bool = False) -> Any:
    """The same value with all its texts made readable, those in tuples, lists and dicts too. Twice is as good as once."""
    if isinstance(value, str):
        return several_lines(value) if lines else one_line(value)
    if isinstance(value, (list, tuple)):
        return type(value)(sanitize(item, lines=lines) for item in value)
    if isinstance(value, dict):
        return {sanitize(key): sanitize(item, lines=lines) for key, item in value.items()}
    return value
