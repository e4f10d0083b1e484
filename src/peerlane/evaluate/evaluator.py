"""Evaluates candidates: the API. Read this first, then plan.py (what is asked for), scheduler.py (when it is judged), job_runner.py (when
it is judged again), pipeline.py (one evaluation), correctness/case_runner.py (one case) and timing/; processes/session.py holds the
processes, ranks/ what they run."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from peerlane.errors import HarnessError, RunStopped, UsageError
from peerlane.evaluate.candidates import CandidateFile, candidate_info, one_candidate
from peerlane.evaluate.node import Node
from peerlane.evaluate.plan import EvaluationPlan, Job, make_jobs
from peerlane.evaluate.processes.limit import Cancelled, Limit
from peerlane.evaluate.processes.prestart import kept_between_sessions
from peerlane.evaluate.progress import OneAtATime
from peerlane.evaluate.progress import Progress as Progress
from peerlane.evaluate.progress import Silent as Silent
from peerlane.evaluate.scheduler import PhaseListener, Scheduler, ignore_phase
from peerlane.evaluate.turns import SharedContext, Turns
from peerlane.results.identity import Identity
from peerlane.results.result import Result
from peerlane.results.store import ResultsStore
from peerlane.sandbox.hidden_files import holds_program, keep_from_candidates
from peerlane.sandbox.isolation import Isolation


def evaluate(plan: EvaluationPlan, progress: Progress | None = None) -> list[Result]:
    """Judges every candidate on every problem, preset and world size of the plan: one result each, in the order of the plan.

    Results are stored as they come; what ``plan.out`` already holds is returned from there. Raises :class:`UsageError` before anything
    runs, :class:`RunStopped` when a result cannot be stored, and :class:`HarnessError` when peerlane itself fails; after KeyboardInterrupt
    no process is left.
    """
    with Evaluator(plan=plan, progress=progress) as evaluator:
        return evaluator.evaluate_plan(plan)


class Evaluator:
    """Judges candidates in rank processes that it keeps warm: on GPUs one at a time, elsewhere side by side; see worker_slots.py. Use as a
    context manager: leaving it ends every process.

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
        plan_given = plan
        if plan is None:
            chosen = device if device != "auto" else "cuda" if torch.cuda.device_count() else "cpu"
            plan = _changed(EvaluationPlan(()), {"world_sizes": (world_size,), "device": chosen, **options})
        self._plan, self._progress = plan, OneAtATime(progress or Silent())
        self.scheduler = Scheduler(plan, self._progress, warm=plan_given is None)
        self._store = ResultsStore(plan.out) if plan.out is not None else None
        if self._store is not None and plan.out is not None:
            keep_from_candidates(self._store.path if holds_program(plan.out) else plan.out)
        self._turns = Turns()
        self._storing = threading.Lock()
        self._alone_with = SharedContext()
        self._threads: ThreadPoolExecutor | None = None
        self._kept = contextlib.ExitStack()  # a fork server, from one number of ranks to the next
        self._closed = self._introduced = False

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as kept:
            kept.enter_context(kept_between_sessions())
            self.scheduler.warm_up()
            self._kept = kept.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._closed = True
        self._turns.cancel_all()
        if self._threads is not None:
            self._threads.shutdown()
        self._turns.wait_for_all()
        with self._kept:
            self.scheduler.end_session()

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
        chosen = one_candidate(problem, source, path, candidate, name)
        if source is not None and problem is None:
            raise UsageError("source=TEXT does not say which problem it solves: give problem=NUMBER")
        return self._plan_of((chosen,), {**changes, "problems": None if problem is None else str(problem)})

    def _only_result(self, plan: EvaluationPlan, limit: Limit, tell: PhaseListener = ignore_phase) -> Result:
        jobs = make_jobs(plan)
        if len(jobs) != 1:
            asked = ", ".join(f"problem {job.problem.id} {job.preset}" for job in jobs[:4])
            raise UsageError(f"got {len(jobs)} evaluations ({asked}, ...): expected one problem and one preset; use evaluate_all")
        return self.evaluate_plan(plan, limit, tell)[0]

    # --- many candidates ---

    def evaluate_plan(self, plan: EvaluationPlan, limit: Limit | None = None, tell: PhaseListener = ignore_phase) -> list[Result]:
        """The results of everything that a plan asks for, in its order; what the store holds comes from there.

        Raises :class:`UsageError`, :class:`RunStopped` and :class:`Cancelled`. ``limit`` can end it from another thread. ``tell`` hears of
        every phase.
        """
        jobs = make_jobs(plan, self._progress.note)
        with contextlib.ExitStack() as inside:
            granted = inside.enter_context(contextlib.closing(limit or Limit()))
            inside.enter_context(self._turns.caller(granted))
            inside.enter_context(self._compiling(jobs, plan, granted))
            let_next_begin = inside.enter_context(self._turns.turn(granted))
            inside.enter_context(self._alone(granted))
            if self._closed:
                raise UsageError("the evaluator is closed: use it inside its `with` block")
            self._introduce()
            results: dict[int, Result] = {}
            waiting = self._waiting(jobs, plan)
            self._progress.started(len(waiting), len(jobs) - len(waiting))
            world_sizes = list(dict.fromkeys(job.world_size for job in waiting))
            for world_size in world_sizes:
                due = [job for job in waiting if job.world_size == world_size]
                begun = let_next_begin if world_size == world_sizes[-1] else lambda: None
                with contextlib.closing(self.scheduler.judge(due, granted, tell, begun)) as judged:
                    for job, result in judged:
                        results[id(job)] = result
                        self._keep(result, list(results.values()))
                        self._progress.finished(result)
            new = {self.identity(job): results[id(job)] for job in waiting if id(job) in results}
            return [results.get(id(job)) or self._cached(job, new) for job in jobs]

    def _compiling(self, jobs: Sequence[Job], plan: EvaluationPlan, limit: Limit) -> contextlib.AbstractContextManager[None]:
        """Compiles a single candidate before it waits for its turn, unless its result is stored."""
        if len(jobs) > 1 or (self._store is not None and not plan.rerun and self._store.has(self.identity(jobs[0]))):
            return contextlib.nullcontext()
        return self.scheduler.compiling(jobs[0], limit)

    def _alone(self, limit: Limit) -> contextlib.AbstractContextManager[None]:
        """No other run judges for the same folder, so that nothing is judged twice."""
        if self._store is None:
            return contextlib.nullcontext()
        store, folder, reported = self._store, self._store.path.parent, False

        def wait() -> None:
            nonlocal reported
            if limit.cancelled:
                raise Cancelled
            if not reported:
                self._progress.note(f"another run judges for {folder}; this one goes on when it ends")
            reported = True

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
        """Returns the identity that the result of a job would have."""
        return job.identity(self.node_of(job.world_size).node_class, self.isolation.tier, self.scheduler.node.rules_hash)

    @property
    def isolation(self) -> Isolation:
        """Returns how candidates are confined."""
        return self.scheduler.isolation

    def node_of(self, world_size: int) -> Node:
        """Returns this machine, as results with so many ranks record it."""
        return self.scheduler.node_of(world_size)

    def _keep(self, result: Result, results: list[Result]) -> None:
        if self._store is None:
            return
        try:
            with self._storing:
                self._store.append(result)
        except HarnessError as error:
            raise RunStopped(f"{error}; the run stops with {len(results) - 1} results stored", results) from None

    def _cached(self, job: Job, new: Mapping[Identity, Result]) -> Result:
        """The result of what this job asks for, just made or stored, under the name of the file that was asked for; stored under it too."""
        assert self._store is not None
        result = self._store.find(self.identity(job), job.candidate.name) or new[self.identity(job)]
        if result.candidate.name != job.candidate.name:
            result = result.model_copy(update={"candidate": candidate_info(job.candidate)})
            self._keep(result, [result])
        return result

    @property
    def capacity(self) -> int:
        """Returns how many evaluations to ask for at a time: those that are judged, and those that are compiled meanwhile."""
        return self.scheduler.capacity

    @property
    def gave_up(self) -> str | None:
        """Returns why this evaluator judges no more, such as a lost GPU; None while it works. Another one must be opened."""
        return self.scheduler.runner.gave_up


_ASYNC_CALLS = 64  # of one evaluator that may wait at a time, each in a thread
_OF_ALL_CALLS = {
    *("world_sizes", "nodes", "device", "ranks_per_gpu", "baseline", "isolation", "out", "candidates"),
    *("deadlines", "pool_settings", "rules", "stress"),
}


def _changed(plan: EvaluationPlan, changes: dict[str, Any]) -> EvaluationPlan:
    try:
        return replace(plan, **changes)
    except TypeError:
        fields = EvaluationPlan.__dataclass_fields__
        unknown = ", ".join(name for name in changes if name not in fields)
        raise UsageError(f"unknown options: {unknown}; expected fields of EvaluationPlan: {', '.join(fields)}") from None
