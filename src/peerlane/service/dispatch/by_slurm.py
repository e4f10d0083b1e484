"""Slurm arrays through submitit: a task of the array checks its node, then judges a batch. The extra ``slurm``."""

import importlib.util
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peerlane.errors import MissingDependency, RunStopped, UsageError
from peerlane.evaluate.evaluator import Progress
from peerlane.evaluate.plan import EvaluationPlan, Job, make_jobs
from peerlane.results.result import Result
from peerlane.service import node_check
from peerlane.service.dispatch.collect import Collector, Conditions, group
from peerlane.service.dispatch.farm import FarmSettings, batch_task, check_task
from peerlane.service.dispatch.launch import check_and_run
from peerlane.service.node_check import NodeReport

INSTALL = "pip install 'peerlane[slurm]'"
_LOOK_S = 1.0
_NODES = 4
"""tasks of an array that run at a time"""


class SlurmDispatcher:
    """The cluster whose ``sbatch`` is on the path. Options that have no place here go into SBATCH_* variables."""

    def __init__(self, partition: str | None = None, settings: FarmSettings | None = None) -> None:
        if importlib.util.find_spec("submitit") is None:
            raise MissingDependency(f"--on slurm needs the package submitit, which is not installed: {INSTALL}")
        if missing := [name for name in ("sbatch", "srun") if shutil.which(name) is None]:
            raise UsageError(f"--on slurm: no {' and no '.join(missing)} on this machine: run the command where jobs are submitted")
        self._partition, self._settings = partition, settings or FarmSettings(batch=16)

    def world_sizes(self) -> tuple[int, ...]:
        raise UsageError("--on slurm: expected --world-size, for this machine cannot tell how many GPUs the nodes have")

    def run(self, plan: EvaluationPlan, progress: Progress) -> list[Result]:
        jobs = make_jobs(plan, progress.note)
        run = _SlurmRun(plan, jobs, progress)
        left = run.left()
        for _ in range(self._settings.tries):
            batches = group(left, self._settings.batch)
            if not batches:
                break
            self._submit(run, batches)
            left = run.left()
        if run.collector is None:
            raise RunStopped(f"no node is fit: {run.fault or 'no task came back'}", [])
        return run.collector.results(run.fault)

    def _submit(self, run: "_SlurmRun", batches: list[list[Job]]) -> None:
        """One array, until all of its tasks have ended."""
        from submitit.core.utils import FailedJobError

        folder = (run.plan.out or Path("peerlane-results")) / "slurm"
        tasks = [batch_task(run.plan, batch, self._settings) for batch in batches]
        executor = self._executor(folder, run.plan, max(task.deadline_s for task in tasks))
        check = check_task(run.plan, self._settings)
        try:
            started = executor.map_array(check_and_run, [check] * len(tasks), tasks)
        except FailedJobError as error:
            raise UsageError(f"--on slurm: sbatch refuses the array: {str(error).strip()}") from None
        waiting = dict(zip(started, batches, strict=True))
        try:
            while waiting:
                for job in [job for job in waiting if job.done()]:
                    run.take(waiting.pop(job), job)
                time.sleep(_LOOK_S)
        finally:
            for job in waiting:
                job.cancel()

    def _executor(self, folder: Path, plan: EvaluationPlan, seconds: float) -> Any:
        import submitit

        limit = seconds + node_check.LIMIT_S + self._settings.grace_s
        executor = submitit.SlurmExecutor(folder=str(folder))
        executor.update_parameters(
            job_name="peerlane",
            partition=self._partition,
            time=max(1, math.ceil(limit / 60)),
            nodes=1,
            ntasks_per_node=1,
            gpus_per_node=max(plan.world_sizes) if plan.place.has_gpus else None,
            array_parallelism=_NODES,
            exclusive=True,
            additional_parameters={"requeue": True},
        )
        return executor


class _SlurmRun:
    """Outcomes of the tasks of a run's arrays. The class of the first node that comes back is the run's."""

    def __init__(self, plan: EvaluationPlan, jobs: Sequence[Job], progress: Progress) -> None:
        self.plan, self.progress, self._jobs = plan, progress, jobs
        earlier = Conditions.of_earlier_run(plan)
        self.collector = None if earlier is None else Collector(plan, jobs, earlier, progress)
        self.fault = ""

    def take(self, batch: Sequence[Job], job: Any) -> None:
        """A task has ended."""
        if (error := job.exception()) is not None:
            self._note(f"task {job.job_id}: {str(error).strip().splitlines()[-1]}")
            return
        told, rows = job.result()
        report = NodeReport.from_json(told)
        if report.faults:
            self._note(f"task {job.job_id}: {report}")
            return
        if self.collector is None:
            Conditions.remember(self.plan, report.conditions)
            self.collector = Collector(self.plan, self._jobs, Conditions.of(report.conditions), self.progress)
        if (fault := self.collector.keep_batch(batch, rows)) is not None:
            self._note(f"task {job.job_id}: {fault}")

    def left(self) -> Sequence[Job]:
        """Jobs without a result."""
        return self._jobs if self.collector is None else self.collector.left()

    def _note(self, fault: str) -> None:
        self.fault = fault
        self.progress.note(fault)
