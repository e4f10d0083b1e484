"""Decides which node of a cluster gets which batch: fit nodes of one class, one batch at a time, again elsewhere after a fault."""

import pickle
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from peerlane.common.words import counted
from peerlane.errors import RunStopped
from peerlane.evaluate.evaluator import Progress
from peerlane.evaluate.plan import EvaluationPlan, Job, make_jobs
from peerlane.results.result import Result
from peerlane.service import node_check
from peerlane.service.dispatch.batch import batch_plan
from peerlane.service.dispatch.collect import Collector, Conditions, group
from peerlane.service.dispatch.launch import BatchTask, CheckTask
from peerlane.service.node_check import NodeReport

_EVALUATION_S = 600.0  # for one evaluation, where the plan sets no limit
_WITH_SECOND = 3.0  # times the limit: a busy node judges once more, with twice the time


@dataclass(frozen=True)
class FarmSettings:
    """Time limits and retries of a farm.

    Attributes:
        batch: evaluations in one batch; what a lost node was doing is done again.
        grace_s: beyond the deadline of a batch, for the start of its worker; then it is cancelled.
        tries: of one batch.
        faults: batches in a row that fail on a node before it is checked again.
        nodes_s: for the first node to appear.
        command: of the process that judges a batch, and of that which checks a node.
    """

    batch: int = 4
    grace_s: float = 60.0
    tries: int = 3
    faults: int = 2
    nodes_s: float = 120.0
    command: tuple[str, ...] = BatchTask.command
    check_command: tuple[str, ...] = field(default_factory=lambda: tuple(node_check.command()))


class Cluster(Protocol):
    """Nodes that can be given work: Ray, or a stand-in."""

    def nodes(self) -> set[str]:
        """Names of the nodes that are there now."""

    def judge(self, node: str, task: BatchTask) -> object:
        """Starts a batch on a node; the handle of what runs."""

    def check(self, node: str, task: CheckTask) -> object:
        """Starts the check of a node."""

    def finished(self, handles: Iterable[object], seconds: float) -> list[tuple[object, Any, str | None]]:
        """Returns what has ended within so many seconds: handle, result, and the fault that took its place."""

    def cancel(self, handle: object) -> None:
        """Ends what runs, with all its processes; it comes back from :meth:`finished` with a fault."""


@dataclass
class _Work:
    """Work of a node: a batch, or its check."""

    node: str
    jobs: list[Job] | None
    tries: int
    cancel_at: float


class Farm:
    """One run on a cluster."""

    def __init__(self, cluster: Cluster, plan: EvaluationPlan, progress: Progress, settings: FarmSettings | None = None) -> None:
        self._cluster, self._plan, self._progress = cluster, plan, progress
        self._settings = settings or FarmSettings()
        self._running: dict[object, _Work] = {}
        self._fit: dict[str, NodeReport] = {}
        self._out: dict[str, str] = {}
        """nodes that get no work, and why"""
        self._faults: Counter[str] = Counter()
        self._queue: list[tuple[list[Job], int]] = []
        self._last_fault = ""
        self._chosen: Conditions | None = None

    def run(self) -> list[Result]:
        """All results; see :class:`.Dispatcher`."""
        jobs = make_jobs(self._plan, self._progress.note)
        if (conditions := Conditions.of_earlier_run(self._plan)) is not None:
            collector = Collector(self._plan, jobs, conditions, self._progress)
            if not collector.due:
                return collector.results()
        try:
            chosen = self._choose_class(conditions)
            if conditions is None:
                collector = Collector(self._plan, jobs, chosen, self._progress)
            self._queue = [(batch, 1) for batch in group(collector.due, self._settings.batch)]
            idle_since = time.monotonic()
            while self._queue or any(work.jobs for work in self._running.values()):
                self._start()
                for handle, value, fault in self._cluster.finished(list(self._running), 0.5):
                    self._end(self._running.pop(handle), value, fault, collector)
                self._cancel_late()
                if self._running:
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > self._settings.nodes_s:
                    break  # no node is left that could do it
        finally:
            for handle in self._running:
                self._cluster.cancel(handle)
        return collector.results(self._last_fault or "; ".join(f"{node}: {why}" for node, why in self._out.items()))

    # --- nodes ---

    def _choose_class(self, wanted: Conditions | None) -> Conditions:
        """Checks the nodes that are there; the class that is wanted, or that most fit ones have. Raises RunStopped if none is fit."""
        give_up = time.monotonic() + self._settings.nodes_s
        if not self._cluster.nodes():
            self._progress.note(f"no node is there yet: waiting for one, {self._settings.nodes_s:g} s at most")
        while not (nodes := self._cluster.nodes()):
            if time.monotonic() > give_up:
                raise RunStopped(f"no node appeared within {self._settings.nodes_s:g} s", [])
            time.sleep(0.2)
        for node in sorted(nodes):
            self._check(node)
        while self._running:
            for handle, value, fault in self._cluster.finished(list(self._running), 0.5):
                self._note_check(self._running.pop(handle).node, value, fault)
            self._cancel_late()
        reports = list(self._fit.values())
        if wanted is None and reports:
            most = Counter(_class_of(report) for report in reports).most_common(1)[0][0]
            wanted = next(Conditions.of(report.conditions) for report in reports if _class_of(report) == most)
        self._chosen = wanted
        for node in list(self._fit):
            self._require_class(node)
        if not self._fit:
            raise RunStopped(f"no node is fit: {'; '.join(self._out.values())}", [])
        report = next(iter(self._fit.values()))
        self._progress.note(f"judging on {counted(len(self._fit), 'node')}: {report.node}")
        Conditions.remember(self._plan, report.conditions)
        return Conditions.of(report.conditions)

    def _check(self, node: str) -> None:
        handle = self._cluster.check(node, check_task(self._plan, self._settings))
        self._running[handle] = _Work(node, None, 1, time.monotonic() + node_check.LIMIT_S + self._settings.grace_s)

    def _note_check(self, node: str, value: Any, fault: str | None) -> None:
        report = NodeReport(node, (fault,)) if fault is not None else NodeReport.from_json(value)
        self._progress.note(f"node {node}: {report}")
        if report.faults:
            self._out[node] = "; ".join(report.faults)
        else:
            self._fit[node], self._faults[node] = report, 0

    def _require_class(self, node: str) -> None:
        """Leaves a node out whose results could not be compared with those of the others."""
        if Conditions.of(self._fit[node].conditions) != self._chosen:
            report = self._fit.pop(node)
            self._out[node] = f"its class differs: {report.node}"
            self._progress.note(f"node {node} is left out: {self._out[node]}; results of different classes are never mixed")

    # --- batches ---

    def _start(self) -> None:
        there = self._cluster.nodes()
        busy = {work.node for work in self._running.values()}
        for node in sorted(there - busy - self._out.keys()):
            if node not in self._fit:
                self._check(node)  # it came later, or its check was due again
            elif self._queue:
                jobs, tries = self._queue.pop(0)
                task = batch_task(self._plan, jobs, self._settings)
                handle = self._cluster.judge(node, task)
                self._running[handle] = _Work(node, jobs, tries, time.monotonic() + task.deadline_s + self._settings.grace_s)

    def _end(self, work: _Work, value: Any, fault: str | None, collector: Collector) -> None:
        if work.jobs is None:
            self._note_check(work.node, value, fault)
            if work.node in self._fit:
                self._require_class(work.node)
            return
        if fault is None and (fault := collector.keep_batch(work.jobs, value)) is None:
            self._faults[work.node] = 0
            return
        self._faults[work.node] += 1
        self._last_fault = f"node {work.node}: {fault}"
        again = work.tries < self._settings.tries
        names = ", ".join(job.candidate.name for job in work.jobs)
        self._progress.note(f"{self._last_fault}; {names} {'is tried again' if again else 'is given up'}")
        if again:
            self._queue.append((work.jobs, work.tries + 1))
        if self._faults[work.node] >= self._settings.faults:
            self._fit.pop(work.node, None)

    def _cancel_late(self) -> None:
        now = time.monotonic()
        for handle, work in self._running.items():
            if now > work.cancel_at:
                self._cluster.cancel(handle)
                work.cancel_at = now + self._settings.grace_s  # if that was not heard


def batch_task(plan: EvaluationPlan, jobs: Sequence[Job], settings: FarmSettings) -> BatchTask:
    """Returns what a node gets that judges these jobs of a plan."""
    seconds = sum(_EVALUATION_S if job.timeout is None else _WITH_SECOND * job.timeout for job in jobs)
    return BatchTask(pickle.dumps(batch_plan(plan, jobs)), seconds, settings.command)


def check_task(plan: EvaluationPlan, settings: FarmSettings) -> CheckTask:
    """Returns how the nodes for a plan are checked."""
    asked = {name: getattr(plan, name) for name in ("device", "isolation", "ranks_per_gpu")}
    return CheckTask({**asked, "world_sizes": list(plan.world_sizes)}, settings.check_command)


def _class_of(report: NodeReport) -> str:
    return repr(sorted(report.conditions.items()))
