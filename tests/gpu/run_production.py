"""Judge the solutions (or libraries) at sizes of real models, the most telling problems first, in slices that resume.

    PYTHONPATH=src python tests/gpu/run_production.py --world-size 2 --out production
    PYTHONPATH=src python tests/gpu/run_production.py --world-size 4 --ranks-per-gpu 4 --preset bandwidth --out virtual

Runs `peerlane eval` on one group of problems after the other. What is stored in OUT is not judged again: after a cut, the same command goes
on. All ends --budget seconds after the start, or up to 20 s later: what runs then is interrupted, and judged by the next call. Prints a
line for every problem that has a result. Exit code 1 if a result is missing or not correct.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from peerlane.results.reader import FILE, last_right, read_results
from peerlane.results.result import Result

GROUPS: tuple[tuple[int, ...], ...] = (
    (13, 16, 12, 11, 14, 15, 1, 2, 7, 8),
    (49, 50, 51, 31, 54, 39, 27, 28, 29, 44),
    (22, 25, 68, 71, 72, 48, 40, 47, 73, 45),
    (3, 4, 5, 6, 9, 10, 17, 18, 19, 20, 21, 32),
    (33, 34, 35, 36, 37, 38, 41, 42, 43, 46, 52, 53),
    (55, 56, 57, 58, 59, 60, 76, 78, 87, 80, 77, 61),
    (63, 64, 65, 66, 67, 69, 70, 79, 81, 85),
    (23, 24, 26, 30, 82, 84, 86, 74, 75, 83, 62),
)
"""Problems in the order of what is lost by a cut: tensor parallelism, experts and attention, what was too large or too slow before, the
others; references that take long come last."""
ENDING_S = 20.0


def command(options: argparse.Namespace, group: Sequence[int]) -> list[str]:
    numbers = ",".join(map(str, group))
    chosen = ["--problem", numbers, "--preset", options.preset, "--cases", "timed", "--mode", options.mode, "--out", str(options.out)]
    ranks = ["--world-size", str(options.world_size), "--timeout", str(options.timeout), "--device", options.device]
    shared = ["--ranks-per-gpu", str(options.ranks_per_gpu)] if options.ranks_per_gpu else []
    return [sys.executable, "-m", "peerlane", "eval", *options.candidates, *chosen, *ranks, *shared]


def covered(candidates: Sequence[str]) -> set[int]:
    """The problems that the candidates solve."""
    from peerlane.evaluate import discover

    numbers = {candidate.problem for candidate in discover(list(candidates))}
    known = {number for group in GROUPS for number in group}
    return known & {number for number in numbers if number is not None} or known


def line(result: Result) -> str:
    speeds = [
        f"{item.mode} {item.speedup.median:.2f} [{item.speedup.low:.2f}, {item.speedup.high:.2f}] n={item.rounds}"
        if item.status == "measured"
        else f"{item.mode} {item.status}: {(item.reason if item.status == 'failed' else item.why)[:60]}"
        for item in result.speed
    ]
    said = "; ".join(speeds) if result.correct else result.verdict.reason.splitlines()[0][:120]
    slow = {name: round(seconds, 1) for name, seconds in result.stage_seconds.items() if seconds >= 3}
    flags = f" {','.join(result.flags)}" if result.flags else ""
    return f"{result.problem.id:3d} {result.verdict.kind}{flags} {sum(result.stage_seconds.values()):.0f} s {said} {slow or ''}"


def judge(options: argparse.Namespace, group: Sequence[int], end: float) -> None:
    """Judges a group, by ``time.monotonic`` until ``end`` or up to ``ENDING_S`` later."""
    with open(options.out / "log.txt", "ab") as log, subprocess.Popen(command(options, group), stdout=log, stderr=log) as process:
        for how, seconds in ((signal.SIGINT, max(0.0, end - time.monotonic())), (signal.SIGKILL, ENDING_S)):
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(how)  # its processes end by themselves


def run(options: argparse.Namespace) -> int:
    end, wanted = time.monotonic() + options.budget, covered(options.candidates)
    options.out.mkdir(parents=True, exist_ok=True)
    for group in GROUPS:
        kept = [number for number in group if number in wanted]
        if kept and time.monotonic() < end:
            judge(options, kept, end)
    found = last_right(read_results(options.out)) if (options.out / FILE).is_file() else []
    for result in sorted(found, key=lambda item: item.problem.id):
        print(line(result))
    missing = sorted(wanted - {result.problem.id for result in found})
    wrong = [result.problem.id for result in found if not result.correct]
    print(f"{len(found)} results, not correct: {wrong or 'none'}, missing: {missing or 'none'}; log: {options.out / 'log.txt'}")
    return 1 if missing or wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", nargs="+", default=["solutions"])
    parser.add_argument("--preset", default="production_first")
    parser.add_argument("--mode", default="graph,eager")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--ranks-per-gpu", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of one evaluation")
    parser.add_argument("--budget", type=float, default=500.0, help="seconds for all")
    parser.add_argument("--out", type=Path, required=True)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
