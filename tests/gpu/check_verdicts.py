"""Every broken example gets its verdict on this machine's GPUs, harms nobody after it, and leaves no process and no GPU memory behind.

    python tests/gpu/check_verdicts.py --world-size 4 [--quick]

``--quick`` leaves out what does not depend on the device, and puts a good candidate only behind those that break something.
Prints a line per candidate, then the checks; exits with 1 if any of them failed. ``--device cpu`` shows the same on gloo ranks.
"""

import argparse
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from e2e.runs import EXAMPLES, GOOD, MARK, alternate, marked, marked_processes
from peerlane.cli.demo import can_run
from peerlane.cli.expectations import read_expectation
from peerlane.evaluate import EvaluationPlan, Result, discover, evaluate
from peerlane.evaluate.evaluator import Silent
from peerlane.settings import SELFTEST_RULES, Deadlines

DEADLINES = Deadlines(exit=5.0).with_calls(8.0)
MEMORY_MB = 100
QUICK_WITH_GOOD = (
    "spins_in_kernel", "endless_loop_pytorch", "collective_skipped", "illegal_address", "index_out_of_range", "exits_with_status_0",
    "raises_on_one_rank", "wrong_dtype", "right_on_rank_0",
)  # fmt: skip
QUICK_ALONE = (
    "caches_first_output", "stream_not_joined", "returns_constants", "patches_clock", "allocates_too_much", "jit_syntax_error",
    "endless_loop_at_exit", "leaves_daemon",
)  # fmt: skip
SLOW = "1_patches_clock_pytorch"
"""Works eight times as much as the reference and forges its times: a true measurement shows it slower."""


class Watch(Silent):
    """Prints every result as it comes, with its wall time and whether its verdict is one of those that ``expected`` gives for it."""

    def __init__(self, expected: Callable[[Result], Collection[str]]) -> None:
        self.expected, self.timed = expected, list[dict[str, Any]]()
        self.begin = self.last = time.monotonic()

    def finished(self, result: Result) -> None:
        now, expected, speed = time.monotonic(), self.expected(result), result.speed_in("eager")
        name, kind, good = result.candidate.name, result.verdict.kind, result.verdict.kind in expected
        row = {"candidate": name, "verdict": kind, "expected": good, "seconds": now - self.last}
        self.timed.append(row | {"build_s": result.stage_seconds.get("build", 0.0)})
        measured = "" if speed is None else f", speedup {speed.speedup.median:.3f}"
        print(
            f"{'ok  ' if good else 'FAIL'} {now - self.last:6.1f} s  {name}: expected {' or '.join(sorted(expected))}, "
            f"got {kind}{measured}" + ("" if good else f" ({result.verdict.reason})\n{result.log_tail}"),
            flush=True,
        )
        self.last = now

    @property
    def failures(self) -> int:
        return sum(not row["expected"] for row in self.timed)


def expected_on(device: str, result: Result) -> Collection[str]:
    """Returns the verdicts that are right for a broken example, or a good one; none if its forged times were believed."""
    if result.candidate.name == GOOD.stem:
        return ("correct",)
    speed = result.speed_in("eager")
    if result.candidate.name == SLOW and device == "cuda" and (speed is None or speed.speedup.median >= 0.5):
        return ()
    return read_expectation(EXAMPLES / "broken" / f"{result.candidate.name}.py").on(device)  # type: ignore[arg-type]


def memory_mb() -> list[int]:
    """Memory in use on every GPU, as nvidia-smi reports it; nothing where there is no nvidia-smi."""
    try:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return [int(line) for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()]
    except FileNotFoundError:
        return []


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def check(what: str, passed: bool, detail: object = "") -> int:
    """Prints the outcome of a check; 1 if it failed."""
    print(f"{'ok  ' if passed else 'FAIL'} {what}" + ("" if passed else f": {detail}"), flush=True)
    return int(not passed)


def check_memory(what: str, before: list[int]) -> int:
    """Whether as much GPU memory is in use as before, soon; 1 if not. Without GPUs there is nothing to check."""

    def back() -> bool:
        return all(abs(now - then) <= MEMORY_MB for now, then in zip(memory_mb(), before, strict=True))

    return check(what, within(20, back), (before, memory_mb())) if before else 0


def chosen(device: str, quick: bool) -> list[Path]:
    """The broken candidates that this machine can judge, with a good one behind each, or behind some of them."""
    paths = [path for path in sorted((EXAMPLES / "broken").glob("*.py")) if can_run(read_expectation(path), device)]  # type: ignore[arg-type]
    if not quick:
        return alternate(paths)

    def those(names: tuple[str, ...]) -> list[Path]:
        return [path for path in paths if any(name in path.name for name in names)]

    return [*alternate(those(QUICK_WITH_GOOD)), *those(QUICK_ALONE)]


def judge_all(device: str, world_size: int, quick: bool) -> int:
    """The chosen candidates in one run; the number of failures."""
    paths = chosen(device, quick)
    plan = EvaluationPlan(
        candidates=discover([str(path) for path in paths]),
        presets=("small",),
        world_sizes=(world_size,),
        modes=("eager",),
        device=device,  # type: ignore[arg-type]
        deadlines=DEADLINES,
        rules=SELFTEST_RULES,
    )
    watch = Watch(partial(expected_on, device))
    results = evaluate(plan, watch)
    print(f"{len(results)} evaluations in {time.monotonic() - watch.begin:.0f} s", flush=True)
    return watch.failures + check("every candidate was judged", len(results) == len(paths), len(results))


def kill_supervisor(device: str, world_size: int, before: list[int]) -> int:
    """SIGKILL for a supervisor whose candidate hangs on the GPUs; the number of failures."""
    stuck = EXAMPLES / "broken" / ("1_spins_in_kernel_cuda.py" if device == "cuda" else "1_endless_loop_pytorch.py")
    mark = f"killed-{os.getpid()}"
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "peerlane", "eval", str(GOOD), str(stuck), "--preset", "small", "--mode", "eager"]
        command += ["--world-size", str(world_size), "--device", device, "--out", out]
        process = subprocess.Popen(command, env={**os.environ, MARK: mark}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            stored = within(120, lambda: (Path(out) / "results.jsonl").exists() and bool((Path(out) / "results.jsonl").read_bytes()))
            time.sleep(15.0 if device == "cuda" else 3.0)  # the second candidate is in its first call by now, for 90 s
            failures = check("the supervisor is in mid-run", stored and process.poll() is None and len(marked_processes(mark)) > world_size)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        gone = within(10, lambda: not marked_processes(mark))
        failures += check("no process outlives a killed supervisor by 10 s", gone, marked_processes(mark))
        return failures + check_memory("its GPU memory is free", before)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    print(f"rules: {dataclasses.asdict(SELFTEST_RULES)}\ndeadlines: {dataclasses.asdict(DEADLINES)}", flush=True)

    before, mark = memory_mb(), f"verdicts-{os.getpid()}"
    with marked(mark):
        failures = judge_all(options.device, options.world_size, options.quick)
    failures += check("no process is left", within(10, lambda: not marked_processes(mark)), marked_processes(mark))
    failures += check_memory("GPU memory is as before", before)
    failures += kill_supervisor(options.device, options.world_size, before)
    print("all as expected" if not failures else f"{failures} failures", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
