"""Reads a ``results.jsonl``. Lines that are no results of this version are left out and told; none makes the others unreadable.

What a killed run left of a record, or is still writing, is the end of a file: it alone goes without a word.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from peerlane.common.words import counted
from peerlane.errors import FileRefused, UsageError
from peerlane.results.json_lines import MOST_LINE_BYTES, is_torn, read_lines
from peerlane.results.record import first_fault
from peerlane.results.result import SCHEMA_VERSION, EnvironmentLine, Result

FILE = "results.jsonl"
_LAST_VERSION = 1_000_000
_MOST_TOLD = 5
"""lines that a note names"""


class ResultsReader:
    """The results of a file, oldest first, and what was left out. Raises UsageError if the file cannot be read.

    ``follow``: whether it may be a link, as where the user named it.
    """

    def __init__(self, path: Path, *, follow: bool = False) -> None:
        self.path = path
        self.results: list[Result] = []
        self.environments: dict[str, dict[str, Any]] = {}
        self._garbage: dict[int, str] = {}
        self._versions: dict[int, int] = {}
        try:
            for self._number, line in enumerate(read_lines(path, follow=follow), 1):
                self._read(line)
        except FileRefused as error:
            raise UsageError(f"{error}; expected a {FILE} that `peerlane eval` wrote") from None

    def notes(self) -> list[str]:
        """A sentence for every kind of line that was left out."""
        found = []
        for version, count in sorted(self._versions.items()):
            lines = f"{self.path}: {counted(count, 'line')} left out"
            found.append(f"{lines}: written by another version of peerlane (schema {version}, this one reads {SCHEMA_VERSION})")
        if self._garbage:
            (number, why), *others = self._garbage.items()
            which = f"line {number} is no result"
            if others:
                more = f" and {len(others) + 1 - _MOST_TOLD} more" if len(others) >= _MOST_TOLD else ""
                which = f"lines {', '.join(map(str, list(self._garbage)[:_MOST_TOLD]))}{more} are no results"
            found.append(f"{self.path}: {which} and left out ({why})")
        return found

    def _read(self, line: bytes) -> None:
        if not line.strip():
            return
        if len(line) > MOST_LINE_BYTES:
            self._garbage[self._number] = f"more than {MOST_LINE_BYTES} bytes"
            return
        try:
            record = json.loads(line, parse_constant=_refuse)
        except (ValueError, RecursionError):
            if line.endswith(b"\n") or not is_torn(line):
                self._garbage[self._number] = "not JSON"
            return
        version = record.get("schema_version") if isinstance(record, dict) else None
        if type(version) is not int or not 0 <= version <= _LAST_VERSION:
            self._garbage[self._number] = "no schema_version"
        elif version != SCHEMA_VERSION:
            self._versions[version] = self._versions.get(version, 0) + 1
        else:
            self._read_record(record)

    def _read_record(self, record: dict[str, Any]) -> None:
        try:
            if record.get("type") == "environment":
                found = EnvironmentLine.model_validate(record)
                self.environments[found.environment_hash] = found.environment
            elif "type" not in record:
                self._garbage[self._number] = "no type"
            elif record["type"] != "result":
                self._garbage[self._number] = "an unknown type"
            else:
                environment = self.environments.get(str(record.get("environment_hash")), {})
                self.results.append(Result.model_validate({**record, "environment": environment}))
        except ValidationError as error:
            self._garbage[self._number] = first_fault(error, "the line")


def read_results(path: Path, notes: list[str] | None = None, *, follow: bool = False) -> list[Result]:
    """The results in a file, or in a folder's ``results.jsonl``. What was left out is added to ``notes``.

    ``follow``: whether a file may be a link; the one in a folder may not. Raises UsageError if there is no such file, and if it holds lines
    and none of them is a result.
    """
    if path.is_dir():
        path, follow = path / FILE, False
    if not os.path.lexists(path):
        own = "; peerlane's own are in its source, not in its package" if path.parts[:1] == ("results",) else ""
        raise UsageError(f"there is no file {path}: expected a {FILE} that `peerlane eval` wrote, or its folder{own}")
    reader = ResultsReader(path, follow=follow)
    found = reader.notes()
    if found and not reader.results:
        raise UsageError("\n".join(found))
    if notes is not None:
        notes += found
    return reader.results


def newest(results: Iterable[Result]) -> list[Result]:
    """Without results that a later one of the same candidate's name and identity replaces; the order stays."""
    found = {(result.identity, result.candidate.name): result for result in results}
    return list(found.values())


def last_right(results: Iterable[Result]) -> list[Result]:
    """Returns the last correct result of every problem and preset, or the last one if none is correct: runs come in slices, and repeat.

    Results of the public timing protocol are left out, for the others are put together.
    """
    found: dict[tuple[object, ...], Result] = {}
    for result in results:
        if result.timing_protocol == "kittens":
            continue
        key = result.problem.id, result.preset, result.world_size, result.node, result.candidate.name
        if key not in found or result.correct or not found[key].correct:
            found[key] = result
    return list(found.values())


def as_document(results: Sequence[Result]) -> dict[str, Any]:
    """Results as one JSON object: ``environments`` by hash, and ``results`` as the lines of a file have them."""
    return {
        "environments": {result.environment_hash: result.environment for result in results},
        "results": [result.model_dump(mode="json") for result in results],
    }


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
