"""Evaluates candidates. Read this first, then plan.py (what is asked for), pipeline.py (one evaluation), correctness/case_runner.py (one
case) and timing/; processes/session.py holds the processes, ranks/ what they run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch

from peerlane.errors import HarnessError, RunStopped, UsageError
from peerlane.evaluate.candidates import CandidateFile, candidate_file, candidate_info, candidate_text
from peerlane.evaluate.lanes import Lane, Lanes, OneByOne, SideBySide
from peerlane.evaluate.node import Node, TooFewGpus, choose_isolation, describe_node, place_ranks
from peerlane.evaluate.pipeline import EvaluationPipeline, groups_needed
from peerlane.evaluate.pipeline_emulated import EmulatedPipeline
from peerlane.evaluate.plan import EvaluationPlan, Job, make_jobs
from peerlane.evaluate.processes.limit import Cancelled, Limit
from peerlane.evaluate.processes.machine_faults import SLOWED, STARVED, lost_gpus
from peerlane.evaluate.processes.prestart import kept_between_sessions
from peerlane.evaluate.processes.rank_group import RankGroup
from peerlane.evaluate.processes.session import Session
from peerlane.evaluate.progress import OneAtATime
from peerlane.evaluate.progress import Progress as Progress
from peerlane.evaluate.progress import Silent as Silent
from peerlane.evaluate.ranks.builds import Builds
from peerlane.evaluate.turns import SharedContext, Turns
from peerlane.hardware.virtual_node import VirtualNode
from peerlane.results.identity import Identity
from peerlane.results.result import OVERLOADED, Result
from peerlane.results.store import ResultsStore
from peerlane.results.verdict import NotRun
from peerlane.sandbox.hidden_files import holds_program, keep_from_candidates

Tell: TypeAlias = Callable[[Job, str], None]
"""hears that a job has entered a phase"""
_RUNS_WITHOUT_RANKS = 2  # so many evaluations in a row without rank groups, and the rest of the run is given up
_LOOK_S = 0.1
_MEMORY_S = 3.0  # after which the driver has taken back the memory of processes that were killed


def _silent(job: Job, phase: str) -> None: ...


def evaluate(plan: EvaluationPlan, progress: Progress | None = None) -> list[Result]:
    """Judges every candidate on every problem, preset and world size of the plan: one result each, in the order of the plan.

    Results are stored as they come; what ``plan.out`` already holds is returned from there. Raises :class:`UsageError` before anything
    runs, :class:`RunStopped` when a result cannot be stored, and :class:`HarnessError` when peerlane itself fails; after KeyboardInterrupt
    no process is left.
    """
    with Evaluator(plan=plan, progress=progress) as evaluator:
        return evaluator.evaluate_plan(plan)


class Evaluator:
    """Judges candidates in rank processes that it keeps warm: on GPUs one at a time, elsewhere side by side; see lanes.py. Use as a context
    manager: leaving it ends every process.

    Args:
        world_size: number of ranks.
        device: ``cuda``, ``cpu``, ``emulated``, or ``auto``: CUDA where there is a GPU.
        plan: in place of all other options, which are fields of :class:`EvaluationPlan`: what every evaluation has in common.
        progress: hears what happens.

    Calls may come from several threads; they begin in the order of their arrival. Raises :class:`UsageError` for options that cannot be.
    """

    def __init__(
        self,
        world_size: int = 4,
        device: str = "auto",
        *,
        plan: EvaluationPlan | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        self._warm = plan is None
        if plan is None:
            chosen = device if device != "auto" else "cuda" if torch.cuda.device_count() else "cpu"
            plan = _changed(EvaluationPlan(()), {"world_sizes": (world_size,), "device": chosen, **options})
        self._plan, self._progress = plan, OneAtATime(progress or Silent())
        self._node = describe_node(plan)
        self.isolation = choose_isolation(plan)
        self._store = ResultsStore(plan.out) if plan.out is not None else None
        if self._store is not None and plan.out is not None:
            keep_from_candidates(self._store.path if holds_program(plan.out) else plan.out)
        self._turns = Turns()
        self._lanes: Lanes | None = None
        self._opening = threading.RLock()
        self._storing = threading.Lock()
        self._alone_with = SharedContext()
        self._without_ranks: list[str] = []  # why the last evaluations had no ranks
        self._missing: str | None = None  # why there is no evaluating any more
        self._threads: ThreadPoolExecutor | None = None
        self._kept = contextlib.ExitStack()  # a fork server, from one number of ranks to the next
        self._closed = self._introduced = False

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as kept:
            kept.enter_context(kept_between_sessions())
            if self._warm and not isinstance(self._placement(self._plan.world_sizes[0]), str):
                lanes = self._lanes_of(self._plan.world_sizes[0])
                lanes.first.start_warm_groups(self._plan.pool_settings.warm_groups)
            self._kept = kept.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._closed = True
        self._turns.cancel_all()
        if self._threads is not None:
            self._threads.shutdown()
        self._turns.wait_for_all()
        with self._kept:
            self._end_session()

    # --- one candidate ---

    def evaluate(
        self,
        problem: int | None = None,
        source: str | bytes | None = None,
        *,
        path: str | Path | None = None,
        candidate: CandidateFile | None = None,
        name: str = "candidate",
        **changes: Any,
    ) -> Result:
        """The result of one candidate on one problem and preset: its ``source``, its file's ``path``, or a ``candidate``.

        ``problem`` may be left out where the file's name says it. ``name`` is what results call a text. ``changes`` are other fields of
        :class:`EvaluationPlan` for this call, such as ``presets=("small",)``, ``modes=()`` or ``timeout=60``. Raises :class:`UsageError`
        for a request that cannot be; whatever the candidate does, there is a result.
        """
        plan = self._plan_of_one(problem, source, path, candidate, name, **changes)
        return self._only_result(plan, Limit(plan.timeout))

    async def evaluate_async(
        self, problem: int | None = None, source: str | bytes | None = None, *, tell: Callable[[str], None] = lambda _: None, **request: Any
    ) -> Result:
        """The same as :meth:`evaluate`, awaited. A cancelled task leaves the queue, or ends the evaluation and its processes at once.

        ``tell`` hears of every phase, in another thread.
        """
        plan = self._plan_of_one(problem, source, **request)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(max_workers=_ASYNC_CALLS, thread_name_prefix="peerlane")
        limit = Limit(plan.timeout)
        future = self._threads.submit(self._only_result, plan, limit, lambda _, phase: tell(phase))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            limit.cancel()
            if future.cancelled():  # no thread has looked at it
                limit.close()
            raise

    def evaluate_all(self, candidates: Sequence[CandidateFile], **changes: Any) -> list[Result]:
        """One result for every candidate, problem and preset, in order; ``changes`` as in :meth:`evaluate`, and ``problems="1-8,13"``."""
        return self.evaluate_plan(self._plan_of(tuple(candidates), changes))

    def _plan_of(self, candidates: tuple[CandidateFile, ...], changes: dict[str, Any]) -> EvaluationPlan:
        if fixed := _OF_ALL_CALLS & changes.keys():
            raise UsageError(f"{', '.join(sorted(fixed))} cannot change from call to call; the Evaluator has them for all calls")
        return _changed(self._plan, {**changes, "candidates": candidates})

    def _plan_of_one(
        self,
        problem: int | None,
        source: str | bytes | None,
        path: str | Path | None = None,
        candidate: CandidateFile | None = None,
        name: str = "candidate",
        **changes: Any,
    ) -> EvaluationPlan:
        if sum(item is not None for item in (source, path, candidate)) != 1:
            raise UsageError("expected one of source=TEXT, path=FILE and candidate=CANDIDATE")
        if source is not None:
            if problem is None:
                raise UsageError("source=TEXT does not say which problem it solves: give problem=NUMBER")
            chosen = candidate_text(source, problem, name)
        else:
            chosen = candidate if candidate is not None else candidate_file(Path(path or ""))
            chosen = chosen if problem is None else replace(chosen, problem=problem)
        return self._plan_of((chosen,), {**changes, "problems": None if problem is None else str(problem)})

    def _only_result(self, plan: EvaluationPlan, limit: Limit, tell: Tell = _silent) -> Result:
        jobs = make_jobs(plan)
        if len(jobs) != 1:
            asked = ", ".join(f"problem {job.problem.id} {job.preset}" for job in jobs[:4])
            raise UsageError(f"got {len(jobs)} evaluations ({asked}, ...): expected one problem and one preset; use evaluate_all")
        return self.evaluate_plan(plan, limit, tell)[0]

    # --- many candidates ---

    def evaluate_plan(self, plan: EvaluationPlan, limit: Limit | None = None, tell: Tell = _silent) -> list[Result]:
        """The results of everything that a plan asks for, in its order; what the store holds comes from there.

        Raises :class:`UsageError`, :class:`RunStopped` and :class:`Cancelled`. ``limit`` can end it from another thread. ``tell`` hears of
        every phase.
        """
        jobs = make_jobs(plan, self._progress.note)
        with contextlib.ExitStack() as inside:
            granted = inside.enter_context(contextlib.closing(limit or Limit()))
            inside.enter_context(self._turns.caller(granted))
            inside.enter_context(self._compiled(jobs, plan, granted))
            let_next_begin = inside.enter_context(self._turns.turn(granted))
            inside.enter_context(self._alone(granted))
            if self._closed:
                raise UsageError("the evaluator is closed: use it inside its `with` block")
            self._introduce()
            found: dict[int, Result] = {}
            waiting = self._waiting(jobs, plan)
            self._progress.started(len(waiting), len(jobs) - len(waiting))
            world_sizes = list(dict.fromkeys(job.world_size for job in waiting))
            for world_size in world_sizes:
                due = [job for job in waiting if job.world_size == world_size]
                begun = let_next_begin if world_size == world_sizes[-1] else lambda: None
                with contextlib.closing(self.judge(due, granted, tell, begun)) as judged:
                    for job, result in judged:
                        found[id(job)] = result
                        self._keep(result, list(found.values()))
                        self._progress.finished(result)
            new = {self.identity(job): found[id(job)] for job in waiting if id(job) in found}
            return [found.get(id(job)) or self._known(job, new) for job in jobs]

    @contextlib.contextmanager
    def _compiled(self, jobs: Sequence[Job], plan: EvaluationPlan, limit: Limit) -> Iterator[None]:
        """Has a single candidate compiled before it waits for its turn, so that it holds up nobody."""
        lanes = self._lanes
        candidate = jobs[0].candidate
        known = self._store is not None and not plan.rerun and self._store.has(self.identity(jobs[0]))
        if (
            len(jobs) > 1
            or not candidate.compiles
            or plan.place.emulated
            or known
            or lanes is None
            or lanes.world_size != jobs[0].world_size
        ):
            yield
            return
        lanes.builds.order([candidate])
        try:
            with lanes.changed:
                while not limit.cancelled and not lanes.builds.ready(candidate):
                    lanes.changed.wait(_LOOK_S)
            yield
        finally:
            lanes.builds.drop([candidate])

    def _alone(self, limit: Limit) -> contextlib.AbstractContextManager[None]:
        """No other run judges for the same folder, so that nothing is judged twice."""
        if self._store is None:
            return contextlib.nullcontext()
        store, folder, told = self._store, self._store.path.parent, False

        def wait() -> None:
            nonlocal told
            if limit.cancelled:
                raise Cancelled
            if not told:
                self._progress.note(f"another run judges for {folder}; this one goes on when it ends")
            told = True

        return self._alone_with.enter(lambda: store.alone(wait))

    def _introduce(self) -> None:
        """Says once under which conditions it judges, and what of the store it cannot read."""
        if not self._introduced:
            self._introduced = True
            for note in (f"isolation {self.isolation.describe()}", *(self._store.notes if self._store is not None else ())):
                self._progress.note(note)

    def _waiting(self, jobs: Sequence[Job], plan: EvaluationPlan) -> list[Job]:
        """The jobs that the store has no result for; of those that would have the same, the first."""
        if self._store is None:
            return list(jobs)
        new: dict[Identity, Job] = {}
        for job in jobs:
            if plan.rerun or not self._store.has(self.identity(job)):
                new.setdefault(self.identity(job), job)
        return list(new.values())

    def identity(self, job: Job) -> Identity:
        return job.identity(self.node_of(job.world_size).node_class, self.isolation.tier, self._node.rules_hash)

    def _keep(self, result: Result, results: list[Result]) -> None:
        if self._store is None:
            return
        try:
            with self._storing:
                self._store.append(result)
        except HarnessError as error:
            raise RunStopped(f"{error}; the run stops with {len(results) - 1} results stored", results) from None

    def _known(self, job: Job, new: Mapping[Identity, Result]) -> Result:
        """The result of what this job asks for, just made or stored, under the name of the file that was asked for; stored under it too."""
        assert self._store is not None
        result = self._store.find(self.identity(job), job.candidate.name) or new[self.identity(job)]
        if result.candidate.name != job.candidate.name:
            result = result.model_copy(update={"candidate": candidate_info(job.candidate)})
            self._keep(result, [result])
        return result

    def judge(
        self, jobs: Sequence[Job], limit: Limit | None = None, tell: Tell = _silent, all_begun: Callable[[], None] = lambda: None
    ) -> Generator[tuple[Job, Result], None, None]:
        """The results of jobs of one world size, as they come: in order, but for what is still being compiled when its turn comes, which
        lets others pass, and for what ends before others do that began earlier.

        Every candidate gets fresh groups; the reference keeps one for all its problems. ``tell`` hears of every phase of a job.
        ``all_begun`` is called when the last one has begun.
        """
        if not jobs:
            return
        world_size = jobs[0].world_size
        if isinstance(missing := self._placement(world_size), str):
            yield from self._not_run(jobs, missing)
            return
        lanes = self._lanes_of(world_size)
        built = [] if self._plan.place.emulated else [job.candidate for job in jobs]  # the emulator compiles kernels when they are launched
        lanes.builds.order(built)
        run = SideBySide(lanes, limit) if lanes.most > 1 else OneByOne(lanes, limit)
        left = list(jobs)
        try:
            while left or run.running:
                if self._missing is not None and not run.running:
                    yield from self._not_run(left, self._missing)
                    return
                job = None if self._missing is not None else self._next(left, lanes)
                if job is not None and (lane := lanes.take(alone=bool(job.modes) and not self._node.place.untimed)) is not None:
                    left.remove(job)
                    if not left:
                        all_begun()
                    run.begin(job, lane, partial(self._judge_in, lane, lanes.builds, job, list(left), tell))
                    if not run.any_ended:
                        continue  # another lane may be free
                for ended, outcome in run.ended():
                    if isinstance(outcome, BaseException):
                        raise outcome
                    yield ended, outcome
        finally:
            lanes.builds.drop(built)
            if not run.stop():
                self._end_session()

    @staticmethod
    def _next(left: Sequence[Job], lanes: Lanes) -> Job | None:
        """The next job whose candidate is compiled: GPUs do not wait for compilers."""
        return next((job for job in left if lanes.builds.ready(job.candidate)), None)

    def _judge_in(self, lane: Lane, builds: Builds, job: Job, left: Sequence[Job], tell: Tell, limit: Limit | None) -> Result:
        """Judges a job in a lane; ``left``: those that come after it."""
        plan = self._plan
        kind = EmulatedPipeline if plan.place.emulated else EvaluationPipeline
        still_needed = plan.pool_settings.warm_groups if self._warm else 0
        still_needed += sum(groups_needed(other, plan.place) for other in left)

        def told(phase: str) -> None:
            self._progress.phase(job.candidate.name, job.problem.id, job.preset, job.world_size, phase)
            tell(job, phase)

        def told_wait(phase: str, left_s: float) -> None:
            text = f"{phase}, timeout in {left_s:.0f} s"
            self._progress.phase(job.candidate.name, job.problem.id, job.preset, job.world_size, text)

        node = self.node_of(job.world_size)
        start = partial(
            kind, lane.session, job, node, plan.rules, told, builds, still_needed, stress=plan.stress, limit=limit, tell_wait=told_wait
        )
        return self._run(lane, start)

    def _run(self, lane: Lane, start: Callable[..., EvaluationPipeline]) -> Result:
        pipeline = start(kept=lane.kept)
        lane.kept = None
        try:
            result = pipeline.run()
            if pipeline.late and pipeline.kept_share >= SLOWED:
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
            shared = result.verdict.kind == "harness_error" and pipeline.session.shares_faults
            if shared or (lane.after_failure and pipeline.short_of_memory):
                # What is left of the fault of an earlier candidate, or of its memory, costs this one nothing.
                self._progress.note(f"{pipeline.job.candidate.name} is judged once more: {result.verdict.reason.splitlines()[0]}")
                pipeline.group.end()
                if not shared:
                    time.sleep(_MEMORY_S)
                self._recover(pipeline.session)
                if self._missing is None:
                    pipeline = start()
                    result = pipeline.run()
        except Cancelled:
            raise
        except BaseException:  # an interrupt, in the middle of a conversation with the ranks
            self._end_session()
            raise
        lane.kept = _keep_or_end(pipeline, result)
        lane.after_failure = not (result.correct and pipeline.group.healthy)
        if lane.after_failure:
            self._recover(pipeline.session)
        self._without_ranks = [*self._without_ranks, result.verdict.reason] if pipeline.group.no_ranks else []
        if len(self._without_ranks) == _RUNS_WITHOUT_RANKS:
            self._missing = f"rank groups do not start here any more: {self._without_ranks[-1]}"
        if self._plan.place.has_gpus and not pipeline.group.healthy and self._missing is None:
            place = pipeline.session.node
            used = pipeline.job.world_size if place is None else place.gpus
            self._missing = lost_gpus([gpu["index"] for gpu in self._node.environment["gpus"]][:used])
        return result

    def _recover(self, session: Session) -> None:
        try:
            session.recover_from_fault()
        except HarnessError as error:
            self._missing = f"ranks can share GPUs no more: {error}"

    @property
    def capacity(self) -> int:
        """Returns how many evaluations to ask for at a time: those that are judged, and those that are compiled meanwhile."""
        lanes = self._lanes
        return 1 if lanes is None else lanes.capacity

    @property
    def gave_up(self) -> str | None:
        """Returns why this evaluator judges no more, such as a lost GPU; None while it works. Another one must be opened."""
        return self._missing

    def _lanes_of(self, world_size: int) -> Lanes:
        """The lanes with so many ranks, which are open; those with another number end, once nothing is judged there."""
        with self._opening:
            if self._lanes is None or self._lanes.world_size != world_size:
                if self._lanes is not None:
                    with self._lanes.changed:
                        self._lanes.changed.wait_for(lambda: self._lanes is None or self._lanes.idle)
                self._end_session()
                place = self._placement(world_size)
                assert not isinstance(place, str), "there are too few GPUs"
                if place is not None:
                    self._progress.note(str(place))
                first = self._new_session(world_size, place).__enter__()
                self._lanes = Lanes.of(first, lambda: self._new_session(world_size, place, first).__enter__())
            return self._lanes

    def _new_session(self, world_size: int, place: VirtualNode | None, beside: Session | None = None) -> Session:
        plan, note = self._plan, self._progress.note
        common = plan.pool_settings, self.isolation, note, place, beside
        return Session(plan.device, world_size, plan.deadlines, *common, nodes=plan.nodes)

    def _end_session(self) -> None:
        lanes, self._lanes = self._lanes, None
        self._without_ranks, self._missing = [], None
        if lanes is not None:
            lanes.close()

    def _placement(self, world_size: int) -> VirtualNode | str | None:
        """The virtual node where these ranks share GPUs; why they have no place here; None where each has a GPU or a CPU of its own."""
        try:
            return place_ranks(self._plan, world_size, self._node.gpus)
        except TooFewGpus as error:
            return str(error)

    def node_of(self, world_size: int) -> Node:
        """This machine, as results with so many ranks record it."""
        place = self._placement(world_size)
        return self._node if isinstance(place, str) else self._node.shared_by(place)

    def _not_run(self, jobs: Sequence[Job], missing: str) -> Iterator[tuple[Job, Result]]:
        for job in jobs:
            session = Session(self._plan.device, job.world_size, self._plan.deadlines, isolation=self.isolation, nodes=job.nodes)
            pipeline = EvaluationPipeline(session, job, self.node_of(job.world_size), self._plan.rules, lambda _: None)
            yield job, pipeline.give_up(NotRun(missing=missing))


_ASYNC_CALLS = 64  # of one evaluator that may wait at a time, each in a thread
_OF_ALL_CALLS = {
    *("world_sizes", "nodes", "device", "ranks_per_gpu", "baseline", "isolation", "out", "candidates"),
    *("deadlines", "pool_settings", "rules", "stress"),
}


def _changed(plan: EvaluationPlan, changes: dict[str, Any]) -> EvaluationPlan:
    try:
        return replace(plan, **changes)
    except TypeError:
        known = EvaluationPlan.__dataclass_fields__
        unknown = ", ".join(name for name in changes if name not in known)
        raise UsageError(f"unknown options: {unknown}; expected fields of EvaluationPlan: {', '.join(known)}") from None


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
