"""The command line, as tests call it in their own process: the fixture ``peerlane`` of conftest.py."""

from typing import NamedTuple, Protocol


class Said(NamedTuple):
    """The output of a command."""

    out: str
    err: str


class Peerlane(Protocol):
    """Runs a command, whose exit code must be ``code``, and returns what it said."""

    def __call__(self, *words: object, code: int = 0) -> Said: ...
