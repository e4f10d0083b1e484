"""Reads a ``results.jsonl``. Lines that are no results of this version are left out and counted; none makes the others unreadable."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from peerlane.common.files import read_regular
from peerlane.common.words import counted
from peerlane.errors import FileRefused, UsageError
from peerlane.results.json_lines import is_json, is_torn
from peerlane.results.result import SCHEMA_VERSION, EnvironmentLine, Result

FILE = "results.jsonl"
MOST_BYTES = 4 << 30
"""of a file: some hundred thousand results"""


class ResultsReader:
    """The results of a file, oldest first, and what was left out. Raises UsageError if the file cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: list[Result] = []
        self.environments: dict[str, dict[str, Any]] = {}
        self._garbage: dict[int, str] = {}
        self._versions: dict[int, int] = {}
        try:
            *lines, last = read_regular(path, MOST_BYTES, follow=True).split(b"\n")
        except FileRefused as error:
            raise UsageError(f"{error}; expected a {FILE} that `peerlane eval` wrote") from None
        for self._number, line in enumerate([*lines, last] if is_json(last) else lines, 1):  # a last line may lack its end alone
            self._read(line)

    def notes(self) -> list[str]:
        """A sentence for every kind of line that was left out."""
        found = []
        for version, count in sorted(self._versions.items()):
            lines = f"{self.path}: {counted(count, 'line')} left out"
            found.append(f"{lines}: written by another version of peerlane (schema {version}, this one reads {SCHEMA_VERSION})")
        if self._garbage:
            number, why = next(iter(self._garbage.items()))
            count = len(self._garbage)
            which = f"line {number} is no result" if count == 1 else f"{count} lines are no results, the first is line {number}"
            found.append(f"{self.path}: {which} and left out ({why})")
        return found

    def _read(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            record = json.loads(line, parse_constant=_refuse)
        except (ValueError, RecursionError):
            if not is_torn(line):
                self._garbage[self._number] = "not JSON"
            return
        version = record.get("schema_version") if isinstance(record, dict) else None
        if not isinstance(version, int):
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
            elif record["type"] == "result":
                environment = self.environments.get(record.get("environment_hash", ""), {})
                self.results.append(Result.model_validate({**record, "environment": environment}))
        except ValidationError as error:
            first = error.errors()[0]
            self._garbage[self._number] = f"{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}"


def read_results(path: Path, notes: list[str] | None = None) -> list[Result]:
    """The results in a file, or in a folder's ``results.jsonl``. What was left out is added to ``notes``.

    Raises UsageError if there is no such file, and if it holds lines and none of them is a result.
    """
    if path.is_dir():
        path /= FILE
    if not os.path.lexists(path):
        raise UsageError(f"there is no file {path}: expected a {FILE} that `peerlane eval` wrote, or its folder")
    reader = ResultsReader(path)
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
    """Returns the last correct result of every problem and preset, or the last one if none is correct: runs come in slices, and repeat."""
    found: dict[tuple[object, ...], Result] = {}
    for result in results:
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
