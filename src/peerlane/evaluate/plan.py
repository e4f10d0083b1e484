"""What is to be evaluated: the plan, checked as soon as it is made, and the jobs that it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import peerlane
from peerlane import problems
from peerlane.errors import UnknownPreset, UnknownProblem, UsageError
from peerlane.evaluate.candidates import REFERENCE, CandidateFile
from peerlane.evaluate.results.identity import Identity, NodeClass, hash_rules, source_hash
from peerlane.evaluate.results.record import Mode, Track
from peerlane.evaluate.sandbox.isolation import TIERS, Tier
from peerlane.hardware.virtual_node import Baseline
from peerlane.problems.contract.spec import Problem
from peerlane.settings import Deadlines, PoolSettings, StressRules, TimingRules

Device = Literal["cuda", "cpu", "emulated"]
Cases = Literal["all", "timed"]
MAX_RANKS_PER_GPU = 8
PRODUCTION, PRODUCTION_FIRST, SWEEP = "production", "production_first", "sweep"


@dataclass(frozen=True)
class EvaluationPlan:
    """What to evaluate. Raises :class:`UsageError` for a value that cannot be.

    Attributes:
        candidates: see :func:`discover`.
        problems: ``"1-8,13"``, ``"all"``, or None: by the candidates' file names (all, for the reference).
        presets: names; ``production`` and ``sweep`` stand for all presets of that family of a problem, ``production_first`` for the first
            that has a case at the world size.
        track: ``open``: anything goes; ``custom``: what a call communicates must be the candidate's own doing. See docs/tracks.md. Of
            candidates that name none themselves.
        variant: ``default``, or ``pkb``: the public benchmark's semantics, for the problems where those differ.
        world_sizes: numbers of ranks.
        modes: launch modes to time; none: correctness alone.
        cases: ``all`` cases of the preset and of ``small``, or the ``timed`` one alone, which is a preset's first.
        device: ``cuda``; ``cpu`` (gloo ranks: correctness is real, speed is not measured); or ``emulated`` (ranks are threads, and kernels
            of the device kit run in the emulator: correctness and races, without a GPU).
        isolation: ``L0``, ``L1`` or ``L2``, see docs/isolation.md; None: the best of L0 and L1 that this machine gives.
        ranks_per_gpu: how many ranks may share a GPU; 0: as many as needed. Where some do, the machine is a virtual node.
        baseline: what serves torch.distributed: ``nccl``, or on virtual nodes ``peerlane``, the kit's collectives; None: the latter there.
        out: folder of ``results.jsonl``; None keeps nothing.
        timeout: seconds that one evaluation may take, waiting for its turn apart; None: no limit but the deadlines of its phases.
        rerun: judge again what ``out`` already holds.
        timelines: folder that gets a file ``NAME.MODE.json`` for every evaluation and launch mode: what every rank did when, in the timed
            case; on CPU ranks in one call. See :mod:`peerlane.evaluate.audit.timeline`.
        deadlines, pool_settings, rules, stress: see :mod:`peerlane.settings`.
    """

    candidates: Sequence[CandidateFile]
    problems: str | None = None
    presets: tuple[str, ...] = ("pkb",)
    world_sizes: tuple[int, ...] = (4,)
    modes: tuple[Mode, ...] = ("eager", "graph")
    cases: Cases = "all"
    device: Device = "cpu"
    ranks_per_gpu: int = 0
    baseline: Baseline | None = None
    out: Path | None = None
    variant: str = "default"
    track: Track = "open"
    isolation: Tier | None = None
    timeout: float | None = None
    rerun: bool = False
    timelines: Path | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    pool_settings: PoolSettings = field(default_factory=PoolSettings)
    rules: TimingRules = field(default_factory=TimingRules)
    stress: StressRules = field(default_factory=StressRules)

    def __post_init__(self) -> None:
        for name, kind, what in _LISTS:
            _require_list(name, getattr(self, name), kind, what)
        for name, allowed in _CHOICES.items():
            _require_choice(name, getattr(self, name), allowed)
        for mode in self.modes:
            _require_choice("modes", mode, get_args(Mode))
        if not self.world_sizes or min(self.world_sizes) < 1:
            raise UsageError(f"world_sizes={self.world_sizes!r}: expected one or more positive numbers of ranks, such as (2, 4)")
        if not self.presets:
            raise UsageError("presets=(): expected one or more names, such as ('small',)")
        if self.problems is not None and not isinstance(self.problems, str):
            raise UsageError(f"problems={self.problems!r}: expected text such as '1-8,13', or None")
        if not isinstance(self.ranks_per_gpu, int) or not 0 <= self.ranks_per_gpu <= MAX_RANKS_PER_GPU:
            raise UsageError(f"ranks_per_gpu={self.ranks_per_gpu!r}: expected 1 to {MAX_RANKS_PER_GPU}, or 0 for as many as needed")
        if self.timeout is not None and not (_is_number(self.timeout) and 0 < self.timeout < math.inf):
            raise UsageError(f"timeout={self.timeout!r}: expected a positive number of seconds, or None for no limit")
        for name, kind in _SETTINGS.items():
            if not isinstance(getattr(self, name), kind):
                raise UsageError(f"{name}={getattr(self, name)!r}: expected a {kind.__name__} of peerlane.settings")
        if self.out is not None:
            if not isinstance(self.out, (str, Path)) or not str(self.out):
                raise UsageError(f"out={self.out!r}: expected a folder, or None to keep nothing; '.' is the current one")
            object.__setattr__(self, "out", Path(self.out))

    @property
    def rules_hash(self) -> str:
        """Names the settings that decide verdicts and speeds."""
        return hash_rules(self.deadlines, self.rules, self.stress)


_LISTS: tuple[tuple[str, type, str], ...] = (
    ("candidates", CandidateFile, "candidates, as peerlane.evaluate.discover gives them"),
    ("presets", str, "names, such as ('small',)"),
    ("world_sizes", int, "numbers of ranks, such as (2, 4)"),
    ("modes", str, "launch modes, such as ('eager', 'graph'); () for correctness alone"),
)
_CHOICES: dict[str, tuple[Any, ...]] = {
    "device": get_args(Device),
    "cases": get_args(Cases),
    "track": get_args(Track),
    "variant": ("default", "pkb"),
    "isolation": (None, *TIERS),
    "baseline": (None, *get_args(Baseline)),
    "rerun": (True, False),
}
_SETTINGS = {"deadlines": Deadlines, "pool_settings": PoolSettings, "rules": TimingRules, "stress": StressRules}


def _require_list(name: str, value: object, kind: type, what: str) -> None:
    good = isinstance(value, Sequence) and not isinstance(value, str)
    if not good or not all(isinstance(item, kind) and not isinstance(item, bool) for item in value):  # type: ignore[attr-defined]
        raise UsageError(f"{name}={value!r}: expected a tuple of {what}")


def _require_choice(name: str, value: object, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        raise UsageError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Job:
    """One evaluation that is to be done."""

    candidate: CandidateFile
    problem: Problem
    preset: str
    world_size: int
    modes: tuple[Mode, ...]
    variant: str = "default"
    track: Track = "open"
    cases: Cases = "all"
    timeout: float | None = None
    timelines: Path | None = None

    def identity(self, node: NodeClass, isolation: Tier, rules_hash: str) -> Identity:
        """The identity of the result that it will have; see :attr:`.Result.identity`."""
        return Identity(
            sha256=self.candidate.sha256,
            problem=self.problem.id,
            preset=self.preset,
            world_size=self.world_size,
            variant=self.variant,
            modes=self.modes,
            cases=self.cases,
            track=self.track,
            isolation=isolation,
            node=node,
            evaluator_version=peerlane.__version__,
            rules_hash=rules_hash,
            source_hash=source_hash(self.problem),
        )


def make_jobs(plan: EvaluationPlan, note: Callable[[str], None] = lambda _: None) -> list[Job]:
    """The evaluations of a plan, in order; raises :class:`UsageError` if any part of it cannot be. ``note`` hears what is left out."""
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
                    track = candidate.track or plan.track
                    jobs.append(
                        Job(candidate, problem, preset, world_size, plan.modes, variant, track, plan.cases, plan.timeout, plan.timelines)
                    )
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
