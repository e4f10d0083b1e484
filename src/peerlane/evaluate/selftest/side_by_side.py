"""Evaluations side by side on one machine: every run has a process, GPUs and cores of its own.

Verdicts do not suffer from neighbours. Speeds may: runs share memory, power and the host. Use one run at a time for speeds to publish.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from peerlane.errors import HarnessError, PeerlaneError
from peerlane.evaluate.processes.prestart import early_start
from peerlane.results.result import Result
from peerlane.sandbox.process_tree import die_with_parent

if TYPE_CHECKING:
    from peerlane.evaluate.evaluator import Progress
    from peerlane.evaluate.plan import EvaluationPlan

_CORES_PER_RANK = 4  # at least: trusted rank, candidate rank, warm groups, builders
_END_S = 20.0  # seconds that an interrupted run gets to end
_ERROR_CHARACTERS = 2_000  # of a run that failed


@dataclass(frozen=True)
class RunResources:
    """The resources of one run. ``gpus``: their UUIDs; empty for CPU ranks."""

    gpus: tuple[str, ...]
    cores: tuple[int, ...]


def divide(gpus: Sequence[str], cores: Collection[int], world_size: int, maximum: int, gpus_each: int = 0) -> list[RunResources]:
    """Divides a machine into as many runs as it has GPUs and cores for, ``maximum`` at most, one in any case. Each gets ``gpus_each`` GPUs,
    by default one for each rank."""
    each = gpus_each or world_size
    count = max(1, min(maximum, len(gpus) // each, len(cores) // (_CORES_PER_RANK * world_size)))
    ordered, share = sorted(cores), len(cores) // count
    if count == 1:
        return [RunResources(tuple(gpus), tuple(ordered))]
    return [
        RunResources(tuple(gpus[number * each : (number + 1) * each]), tuple(ordered[number * share : (number + 1) * share]))
        for number in range(count)
    ]


def evaluate_side_by_side(work: Sequence[tuple[RunResources, EvaluationPlan, Progress]]) -> None:
    """Carries out all plans at once. Each run's events go to its progress, but for ``started``; all calls come from this thread.

    Raises :class:`HarnessError` with a run's last words if it does not get through. However this ends, no process is left.
    """
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(contextlib.closing(_Running(resources, plan, progress))) for resources, plan, progress in work]
        selector = stack.enter_context(selectors.DefaultSelector())
        for run in running:
            selector.register(run.stdout, selectors.EVENT_READ, run)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.pump():
                    selector.unregister(key.fileobj)
                    key.data.finish()


class _Running:
    """The process of a run."""

    def __init__(self, resources: RunResources, plan: EvaluationPlan, progress: Progress) -> None:
        self._resources, self._progress, self._rest = resources, progress, b""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed with this)
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(resources.gpus)} if resources.gpus else {})}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "peerlane.evaluate.selftest.side_by_side"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,  # an interrupt from the terminal reaches it through this process, once
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.stdout = self._process.stdout.fileno()
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            pickle.dump((os.getpid(), resources.cores, plan.device, plan.isolation), stdin)
            pickle.dump(plan, stdin)

    def pump(self) -> bool:
        """Passes on what the process has said; False at its end."""
        data = os.read(self.stdout, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            what, arguments = json.loads(line)
            if what == "finished":
                self._progress.finished(Result.model_validate(arguments))
            elif what == "phase":
                self._progress.phase(*arguments)
            else:
                self._progress.note(arguments)
        return bool(data)

    def finish(self) -> None:
        """Waits for the end of the process; raises :class:`HarnessError` if it failed."""
        if (status := self._process.wait()) == 0:
            return
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _ERROR_CHARACTERS))
        errors = self._errors.read().decode(errors="replace").strip()
        raise HarnessError(f"a run on {', '.join(self._resources.gpus) or 'CPU ranks'} beside others ended with status {status}: {errors}")

    def close(self) -> None:
        """Ends the process, if it still runs: as an interrupt from the keyboard would, so that it clears up."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        if self._process.poll() is None:
            self._process.kill()  # its fork server sees that, and ends all ranks
            self._process.wait()
        self._errors.close()
        if self._process.stdout is not None:
            self._process.stdout.close()


class _JsonProgress:
    """Progress that writes a line of JSON for everything but the start."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def started(self, total: int, skipped: int) -> None: ...

    def phase(self, *where: Any) -> None:
        self._tell("phase", where)

    def finished(self, result: Result) -> None:
        self._tell("finished", {**result.model_dump(mode="json"), "environment": result.environment})

    def note(self, text: str) -> None:
        self._tell("note", text)

    def _tell(self, what: str, arguments: Any) -> None:
        print(json.dumps([what, arguments]), file=self._out, flush=True)


def main() -> int:
    """Runs the process of a run: reads its plan from stdin, tells of it on stdout."""
    parent, cores, device, tier = pickle.load(sys.stdin.buffer)
    die_with_parent(parent)
    os.sched_setaffinity(0, cores)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else goes there
    try:
        with early_start(device, tier):
            from peerlane.evaluate.evaluator import evaluate  # torch, which takes seconds

            evaluate(pickle.load(sys.stdin.buffer), _JsonProgress(out))
    except KeyboardInterrupt:
        return 130
    except PeerlaneError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
