"""Short evaluations on gloo ranks, and the search for processes that outlive them."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kept_fork_servers import MARK
from peerlane.evaluate import EvaluationPlan, Result, discover, evaluate
from peerlane.sandbox.isolation import Tier
from peerlane.settings import Deadlines, PoolSettings, StressRules

EXAMPLES = Path(__file__).parents[2] / "examples"
GOOD = EXAMPLES / "pytorch" / "1_allreduce_pytorch.py"
DEADLINES = Deadlines(spawn=60.0, build=200.0, load=20.0, exit=4.0).with_calls(4.0)
STRESS = StressRules(budget_s=0.2)  # what takes many calls to show has tests of its own
PATIENT = DEADLINES.with_calls(30.0)
"""For candidates that do end, on a loaded machine, the slowest of them in Triton's interpreter."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread if the block takes longer: a supervisor that waits for ever fails its test."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judge(
    *candidates: Path | str,
    world_size: int = 2,
    out: Path | None = None,
    problems: str | None = None,
    isolation: Tier | None = None,
    stress: StressRules = STRESS,
    deadlines: Deadlines = DEADLINES,
) -> list[Result]:
    """The results of these candidates on the ``small`` cases, in order."""
    plan = EvaluationPlan(
        candidates=discover([str(candidate) for candidate in candidates]),
        problems=problems,
        presets=("small",),
        world_sizes=(world_size,),
        device="cpu",
        out=out,
        isolation=isolation,
        deadlines=deadlines,
        stress=stress,
        pool_settings=PoolSettings(judged_at_a_time=1),  # in order, and each without another beside it
    )
    with within(120.0 + 30.0 * len(plan.candidates)):  # many at once on a busy machine
        return evaluate(plan)


def marked_processes(mark: str) -> list[int]:
    """Processes that inherited ``PEERLANE_TEST_MARK=mark`` in their environment; zombies have none.

    Those that let nobody look at their environment count if their command line says that they are peerlane's.
    """
    word = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                try:
                    marked = word in (entry / "environ").read_bytes().split(b"\0")
                except PermissionError:
                    marked = os.stat(entry).st_uid != os.getuid() and b"peerlane" in (entry / "cmdline").read_bytes()
                if marked:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_for(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Polls a function until it returns True."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true within {deadline_s:g} s"
        time.sleep(0.01)


@contextmanager
def marked(mark: str) -> Iterator[None]:
    """Marks all processes that are started meanwhile."""
    os.environ[MARK] = mark
    try:
        yield
    finally:
        del os.environ[MARK]


def alternate(broken: Sequence[Path]) -> list[Path]:
    """A good candidate behind every broken one."""
    return [path for item in broken for path in (item, GOOD)]
