"""NVSHMEM candidates on a virtual node: five right ones, three broken ones, and twenty evaluations in a row with two hangs among them.

    NVSHMEM_DISABLE_NVLS=1 timeout 900 python tests/gpu/check_nvshmem.py --world-sizes 2,4
    timeout 600 python tests/gpu/check_nvshmem.py --compile       # all of them for sm_90a; needs no GPU

Needs `pip install 'peerlane[nvshmem]'`; the first form a GPU, and MPS for ranks that share it. Exits with 1 if anything failed.
"""

import argparse
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from check_verdicts import check, check_memory, memory_mb, within

from device.nvshmem_candidates import EXAMPLES, PROMPT, TWINS
from e2e.runs import marked, marked_processes
from peerlane.device.nvshmem.installation import what_is_missing
from peerlane.evaluate import EvaluationPlan, discover, evaluate
from peerlane.evaluate.plan import Device
from peerlane.settings import SELFTEST_RULES, Deadlines

DEADLINES = Deadlines(exit=5.0).with_calls(12.0)
CORRECT = ("correct",)
HANGS = (6, 13)  # places among the twenty


def compile_all(paths: Sequence[Path]) -> int:
    """Imports every candidate, which compiles it; the number of failures."""
    failures = 0
    for path in paths:
        begin = time.monotonic()
        try:
            programs = runpy.run_path(str(path))
        except Exception as error:
            failures += check(f"{path.name} compiles", False, error)
        else:
            cubin = programs["PROGRAM"] if "PROGRAM" in programs else next(iter(programs["PROGRAMS"].values()))
            failures += check(f"{path.name} compiles for {cubin.arch} in {time.monotonic() - begin:.1f} s", cubin.arch == "sm_90a", cubin)
    return failures


def judge(paths: Sequence[Path], world_sizes: tuple[int, ...], expected: Mapping[str, Sequence[str]], device: Device = "cuda") -> int:
    """Judges candidates in one run, and prints a line for each; the number of verdicts that are not the expected ones."""
    plan = EvaluationPlan(
        candidates=discover([str(path) for path in paths]),
        presets=("small",),
        world_sizes=world_sizes,
        modes=("eager", "graph"),
        device=device,
        deadlines=DEADLINES,
        rules=SELFTEST_RULES,
    )
    results = evaluate(plan)
    failures = check(f"{len(paths)} candidates were judged", len(results) == len(paths) * len(world_sizes), len(results))
    for result in results:
        name, verdict = result.candidate.name, result.verdict
        wanted = expected.get(name, CORRECT)
        got = f"{name} on {result.world_size} ranks: {verdict.kind}, mechanisms {', '.join(item.name for item in result.mechanisms)}"
        failures += check(got, verdict.kind in wanted, f"expected {' or '.join(wanted)}: {verdict.reason}\n{result.log_tail}")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-sizes", default="2,4")
    parser.add_argument("--compile", action="store_true", help="compile only")
    parser.add_argument("--parts", nargs="+", choices=("each", "row"), default=["each", "row"], help="one of each kind; twenty in a row")
    options = parser.parse_args()
    if missing := what_is_missing():
        print(f"not run: {missing}")
        return 1
    world_sizes = tuple(int(size) for size in options.world_sizes.split(","))
    good = sorted(EXAMPLES.glob("*.py"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for twin in TWINS:
            (folder / f"{twin.name}.py").write_text(twin.source())
        if options.compile:
            return int(compile_all([*good, PROMPT, *sorted(folder.glob("*.py"))]) > 0)
        before, mark = memory_mb(), f"nvshmem-{os.getpid()}"
        with marked(mark):
            failures = 0
            if "each" in options.parts:
                failures += judge([*good, *sorted(folder.glob("*.py"))], world_sizes, {twin.name: twin.verdicts for twin in TWINS})
            row = folder / "row"
            row.mkdir()
            expected = {}
            for place in range(20 if "row" in options.parts else 0):
                twin, original = TWINS[-1], good[place % len(good)]
                number = (twin.name if place in HANGS else original.stem).partition("_")[0]
                path = row / f"{number}_in_a_row_{place:02d}_nvshmem.py"
                path.write_text(twin.source() if place in HANGS else original.read_text())
                expected[path.stem] = twin.verdicts if place in HANGS else CORRECT
            ordered = sorted(row.glob("*.py"), key=lambda path: path.stem.rpartition("_row_")[2])
            failures += judge(ordered, world_sizes[:1], expected) if ordered else 0
        failures += check("no process is left", within(10, lambda: not marked_processes(mark)), marked_processes(mark))
        failures += check_memory("GPU memory is as before", before)
    print("all as expected" if not failures else f"{failures} failures", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
