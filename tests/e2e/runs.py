"""Short evaluations on gloo ranks, and the search for processes that outlive them."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kept_fork_servers import MARK
from peerlane.evaluate import EvaluationPlan, Result, discover, evaluate
from peerlane.evaluate.evaluator import Silent
from peerlane.settings import Deadlines, PoolSettings, StressRules

EXAMPLES = Path(__file__).parents[2] / "examples"
GOOD = EXAMPLES / "pytorch" / "1_allreduce_pytorch.py"
RIGHT = "import torch.distributed as dist\n\n\ndef solution(tensor):\n    out = tensor.clone()\n    dist.all_reduce(out)\n    return out\n"
SLEEPS = "import time\n\n\ndef solution(tensor):\n    time.sleep(600)\n"
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


class Heard(Silent):
    """Remembers what is told."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.notes: list[str] = []
        self.phases = [""]

    def phase(self, candidate: str, problem: int, preset: str, world_size: int, phase: str) -> None:
        self.phases.append(phase)

    def finished(self, result: Result) -> None:
        self.results.append(result)

    def note(self, text: str) -> None:
        self.notes.append(text)


def plan_of(*candidates: Path | str, **changes: Any) -> EvaluationPlan:
    """A plan to judge these candidates on the ``small`` cases of two ranks, or as the changes say."""
    one_by_one = PoolSettings(judged_at_a_time=1)  # in order, and each without another beside it
    usual = {"presets": ("small",), "world_sizes": (2,), "deadlines": DEADLINES, "stress": STRESS, "pool_settings": one_by_one}
    return EvaluationPlan(discover([str(candidate) for candidate in candidates]), **{**usual, **changes})


def judge(*candidates: Path | str, **changes: Any) -> list[Result]:
    """The results of these candidates, in order."""
    plan = plan_of(*candidates, **changes)
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


def processes_named(sign: str) -> list[str]:
    """The names of processes that begin so, but for those that are dead."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name = (entry / "comm").read_text().strip()
            if name.startswith(sign) and ") Z" not in (entry / "stat").read_text():
                found.append(name)
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
