"""The short demonstration: one right candidate, four wrong ones, and a kernel with a race, each with a sentence."""

from __future__ import annotations

import ast
import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerlane.cli.exit_codes import ExitCode
from peerlane.cli.expectations import BROKEN, read_expectation
from peerlane.cli.output import console, print_error, print_json
from peerlane.cli.race import imported, scenarios
from peerlane.common.syntax import parse

if TYPE_CHECKING:
    from peerlane.emulator import Report
    from peerlane.results.result import Result

CANDIDATES = (
    "pytorch/1_allreduce_pytorch.py",
    "broken/1_returns_nan_pytorch.py",
    "broken/1_collective_skipped_pytorch.py",
    "broken/1_forges_messages_pytorch.py",
    "broken/1_reuses_buffer_too_early_pytorch.py",
)
KERNEL = "race/missing_release.py"
COMPILER = "g++"
"""The compiler of the emulator."""
WORLD_SIZE = 2
CALLS_S = 4.0
"""Seconds for calls, one of which never ends. Right ones take milliseconds, and a second on a machine that is very busy."""
_TOLD = "{name}: {got}{but}\n    {sentence}\n    {reason}"


class ShortDemo:
    """Runs the short demonstration of a folder of examples; as the progress of its evaluations it prints each as it ends."""

    def __init__(self, examples: Path, *, as_json: bool) -> None:
        self.examples, self.as_json = examples, as_json
        self.shown: list[dict[str, Any]] = []
        self.failed = False
        """peerlane itself did"""

    def run(self) -> ExitCode:
        """Judges everything; returns OK if every verdict is as expected."""
        begin = time.monotonic()
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            self._judge_beside_race(pool)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an interrupt does not wait for the race
        as_expected = sum(item["as_expected"] for item in self.shown)
        if self.as_json:
            print_json({"shown": self.shown, "seconds": round(time.monotonic() - begin, 1)})
        else:
            console().print(
                f"{as_expected} of {len(self.shown)} verdicts are as expected, after {time.monotonic() - begin:.0f} s. "
                "`peerlane demo --all` judges all examples, `peerlane new 1` writes a candidate of your own."
            )
        if as_expected == len(self.shown):
            return ExitCode.OK
        print_error("the demonstration failed: a verdict is not the expected one")
        return ExitCode.HARNESS if self.failed else ExitCode.NOT_CORRECT

    def _judge_beside_race(self, pool: ThreadPoolExecutor) -> None:
        from peerlane.evaluate.processes.prestart import early_start

        with early_start("cpu", None):
            from peerlane.emulator import check  # here, for two threads must not import at a time
            from peerlane.evaluate import EvaluationPlan, discover, evaluate
            from peerlane.settings import Deadlines

            (scenario,) = scenarios(self.examples / KERNEL, imported(self.examples / KERNEL), WORLD_SIZE)
            # One schedule does: nothing orders the two accesses in any.
            report = pool.submit(check, scenario, schedules=1, for_gpu=False) if shutil.which(COMPILER) else None
            plan = EvaluationPlan(
                candidates=discover([str(self.examples / name) for name in CANDIDATES]),
                presets=("small",),
                world_sizes=(WORLD_SIZE,),
                modes=(),
                device="cpu",
                deadlines=Deadlines().with_calls(CALLS_S),
            )
            evaluate(plan, self)
        self._tell_race(report)

    def _tell_race(self, report: Future[Report] | None) -> None:
        if report is None:
            print(f"left out: the race of a kernel, for there is no {COMPILER} here, which the emulator compiles it with", file=sys.stderr)
            return
        found = report.result().findings
        reason = "\n    ".join(str(found[0]).splitlines()) if found else "nothing was found"
        self._tell(self.examples / KERNEL, "race", found[0].kind if found else "correct", reason)

    def _tell(self, path: Path, expected: str, got: str, reason: str) -> None:
        item = {"name": path.stem, "expected": expected, "got": got, "sentence": _about(path), "reason": reason}
        self.shown.append({**item, "as_expected": expected == got})
        if not self.as_json:
            but = "" if expected == got else f", and not {expected} as expected"
            console().print(_TOLD.format(**item, but=but).rstrip() + "\n")

    # --- the progress of evaluations ---

    def started(self, total: int, skipped: int) -> None: ...

    def phase(self, candidate: str, problem: int, preset: str, world_size: int, phase: str) -> None: ...

    def finished(self, result: Result) -> None:
        """Prints a verdict."""
        path = next(self.examples / name for name in CANDIDATES if Path(name).stem == result.candidate.name)
        expected = read_expectation(path).on("cpu")[0] if path.parent.name == BROKEN else "correct"
        self.failed |= result.verdict.kind == "harness_error"
        self._tell(path, expected, result.verdict.kind, "" if result.correct else result.verdict.reason)

    def note(self, text: str) -> None:
        """Prints a note on stderr."""
        print(text, file=sys.stderr)


def _about(path: Path) -> str:
    """Returns the first paragraph of a file's docstring."""
    text = ast.get_docstring(parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())
