"""The plan of evaluations, checked as soon as it is made, and the jobs that it stands for."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from peerlane import problems
from peerlane.common.cluster import Cluster
from peerlane.common.place import Device, Place
from peerlane.common.version import __version__
from peerlane.common.words import counted
from peerlane.errors import UnknownPreset, UnknownProblem, UsageError
from peerlane.evaluate.candidates import REFERENCE, CandidateFile, candidate_info
from peerlane.hardware.virtual_node import Baseline
from peerlane.problems.contract.spec import BANDWIDTH, Case, Problem
from peerlane.results.identity import Identity, NodeClass, hash_rules, source_hash
from peerlane.results.record import Mode, Track
from peerlane.results.result import Asked, ProblemInfo
from peerlane.sandbox.isolation import Tier
from peerlane.settings import Deadlines, PoolSettings, Protocol, StressRules, TimingRules, timing_protocol

Cases = Literal["all", "timed"]
MAX_RANKS_PER_GPU = 8
PRODUCTION, PRODUCTION_FIRST, SWEEP = "production", "production_first", "sweep"


@dataclass(frozen=True)
class EvaluationPlan:
    """A plan of evaluations. Raises :class:`UsageError` for a value that cannot be.

    Attributes:
        candidates: see :func:`discover`.
        problems: ``"1-8,13"``, ``"all"``, or None: by the candidates' file names (all, for the reference).
        presets: names; ``production`` and ``sweep`` stand for all presets of that family of a problem, ``production_first`` for the first
            that has a case at the world size, ``bandwidth`` for the one at which bandwidth counts, and not latency.
        track: ``open``: anything goes; ``custom``: what a call communicates must be the candidate's own doing. See docs/tracks.md. Of
            candidates that name none themselves.
        variant: ``default``, or ``pkb``: the public benchmark's semantics, for the problems where those differ.
        world_sizes: numbers of ranks, of all nodes together.
        nodes: number of nodes that the ranks are in, equally many on each. Several are a virtual cluster on one machine: see
            docs/between-nodes.md.
        modes: launch modes to time; none: correctness alone.
        cases: ``all`` cases of the preset and of ``small``, or the ``timed`` one alone, which is a preset's first.
        device: ``cuda``; ``cpu`` (gloo ranks: correctness is real, speed is not measured); or ``emulated`` (ranks are threads, and kernels
            of the device kit run in the emulator: correctness and races, without a GPU).
        isolation: ``L0``, ``L1`` or ``L2``, see docs/isolation.md; None: the best of L0 and L1 that this machine gives.
        ranks_per_gpu: how many ranks may share a GPU; 0: as many as needed. Where some do, the machine is a virtual node.
        baseline: what serves torch.distributed: ``nccl``, or on virtual nodes ``peerlane``, the kit's collectives; None: the latter there.
        protocol: how speed is timed: ``peerlane``, or ``kittens``, the public protocol; see docs/judging.md.
        out: folder of ``results.jsonl``; None keeps nothing.
        timeout: seconds that one evaluation may take, waiting and compiling apart; None: no limit but the deadlines of its phases.
        rerun: judge again what ``out`` already holds.
        timelines: folder that gets a file ``NAME.MODE.json`` for every evaluation and launch mode: what every rank did when, in the timed
            case; on CPU ranks in one call. See :mod:`peerlane.evaluate.audit.timeline`.
        deadlines, pool_settings, rules, stress: see :mod:`peerlane.settings`.
    """

    candidates: Sequence[CandidateFile]
    problems: str | None = None
    presets: Annotated[tuple[str, ...], Field(min_length=1)] = ("pkb",)
    world_sizes: Annotated[tuple[Annotated[int, Field(ge=1, strict=True)], ...], Field(min_length=1)] = (4,)
    nodes: Annotated[int, Field(ge=1, strict=True)] = 1
    modes: tuple[Mode, ...] = ("eager", "graph")
    cases: Cases = "all"
    device: Device = "cpu"
    ranks_per_gpu: Annotated[int, Field(ge=0, le=MAX_RANKS_PER_GPU, strict=True)] = 0
    baseline: Baseline | None = None
    protocol: Protocol = "peerlane"
    out: Path | None = None
    variant: Annotated[str, Field(pattern="default|pkb")] = "default"
    track: Track = "open"
    isolation: Tier | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    rerun: bool = False
    timelines: Path | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    pool_settings: PoolSettings = field(default_factory=PoolSettings)
    rules: TimingRules = field(default_factory=TimingRules)
    stress: StressRules = field(default_factory=StressRules)

    def __post_init__(self) -> None:
        for name, kind in _kinds().items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind.validate_python(value if value != "" else b""))  # a path of no characters is none
            except ValidationError as error:
                told = error.errors()[0]["msg"]
                expected = told.replace("Input should be", "expected") if "should be" in told else f"expected another value: {told}"
                raise UsageError(f"{name}={value!r}: {expected}") from None
        for world_size in self.world_sizes:
            Cluster(self.nodes, world_size)  # raises for ranks that cannot be divided so

    @property
    def place(self) -> Place:
        """Returns the place of its ranks; which of them share GPUs depends on the machine."""
        return Place.of(self.device).in_nodes(self.nodes)

    @property
    def rules_hash(self) -> str:
        """Names the settings that decide verdicts and speeds."""
        return hash_rules(self.deadlines, self.rules, self.stress, version=timing_protocol(self.protocol))


@functools.cache
def _kinds() -> dict[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(kind) for name, kind in get_type_hints(EvaluationPlan, include_extras=True).items()}


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
    nodes: int = 1
    protocol: Protocol = "peerlane"

    def asked(self, node: NodeClass, isolation: Tier, rules_hash: str) -> Asked:
        """Returns the fields by which its result names the question, on such a machine and under these settings."""
        return Asked(
            evaluator_version=__version__,
            candidate=candidate_info(self.candidate),
            problem=ProblemInfo(id=self.problem.id, slug=self.problem.slug, variant=self.variant, source_hash=source_hash(self.problem)),
            preset=self.preset,
            world_size=self.world_size,
            modes=self.modes,
            cases=self.cases,
            isolation=isolation,
            track=self.track,
            node=node,
            rules_hash=rules_hash,
        )

    def judged_cases(self) -> tuple[Case, ...]:
        """Returns the cases to judge, the timed one first; none if the preset has none for so many ranks."""
        cases = self.problem.cases(self.preset, self.world_size, self.variant, self.nodes)
        if self.cases != "all" or not cases:
            return tuple(cases[:1])
        more = self.problem.cases("small", self.world_size, self.variant, self.nodes) if self.preset != "small" else ()
        return (*cases, *more)

    def groups_needed(self, place: Place) -> int:
        """Returns how many fresh groups the candidate may take. The reference keeps the one it has."""
        return 0 if self.candidate.is_reference else place.groups

    def identity(self, node: NodeClass, isolation: Tier, rules_hash: str) -> Identity:
        """The identity of the result that it will have; see :attr:`.Result.identity`."""
        return self.asked(node, isolation, rules_hash).identity


def make_jobs(plan: EvaluationPlan, note: Callable[[str], None] = lambda _: None) -> list[Job]:
    """The evaluations of a plan, in order; raises :class:`UsageError` if any part of it cannot be. ``note`` hears what is left out."""
    if not plan.candidates:
        raise UsageError("no candidates: expected at least one file, folder or the word 'reference'")
    if any(candidate.is_reference and (candidate.track or plan.track) == "custom" for candidate in plan.candidates):
        raise UsageError(f"{REFERENCE!r} has no place in the custom track: it communicates by NCCL or gloo; evaluate it in the open track")
    selected = None if plan.problems is None else problems.select(plan.problems, plan.nodes)
    jobs = []
    chosen = [(candidate, _problems_of(candidate, selected, plan.nodes)) for candidate in plan.candidates]
    if selected is None:
        chosen = _on_nodes(chosen, plan.nodes, note)
    must_have_presets([problem for _, candidates_problems in chosen for problem in candidates_problems], plan.presets)
    for world_size in plan.world_sizes:
        for candidate, candidates_problems in chosen:
            for problem in candidates_problems:
                for preset in presets_of(problem, plan.presets, world_size, plan.nodes):
                    problem.cases(preset, world_size, nodes=plan.nodes)  # raises for a world size that the mathematics forbids
                    variant = plan.variant if plan.variant in problem.variants else "default"
                    track = candidate.track or plan.track
                    common = plan.cases, plan.timeout, plan.timelines, plan.nodes, plan.protocol
                    jobs.append(Job(candidate, problem, preset, world_size, plan.modes, variant, track, *common))
    if not jobs:
        raise UsageError("nothing to evaluate: no candidate belongs to the chosen problems, or none of them has the chosen presets")
    return jobs


def _on_nodes(
    chosen: list[tuple[CandidateFile, tuple[Problem, ...]]], nodes: int, note: Callable[[str], None]
) -> list[tuple[CandidateFile, tuple[Problem, ...]]]:
    """Leaves out problems that do not run on so many nodes, if others do: a folder may hold candidates of both kinds."""
    fitting = [(candidate, tuple(problem for problem in found if nodes in problem.nodes)) for candidate, found in chosen]
    if not any(found for _, found in fitting):
        return chosen
    left_out = {problem.id for _, found in chosen for problem in found if nodes not in problem.nodes}
    if left_out:
        note(f"{counted(len(left_out), 'problem')} that cannot run on {counted(nodes, 'node')} left out: see --nodes")
    return fitting


def _problems_of(candidate: CandidateFile, selected: tuple[Problem, ...] | None, nodes: int) -> tuple[Problem, ...]:
    if candidate.problem is not None:
        try:
            problem = problems.get(candidate.problem)
        except UnknownProblem as error:
            raise UnknownProblem(f"{candidate.path or candidate.name}: {error}") from None
        return (problem,) if selected is None or problem in selected else ()
    if candidate.is_reference:
        return problems.all_problems(nodes) if selected is None else selected
    if selected is None:
        raise UsageError(f"cannot tell which problem {candidate.name} solves: name the file <id>_<name>_<backend>.py, or give --problem")
    return selected


def must_have_presets(chosen: Sequence[Problem], names: tuple[str, ...]) -> None:
    """Raises :class:`UnknownPreset` for a name that none of these problems has: of several, each leaves out what it has not."""
    known = {item.name for problem in chosen for item in problem.presets} | {PRODUCTION, PRODUCTION_FIRST, SWEEP, BANDWIDTH}
    for name in names:
        if not chosen or name in known:
            continue
        if len({problem.id for problem in chosen}) == 1:
            chosen[0].preset(name)  # raises, and says which there are
        raise UnknownPreset(f"none of the chosen problems has a preset {name!r}: expected one that `peerlane show NUMBER` lists")


def presets_of(problem: Problem, names: tuple[str, ...], world_size: int, nodes: int | None = None) -> list[str]:
    """The presets of a problem that these names stand for."""
    chosen: list[str] = []
    for name in names:
        if name in (PRODUCTION, SWEEP):
            chosen += [item.name for item in problem.family(name)]
        elif name == BANDWIDTH:
            chosen.append(name)
        elif name == PRODUCTION_FIRST:
            chosen += [item.name for item in problem.family(PRODUCTION) if problem.cases(item.name, world_size, nodes=nodes)][:1]
        elif len(names) == 1 or not name.startswith((f"{PRODUCTION}_", f"{SWEEP}_")):
            chosen.append(problem.preset(name).name)
        else:  # of several presets of a family, every problem takes its own
            chosen += [item.name for item in problem.presets if item.name == name]
    return list(dict.fromkeys(chosen))
