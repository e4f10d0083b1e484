"""The results of a folder: its ``results.jsonl``, which one run at a time adds to."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from peerlane.common.files import lock, open_appendable
from peerlane.errors import HarnessError
from peerlane.results.identity import Identity
from peerlane.results.json_lines import append_lines, make_appendable
from peerlane.results.reader import FILE, ResultsReader
from peerlane.results.result import EnvironmentLine, Result

_LOCK, _LOOK_S = "results.lock", 0.2


class ResultsStore:
    """The results of a folder, indexed once. Lines that are no results of this version stay where they are; :attr:`notes` counts them.

    Raises UsageError if the folder cannot be written, or its ``results.jsonl`` is another kind of file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        make_appendable(self.path)
        self._read()

    def _read(self) -> None:
        self._size = self._size_now()  # before: what another run adds meanwhile is read again
        self._reader = ResultsReader(self.path)
        self._results: list[Result] = []
        self._final: dict[Identity, dict[str, Result]] = {}
        for result in self._reader.results:
            self._add(result)
        self.notes = self._reader.notes()

    def _size_now(self) -> int:
        """Returns the size of the file, which is made again if it was removed."""
        with open_appendable(self.path) as file:
            return os.fstat(file.fileno()).st_size

    @contextmanager
    def alone(self, wait: Callable[[], None]) -> Iterator[None]:
        """Keeps other runs from judging for this folder, after what they have added is read. They are waited for, with calls of ``wait``,
        which may raise. The kernel ends the lock of a run that is killed."""
        with open_appendable(self.path.with_name(_LOCK)) as file:
            while not lock(file, _LOOK_S):
                wait()
            if self._size_now() != self._size:
                self._read()
            yield

    def results(self) -> list[Result]:
        """All results, oldest first."""
        return list(self._results)

    def has(self, identity: Identity) -> bool:
        """True if this evaluation is done. One that says nothing about the candidate is to be done again."""
        return identity in self._final

    def find(self, identity: Identity, name: str) -> Result | None:
        """The newest result that is done: of the candidate with this name, else of another with the same source."""
        found = self._final.get(identity)
        return None if found is None else found.get(name) or list(found.values())[-1]

    def append(self, result: Result) -> None:
        """Adds a result: written in one piece, flushed to the disk before this returns; raises HarnessError if it cannot be.

        Its environment is written before it, if the file does not have it yet.
        """
        lines = [_line(result, result.candidate.name)]
        if result.environment_hash not in self._reader.environments:
            told = EnvironmentLine(environment_hash=result.environment_hash, environment=result.environment)
            lines.insert(0, _line(told, "the environment"))
        append_lines(self.path, *lines)
        self._size = self._size_now()
        self._reader.environments[result.environment_hash] = result.environment
        self._add(result)

    def _add(self, result: Result) -> None:
        self._results.append(result)
        if not result.says_nothing:
            self._final.setdefault(result.identity, {})[result.candidate.name] = result


def _line(record: Result | EnvironmentLine, name: str) -> bytes:
    """The record as it is written; it must be readable again."""
    try:
        line = record.model_dump_json().encode()
        type(record).model_validate_json(line)
    except ValueError as error:  # of pydantic's errors too
        raise HarnessError(f"the result of {name!a} cannot be written so that it can be read: {error}") from None
    return line
