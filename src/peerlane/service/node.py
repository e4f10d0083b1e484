"""The node behind a service: one evaluator that has the machine to itself, and takes from the queue as many jobs as it has work for."""

import asyncio
import bisect
import contextlib
import json
import os
import signal
import sqlite3
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from peerlane.errors import PeerlaneError, RunStopped, UsageError
from peerlane.evaluate.evaluator import Evaluator, Progress, Silent
from peerlane.results.result import OVERLOADED, Result
from peerlane.service import node_check
from peerlane.service.node_check import NodeReport
from peerlane.service.queue import JobQueue, Outcome, Taken
from peerlane.service.request import call_options

Condition = Literal["checking", "ready", "left_out", "draining"]
_RECHECK_S = 300.0
"""after a check that failed"""
_FAULTS = 2
"""so many harness errors in a row, and the node is checked again"""
_HOLD_UP = ("hang", "too_slow", "out_of_memory")
"""verdicts of candidates that cost the node much"""
_LOOK_S = 0.5
_DISK_S = 5.0
"""after an error of the disk"""

Opener: TypeAlias = Callable[[Progress], Evaluator]
T = TypeVar("T")


class NodeCheck(NamedTuple):
    """Arguments of :func:`.check_node`."""

    device: str
    isolation: str


@dataclass
class Running:
    """A job that runs."""

    taken: Taken
    evaluation: asyncio.Task[Result]
    stage: str = "waiting for ranks"


class Histogram:
    """Counts of seconds in buckets, as Prometheus has them."""

    BOUNDS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS) + 1)
        """the last one: beyond all bounds"""
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(self.BOUNDS, seconds)] += 1
        self.total += seconds


class Changes:
    """Tells waiting clients that a job has changed. Use from the event loop's thread."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def of(self, key: str) -> asyncio.Event:
        """Set at the job's next change. Ask for it before you look at the job."""
        return self._events.setdefault(key, asyncio.Event())

    def tell(self, key: str) -> None:
        """Wakes everybody who waits for a change of the job."""
        if (event := self._events.pop(key, None)) is not None:
            event.set()

    def tell_all(self) -> None:
        """Wakes everybody who waits for any job."""
        for key in list(self._events):
            self.tell(key)


class Node:
    """Judges what is queued, while the node is fit. :meth:`run` ends after :meth:`drain`.

    Args:
        queue: where jobs come from.
        open_evaluator: makes an evaluator that reports to a Progress; called again after a failure of the machine.
        check: the device and the isolation to check the node with; None takes its fitness for granted.
    """

    def __init__(self, queue: JobQueue, open_evaluator: Opener, check: NodeCheck | None = None) -> None:
        self.changes = Changes()
        self._condition: Condition = "checking" if check else "ready"
        self._why: str | None = None
        self._disk_fault: str | None = None
        self.ended_by: Exception | None = None
        """what ended the loop: a defect of peerlane"""
        self.stopped = False
        """nothing will change any more"""
        self.running: dict[str, Running] = {}
        """by key"""
        self.verdicts: Counter[str] = Counter()
        self.seconds = 0.0
        """The seconds of all evaluations together."""
        self.histograms = {name: Histogram() for name in ("waiting", "building", "judging")}
        """seconds of every job that was judged"""
        self._queue, self._open, self._check = queue, open_evaluator, check
        self._evaluator: Evaluator | None = None
        self._wake = asyncio.Event()
        self._faults = 0

    # --- for the service ---

    @property
    def condition(self) -> Condition:
        """Returns what the node does; it is left out while its disk fails."""
        return "left_out" if self._disk_fault is not None and self._condition != "draining" else self._condition

    @property
    def why(self) -> str | None:
        """Returns why the node is left out or checked."""
        return self._why if self._disk_fault is None else self._disk_fault

    def disk_failed(self, error: Exception) -> None:
        """Leaves the node out until a job and its result can be written again."""
        fault = f"jobs and results cannot be stored: {error}"
        if self._disk_fault is None:
            print(f"{fault}; the service goes on when they can", file=sys.stderr, flush=True)
        self._disk_fault = fault
        self.changes.tell_all()
        self._wake.set()

    def work_came(self) -> None:
        """Wakes the node: something was queued."""
        self._wake.set()

    def cancel(self, key: str) -> None:
        """Ends the evaluation of this job, if it runs."""
        if (running := self.running.get(key)) is not None:
            running.evaluation.cancel()
        self.changes.tell(key)

    async def drain(self, seconds: float) -> None:
        """Takes no more jobs, and gives those that run so many seconds; what is left of them is queued again."""
        self._say("draining", None)
        self._wake.set()
        if tasks := [running.evaluation for running in self.running.values()]:
            await asyncio.wait(tasks, timeout=seconds)
            for task in tasks:
                task.cancel()
        self.stopped = True
        self.changes.tell_all()

    # --- the loop ---

    async def run(self) -> None:
        """Judges until it is drained; then no process of the evaluator is left."""
        tasks = set[asyncio.Task[None]]()
        try:
            while self._condition != "draining":
                if self.ended_by is not None:
                    raise self.ended_by
                if self._condition != "ready" or self._evaluator is None:
                    await _all_of(tasks)
                    await self._get_ready()
                    continue
                taken = await self._written(self._take)
                if taken is None:
                    await self._sleep(_LOOK_S if self.running else 60.0)  # an evaluation that takes long makes room for another
                    continue
                tasks.add(task := asyncio.create_task(self._judge(self._begin(taken), self._evaluator)))
                task.add_done_callback(tasks.discard)
            await _all_of(tasks)
        except Exception as error:
            traceback.print_exc()
            self.ended_by = error
            self._say("left_out", f"the loop of the node has ended: {type(error).__name__}: {error}")
            raise
        finally:
            await asyncio.to_thread(self._close)

    def _take(self) -> Taken | None:
        """Returns the next job, if there is room for one."""
        assert self._evaluator is not None
        return self._queue.take() if len(self.running) < self._evaluator.capacity else None

    async def _written(self, write: Callable[[], T]) -> T | None:
        """Returns what a call of the queue gives, once the disk has room for it; None if the service ends before."""
        while True:
            try:
                if self._disk_fault is not None:
                    await asyncio.sleep(_DISK_S)
                    self._queue.check_room()
                    self._disk_fault = None
                    self.changes.tell_all()
                return write()
            except sqlite3.Error as error:
                self.disk_failed(error)
                if self._condition == "draining":
                    return None  # the next service queues again what seems to run

    async def _get_ready(self) -> None:
        """Checks the node and opens an evaluator; a node that fails waits for its next check."""
        await asyncio.to_thread(self._close)
        if self._check is not None and self._condition != "ready":
            report = await self._run_check(self._check)
            print(report, file=sys.stderr, flush=True)
            if report.faults:
                self._say("left_out", "; ".join(report.faults))
                await self._sleep(_RECHECK_S)
                return
        try:
            evaluator = self._open(_Notes())
            await asyncio.to_thread(evaluator.__enter__)
        except PeerlaneError as error:
            self._say("left_out", str(error))
            await self._sleep(_RECHECK_S)
            return
        self._evaluator, self._faults = evaluator, 0
        self._say("ready", None)

    async def _run_check(self, check: NodeCheck) -> NodeReport:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*node_check.command(), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        asked = json.dumps(check._asdict()).encode()
        talk = asyncio.ensure_future(process.communicate(asked))
        stopped = asyncio.ensure_future(self._stopped())
        try:
            await asyncio.wait([talk, stopped], timeout=node_check.LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            if talk.done():
                out, err = talk.result()
                return node_check.read_report(process.returncode or 0, out, err)
            why = "the service ends" if stopped.done() else f"the check took more than {node_check.LIMIT_S:g} s"
            return NodeReport("this node", (why,))
        finally:
            stopped.cancel()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await talk

    async def _stopped(self) -> None:
        while self._condition != "draining":
            await self._sleep(60.0)

    def _begin(self, taken: Taken) -> Running:
        assert self._evaluator is not None
        loop, request = asyncio.get_running_loop(), taken.request

        def entered(stage: str) -> None:
            running.stage = stage
            self.changes.tell(taken.key)

        def tell(stage: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(entered, stage)

        evaluation = self._evaluator.evaluate_async(request.problem, request.source, tell=tell, **call_options(request))
        running = self.running[taken.key] = Running(taken, asyncio.create_task(evaluation))
        self.changes.tell(taken.key)
        return running

    async def _judge(self, running: Running, evaluator: Evaluator) -> None:
        """Waits for the end of an evaluation, and stores what it gives."""
        taken, begin = running.taken, time.monotonic()
        end: Callable[[], object]
        release = partial(self._queue.release, taken)  # of a job that was cancelled, this changes nothing
        try:
            end = self._end_with(taken, await running.evaluation)
        except asyncio.CancelledError:
            end = release
        except RunStopped as error:
            self.disk_failed(error)
            end = release
        except UsageError as error:
            end = partial(self._queue.finish, taken, Outcome(error=f"the request cannot be carried out: {error}"))
        except Exception as error:  # a fault of ours must not end the service
            self._faults += 1
            end = partial(self._queue.finish, taken, Outcome(error=f"{type(error).__name__}: {error}", again=True))
        try:
            await self._written(end)
        except Exception as error:
            self.ended_by = error
        finally:
            self.seconds += time.monotonic() - begin
            del self.running[taken.key]
            self.changes.tell(taken.key)
            self._wake.set()
        if self._condition == "ready" and (self._faults >= _FAULTS or evaluator.gave_up is not None):
            self._say("checking", evaluator.gave_up or f"{self._faults} evaluations in a row failed in the harness")

    def _end_with(self, taken: Taken, result: Result) -> Callable[[], object]:
        """Returns the call that stores a result with its job; what says nothing about the candidate is tried again."""
        kind = result.verdict.kind
        self.verdicts[kind] += 1
        self._faults = self._faults + 1 if kind == "harness_error" else 0
        ours = result.says_nothing
        environment = json.dumps(result.environment)
        error = result.verdict.reason if ours else None
        outcome = Outcome(result.model_dump_json(), environment, error, again=ours, held_up=kind in _HOLD_UP)
        if kind == "not_run" and OVERLOADED not in result.flags and self._evaluator is not None and self._evaluator.gave_up is None:
            taken = taken._replace(tries=sys.maxsize)  # this machine lacks what the candidate needs: so it will the next time
        if not ours:
            building = result.stage_seconds.get("build", 0.0)
            judging = sum(result.stage_seconds.values()) - building
            self.histograms["judging"].add(judging)
            self.histograms["waiting"].add(max(0.0, time.time() - taken.submitted - building - judging))
            if "build" in result.stage_seconds:
                self.histograms["building"].add(building)
        return partial(self._queue.finish, taken, outcome)

    def _say(self, condition: Condition, why: str | None) -> None:
        if self._condition != "draining":
            self._condition, self._why = condition, why
            self.changes.tell_all()

    def _close(self) -> None:
        evaluator, self._evaluator = self._evaluator, None
        if evaluator is not None:
            evaluator.__exit__(None, None, None)

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)
        self._wake.clear()


class _Notes(Silent):
    """Progress that prints notes alone."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


async def _all_of(tasks: set[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks)
