"""The problem contract: what a problem's one file declares.

A problem is a function ``solution(*args)`` that every rank calls, with everything needed to judge an implementation of it: a reference in
PyTorch and torch.distributed, inputs, an oracle in higher precision, an error model, a cost model, and wrong answers that must be rejected.
See :class:`Problem`; ``p001_allreduce.py`` is the shortest complete example.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from peerlane.common.cluster import Cluster
from peerlane.common.words import counted
from peerlane.errors import UnknownPreset, UsageError
from peerlane.problems.contract.cost import Cost, Steps
from peerlane.problems.contract.draw import Draw
from peerlane.problems.contract.tree import Tree

# Unit roundoff u: half the distance between 1 and the next representable number (IEEE 754; bfloat16 has 8 significant bits).
UNIT_ROUNDOFF: Mapping[torch.dtype, float] = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}

Inputs = Sequence[tuple[Any, ...]]
"""The arguments of every rank."""


@dataclass(frozen=True)
class Case:
    """One preset's inputs at one world size: what a single evaluation of correctness or speed runs on.

    Attributes:
        problem: the problem's number.
        preset: ``small``, ``pkb``, ``production_*`` or ``sweep_*``.
        label: names the case within its preset; unique there.
        world_size: number of ranks.
        dtype: the main floating dtype (or the dtype of the payload).
        variant: ``default``, or ``pkb``: the public benchmark's semantics, where they differ from the right ones.
        params: whatever the problem's functions need: sizes, flags, models.
        nodes: number of nodes that the ranks are on, equally many on each.
    """

    problem: int
    preset: str
    label: str
    world_size: int
    dtype: torch.dtype
    variant: str = "default"
    params: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 1

    @property
    def cluster(self) -> Cluster:
        """The ranks in their nodes: ``case.cluster.node_of(rank)``, ``ranks_per_node``, ``node_groups``, ``rail_groups``."""
        return Cluster(self.nodes, self.world_size)

    @property
    def key(self) -> str:
        """Identifies the case in results and seeds: ``13/small/ragged/w2``; ``101/small/ragged/w2x2`` on two nodes of two ranks."""
        return f"{self.problem}/{self.name}"

    @property
    def name(self) -> str:
        """Identifies the case within its problem: ``small/ragged/w2``."""
        return f"{self.preset}/{self.label}/w{self.world_size if self.nodes == 1 else self.cluster}"

    def __getitem__(self, name: str) -> Any:
        return self.params[name]


@dataclass(frozen=True)
class CaseSpec:
    """A case before the world size is chosen. ``world_sizes`` None: all that the problem allows."""

    label: str
    dtype: torch.dtype
    params: Mapping[str, Any]
    world_sizes: tuple[int, ...] | None = None
    variant: str = "default"


BANDWIDTH = "bandwidth"
"""The name under which every problem has the preset at which bandwidth counts: it stands for one of its production presets."""


@dataclass(frozen=True)
class Preset:
    """A named set of cases. The first case is the one that is timed; all of them are checked for correctness.

    Attributes:
        name: ``small``, ``pkb``, ``production_<model>_<part>`` or ``sweep_<size>``; or ``bandwidth``, which stands for one of these.
        about: one line: which model, which layer, which regime.
        cases: at least one.
    """

    name: str
    about: str
    cases: tuple[CaseSpec, ...]

    @property
    def family(self) -> str:
        """``small``, ``pkb``, ``production`` (a model's own sizes) or ``sweep`` (one size of many, to draw a curve through).

        All presets of a family are chosen by its name. A sweep adds sizes and nothing else, so what is checked or shown of every preset
        leaves it out.
        """
        return self.name.partition("_")[0]


def case(label: str, dtype: torch.dtype, *, world_sizes: Sequence[int] | None = None, variant: str = "default", **params: Any) -> CaseSpec:
    """A case of a preset; keyword arguments become :attr:`Case.params`."""
    return CaseSpec(label, dtype, params, tuple(world_sizes) if world_sizes is not None else None, variant)


def preset(name: str, about: str, *cases: CaseSpec) -> Preset:
    """A preset with its cases, the timed one first."""
    if not cases:
        raise ValueError(f"preset {name!r} has no cases: expected at least one")
    labels = [spec.label for spec in cases]
    if len(set(labels)) != len(labels):
        raise ValueError(f"preset {name!r} repeats a case label: {labels}")
    return Preset(name, about, cases)


@dataclass
class Expected:
    """The right answer for one output tensor on one rank.

    Attributes:
        name: the output's name, as error messages and the tolerance table use it.
        value: the answer before the last rounding, in float64 (float32 where memory forbids), or in the final dtype if it is exact.
        dtype: the dtype that a candidate must return.
        exact: compare bit for bit (data movement, integers).
        magnitude: sum of the absolute values of the terms behind every element, broadcastable to ``value``; scales the part of the error
            that cancellation leaves behind. None where the error model does not use it.
        host: the candidate must return it in host memory; anything else belongs on the rank's device.
    """

    name: str
    value: torch.Tensor
    dtype: torch.dtype
    exact: bool = False
    magnitude: torch.Tensor | None = None
    host: bool = False


def exactly(name: str, value: torch.Tensor, *, host: bool = False) -> Expected:
    """An answer that must be met bit for bit."""
    return Expected(name, value, value.dtype, exact=True, host=host)


@dataclass(frozen=True)
class Tolerance:
    """The error model of one float output. All parts hold at once. The elementwise bound always applies; normwise and rowwise may be None.

    * elementwise: ``|got - want| <= relative * |want| + magnitude * Expected.magnitude + rms * rms(want)``
    * normwise: ``norm(got - want) <= normwise * norm(want)``
    * rowwise: the same for every row (last axis) on its own

    Every number follows from the unit roundoff u, the depth of the sums and the scale of the data; there is no absolute tolerance.

    ``size`` says what :attr:`Expected.magnitude` is. ``words`` says the elementwise bound itself, where the oracle or
    :attr:`Problem.compare` computes it and the numbers say nothing. Authors of candidates read both.
    """

    relative: float = 0.0
    magnitude: float = 0.0
    rms: float = 0.0
    normwise: float | None = None
    rowwise: float | None = None
    size: str = "the sum of the absolute values of the element's terms"
    words: str = ""


@dataclass(frozen=True)
class Score:
    """How far one output is from the right answer.

    Attributes:
        output: the output's name.
        ratio: error divided by what is allowed: right iff <= 1; infinite where an exact output differs or NaN and infinities are misplaced.
        detail: for people: which part of the error model, how many elements.
        index: where the worst element lies, if one can be named.
        got, want: the worst element's values.
    """

    output: str
    ratio: float
    detail: str
    index: tuple[int, ...] | None = None
    got: float | None = None
    want: float | None = None

    @property
    def passed(self) -> bool:
        """True when the output is right."""
        return self.ratio <= 1.0


@dataclass(frozen=True)
class Algorithm:
    """A known algorithm with its source. Its time at measured rates is *attainable*: a model and no bound, which a better one may beat."""

    name: str
    source: str
    steps: Callable[[Case, int], Steps]


@dataclass
class AnswerContext:
    """What a wrong answer may be made from: everything a lazy candidate could know, and the right answers."""

    case: Case
    rank: int
    inputs: Inputs
    """All ranks' arguments, as ``Problem.inputs`` returned them."""
    answers: Mapping[int, Tree]
    """By rank, its right answer, rounded to its dtypes."""
    previous: Tree
    """This rank's right answer to the previous slot."""
    problem: Problem | None = None
    previous_inputs: Inputs = ()
    """All ranks' arguments in the previous slot."""

    @property
    def args(self) -> tuple[Any, ...]:
        """This rank's own arguments."""
        return self.inputs[self.rank]

    @property
    def ranks(self) -> range:
        """All ranks of the world."""
        return range(self.case.world_size)

    @property
    def members(self) -> Sequence[int]:
        """The ranks of this rank's process group, in its order; all ranks where the case has no groups."""
        assert self.problem is not None, "calibration names the problem"
        for groups in self.problem.process_groups(self.case).values():
            return next(members for members in groups if self.rank in members)
        return self.ranks

    @property
    def place(self) -> int:
        """This rank's place among :attr:`members`."""
        return self.members.index(self.rank)

    def by(self, answer: Callable[..., Tree], **options: Any) -> Tree:
        """``answer(case, inputs, rank, **options)``, a function as alternative solutions are, with options that make mistakes."""
        return answer(self.case, self.inputs, self.rank, **options)

    @property
    def answer(self) -> Tree:
        """This rank's own right answer (to be spoilt, never returned)."""
        return self.answers[self.rank]


Where = Sequence[str] | Callable[[Case], bool]
"""Cases, by their names, or by a test that they pass."""


@dataclass(frozen=True)
class KnownWrongAnswer:
    """A wrong answer that must be rejected: what a candidate gets away with when inputs test too little.

    ``cases`` restricts it to the cases (``preset/label`` or ``preset/label/wN``) where it is wrong, or says whether it is wrong for a case;
    None: everywhere that outputs are not empty.
    """

    name: str
    why: str
    answer: Callable[[AnswerContext], Tree]
    cases: Where | None = None

    def applies(self, case: Case) -> bool:
        """Whether the answer is wrong for this case."""
        if self.cases is None:
            return True
        if callable(self.cases):
            return self.cases(case)
        return not {f"{case.preset}/{case.label}", case.name}.isdisjoint(self.cases)


@dataclass(frozen=True)
class AlternativeSolution:
    """Another right way to compute the answer (other order, wider accumulation), from all ranks' inputs. Must pass with room to spare.

    ``answer(case, inputs, rank)`` returns what a candidate would return on that rank.
    """

    name: str
    answer: Callable[[Case, Inputs, int], Tree]


GroupLayout = Mapping[str, Sequence[Sequence[int]]]


def node_and_rail(case: Case) -> GroupLayout:
    """The process groups of two tiers: ``node``, the ranks of a node, and ``rail``, the ranks of the same local rank, one of every node.

    A rank's position in ``node`` is its local rank, and its position in ``rail`` is the number of its node.
    """
    return {"node": case.cluster.node_groups, "rail": case.cluster.rail_groups}


@dataclass(frozen=True)
class Problem:
    """Everything about one problem. Module-level name in its file: ``PROBLEM``.

    Functions:
        reference(*args): PyTorch + torch.distributed, the idiom a good engineer writes first; creates no process group and does not wait
            for the device without need. Its parameter names, order and defaults are the interface of ``solution``.
        inputs(case, rank, draw): the arguments of one call on one rank, positional, as a tuple. Tensors live on ``draw.device``.
        oracle(case, inputs, rank): the right answer on ``rank`` from all ranks' arguments: the output structure with an
            :class:`Expected` in place of every tensor. Runs on any device, uses no torch.distributed.
        tolerance(case): output name -> :class:`Tolerance`, for the outputs that are not exact.
        cost(case, rank): the :class:`Cost` of one call.
        compare(case, got, expected, kind): replaces the standard comparison where an answer is not unique (ties); a list of Scores.
        variant_references: the reference of another variant, where no argument tells the variants apart.
        variant_results: by variant, what makes one of several forms that a candidate may return the form that is compared.

    Attributes:
        parallelism: every kind that applies: data, tensor, sequence, context, pipeline, expert, fsdp, zero, vocabulary, graph,
            spatial, none.
        nodes: numbers of nodes that it runs on, the usual one first. A problem between nodes has :func:`node_and_rail` among its groups.
        bandwidth: the preset that ``bandwidth`` stands for, where it is not the first production preset: one at which bandwidth or
            arithmetic counts, and not latency.
        graph: True if one call of the reference can be captured in a CUDA graph, so that shapes of outputs follow from those of arguments;
            else ``graph_reason`` says why not.
        attainable: a known algorithm, where the bound is far below what one reaches; or the reason why none can be modelled.
        replicated: True: all outputs are bit-identical on all ranks, and are checked to be; or the names of those that are.
        updates: names of parameters that the call updates in place. Their contents afterwards are part of the answer, which is then
            everywhere the pair ``(returned, {name: contents})``; see :meth:`answer`.
        mutates: names of parameters whose contents may change, and are not compared.
        integer_exact: an integer draw makes every float output exact.
        excused: standard wrong answers and transport faults that are right here, with the reason: ``name`` or ``name/output``, and
            ``@preset/label`` or ``@preset/label/wN`` behind it where that holds for one case only.
        notes: what differs from the public benchmark's problem of the same number, and why.
        speed_note: why the reference is much faster or slower than the public benchmark's, where it is.
    """

    id: int
    slug: str
    title: str
    category: str
    parallelism: tuple[str, ...]
    origin: str
    summary: str
    reference: Callable[..., Tree]
    inputs: Callable[[Case, int, Draw], tuple[Any, ...]]
    oracle: Callable[[Case, Inputs, int], Tree]
    cost: Callable[[Case, int], Cost]
    presets: tuple[Preset, ...]
    tolerance: Callable[[Case], Mapping[str, Tolerance]] = lambda _: {}
    known_wrong_answers: Sequence[KnownWrongAnswer] = ()
    alternative_solutions: Sequence[AlternativeSolution] = ()
    excused: Mapping[str, str] = field(default_factory=dict)
    compare: Callable[[Case, Tree, Tree, str], list[Score]] | None = None
    variant_references: Mapping[str, Callable[..., Tree]] = field(default_factory=dict)
    variant_results: Mapping[str, Callable[[Tree], Tree]] = field(default_factory=dict)
    process_groups: Callable[[Case], GroupLayout] = lambda _: {}
    world_sizes: tuple[int, ...] = (2, 4, 8)
    nodes: tuple[int, ...] = (1,)
    bandwidth: str = ""
    graph: bool = True
    graph_reason: str = ""
    attainable: Algorithm | str = ""
    replicated: bool | tuple[str, ...] = False
    integer_exact: bool = False
    updates: tuple[str, ...] = ()
    mutates: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    speed_note: str = ""

    @property
    def signature(self) -> str:
        """``solution(tensor: torch.Tensor, src: int = 0) -> torch.Tensor``: the reference's, under the name candidates use."""
        return f"solution{inspect.signature(self.reference, eval_str=True)}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of solution's parameters, in order."""
        return tuple(inspect.signature(self.reference).parameters)

    @property
    def modes(self) -> tuple[str, ...]:
        """Launch modes: always ``eager``, and ``graph`` where the reference can be captured."""
        return ("eager", "graph") if self.graph else ("eager",)

    @property
    def variants(self) -> tuple[str, ...]:
        """``default``, and the others that some preset has cases of."""
        return tuple(dict.fromkeys(["default", *(spec.variant for item in self.presets for spec in item.cases)]))

    @property
    def changeable(self) -> frozenset[str]:
        """Names of the parameters whose contents may differ after a call."""
        return self.mutates | set(self.updates)

    def reference_of(self, variant: str) -> Callable[..., Tree]:
        """The reference of a variant."""
        return self.variant_references.get(variant, self.reference)

    def accepting(self, variant: str, solution: Callable[..., Tree]) -> Callable[..., Tree]:
        """A candidate's function, returning the form that is compared."""
        unify = self.variant_results.get(variant)
        return solution if unify is None else lambda *args: unify(solution(*args))

    def answer(self, returned: Tree, args: Sequence[Any]) -> Tree:
        """What is compared after a call: what it returned and, if it updates parameters in place, the pair of that and those."""
        if not self.updates:
            return returned
        return returned, {name: args[self.parameters.index(name)] for name in self.updates}

    def is_replicated(self, output: str) -> bool:
        """Whether this output must have the same bits on all ranks."""
        return self.replicated if isinstance(self.replicated, bool) else output in self.replicated

    def family(self, name: str) -> tuple[Preset, ...]:
        """The presets of this family, in order; none where the problem has none."""
        return tuple(item for item in self.presets if item.family == name)

    def preset(self, name: str) -> Preset:
        """The preset of this name; raises :class:`UnknownPreset`, naming those there are."""
        for candidate in self.presets:
            if candidate.name == name:
                return candidate
        if name == BANDWIDTH and self.family("production"):
            return replace(self._meant(name)[0], name=name)
        known = ", ".join([*(item.name for item in self.presets if item.family != "sweep"), *(["sweep"] if self.family("sweep") else [])])
        raise UnknownPreset(f"problem {self.id} has no preset {name!r}; it has: {known}")

    def cases(self, preset_name: str, world_size: int, variant: str = "default", nodes: int | None = None) -> list[Case]:
        """The preset's cases of a variant at this world size, the timed one first. ``nodes``: by default the first number that fits.

        Raises :class:`UsageError` if the mathematics forbids the size. A problem without this variant has the default one alone.
        """
        chosen = variant if variant in self.variants else "default"
        if nodes is None:
            nodes = next((number for number in self.nodes if Cluster.fits(number, world_size)), self.nodes[0])
        if nodes not in self.nodes:
            allowed = " or ".join(map(str, self.nodes))
            raise UsageError(f"problem {self.id} does not run on {counted(nodes, 'node')}: use --nodes {allowed}")
        if world_size not in self.world_sizes:
            allowed = ", ".join(map(str, self.world_sizes))
            raise UsageError(f"problem {self.id} does not run on {counted(world_size, 'rank')}; it runs on {allowed}")
        Cluster(nodes, world_size)  # raises for ranks that cannot be divided so
        for preset in self._meant(preset_name):
            cases = [
                Case(self.id, preset_name, spec.label, world_size, spec.dtype, spec.variant, spec.params, nodes)
                for spec in preset.cases
                if spec.variant == chosen and (spec.world_sizes is None or world_size in spec.world_sizes)
            ]
            if cases:
                return cases
        return []

    def _meant(self, name: str) -> tuple[Preset, ...]:
        """The presets that a name may stand for: ``bandwidth`` is the first of several that has cases at the world size."""
        production = self.family("production")
        if name != BANDWIDTH or not production:
            return (self.preset(name),)
        return tuple(sorted(production, key=lambda item: item.name != self.bandwidth))

    def case(self, preset_name: str, label: str, world_size: int, nodes: int | None = None) -> Case:
        """One case of any variant by its label."""
        for variant in self.variants:
            for item in self.cases(preset_name, world_size, variant, nodes):
                if item.label == label:
                    return item
        raise UsageError(f"preset {preset_name!r} of problem {self.id} has no case {label!r} on {counted(world_size, 'rank')}")
