"""Judges candidates for an agent, in the evaluator's ranks and never in this process."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from peerlane.errors import UsageError
from peerlane.evaluate.audit.timeline import Timeline
from peerlane.generate.attempts import Speedup

if TYPE_CHECKING:
    from peerlane.evaluate import Result

MODES = ("eager", "graph")


@dataclass(frozen=True)
class Judged:
    """A verdict with what the author of the candidate may know of it."""

    verdict: str
    feedback: str
    speedups: dict[str, Speedup]
    sha256: str


class AsyncEvaluator(Protocol):
    """What :class:`.Evaluator` and :class:`.Client` have in common."""

    async def evaluate_async(self, problem: int | None = None, source: str | bytes | None = None, **request: Any) -> Result:
        """The result of one candidate."""


class Judge:
    """Asks an open evaluator, here or on a service: it lets one candidate at a time have the machine, and stores every result."""

    def __init__(self, evaluator: AsyncEvaluator, preset: str, variant: str = "default") -> None:
        self._evaluator, self._preset, self._variant = evaluator, preset, variant

    async def judge(self, problem: int, source: str, modes: tuple[str, ...]) -> Judged:
        """The verdict on a source; without modes, of correctness only."""
        data = source.encode(errors="replace")
        variant = self._variant
        result = await self._evaluator.evaluate_async(problem, data, modes=modes, presets=(self._preset,), variant=variant)
        return judged(result, hashlib.sha256(data).hexdigest())

    async def trace(self, problem: int, source: str) -> str:
        """What every rank does when, reference apart, in a few lines per launch mode; the verdict's feedback if there is no timeline."""
        data, common = source.encode(errors="replace"), {"presets": (self._preset,), "variant": self._variant, "rerun": True}
        with tempfile.TemporaryDirectory(prefix="peerlane-trace-") as folder:
            try:
                result = await self._evaluator.evaluate_async(problem, data, modes=MODES, timelines=Path(folder), **common)
            except UsageError as error:
                return str(error)
            found = [Timeline.read(file).summary() for file in sorted(Path(folder).glob("*.json"))]
        return "\n\n".join(found) or result.feedback()


def judged(result: Result, sha256: str) -> Judged:
    """A result as an author may see it."""
    return Judged(result.verdict.kind, result.feedback(), speedups_of(result), sha256)


def speedups_of(result: Result) -> dict[str, Speedup]:
    """By launch mode, where one was measured."""
    speeds = {mode: speed.speedup for mode in MODES if (speed := result.speed_in(mode)) is not None}
    return {mode: Speedup(speedup.low, speedup.median, speedup.high) for mode, speedup in speeds.items()}
