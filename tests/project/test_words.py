"""Words in code: docstrings say what a function returns or does, and names of tests are short promises."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUESTION = re.compile(r"(What|Whether|Why|How|Where|Which|Who)\b")
MOST_LETTERS = 60
NOT_YET_CONVERTED = (
    "src/peerlane/device/attention", "src/peerlane/device/host", "src/peerlane/device/products", "src/peerlane/problems",
    "tests/device/test_grouped_products.py", "tests/device/test_loaded_code.py", "tests/device/test_matrix_products.py", "tests/e2e",
    "tests/evaluate", "tests/ranks",
)  # fmt: skip
"""Folders and files that still hold other words. The list may only shrink: an entry without such words has to go."""


def questions(path: Path) -> Iterator[str]:
    """Yields the docstrings that begin like a question, where a verb phrase or a noun phrase is expected."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            if QUESTION.match(docstring):
                yield docstring.splitlines()[0]


def long_names(path: Path) -> Iterator[str]:
    """Yields the names of tests that are too long for a promise."""
    names = re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    yield from (name for name in names if len(name) > MOST_LETTERS)


@functools.cache
def offences() -> dict[str, list[str]]:
    """Returns the words to change, by file."""
    found = {path: [*questions(path)] for folder in ("src", "docs/build") for path in sorted((ROOT / folder).rglob("*.py"))}
    found |= {path: [*long_names(path)] for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    return {path.relative_to(ROOT).as_posix(): lines for path, lines in found.items() if lines}


def is_below(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place}/")


def test_docstrings_and_names_of_tests_use_plain_words() -> None:
    assert {path: lines for path, lines in offences().items() if not any(is_below(path, place) for place in NOT_YET_CONVERTED)} == {}


@pytest.mark.parametrize("place", NOT_YET_CONVERTED)
def test_the_list_of_unconverted_places_may_only_shrink(place: str) -> None:
    assert any(is_below(path, place) for path in offences()), f"{place} holds none of these words any more; take it off the list"
