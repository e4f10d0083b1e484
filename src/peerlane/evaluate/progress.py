"""Those who hear of the progress of an evaluator."""

import threading
from typing import Protocol

from peerlane.results.result import Result


class Progress(Protocol):
    """Hears what happens, in one call at a time; evaluations side by side call from threads of their own."""

    def started(self, total: int, skipped: int) -> None:
        """``total`` evaluations are to be done; ``skipped`` more were done before."""

    def phase(self, candidate: str, problem: int, preset: str, world_size: int, phase: str) -> None:
        """An evaluation entered a phase, or waits in it for a call that may hang; the text of the phase then says for how long."""

    def finished(self, result: Result) -> None:
        """An evaluation ended."""

    def note(self, text: str) -> None:
        """Something went wrong, and the run goes on."""


class Silent:
    """Progress that goes nowhere."""

    def started(self, total: int, skipped: int) -> None: ...

    def phase(self, candidate: str, problem: int, preset: str, world_size: int, phase: str) -> None: ...

    def finished(self, result: Result) -> None: ...

    def note(self, text: str) -> None: ...


class OneAtATime:
    """Passes progress on, one call at a time: evaluations side by side are in threads of their own."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._lock = progress, threading.RLock()

    def started(self, total: int, skipped: int) -> None:
        with self._lock:
            self._progress.started(total, skipped)

    def phase(self, candidate: str, problem: int, preset: str, world_size: int, phase: str) -> None:
        with self._lock:
            self._progress.phase(candidate, problem, preset, world_size, phase)

    def finished(self, result: Result) -> None:
        with self._lock:
            self._progress.finished(result)

    def note(self, text: str) -> None:
        with self._lock:
            self._progress.note(text)
