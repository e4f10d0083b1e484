"""Judges one job, and once more where the machine or an earlier candidate is to blame; knows when a machine is of no more use."""

import time
from typing import Protocol

from peerlane.errors import HarnessError
from peerlane.evaluate.pipeline import EvaluationPipeline
from peerlane.evaluate.processes.machine_faults import SLOWED, STARVED, lost_gpus
from peerlane.evaluate.processes.rank_group import RankGroup
from peerlane.evaluate.processes.session import Session
from peerlane.evaluate.progress import Progress
from peerlane.evaluate.worker_slots import WorkerSlot
from peerlane.results.result import OVERLOADED, Result
from peerlane.results.verdict import NotRun

_MAX_WITHOUT_RANKS = 2
"""After so many evaluations in a row whose rank groups did not start, the rest of the run is given up."""
_MEMORY_S = 3.0  # seconds after which the driver has taken back the memory of processes that were killed


class StartPipeline(Protocol):
    """Makes the pipeline of a job, which may use a group that the last evaluation of the reference has left."""

    def __call__(self, *, kept: RankGroup | None = None) -> EvaluationPipeline: ...


class JobRunner:
    """Judges jobs, and judges one again where something else than the candidate failed.

    Attributes:
        gave_up: why nothing can be judged here any more, such as a lost GPU; None while it works.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.reset()

    def reset(self) -> None:
        """Forgets failures of sessions that have ended."""
        self._without_ranks = list[str]()
        """Why the last evaluations had no ranks."""
        self.gave_up: str | None = None

    def run(self, slot: WorkerSlot, start: StartPipeline) -> Result:
        """Judges a job in a slot, with the pipelines that ``start`` makes."""
        pipeline = start(kept=slot.reference_group)
        slot.reference_group = None
        result = pipeline.run()
        if pipeline.late and pipeline.kept_share >= SLOWED:
            pipeline, result = self._run_with_more_time(pipeline, start)
        shared = result.verdict.kind == "harness_error" and pipeline.session.shares_faults
        if shared or (slot.after_failure and pipeline.short_of_memory):
            # What is left of the fault of an earlier candidate, or of its memory, costs this one nothing.
            self._progress.note(f"{pipeline.job.candidate.name} is judged once more: {result.verdict.reason.splitlines()[0]}")
            pipeline.group.end()
            if not shared:
                time.sleep(_MEMORY_S)
            self._recover(pipeline.session)
            if self.gave_up is None:
                pipeline = start()
                result = pipeline.run()
        slot.reference_group = _keep_or_end(pipeline, result)
        slot.after_failure = not (result.correct and pipeline.group.healthy)
        if slot.after_failure:
            self._recover(pipeline.session)
        self._look_at_machine(pipeline, result)
        return result

    def _run_with_more_time(self, pipeline: EvaluationPipeline, start: StartPipeline) -> tuple[EvaluationPipeline, Result]:
        """Judges a job again that was late because other programs had the cores, with twice the time."""
        where = f"{pipeline.job.candidate.name} missed a deadline in {pipeline.phase}"
        self._progress.note(f"{where} while other programs kept the machine busy; it is judged once more, with twice the time")
        pipeline.group.end()
        pipeline = start()
        if pipeline.limit is not None:
            pipeline.limit.start(2.0)
        with pipeline.session.longer_deadlines(2.0):
            result = pipeline.run()
        if pipeline.late and pipeline.kept_share >= STARVED:
            result = _starved(result, pipeline.kept_share)
        return pipeline, result

    def _look_at_machine(self, pipeline: EvaluationPipeline, result: Result) -> None:
        """Gives up where rank groups do not start any more, and where a GPU does not answer after ranks failed."""
        self._without_ranks = [*self._without_ranks, result.verdict.reason] if pipeline.group.no_ranks else []
        if len(self._without_ranks) == _MAX_WITHOUT_RANKS:
            self.gave_up = f"rank groups do not start here any more: {self._without_ranks[-1]}"
        if pipeline.session.place.has_gpus and not pipeline.group.healthy and self.gave_up is None:
            place = pipeline.session.node
            used = pipeline.job.world_size if place is None else place.gpus
            self.gave_up = lost_gpus([gpu["index"] for gpu in pipeline.node.environment["gpus"]][:used])

    def _recover(self, session: Session) -> None:
        try:
            session.recover_from_fault()
        except HarnessError as error:
            self.gave_up = f"ranks can share GPUs no more: {error}"


def _starved(result: Result, share: float) -> Result:
    """Returns what is left of a result that was late because others had the cores."""
    took = f"other programs kept the ranks from their cores for {100 * share:.0f} % of the time"
    verdict = NotRun(missing=f"time: {result.verdict.reason}; {took}, in the second evaluation too. Judge it again when less else runs")
    return result.model_copy(update={"verdict": verdict, "flags": tuple(sorted({*result.flags, OVERLOADED}))})


def _keep_or_end(pipeline: EvaluationPipeline, result: Result) -> RankGroup | None:
    """The group, if the next evaluation of the reference may use it; any other is killed."""
    if pipeline.job.candidate.is_reference and result.correct and pipeline.group.healthy and pipeline.group.reusable:
        return pipeline.group.ranks
    pipeline.group.end()
    if not pipeline.group.healthy and result.verdict.kind == "harness_error":
        pipeline.session.drop_trusted()
    return None
