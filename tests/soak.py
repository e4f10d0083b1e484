"""Many evaluations in one run, good candidates mixed with ones that hang, crash, exhaust memory and talk garbage; nothing may pile up.

On CPU some take more memory, processes or disk than they may. A process that holds much memory beside them must survive.

    python tests/soak.py --evaluations 500 --device cpu [--json]

Prints figures from the run's second and last fifth and from after its end, and every good candidate that was misjudged. Exits with 1 if
there is one, if a broken candidate passed, or if something grew or stayed; 130 if it was interrupted, with the same of what was done.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from e2e.bombs import BOMBS, LIMITS, write_bomb
from e2e.runs import EXAMPLES, MARK, marked_processes, wait_for
from peerlane.cli.expectations import read_expectation
from peerlane.evaluate import EvaluationPlan, Result, discover, evaluate
from peerlane.evaluate.evaluator import Silent
from peerlane.hardware.topology import discover as discover_machine
from peerlane.hardware.topology import gpu_memory
from peerlane.sandbox.holdings import available_memory
from peerlane.sandbox.limits import Limits
from peerlane.sandbox.process_tree import children
from peerlane.settings import SELFTEST_POOL_SETTINGS, SELFTEST_RULES, Deadlines, StressRules

BROKEN_SHARE = 0.2
BROKEN = (
    "1_endless_loop_pytorch", "1_collective_skipped_pytorch", "1_killed_by_signal_pytorch", "1_exits_with_status_0_pytorch",
    "1_raises_on_one_rank_pytorch", "1_allocates_too_much_pytorch", "1_forges_messages_pytorch", "1_prints_a_lot_pytorch",
    "1_leaves_daemon_pytorch", "1_returns_nan_pytorch",
)  # fmt: skip
BOMBED = ("recursion", "lists", "processes", "disk", "memory file")
"""of the bombs, on CPU: limits as small as theirs leave ranks on GPUs no room"""
BROKEN_ON_GPU = ("1_illegal_address_cuda", "1_spins_in_kernel_cuda")
GOOD = ("1_allreduce_pytorch", "4_reduce_pytorch", "7_reducescatter_pytorch", "8_alltoall_pytorch", "18_tp_rms_norm_pytorch")
DEADLINES = Deadlines(exit=4.0).with_calls(4.0)
STRESS = StressRules(budget_s=0.1)
MAY_GROW = {"processes": 1.0, "supervisor_fds": 2.0, "fork_server_fds": 2.0, "temp_folders": 1.0, "shared_mb": 8.0, "gpu_mb": 200.0}
MAY_GROW_PER_EVALUATION = {"supervisor_mb": 0.1, "fork_server_mb": 0.02}
CANARY_BYTES = 2 << 30
"""or an eighth of the machine's free memory"""
WARM_RANK_MB = 600.0
"""of GPU memory that a rank takes before it has done anything: one part of a run may keep a group of warm groups more than another does"""
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Figures:
    """What a run holds at a moment."""

    processes: float
    supervisor_fds: float
    fork_server_fds: float
    temp_folders: float
    shared_mb: float
    supervisor_mb: float
    fork_server_mb: float
    gpu_mb: float


def take(mark: str, temp: Path, gpus: list[int]) -> Figures:
    gpu_bytes = sum(gpu.used_bytes for gpu in gpu_memory(gpus))  # first: asking opens files
    fork_server = next((pid for pid in children(os.getpid()) if b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()), None)
    memory_files = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    in_files = sum(path.stat().st_blocks * 512 for path in memory_files if path.exists() and "memfd:" in os.readlink(path))
    return Figures(
        processes=len(marked_processes(mark)),
        supervisor_fds=len(memory_files),
        fork_server_fds=0 if fork_server is None else len(os.listdir(f"/proc/{fork_server}/fd")),
        temp_folders=len(list(temp.iterdir())),
        shared_mb=(in_files + _used("/dev/shm")) / MEGABYTE,
        supervisor_mb=_resident(os.getpid()),
        fork_server_mb=0.0 if fork_server is None else _resident(fork_server),
        gpu_mb=gpu_bytes / MEGABYTE,
    )


def _used(folder: str) -> int:
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def _resident(pid: int) -> float:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / MEGABYTE


class Watch(Silent):
    """Takes the figures after every evaluation, and judges the verdicts."""

    def __init__(self, mark: str, temp: Path, gpus: list[int], device: str, bombs: list[Path]) -> None:
        self.mark, self.temp, self.gpus, self.device = mark, temp, gpus, device
        self.bombs = {path.stem: (BOMBS[name][1],) for name, path in zip(BOMBED, bombs, strict=False)}
        self.begin = time.monotonic()
        self.samples: list[Figures] = []
        self.kinds: dict[str, int] = {}
        self.misjudged: list[str] = []

    def finished(self, result: Result) -> None:
        now = take(self.mark, self.temp, self.gpus)
        self.samples.append(now)
        kind, name = result.verdict.kind, result.candidate.name
        held = f"{now.processes:4.0f} processes {now.gpu_mb:8.0f} MB on GPUs"
        print(f"{len(self.samples):4} {time.monotonic() - self.begin:7.1f} s {held}  {name}: {kind}", file=sys.stderr, flush=True)
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        broken = EXAMPLES / "broken" / f"{name}.py"
        expected = read_expectation(broken).on(self.device) if broken.exists() else self.bombs.get(name, ("correct",))  # type: ignore[arg-type]
        if kind not in expected:
            self.misjudged.append(f"{name}: expected {' or '.join(expected)}, got {kind} ({result.verdict.reason})")

    def note(self, text: str) -> None:
        print(f"note: {text}", file=sys.stderr, flush=True)


def lowest(samples: list[Figures]) -> Figures:
    """The least of every figure: how many ranks are kept ahead changes all the time, but what piles up raises the least too."""
    return Figures(*map(min, zip(*map(dataclasses.astuple, samples), strict=True)))


def open_files() -> Counter[str]:
    """What this process has open, by name, and how often."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[re.sub(r"\d{3,}", "N", os.readlink(f"/proc/self/fd/{fd}"))] += 1
    return found


def grown(first: Figures, last: Figures, evaluations: int, warm_mb: float = 0.0) -> list[str]:
    """The figures that grew by more than they may; ``warm_mb``: of GPU memory, for ranks that one moment has and the other has not."""
    limits = MAY_GROW | {name: 30 + limit * evaluations for name, limit in MAY_GROW_PER_EVALUATION.items()}
    limits["gpu_mb"] += warm_mb
    pairs = [(name, getattr(first, name), getattr(last, name)) for name in limits]
    return [f"{name} grew from {a:.1f} to {b:.1f}, by more than {limits[name]:g}" for name, a, b in pairs if b - a > limits[name]]


def choose(evaluations: int, device: str, seed: int, bombs: list[Path]) -> list[str]:
    """Paths of candidates in random order."""
    dice = random.Random(seed)
    names = BROKEN + (BROKEN_ON_GPU if device == "cuda" else ())
    broken = [*(EXAMPLES / "broken" / f"{name}.py" for name in names), *bombs]
    good = [EXAMPLES / "pytorch" / f"{name}.py" for name in GOOD]
    return [str(dice.choice(broken if dice.random() < BROKEN_SHARE else good)) for _ in range(evaluations)]


@contextlib.contextmanager
def canary() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is no part of the run, holds memory, and ends by itself afterwards: with status 0, if nobody ended it before."""
    size = min(CANARY_BYTES, available_memory() // 8)
    hold = f"held = bytearray(b'x') * {size}; print('holds', flush=True); input()"
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as bird:
        assert bird.stdout is not None and bird.stdout.readline() == b"holds\n"
        yield bird
        bird.communicate(b"\n", timeout=10)


def small_limits() -> None:
    """Has the candidates of this process stopped before the machine notices their bombs."""
    Limits.of_machine = classmethod(lambda cls, scratch, sharers: LIMITS)  # type: ignore[method-assign]


def soak(options: argparse.Namespace, temp: Path, bombs: list[Path]) -> dict[str, object]:
    """Runs the evaluations; figures, verdicts and complaints."""
    gpus = [gpu.index for gpu in discover_machine().gpus] if options.device == "cuda" else []
    mark = os.environ[MARK]
    watch = Watch(mark, temp, gpus, options.device, bombs)
    plan = EvaluationPlan(
        candidates=discover(choose(options.evaluations, options.device, options.seed, bombs)),
        presets=("small",),
        world_sizes=(options.world_size,),
        modes=("eager",),
        device=options.device,
        deadlines=DEADLINES,
        pool_settings=SELFTEST_POOL_SETTINGS[options.device],
        rules=SELFTEST_RULES,
        stress=STRESS,
    )
    torch.cuda.device_count()  # which a run asks as well, and for which the driver keeps files open
    before, opened, interrupted = take(mark, temp, gpus), open_files(), False
    try:
        evaluate(plan, watch)
    except KeyboardInterrupt:
        interrupted = True
    seconds, done = time.monotonic() - watch.begin, len(watch.samples)
    wait_for(lambda: len(marked_processes(mark)) <= before.processes, 10, "the end of all processes")
    time.sleep(2.0 if gpus else 0.0)
    after = take(mark, temp, gpus)
    fifth = max(1, done // 5)
    # While as many warm groups are kept: at first they are still coming up, without GPU memory yet, and at the end no more are needed.
    settled = watch.samples[fifth : 2 * fifth], watch.samples[-3 - fifth : -3]
    first, last = (lowest(samples or [before]) for samples in settled)
    complaints = [*watch.misjudged, *grown(first, last, done, WARM_RANK_MB * options.world_size)]
    complaints += [f"after the end: {text}" for text in grown(before, after, done)]
    if after.supervisor_fds - before.supervisor_fds > MAY_GROW["supervisor_fds"]:
        complaints.append(f"opened and not closed: {dict(open_files() - opened)}")
    if done != options.evaluations:
        complaints.append(f"{done} results of {options.evaluations}{', for it was interrupted' if interrupted else ''}")
    return {
        "interrupted": interrupted,
        "device": options.device,
        "seed": options.seed,
        "evaluations": done,
        "seconds": round(seconds, 1),
        "verdicts": dict(sorted(watch.kinds.items())),
        "figures": {
            name: dataclasses.asdict(item)
            for name, item in (("before", before), ("second fifth", first), ("last fifth", last), ("after", after))
        },
        "complaints": complaints,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--evaluations", type=int, default=500)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as temp, canary() as bird:
        os.environ["TMPDIR"] = tempfile.tempdir = temp
        os.environ[MARK] = f"soak-{os.getpid()}"
        bombs = [write_bomb(name, Path(folder)) for name in BOMBED] if options.device == "cpu" else []
        if bombs:
            small_limits()
        report = soak(options, Path(temp), bombs)
    if bird.returncode:
        report["complaints"] = [*report["complaints"], f"the process beside the run ended with status {bird.returncode}"]  # type: ignore[misc]
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 130 if report["interrupted"] else 1 if report["complaints"] else 0


def show(report: dict[str, object]) -> None:
    """The short table."""
    figures: dict[str, dict[str, float]] = report["figures"]  # type: ignore[assignment]
    print(
        f"{report['evaluations']} evaluations in {report['seconds']} s on {report['device']}, seed {report['seed']}: {report['verdicts']}"
    )
    print(f"{'':16}" + "".join(f"{name:>14}" for name in figures))
    for field in dataclasses.fields(Figures):
        print(f"{field.name:16}" + "".join(f"{item[field.name]:14.1f}" for item in figures.values()))
    for complaint in report["complaints"]:  # type: ignore[attr-defined]
        print(f"FAIL {complaint}")
    print("passed" if not report["complaints"] else "failed")


if __name__ == "__main__":
    sys.exit(main())
