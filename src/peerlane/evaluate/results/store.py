"""The results of a folder: ``results.jsonl``, and claims that keep two runs from judging the same thing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from peerlane.errors import HarnessError
from peerlane.evaluate.results.identity import Identity
from peerlane.evaluate.results.lines import append_lines, make_appendable
from peerlane.evaluate.results.reader import FILE, ResultsReader
from peerlane.evaluate.results.result import EnvironmentLine, Result

CLAIMS = "results.claims"
_TO_REPEAT = ("harness_error", "not_run")  # these say nothing about the candidate


class ResultsStore:
    """The results of a folder, indexed once. Lines that are no results of this version stay where they are; :attr:`notes` counts them.

    Raises UsageError if the folder cannot be written, or its ``results.jsonl`` is another kind of file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        make_appendable(self.path)
        self._reader = ResultsReader(self.path)
        self._results: list[Result] = []
        self._final: dict[Identity, dict[str, Result]] = {}
        for result in self._reader.results:
            self._add(result)
        self.notes = self._reader.notes()
        self._appended: set[Hashable] = set()  # own results that were not read back yet
        self._claims: int | None = None
        self._held: set[int] = set()

    def __del__(self) -> None:
        if getattr(self, "_claims", None) is not None and os is not None:  # modules are gone at the interpreter's end
            os.close(self._claims)  # type: ignore[arg-type]

    def results(self) -> list[Result]:
        """All results, oldest first."""
        return list(self._results)

    def has(self, identity: Identity) -> bool:
        """True if this evaluation is done. One that failed in the harness, or could not be run, is to be done again."""
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
        self._reader.environments[result.environment_hash] = result.environment
        self._appended.add(_place_of(result))
        self._add(result)

    def refresh(self) -> None:
        """Reads what other runs have added."""
        for result in self._reader.update():
            if _place_of(result) in self._appended:
                self._appended.remove(_place_of(result))
            else:
                self._add(result)

    def claim(self, identity: Identity) -> Claim | None:
        """The right to judge this now, until the claim is released or the process ends; None while another run has it.

        Read :meth:`refresh` and :meth:`has` again after the claim: the other run may have finished just before.
        """
        if self._claims is None:
            self._claims = os.open(self.path.with_name(CLAIMS), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        place = int.from_bytes(identity.digest[:7])
        if place in self._held or not _lock_byte(self._claims, place, fcntl.F_WRLCK):
            return None
        self._held.add(place)
        return Claim(self, place)

    def end_claim(self, place: int) -> None:
        """See :meth:`Claim.release`."""
        assert self._claims is not None
        self._held.discard(place)
        _lock_byte(self._claims, place, fcntl.F_UNLCK)

    def _add(self, result: Result) -> None:
        self._results.append(result)
        if result.verdict.kind not in _TO_REPEAT and "overloaded" not in result.flags:
            self._final.setdefault(result.identity, {})[result.candidate.name] = result


class Claim(contextlib.AbstractContextManager["Claim"]):
    """Held until it is left. The kernel releases it when the process is killed."""

    def __init__(self, store: ResultsStore, place: int) -> None:
        self._store, self._place = store, place

    def release(self) -> None:
        """Another run may claim it."""
        self._store.end_claim(self._place)

    def __exit__(self, *_: object) -> None:
        self.release()


def _place_of(result: Result) -> Hashable:
    return result.run_id, result.finished_at, result.candidate.name, result.identity


def _lock_byte(descriptor: int, place: int, kind: int) -> bool:
    """Locks or unlocks one byte, for this open file and not for the process. True where file systems have no locks: as without claims."""
    request: Any = struct.pack("hhqqi4x", kind, os.SEEK_SET, place, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def _line(record: Result | EnvironmentLine, name: str) -> bytes:
    """The record as it is written; it must be readable again."""
    try:
        line = record.model_dump_json().encode()
        type(record).model_validate_json(line)
    except ValueError as error:  # of pydantic's errors too
        raise HarnessError(f"the result of {name!a} cannot be written so that it can be read: {error}") from None
    return line
