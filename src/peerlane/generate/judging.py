"""Judges candidates for an agent, in the evaluator's ranks and never in this process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peerlane.generate.attempts import Speedup

if TYPE_CHECKING:
    from peerlane.evaluate import Evaluator, Result

MODES = ("eager", "graph")


@dataclass(frozen=True)
class Judged:
    """A verdict with what the author of the candidate may know of it."""

    verdict: str
    feedback: str
    speedups: dict[str, Speedup]
    sha256: str


class Judge:
    """Asks an open evaluator, which lets one candidate at a time have the machine and stores every result."""

    def __init__(self, evaluator: Evaluator, preset: str, variant: str = "default") -> None:
        self._evaluator, self._preset, self._variant = evaluator, preset, variant

    async def judge(self, problem: int, source: str, modes: tuple[str, ...]) -> Judged:
        """The verdict on a source; without modes, of correctness only."""
        data = source.encode(errors="replace")
        variant = self._variant
        result = await self._evaluator.evaluate_async(problem, data, modes=modes, presets=(self._preset,), variant=variant)
        return judged(result, hashlib.sha256(data).hexdigest())


def judged(result: Result, sha256: str) -> Judged:
    """A result as an author may see it."""
    speeds = {mode: speed for mode in MODES if (speed := result.speed_in(mode)) is not None}
    speedups = {mode: Speedup(speed.speedup.low, speed.speedup.median, speed.speedup.high) for mode, speed in speeds.items()}
    return Judged(result.verdict.kind, result.feedback(), speedups, sha256)
