"""Judges candidates for an agent, in the evaluator's ranks and never in this process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from peerlane.errors import UsageError
from peerlane.evaluate.audit.timeline import Timeline
from peerlane.generate.samples import MODES, Speedup, speedups_of

if TYPE_CHECKING:
    from peerlane.evaluate import Evaluator, Result

MOST_EMULATED = 4  # ranks: more of them show no other races, and take longer


@dataclass(frozen=True)
class Judged:
    """A verdict with what the author of the candidate may know of it."""

    verdict: str
    feedback: str
    speedups: dict[str, Speedup]
    sha256: str


class AsyncEvaluator(Protocol):
    """The methods that :class:`.Evaluator` and :class:`.Client` have in common."""

    async def evaluate_async(self, problem: int | None = None, source: str | bytes | None = None, **request: Any) -> Result:
        """Judges one candidate."""


class Racer:
    """Emulated ranks for candidates of the device kit. Their processes start with the first one; leaving the context ends them."""

    def __init__(self, world_size: int, **options: Any) -> None:
        self._world_size, self._options = min(world_size, MOST_EMULATED), options
        self._open = contextlib.ExitStack()
        self._evaluator: Evaluator | None = None
        self._starting = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    async def race(self, problem: int, source: str, variant: str) -> str:
        """Returns the emulator's findings in the problem's small cases, in the words of a verdict's feedback."""
        evaluator = await asyncio.to_thread(self._started)
        data = source.encode(errors="replace")
        result = await evaluator.evaluate_async(problem, data, modes=(), presets=("small",), variant=variant)
        return result.feedback()

    def _started(self) -> Evaluator:
        from peerlane.evaluate import Evaluator

        with self._starting:
            if self._evaluator is None:
                self._evaluator = self._open.enter_context(Evaluator(self._world_size, "emulated", **self._options))
            return self._evaluator


class Judge:
    """A client of an open evaluator, here or on a service: it lets one candidate at a time have the machine, and stores every result."""

    def __init__(self, evaluator: AsyncEvaluator, preset: str, variant: str = "default", racer: Racer | None = None) -> None:
        self._evaluator, self._preset, self._variant, self._racer = evaluator, preset, variant, racer

    async def race(self, problem: int, source: str) -> str:
        """Returns the emulator's findings; nothing of them is stored."""
        if self._racer is None:
            return "race: there are no emulated ranks in this run"
        return await self._racer.race(problem, source, self._variant)

    async def judge(self, problem: int, source: str, modes: tuple[str, ...]) -> Judged:
        """Judges a source; without modes, its correctness only."""
        data = source.encode(errors="replace")
        result = await self._evaluator.evaluate_async(problem, data, modes=modes, presets=(self._preset,), variant=self._variant)
        return Judged(result.verdict.kind, result.feedback(), speedups_of(result), hashlib.sha256(data).hexdigest())

    async def trace(self, problem: int, source: str) -> str:
        """Returns a few lines per launch mode that say what every rank does when, reference apart; the verdict's feedback if there is no
        timeline."""
        data, common = source.encode(errors="replace"), {"presets": (self._preset,), "variant": self._variant, "rerun": True}
        with tempfile.TemporaryDirectory(prefix="peerlane-trace-") as folder:
            try:
                result = await self._evaluator.evaluate_async(problem, data, modes=MODES, timelines=Path(folder), **common)
            except UsageError as error:
                return str(error)
            summaries = [Timeline.read(file).summary() for file in sorted(Path(folder).glob("*.json"))]
        return "\n\n".join(summaries) or result.feedback()
