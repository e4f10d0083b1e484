"""Schedules the evaluations of a run: opens sessions, and begins each job when a worker slot and its build are ready."""

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from peerlane.evaluate.job_runner import JobRunner
from peerlane.evaluate.node import Node, TooFewGpus, choose_isolation, describe_node, place_ranks
from peerlane.evaluate.pipeline import EvaluationPipeline
from peerlane.evaluate.pipeline_emulated import EmulatedPipeline
from peerlane.evaluate.plan import EvaluationPlan, Job
from peerlane.evaluate.processes.limit import Cancelled, Limit
from peerlane.evaluate.processes.session import Session
from peerlane.evaluate.progress import Progress
from peerlane.evaluate.ranks.builds import Builds
from peerlane.evaluate.worker_slots import OneByOne, SideBySide, WorkerSlot, WorkerSlots
from peerlane.hardware.virtual_node import VirtualNode
from peerlane.results.result import Result
from peerlane.results.verdict import NotRun

PhaseListener: TypeAlias = Callable[[Job, str], None]
"""Hears that a job has entered a phase."""
_POLL_S = 0.1  # seconds between two looks at a build


def ignore_phase(job: Job, phase: str) -> None: ...


class Scheduler:
    """Judges jobs in worker slots of sessions that it keeps. The sessions of one number of ranks are open at a time.

    ``warm``: more jobs are expected, so that warm groups are kept for them.
    """

    def __init__(self, plan: EvaluationPlan, progress: Progress, *, warm: bool) -> None:
        self.plan, self._progress, self._warm = plan, progress, warm
        self.node = describe_node(plan)
        self.isolation = choose_isolation(plan)
        self.runner = JobRunner(progress)
        self.slots: WorkerSlots | None = None
        self._opening = threading.RLock()

    def judge(
        self,
        jobs: Sequence[Job],
        limit: Limit | None = None,
        tell: PhaseListener = ignore_phase,
        all_begun: Callable[[], None] = lambda: None,
    ) -> Generator[tuple[Job, Result], None, None]:
        """Yields the results of jobs of one world size, as they come: in order, but for what is still being compiled when its turn comes,
        which lets others pass, and for what ends before others do that began earlier.

        Every candidate gets fresh groups; the reference keeps one for all its problems. ``tell`` hears of every phase of a job.
        ``all_begun`` is called when the last one has begun.
        """
        if not jobs:
            return
        world_size = jobs[0].world_size
        if isinstance(missing := self.placement(world_size), str):
            yield from self._not_run(jobs, missing)
            return
        slots = self.slots_of(world_size)
        built = [] if self.plan.place.emulated else [job.candidate for job in jobs]  # the emulator compiles kernels when they are launched
        slots.builds.order(built)
        run = SideBySide(slots, limit) if slots.maximum > 1 else OneByOne(slots, limit)
        left = list(jobs)
        try:
            while left or run.running:
                if self.runner.gave_up is not None and not run.running:
                    yield from self._not_run(left, self.runner.gave_up)
                    return
                job = None if self.runner.gave_up is not None else next((job for job in left if slots.builds.ready(job.candidate)), None)
                if job is not None and (slot := slots.take(alone=bool(job.modes) and not self.node.place.untimed)) is not None:
                    left.remove(job)
                    if not left:
                        all_begun()
                    run.begin(job, slot, partial(self._judge_in, slot, slots.builds, job, list(left), tell))
                    if not run.any_ended:
                        continue  # another slot may be free
                for ended, outcome in run.ended():
                    if isinstance(outcome, BaseException):
                        raise outcome
                    yield ended, outcome
        finally:
            slots.builds.drop(built)
            if not run.stop():
                self.end_session()

    def _judge_in(
        self, slot: WorkerSlot, builds: Builds, job: Job, left: Sequence[Job], tell: PhaseListener, limit: Limit | None
    ) -> Result:
        """Judges a job in a slot; ``left``: those that come after it."""
        plan = self.plan
        kind = EmulatedPipeline if plan.place.emulated else EvaluationPipeline
        still_needed = plan.pool_settings.warm_groups if self._warm else 0
        still_needed += sum(other.groups_needed(plan.place) for other in left)

        show = partial(self._progress.phase, job.candidate.name, job.problem.id, job.preset, job.world_size)

        def report(phase: str) -> None:
            show(phase)
            tell(job, phase)

        def report_wait(phase: str, left_s: float) -> None:
            show(f"{phase}, timeout in {left_s:.0f} s")

        node = self.node_of(job.world_size)
        start = partial(
            kind, slot.session, job, node, plan.rules, report, builds, still_needed, stress=plan.stress, limit=limit, tell_wait=report_wait
        )
        try:
            return self.runner.run(slot, start)
        except Cancelled:
            raise
        except BaseException:  # an interrupt, in the middle of a conversation with the ranks
            self.end_session()
            raise

    @contextlib.contextmanager
    def compiling(self, job: Job, limit: Limit) -> Iterator[None]:
        """Compiles the candidate of a job before it waits for its turn, so that it holds up nobody."""
        slots = self.slots
        if slots is None or slots.world_size != job.world_size or self.plan.place.emulated or not job.candidate.compiles:
            yield
            return
        slots.builds.order([job.candidate])
        try:
            with slots.changed:
                while not limit.cancelled and not slots.builds.ready(job.candidate):
                    slots.changed.wait(_POLL_S)
            yield
        finally:
            slots.builds.drop([job.candidate])

    @property
    def capacity(self) -> int:
        """Returns how many evaluations to ask for at a time: those that are judged, and those that are compiled meanwhile."""
        slots = self.slots
        return 1 if slots is None else slots.capacity

    def warm_up(self) -> None:
        """Opens the sessions of the plan's number of ranks and starts warm groups, if there is a place for the ranks."""
        world_size = self.plan.world_sizes[0]
        if self._warm and not isinstance(self.placement(world_size), str):
            self.slots_of(world_size).first.start_warm_groups(self.plan.pool_settings.warm_groups)

    def slots_of(self, world_size: int) -> WorkerSlots:
        """Returns the slots with so many ranks, which are open; those with another number end, once nothing is judged there."""
        with self._opening:
            if self.slots is None or self.slots.world_size != world_size:
                if self.slots is not None:
                    with self.slots.changed:
                        self.slots.changed.wait_for(lambda: self.slots is None or self.slots.idle)
                self.end_session()
                place = self.placement(world_size)
                assert not isinstance(place, str), "there are too few GPUs"
                if place is not None:
                    self._progress.note(str(place))
                first = self._new_session(world_size, place).__enter__()
                self.slots = WorkerSlots.of(first, lambda: self._new_session(world_size, place, first).__enter__())
            return self.slots

    def _new_session(self, world_size: int, place: VirtualNode | None, beside: Session | None = None) -> Session:
        plan, note = self.plan, self._progress.note
        common = plan.pool_settings, self.isolation, note, place, beside
        return Session(plan.device, world_size, plan.deadlines, *common, nodes=plan.nodes)

    def end_session(self) -> None:
        """Ends every process."""
        slots, self.slots = self.slots, None
        self.runner.reset()
        if slots is not None:
            slots.close()

    def placement(self, world_size: int) -> VirtualNode | str | None:
        """Returns the virtual node where these ranks share GPUs; why they have no place here; None where each has a GPU or a CPU of its
        own."""
        try:
            return place_ranks(self.plan, world_size, self.node.gpus)
        except TooFewGpus as error:
            return str(error)

    def node_of(self, world_size: int) -> Node:
        """Returns this machine, as results with so many ranks record it."""
        place = self.placement(world_size)
        return self.node if isinstance(place, str) else self.node.shared_by(place)

    def _not_run(self, jobs: Sequence[Job], missing: str) -> Iterator[tuple[Job, Result]]:
        for job in jobs:
            session = Session(self.plan.device, job.world_size, self.plan.deadlines, isolation=self.isolation, nodes=job.nodes)
            pipeline = EvaluationPipeline(session, job, self.node_of(job.world_size), self.plan.rules, lambda _: None)
            yield job, pipeline.give_up(NotRun(missing=missing))
