"""Evaluates candidates: the loop over what was asked for. Read this first, then examine.py (one evaluation), trial.py (one case) and
speed.py (the timing protocol); session.py and groups.py hold the processes, trusted.py and candidate.py are the two kinds of rank."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

import peerlane
from peerlane import problems
from peerlane.errors import HarnessError, RunStopped, UnknownPreset, UnknownProblem, UsageError
from peerlane.evaluate.candidates import REFERENCE, CandidateFile
from peerlane.evaluate.pipeline import EvaluationPipeline, Job, Node, groups_needed
from peerlane.evaluate.processes import early
from peerlane.evaluate.processes.gpu_health import GpuHealth
from peerlane.evaluate.processes.rank_group import RankGroup
from peerlane.evaluate.processes.session import Session
from peerlane.evaluate.processes.sharing import sharing_failure
from peerlane.evaluate.ranks.builds import Builds
from peerlane.evaluate.results.record import Mode
from peerlane.evaluate.results.store import ResultsStore
from peerlane.evaluate.results.verdict import EvaluationKey, NotRun, Result, Track
from peerlane.evaluate.sandbox.isolation import NO_ISOLATION, Isolation, Tier, choose
from peerlane.hardware.ceilings import load_ceilings
from peerlane.hardware.environment import node_class, record
from peerlane.hardware.memory import gpu_memory
from peerlane.hardware.profiles import profile_for
from peerlane.hardware.roofline import datasheet_peaks, measured_peaks
from peerlane.problems.contract.spec import Problem
from peerlane.settings import Deadlines, PoolSettings, StressRules, TimingRules

Device = Literal["cuda", "cpu"]
PRODUCTION, PRODUCTION_FIRST, SWEEP = "production", "production_first", "sweep"
_RUNS_WITHOUT_RANKS = 2  # so many evaluations in a row without rank groups, and the rest of the run is given up


@dataclass(frozen=True)
class EvaluationPlan:
    """What to evaluate.

    Attributes:
        candidates: see :func:`discover`.
        problems: ``"1-8,13"``, ``"all"``, or None: by the candidates' file names (all, for the reference).
        presets: names; ``production`` and ``sweep`` stand for all presets of that family of a problem, ``production_first`` for the first
            that has a case at the world size.
        track: ``open``: anything goes; ``custom``: what a call communicates must be the candidate's own doing. See docs/tracks.md. Of
            candidates that name none themselves.
        variant: ``default``, or ``pkb``: the public benchmark's semantics, for the problems where those differ.
        world_sizes: numbers of ranks.
        modes: launch modes to time.
        device: ``cuda``, or ``cpu`` (gloo ranks: correctness is real, speed is not measured).
        isolation: ``L0``, ``L1`` or ``L2``, see docs/isolation.md; None: the best of L0 and L1 that this machine gives.
        out: folder of ``results.jsonl``; None keeps nothing.
        deadlines, supply, rules, stress: see :mod:`peerlane.settings`.
    """

    candidates: Sequence[CandidateFile]
    problems: str | None = None
    presets: tuple[str, ...] = ("pkb",)
    world_sizes: tuple[int, ...] = (4,)
    modes: tuple[Mode, ...] = ("eager", "graph")
    device: Device = "cpu"
    out: Path | None = None
    variant: str = "default"
    track: Track = "open"
    isolation: Tier | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    pool_settings: PoolSettings = field(default_factory=PoolSettings)
    rules: TimingRules = field(default_factory=TimingRules)
    stress: StressRules = field(default_factory=StressRules)


class Progress(Protocol):
    """Hears what happens; all calls come from the thread that called :func:`evaluate`."""

    def started(self, total: int, skipped: int) -> None:
        """``total`` evaluations are to be done; ``skipped`` more were done before."""

    def phase(self, candidate: str, problem: int, preset: str, world_size: int, phase: str) -> None:
        """An evaluation entered a phase."""

    def finished(self, result: Result) -> None:
        """An evaluation ended."""

    def note(self, text: str) -> None:
        """Something went wrong and was mended."""


class Silent:
    """Progress that goes nowhere."""

    def started(self, total: int, skipped: int) -> None: ...

    def phase(self, candidate: str, problem: int, preset: str, world_size: int, phase: str) -> None: ...

    def finished(self, result: Result) -> None: ...

    def note(self, text: str) -> None: ...


def evaluate(plan: EvaluationPlan, progress: Progress | None = None) -> list[Result]:
    """Judges every candidate on every problem, preset and world size of the plan; returns the new results, as :meth:`Run.judge` has them.

    Results are stored as they come; what ``plan.out`` already holds is skipped. Raises :class:`UsageError` before anything runs,
    :class:`RunStopped` when a result cannot be stored, and :class:`HarnessError` when peerlane itself fails; after KeyboardInterrupt no
    process is left.
    """
    progress = progress or Silent()
    jobs = make_jobs(plan)
    node = describe_node(plan.device)
    store = ResultsStore(plan.out) if plan.out is not None else None
    isolation = choose_isolation(plan)
    waiting = [job for job in jobs if store is None or not store.has(job_key(job, plan.device, isolation.tier))]
    progress.started(len(waiting), len(jobs) - len(waiting))
    progress.note(f"isolation {isolation.describe()}")
    run = Run(plan, progress, node, isolation)
    results: list[Result] = []
    for world_size in plan.world_sizes:
        with contextlib.closing(run.judge([job for job in waiting if job.world_size == world_size], world_size)) as judged:
            for result in judged:
                results.append(result)
                if store is not None:
                    _store(store, results)
                progress.finished(result)
    return results


def _store(store: ResultsStore, results: list[Result]) -> None:
    try:
        store.append(results[-1])
    except HarnessError as error:
        raise RunStopped(f"{error}; the run stops with {len(results) - 1} results stored", results) from None


class Run:
    """A run of a plan: its sessions, one after the other, and what it learns about the machine."""

    def __init__(self, plan: EvaluationPlan, progress: Progress, node: Node, isolation: Isolation = NO_ISOLATION) -> None:
        self._plan, self._progress, self._node, self._isolation = plan, progress, node, isolation
        indices = [gpu["index"] for gpu in node.environment["gpus"]] if plan.device == "cuda" else []
        self._gpu_health = GpuHealth(
            lambda: gpu_memory(indices) if indices else (), plan.pool_settings, early.memory_before() if indices else ()
        )

    def judge(self, jobs: list[Job], world_size: int) -> Generator[Result, None, None]:
        """The results of the jobs, all of one world size, as they come: in order, but for what is still being compiled when its turn comes,
        which lets others pass. Every candidate gets fresh groups; the reference, which is ours, keeps one for all its problems."""
        plan, node = self._plan, self._node
        if plan.device == "cuda" and world_size > node.gpus:
            yield from self._not_run(jobs, f"{world_size} ranks need {world_size} GPUs; this machine has {node.gpus}")
            return
        if not jobs:
            return
        kept: RankGroup | None = None
        lacking: list[str] = []  # why the last evaluations had no ranks
        with Session(plan.device, world_size, plan.deadlines, plan.pool_settings, self._isolation, self._progress.note) as session:
            builds = Builds(session, [job.candidate for job in jobs])
            while jobs:
                builds.ahead()
                missing = self._gpu_health.missing(world_size)
                if len(lacking) == _RUNS_WITHOUT_RANKS:
                    missing = f"rank groups do not start here any more: {lacking[-1]}"
                if missing is not None:
                    yield from self._not_run(jobs, missing)
                    return
                job = next((job for job in jobs if builds.ready(job.candidate)), jobs[0])  # GPUs do not wait for compilers
                jobs = [other for other in jobs if other is not job]
                later = sum(groups_needed(job, plan.device) for job in jobs)
                pipeline = EvaluationPipeline(session, job, node, plan.rules, self._reporter(job), builds, later, kept, plan.stress)
                result = pipeline.run()
                kept = _keep_or_end(pipeline, result)
                lacking = [*lacking, result.verdict.reason] if pipeline.no_ranks else []
                yield result
                if plan.device == "cuda" and not pipeline.healthy:
                    self._gpu_health.check(session.end_all, survivors=session.survivors)

    def _reporter(self, job: Job) -> Callable[[str], None]:
        def tell(phase: str) -> None:
            self._progress.phase(job.candidate.name, job.problem.id, job.preset, job.world_size, phase)

        return tell

    def _not_run(self, jobs: list[Job], missing: str) -> Iterator[Result]:
        for job in jobs:
            session = Session(self._plan.device, job.world_size, self._plan.deadlines, isolation=self._isolation)
            pipeline = EvaluationPipeline(session, job, self._node, self._plan.rules, lambda _: None)
            yield pipeline.give_up(NotRun(missing=missing))


def _keep_or_end(pipeline: EvaluationPipeline, result: Result) -> RankGroup | None:
    """The group, if the next evaluation of the reference may use it; any other is killed."""
    if pipeline.job.candidate.is_reference and result.correct and pipeline.healthy and pipeline.reusable:
        return pipeline.group
    pipeline.end_group()
    if not pipeline.healthy and result.verdict.kind == "harness_error":
        pipeline.session.drop_trusted()
    return None


def make_jobs(plan: EvaluationPlan) -> list[Job]:
    """The evaluations of a plan, in order; raises :class:`UsageError` if any part of it cannot be."""
    if not plan.candidates:
        raise UsageError("no candidates: expected at least one file, folder or the word 'reference'")
    if any(candidate.is_reference and (candidate.track or plan.track) == "custom" for candidate in plan.candidates):
        raise UsageError(f"{REFERENCE!r} has no place in the custom track: it communicates by NCCL or gloo; evaluate it in the open track")
    selected = None if plan.problems is None else problems.select(plan.problems)
    jobs = []
    chosen = [(candidate, _problems_of(candidate, selected)) for candidate in plan.candidates]
    must_have_presets([problem for _, candidates_problems in chosen for problem in candidates_problems], plan.presets)
    for world_size in plan.world_sizes:
        for candidate, candidates_problems in chosen:
            for problem in candidates_problems:
                for preset in presets_of(problem, plan.presets, world_size):
                    problem.cases(preset, world_size)  # raises for a world size that the mathematics forbids
                    variant = plan.variant if plan.variant in problem.variants else "default"
                    jobs.append(Job(candidate, problem, preset, world_size, plan.modes, variant, candidate.track or plan.track))
    if not jobs:
        raise UsageError("nothing to evaluate: no candidate belongs to the chosen problems, or none of them has the chosen presets")
    return jobs


def _problems_of(candidate: CandidateFile, selected: tuple[Problem, ...] | None) -> tuple[Problem, ...]:
    if candidate.problem is not None:
        try:
            problem = problems.get(candidate.problem)
        except UnknownProblem as error:
            raise UnknownProblem(f"{candidate.path or candidate.name}: {error}") from None
        return (problem,) if selected is None or problem in selected else ()
    if candidate.is_reference:
        return problems.all_problems() if selected is None else selected
    if selected is None:
        raise UsageError(f"cannot tell which problem {candidate.name} solves: name the file <id>_<name>_<backend>.py, or give --problem")
    return selected


def must_have_presets(chosen: Sequence[Problem], names: tuple[str, ...]) -> None:
    """Raises :class:`UnknownPreset` for a name that none of these problems has: of several, each leaves out what it has not."""
    known = {item.name for problem in chosen for item in problem.presets} | {PRODUCTION, PRODUCTION_FIRST, SWEEP}
    for name in names:
        if not chosen or name in known:
            continue
        if len({problem.id for problem in chosen}) == 1:
            chosen[0].preset(name)  # raises, and says which there are
        raise UnknownPreset(f"none of the chosen problems has a preset {name!r}: expected one that `peerlane show NUMBER` lists")


def presets_of(problem: Problem, names: tuple[str, ...], world_size: int) -> list[str]:
    """The presets of a problem that these names stand for."""
    chosen: list[str] = []
    for name in names:
        if name in (PRODUCTION, SWEEP):
            chosen += [item.name for item in problem.family(name)]
        elif name == PRODUCTION_FIRST:
            chosen += [item.name for item in problem.family(PRODUCTION) if problem.cases(item.name, world_size)][:1]
        elif len(names) == 1 or not name.startswith((f"{PRODUCTION}_", f"{SWEEP}_")):
            chosen.append(problem.preset(name).name)
        else:  # of several presets of a family, every problem takes its own
            chosen += [item.name for item in problem.presets if item.name == name]
    return list(dict.fromkeys(chosen))


def describe_node(device: Device) -> Node:
    """This machine, as results record it; raises :class:`UsageError` if it has no GPU and one was asked for."""
    environment: dict[str, Any] = record()
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cpu":
        return Node(secrets.token_hex(6), device, 0, environment, None, (), 0.0)
    if gpus == 0:
        raise UsageError("--device cuda: no GPU is visible here; use --device cpu, or see `peerlane doctor`")
    gpu = environment["gpus"][0]
    profile = profile_for(gpu["name"])
    peaks = []
    if profile is not None:
        peaks.append(datasheet_peaks(profile))
        if (ceilings := load_ceilings(node_class(environment))) is not None:
            peaks.append(measured_peaks(ceilings, profile))
    return Node(secrets.token_hex(6), device, gpus, environment, profile, tuple(peaks), float(gpu["memory_bytes"]))


def choose_isolation(plan: EvaluationPlan) -> Isolation:
    """The tier that the plan asks for, or the best of L0 and L1 that this machine gives; raises :class:`UsageError`."""
    isolation = choose(plan.isolation, plan.device)  # no candidate's file is shown: each is sent to its own ranks
    if plan.device == "cpu" or isolation.tier == "L0":
        return isolation
    if not (failure := sharing_failure(isolation, plan.device, plan.deadlines)):
        return isolation
    if plan.isolation is None:
        return replace(NO_ISOLATION, missing={"GPU memory shared with confined ranks": failure})
    raise UsageError(
        f"isolation {isolation.tier} is not possible here: confined ranks cannot share GPU memory with the trusted ones: {failure}\n"
        "Use another tier with --isolation, and see docs/isolation.md"
    )


def job_key(job: Job, device: Device, isolation: Tier) -> EvaluationKey:
    """The identity of the result that a job will have; see :attr:`Result.key`."""
    return EvaluationKey(
        evaluator_version=peerlane.__version__,
        sha256=job.candidate.sha256,
        problem=job.problem.id,
        variant=job.variant,
        preset=job.preset,
        world_size=job.world_size,
        device=device,
        modes=job.modes,
        track=job.track,
        isolation=isolation,
    )
