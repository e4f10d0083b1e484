"""Margins: how far the reference, alternative solutions and wrong answers of a case lie from its oracle, in units of what is allowed.

A ratio is an error divided by the allowed one: right iff at most 1. Honest answers must stay within :data:`HONEST_LIMIT`; a wrong answer
must reach :data:`WRONG_LIMIT` on some rank. A transport fault must do so in one case of a preset, for a candidate has to pass them all.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from peerlane.problems.contract.count import Count, counted
from peerlane.problems.contract.draw import INTEGER, RANDOM, Draw
from peerlane.problems.contract.faults import GROUP_FAULTS, DoesNotApply
from peerlane.problems.contract.judge import digests, expected_leaves, rounded, same_bits, score, type_mismatch
from peerlane.problems.contract.spec import AnswerContext, Case, Inputs, KnownWrongAnswer, Problem
from peerlane.problems.contract.standard import STANDARD_WRONG_ANSWERS
from peerlane.problems.contract.tree import Tree, leaves, map_leaves
from peerlane.problems.contract.wrong_answers import is_excused, known_wrong_answers, transport_faults

HONEST_LIMIT = 0.5
WRONG_LIMIT = 10.0

_STANDARD = frozenset(null.name for null in STANDARD_WRONG_ANSWERS)

Ratios = Mapping[str, float]
"""By output; outputs without elements are left out."""


@dataclass
class Margins:
    """Of one case: on one rank, or the worst over ranks (see :func:`worst`).

    Attributes:
        reference: ratios by output, the larger of a random and, where the problem has them, an integer draw.
        variants: the same for every alternative solution.
        nulls: by known wrong answer; outputs for which it is excused are left out. Infinite where structure or an exact output differs.
        transport: the same by transport fault, where it applies.
        faults: what else is wrong with the reference or the cost model, a line each.
        counts: what the reference did in a random draw, by rank.
        bits: digests of the reference's replicated outputs on this rank.
        torn: replicated outputs whose bits differ between ranks.
    """

    reference: dict[str, float] = field(default_factory=dict)
    variants: dict[str, dict[str, float]] = field(default_factory=dict)
    wrong_answers: dict[str, dict[str, float]] = field(default_factory=dict)
    transport: dict[str, dict[str, float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    bits: dict[str, int] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)

    def reach(self) -> dict[str, float]:
        """How far every known wrong answer is from passing: of a standard one the output that it misses least, of an own one the
        largest miss."""
        return {name: (min if name in _STANDARD else max)(ratios.values()) for name, ratios in self.wrong_answers.items() if ratios}

    def complaints(self) -> list[str]:
        """What is wrong with the case: one line each, none if it is sound."""
        found = list(self.faults)
        found += [f"the reference's {name} must have the same bits on all ranks, and has not" for name in self.torn]
        found += [f"the reference misses the oracle: {name} has ratio {ratio:.3g}" for name, ratio in self.reference.items() if ratio > 1]
        for variant, ratios in self.variants.items():
            found += [
                f"alternative solution {variant}: {name} has ratio {ratio:.3g}" for name, ratio in ratios.items() if ratio > HONEST_LIMIT
            ]
        for null, ratios in self.wrong_answers.items():
            if null in _STANDARD:
                weak = {name: ratio for name, ratio in ratios.items() if ratio < WRONG_LIMIT}
            else:
                weak = {} if not ratios or max(ratios.values()) >= WRONG_LIMIT else dict(ratios)
            found += [f"known wrong answer {null}: {name} has ratio {ratio:.3g} only" for name, ratio in weak.items()]
        return found


def worst(each: Sequence[Margins]) -> Margins:
    """The largest ratios over the ranks: a candidate passes only if it is right on every rank."""
    total = Margins(bits=each[0].bits, counts=[count for one in each for count in one.counts])
    total.torn = [name for name, bits in total.bits.items() if any(one.bits[name] != bits for one in each)]
    for one in each:
        total.faults += [line for line in one.faults if line not in total.faults]
        _enlarge(total.reference, one.reference)
        for mine, theirs in ((total.variants, one.variants), (total.wrong_answers, one.wrong_answers), (total.transport, one.transport)):
            for name, ratios in theirs.items():
                _enlarge(mine.setdefault(name, {}), ratios)
    return total


def _enlarge(into: dict[str, float], ratios: Ratios) -> None:
    for name, ratio in ratios.items():
        into[name] = max(into.get(name, 0.0), ratio)


def draw_all(
    problem: Problem, case: Case, *, secret: str, kind: str = RANDOM, block: int = 0, device: Any = "cpu"
) -> list[tuple[Any, ...]]:
    """All ranks' arguments of one call."""
    return [
        problem.inputs(case, rank, Draw(secret=secret, case_key=case.key, slot=0, block=block, rank=rank, kind=kind, device=device))
        for rank in range(case.world_size)
    ]


def ratios_of(problem: Problem, case: Case, got: Tree, expected: Tree, kind: str = RANDOM) -> dict[str, float]:
    """The ratio of every output that has elements; infinite for all if structure, a shape or a dtype is wrong."""
    filled = [leaf.name for leaf in expected_leaves(expected) if leaf.value.numel()]
    if type_mismatch(got, expected) is not None:
        return dict.fromkeys(filled, math.inf)
    found: dict[str, float] = {}
    for item in score(problem, case, got, expected, kind):
        if item.output in filled:
            _enlarge(found, {item.output: math.inf if math.isnan(item.ratio) else item.ratio})
    return found


def margins(
    problem: Problem,
    case: Case,
    rank: int,
    *,
    secret: str,
    resolve: Callable[[Tree], Tree],
    device: torch.device | str = "cpu",
    transport: bool = True,
) -> Margins:
    """This rank's margins. A collective call: every rank of the world makes it, for the reference runs.

    ``resolve`` puts process groups in place of the :class:`GroupRef` entries of a tree. ``transport``: with those of transport faults.
    """
    result = Margins()
    for kind in (INTEGER, RANDOM) if problem.integer_exact else (RANDOM,):  # known wrong answers are made from the last one's inputs
        inputs = draw_all(problem, case, secret=secret, kind=kind, device=device)
        expected = problem.oracle(case, inputs, rank)
        got, count, faults = _call_reference(problem, case, resolve(inputs[rank]))
        if kind == RANDOM:
            result.counts, result.faults = [count], faults
        if (mismatch := type_mismatch(got, expected)) is not None:
            raise ValueError(f"{case.key}, rank {rank}: the reference and the oracle disagree about the output's type: {mismatch}")
        _enlarge(result.reference, ratios_of(problem, case, got, expected, kind))
        named = zip(expected_leaves(expected), leaves(got), strict=True)
        replicated = {f"{leaf.name} ({kind})": tensor for leaf, tensor in named if problem.is_replicated(leaf.name)}
        result.bits |= zip(replicated, digests(list(replicated.values())), strict=True)
        if problem.changeable:  # the reference has written into them
            inputs = draw_all(problem, case, secret=secret, kind=kind, device=device)
        for variant in problem.alternative_solutions:
            answer = variant.answer(case, inputs, rank)
            ratios = ratios_of(problem, case, answer, expected, kind)
            if kind == INTEGER:  # sums are exact, and what is rounded after them may use the whole tolerance
                ratios = {name: 0.0 if ratio <= 1 else math.inf for name, ratio in ratios.items()}
            _enlarge(result.variants.setdefault(variant.name, {}), ratios)
    context = _context(problem, case, rank, inputs, expected, secret=secret, device=device)
    result.wrong_answers = _ratios(context, expected, known_wrong_answers(problem))
    result.transport = _ratios(context, expected, transport_faults(problem)) if transport else {}
    return result


def _call_reference(problem: Problem, case: Case, args: tuple[Any, ...]) -> tuple[Tree, Count, list[str]]:
    """The answer, a count of what the call did, and a line for every argument that it changed and may not."""
    before = map_leaves(args, torch.clone)
    returned, count = counted(lambda: problem.reference_of(case.variant)(*args))
    pairs = zip(problem.parameters, before, args, strict=False)
    changed = [name for name, a, b in pairs if name not in problem.changeable and not _same(a, b)]
    device = next((tensor.device for tensor in leaves(args)), torch.device("cpu"))
    answer = map_leaves(problem.answer(returned, args), lambda tensor: tensor.detach().to(device, copy=True))
    return answer, count, [f"the reference changes its argument {name}" for name in changed]


def _same(before: Tree, after: Tree) -> bool:
    return all(same_bits(a, b) for a, b in zip(leaves(before), leaves(after), strict=True))


class _Answers(dict[int, Tree]):
    """By rank, made when it is asked for: most wrong answers are made from those of one or two ranks."""

    def __init__(self, make: Callable[[int], Tree]) -> None:
        self._make = make

    def __missing__(self, rank: int) -> Tree:
        self[rank] = answer = self._make(rank)
        return answer


def wrong_answer_ratios(
    problem: Problem, case: Case, rank: int, *, secret: str, device: torch.device | str = "cpu"
) -> dict[str, dict[str, float]]:
    """The ratios of every known wrong answer on this rank; needs no other rank."""
    inputs = draw_all(problem, case, secret=secret, device=device)
    expected = problem.oracle(case, inputs, rank)
    return _ratios(_context(problem, case, rank, inputs, expected, secret=secret, device=device), expected, known_wrong_answers(problem))


def passing_faults(problem: Problem, cases: Sequence[Case], *, secret: str) -> dict[str, float]:
    """The transport faults that apply in some of these cases and miss by less than ten times on all ranks, with the largest ratio.

    Needs no other rank. A fault is tried until a rank refuses it, so most of them cost one answer.
    """
    reach: dict[str, float] = {}
    waiting = list(transport_faults(problem))
    for case in cases:
        tried = waiting if problem.process_groups(case) else [fault for fault in waiting if fault not in GROUP_FAULTS]
        if not tried:
            continue
        inputs = draw_all(problem, case, secret=secret)
        for rank in range(case.world_size):
            expected = problem.oracle(case, inputs, rank)
            context = _context(problem, case, rank, inputs, expected, secret=secret, device="cpu")
            for name, ratios in _ratios(context, expected, tried).items():
                if ratios:
                    reach[name] = max(reach.get(name, 0.0), *ratios.values())
            waiting = [fault for fault in waiting if reach.get(fault.name, 0.0) < WRONG_LIMIT]
            tried = [fault for fault in tried if fault in waiting]
            if not tried:
                break
    return {fault.name: reach[fault.name] for fault in waiting if fault.name in reach}


def _context(
    problem: Problem, case: Case, rank: int, inputs: Inputs, expected: Tree, *, secret: str, device: torch.device | str
) -> AnswerContext:
    answers = _Answers(lambda peer: rounded(expected if peer == rank else problem.oracle(case, inputs, peer)))
    own = ratios_of(problem, case, answers[rank], expected)
    if any(ratio > 1 for ratio in own.values()):
        raise ValueError(f"{case.key}, rank {rank}: the oracle's answer, once rounded, fails its own tolerance: {own}")
    before = draw_all(problem, case, secret=secret, block=1, device=device)
    return AnswerContext(case, rank, inputs, answers, rounded(problem.oracle(case, before, rank)), problem, before)


def _ratios(context: AnswerContext, expected: Tree, answers: Sequence[KnownWrongAnswer]) -> dict[str, dict[str, float]]:
    """By wrong answer that applies, its ratios."""
    problem, case = context.problem, context.case
    assert problem is not None, "the context is of this module"
    found: dict[str, dict[str, float]] = {}
    for item in answers:
        if not item.applies(case):
            continue
        try:
            wrong = item.answer(context)
        except DoesNotApply:
            continue
        ratios = ratios_of(problem, case, wrong, expected)
        found[item.name] = {name: ratio for name, ratio in ratios.items() if not is_excused(problem, item, case, name)}
    return found
