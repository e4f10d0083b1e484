"""Which tests run when: the table names tests that exist."""

from __future__ import annotations

from pathlib import Path

from floors import SLOW


def test_every_entry_of_the_slow_tests_is_there() -> None:
    for entry in SLOW:
        file, _, test = entry.partition("::")
        path = Path(__file__).parents[1] / file
        assert path.is_file() and (not test or f"def {test}(" in path.read_text(encoding="utf-8")), f"tests/floors.py names {entry}"
