"""Judges one candidate at a time for an agent, in the evaluator's ranks and never in this process; results go to the run's folder."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerlane.errors import HarnessError
from peerlane.generate.attempts import Speedup

if TYPE_CHECKING:
    from peerlane.evaluate import Result

_LOG_LINES = 15


@dataclass(frozen=True)
class JudgeSettings:
    """How candidates are judged.

    Attributes:
        out: the folder of ``results.jsonl``; what it holds already is not judged again.
    """

    out: Path
    device: Any = "cpu"
    world_size: int = 2
    preset: str = "pkb"
    variant: str = "default"
    track: Any = "custom"
    isolation: Any = None


@dataclass(frozen=True)
class Judged:
    """A verdict with what the author of the candidate may know of it."""

    verdict: str
    feedback: str
    speedups: dict[str, Speedup]
    sha256: str


class Judge:
    """Judges candidates one after the other: they share the machine."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings
        self._turn = asyncio.Lock()

    async def judge(self, problem: int, source: str, modes: tuple[str, ...]) -> Judged:
        """The verdict on a source; raises HarnessError if the evaluator fails."""
        async with self._turn:
            return await asyncio.to_thread(self._judge, problem, source, modes)

    def _judge(self, problem: int, source: str, modes: tuple[str, ...]) -> Judged:
        from peerlane.evaluate import EvaluationPlan, ResultsStore, evaluate
        from peerlane.evaluate.candidates import candidate_file

        settings = self.settings
        data = source.encode(errors="replace")
        digest = hashlib.sha256(data).hexdigest()
        with tempfile.TemporaryDirectory(prefix="peerlane-agent-") as folder:
            path = Path(folder) / "candidate.py"
            path.write_bytes(data)
            plan = EvaluationPlan(
                candidates=[replace(candidate_file(path), problem=problem, name=f"{problem:03d}")],
                presets=(settings.preset,),
                world_sizes=(settings.world_size,),
                modes=modes,  # type: ignore[arg-type]
                device=settings.device,
                out=settings.out,
                variant=settings.variant,
                track=settings.track,
                isolation=settings.isolation,
            )
            results = evaluate(plan) or [
                result
                for result in ResultsStore(settings.out).results()
                if result.candidate.sha256 == digest and result.problem.id == problem and result.modes == modes
            ]
        if not results:
            raise HarnessError(f"the evaluator gave no result for problem {problem}")
        return judged(results[-1], digest)


def judged(result: Result, sha256: str) -> Judged:
    """A result as an author may see it."""
    speeds = {mode: speed for mode in ("eager", "graph") if (speed := result.speed_in(mode)) is not None}
    speedups = {mode: Speedup(speed.speedup.low, speed.speedup.median, speed.speedup.high) for mode, speed in speeds.items()}
    return Judged(result.verdict.kind, feedback(result), speedups, sha256)


def feedback(result: Result) -> str:
    """The evaluator's own words, where it has them; else verdict, reason and the end of what the ranks printed."""
    if (method := getattr(result, "feedback", None)) is not None:
        return str(method())
    lines = [f"{result.verdict.kind}: {result.verdict.reason}"]
    for item in result.speed:
        speed = result.speed_in(item.mode)
        if speed is None:
            lines.append(f"{item.mode}: not measured, {getattr(item, 'why', 'unknown')}")
            continue
        estimate = speed.speedup
        lines.append(
            f"{item.mode}: speedup {estimate.median:.3f} [{estimate.low:.3f}, {estimate.high:.3f}], reference "
            f"{speed.reference_us.median:.1f} us, candidate {speed.candidate_us.median:.1f} us"
        )
        lines += [
            f"{item.mode}: {use.candidate:.0%} of what {use.bound_by} allows ({use.bound_us:.1f} us, {use.ceilings} ceilings)"
            for use in speed.utilisation[-1:]
        ]
    if not result.correct and result.log_tail.strip():
        lines += ["output of the ranks:", *result.log_tail.strip().splitlines()[-_LOG_LINES:]]
    return "\n".join(lines)
