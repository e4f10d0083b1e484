"""``results.jsonl``: one result a line, appended whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from peerlane.errors import HarnessError, UsageError
from peerlane.evaluate.results.verdict import EvaluationKey, Result
from peerlane.files import lock

_PATIENCE_S = 5.0  # with other runs that append to the file, which takes milliseconds; any other holder of its lock is ignored
_BEGINNING = b'{"schema_version"'  # of every record that is appended to a file
_TO_REPEAT = ("harness_error", "not_run")  # these say nothing about the candidate


class ResultsStore:
    """The results of a folder. A line that a killed run left unfinished is dropped; nothing else is ever changed.

    Raises UsageError if the folder cannot be written, or holds a ``results.jsonl`` that is no such file of this version.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.jsonl"
        make_appendable(self.path)
        self._results = self._read()
        self._final: dict[EvaluationKey, dict[str, Result]] = {}
        for result in self._results:
            self._index(result)

    def _read(self) -> list[Result]:
        results = []
        for number, line in enumerate(whole_lines(self.path), 1):
            if not line.strip():
                continue
            try:
                results.append(Result.model_validate_json(line))
            except ValidationError as error:
                first = error.errors()[0]
                raise UsageError(
                    f"{self.path}, line {number} is not a result of this version ({first['msg']} at {first['loc']}); "
                    "move the file away or choose another folder with --out"
                ) from None
        return results

    def results(self) -> list[Result]:
        """All results, oldest first."""
        return list(self._results)

    def has(self, key: EvaluationKey) -> bool:
        """True if this evaluation is done. One that failed in the harness, or could not be run, is to be done again."""
        return key in self._final

    def find(self, key: EvaluationKey, name: str) -> Result | None:
        """The newest result that is done: of the candidate with this name, else of another with the same source."""
        found = self._final.get(key)
        return None if found is None else found.get(name) or list(found.values())[-1]

    def _index(self, result: Result) -> None:
        if result.verdict.kind not in _TO_REPEAT and "overloaded" not in result.flags:
            self._final.setdefault(result.key, {})[result.candidate.name] = result

    def append(self, result: Result) -> None:
        """Adds a result: written in one piece, flushed to the disk before this returns; raises HarnessError if it cannot be."""
        append_line(self.path, _line(result))
        self._results.append(result)
        self._index(result)


def _line(result: Result) -> bytes:
    """The result as it is written; it must be readable, or nothing in its file would be any more."""
    try:
        line = result.model_dump_json().encode()
        Result.model_validate_json(line)
    except ValueError as error:  # of pydantic's errors too
        raise HarnessError(f"the result of {result.candidate.name!a} cannot be written so that it can be read: {error}") from None
    return line


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file, without one at the end that a killed run left unfinished."""
    data = path.read_bytes()
    return data[: _end_of_last_line(data)].splitlines()


def torn(tail: bytes) -> bool:
    """Whether this, behind the last line of a file, is what a killed run left of a record (nothing is): it may be dropped."""
    return tail.startswith(_BEGINNING) or _BEGINNING.startswith(tail)


def make_appendable(path: Path) -> None:
    """Makes the file if there is none; raises UsageError if :func:`append_line` could not add to it without harm."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"):
            pass
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot write results to {path}: {error.strerror}; name a place that can be written with --out") from None
    if not torn(tail := data[_end_of_last_line(data) :]):
        raise UsageError(f"{path} {_ends_in(tail)}; move the file away or choose another place with --out")


def append_line(path: Path, line: bytes) -> None:
    """Adds a line to a file, whole or not at all, flushed to the disk before this returns. What a killed run left of a line is replaced.

    Raises HarnessError if it cannot, and if the file ends in what is not such a rest.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b", buffering=0) as file:  # a buffer would be written again by truncate and close
            lock(file, _PATIENCE_S)
            data = path.read_bytes()
            end = _end_of_last_line(data)
            if not torn(data[end:]):
                raise HarnessError(f"cannot append to {path}: it {_ends_in(data[end:])}; the result was not stored")
            try:
                file.truncate(end)
                left = memoryview(line + b"\n")
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise
    except OSError as error:
        raise HarnessError(f"cannot append to {path}: {error.strerror}; the result was not stored") from None


def _end_of_last_line(data: bytes) -> int:
    return data.rfind(b"\n") + 1


def _ends_in(tail: bytes) -> str:
    return f"ends in {tail[:40].decode(errors='replace')!a}, without a line end: expected records, one a line"
