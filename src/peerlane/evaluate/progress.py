"""Those who hear of the progress of an evaluator."""

import threading
from collections.abc import Callable
from typing import ParamSpec, Protocol

from peerlane.results.result import Result

P = ParamSpec("P")


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
        lock = threading.RLock()

        def locked(hear: Callable[P, None]) -> Callable[P, None]:
            def hear_alone(*args: P.args, **kwargs: P.kwargs) -> None:
                with lock:
                    hear(*args, **kwargs)

            return hear_alone

        self.started, self.phase = locked(progress.started), locked(progress.phase)
        self.finished, self.note = locked(progress.finished), locked(progress.note)
