"""Runs PyTorch's own suite of process groups on CPU: each test on gloo, then on the backend with the stand-in for the kit.

    PYTHONPATH=tests python tests/ranks/torch_suite.py [--match all_reduce]        in two ranks; `make test-torch`, ten minutes on two cores

The suite is ``torch/testing/_internal/distributed/distributed_test.py``, which PyTorch ships. A test that gives one verdict on gloo and
another one here needs a reason in ``torch_suite.toml``; an entry there without a difference fails too.
"""

import argparse
import collections
import contextlib
import datetime
import gc
import os
import re
import sys
import tempfile
import time
import tomllib
import traceback
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORLD, LIMIT_S, GROUP_LIMIT_S, BUDGET_S = 2, 60.0, 30.0, 1200.0
os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD), INIT_METHOD="file://unused", OMP_NUM_THREADS="1", MASTER_ADDR="localhost")
os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
expecttest: Any = types.ModuleType("expecttest")  # of which PyTorch's helpers want a base class, and no test of the suite what it adds
expecttest.ACCEPT, expecttest.TestCase = False, type("TestCase", (unittest.TestCase,), {})
sys.modules.setdefault("expecttest", expecttest)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.common_distributed import TEST_SKIPS  # noqa: E402
from torch.testing._internal.common_utils import set_rng_seed  # noqa: E402
from torch.testing._internal.distributed import distributed_test as suite  # noqa: E402

from peerlane.device.backend import routing  # noqa: E402
from ranks import stand_in_kit  # noqa: E402

REASONS = Path(__file__).with_suffix(".toml")
PASSED, SKIPPED, FAILED = 0, 3, 4


class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
    """The suite as it tests gloo."""


class Disguise(types.ModuleType):
    """torch.distributed as the suite sees it: groups by the name gloo are groups of the backend, which says that it is gloo."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def init_process_group(self, backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        dist.init_process_group("peerlane" if backend == "gloo" else backend, *args, **kwargs)

    def get_backend(self, group: Any = None) -> str:
        found = str(dist.get_backend(group))
        return "gloo" if found == "peerlane" else found


def disguise(folder: Path) -> None:
    """Makes the suite of this process test the backend."""
    stand_in_kit.WAIT_S, stand_in_kit.SLOT_BYTES = LIMIT_S, 1 << 24
    routing.use_provider(stand_in_kit.StandInProvider(folder))
    suite.dist = Disguise("torch.distributed")
    events = suite.get_profiling_event

    def with_ours(name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The spans of gloo, and the backend's, which have their shapes on the launch inside of them."""
        own = name.removeprefix("gloo:").lstrip("_")
        ours = events(f"peerlane:{own}", *args, **kwargs) if name.startswith("gloo:") else []
        for span, launch in zip(ours, events(f"peerlane::launch_{own}", *args, **kwargs), strict=False):
            span.input_shapes = launch.input_shapes
        return [*events(name, *args, **kwargs), *ours]

    suite.get_profiling_event = with_ours


def be_rank(name: str, rank: int, folder: Path, backend: str) -> int:
    """Runs one test as one rank; returns how it ended."""
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TEMP_DIR"] = str(folder)
    if backend == "peerlane":
        disguise(folder)
    test = Suite(name)
    test.rank, test.file_name = rank, str(folder / "store")
    suite.INIT_METHOD = f"file://{folder}/again"
    limit = datetime.timedelta(seconds=min(suite.CUSTOM_PG_TIMEOUT.get(name, GROUP_LIMIT_S), GROUP_LIMIT_S))
    try:
        dist.init_process_group(backend, init_method=f"file://{test.file_name}", world_size=WORLD, rank=rank, timeout=limit)
        test._barrier()
        set_rng_seed()
        ended = PASSED
        with contextlib.suppress(unittest.SkipTest):
            ended = SKIPPED
            getattr(test, name)()
            ended = PASSED
        test._barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
        return ended
    except SystemExit as error:
        return SKIPPED if error.code in {skip.exit_code for skip in TEST_SKIPS.values()} else FAILED
    except BaseException:
        traceback.print_exc()
        return FAILED


class Run:
    """One test on one backend, in ranks that are forked."""

    def __init__(self, name: str, backend: str) -> None:
        self.name, self.backend, self.begun = name, backend, time.monotonic()
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        for part in ("barrier", "test_dir", "init_dir"):
            (folder / part).mkdir()
        self._left: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        for rank in range(WORLD):
            if (process := os.fork()) == 0:
                os._exit(be_rank(name, rank, folder, backend))
            self._left[process] = rank

    def verdict(self) -> str:
        """Returns how the test has ended; empty while it runs."""
        for process, rank in list(self._left.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                del self._left[process]
                self._ends[rank] = os.waitstatus_to_exitcode(status)
        ends = set(self._ends.values())
        late = time.monotonic() - self.begun > LIMIT_S
        if self._left and not late and not ends - {PASSED, SKIPPED}:
            return ""
        for process in self._left:
            os.kill(process, 9)
            os.waitpid(process, 0)
        if late and self._left:
            return "hang"
        return "skip" if ends == {SKIPPED} else "pass" if ends <= {PASSED, SKIPPED} else "fail"

    def error(self) -> str:
        """Returns the last error that a rank has printed."""
        logs = "\n".join(path.read_text(errors="replace") for path in sorted(Path(self._folder.name).glob("log*")))
        found = re.findall(r"^\w[\w.]*(?:Error|Exception): .*(?:\n(?!\w).*){0,3}", logs, re.MULTILINE)
        return " ".join(found[-1].split())[:200] if found else ""


def verdicts(names: list[str], end: float) -> Iterator[tuple[str, str, str, str]]:
    """Yields name, backend, verdict and error; what gloo skips is not run on the backend. Two tests run at a time."""
    waiting = collections.deque((name, "gloo") for name in names)
    running: list[Run] = []
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < 2:
            running.append(Run(*waiting.popleft()))
        for run in list(running):
            if verdict := run.verdict():
                running.remove(run)
                yield run.name, run.backend, verdict, run.error()
                if run.backend == "gloo":
                    waiting.appendleft((run.name, "peerlane")) if verdict != "skip" else None
        time.sleep(0.02)
    for name, backend in [*waiting, *((run.name, run.backend) for run in running)]:
        yield name, backend, "not run", f"the {BUDGET_S:.0f} s of all tests were over"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="only tests with this in their names")
    match = parser.parse_args().match
    names = [name for name in dir(Suite) if name.startswith("test_") and match in name]
    names = [name for name in names if not getattr(getattr(Suite, name), "__unittest_skip__", False)]
    reasons: dict[str, str] = tomllib.loads(REASONS.read_text())["reasons"]
    gc.collect()
    gc.freeze()
    counts: collections.Counter[str] = collections.Counter()
    reference: dict[str, str] = {}
    strange, met = [], set()
    for name, backend, verdict, error in verdicts(names, time.monotonic() + BUDGET_S):
        counts[f"{backend} {verdict}"] += 1
        if backend == "gloo":
            reference[name] = verdict
        if backend == "gloo" and verdict != "not run":
            continue
        if verdict != reference.get(name):
            met.add(name)
            print(f"{name}: gloo {reference.get(name, '-')}, here {verdict}: {reasons.get(name) or error}", flush=True)
            strange += [] if name in reasons else [name]
    strange += [f"{name} (in {REASONS.name}, no difference)" for name in reasons if match in name and name not in met]
    print(f"torch {torch.__version__}, {len(names)} tests: {', '.join(f'{place} {count}' for place, count in sorted(counts.items()))}")
    print(f"{len(met)} differences, {len(strange)} of them without a reason: {', '.join(strange) or 'none'}")
    return 1 if strange else 0


if __name__ == "__main__":
    sys.exit(main())
