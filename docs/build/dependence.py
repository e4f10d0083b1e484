"""Whose data each part of an answer depends on: found by changing one rank's data at a time and asking the problem's oracle again.

Nothing is declared for it. Inputs and oracle of a small case say who holds what before a call, who must hold what after it, and so which
messages no implementation can avoid.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from peerlane.problems import Case, Cost, Draw, Problem
from peerlane.problems.contract.judge import expected_leaves, same_bits
from peerlane.problems.contract.tree import leaves, map_leaves

ROWS, COLUMNS = 12, 24
"""The size of the finest map that is kept of an answer."""


@dataclass(frozen=True)
class Held:
    """An argument with tensors.

    Attributes:
        name: of the parameter.
        replicated: all ranks hold the same contents.
    """

    name: str
    replicated: bool


@dataclass(frozen=True)
class Answer:
    """One output.

    Attributes:
        name: as error messages name it.
        maps: for each rank, rows of cells; a cell is the set of ranks whose data this part of the answer depends on. None where the rank's
            answer has no elements.
    """

    name: str
    maps: tuple[tuple[tuple[frozenset[int], ...], ...] | None, ...]


@dataclass(frozen=True)
class Dependence:
    """The data that moves in one case.

    Attributes:
        needs: for each rank, the ranks whose data its answers depend on.
    """

    ranks: int
    held: tuple[Held, ...]
    answers: tuple[Answer, ...]
    needs: tuple[frozenset[int], ...]

    @property
    def sending(self) -> set[int]:
        """The ranks whose data others need."""
        return {source for rank, needs in enumerate(self.needs) for source in needs - {rank}}

    @property
    def receiving(self) -> set[int]:
        """The ranks that need data of others."""
        return {rank for rank, needs in enumerate(self.needs) if needs - {rank}}


def find_dependence(problem: Problem, ranks: int, costs: Sequence[Cost]) -> Dependence:
    """Returns the dependence in the first case of `small` in which those ranks send and receive that ``costs``, by rank, say so of (all
    ranks, if no rank does there); in the first case of all, if there is no such one."""
    sending = {rank for rank, cost in enumerate(costs) if cost.egress_bytes or cost.network_egress_bytes} or set(range(ranks))
    receiving = {rank for rank, cost in enumerate(costs) if cost.ingress_bytes or cost.network_ingress_bytes} or set(range(ranks))
    first: Dependence | None = None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the cases are tiny: threads cost many times what they save
    try:
        for case in problem.cases("small", ranks):
            found = _in_case(problem, case)
            if (found.sending, found.receiving) == (sending, receiving):
                return found
            first = first or found
    finally:
        torch.set_num_threads(threads)
    assert first is not None, f"problem {problem.id} has no small case on {ranks} ranks"
    return first


def _in_case(problem: Problem, case: Case) -> Dependence:
    ranks = range(case.world_size)
    inputs = [_drawn(problem, case, rank) for rank in ranks]
    flat = [list(leaves(arguments)) for arguments in inputs]
    shared = [all(_equal_at(place, flat[0], other) for other in flat[1:]) for place in range(len(flat[0]))]
    before = [list(_values(problem, case, inputs, rank)) for rank in ranks]
    for change in (_scaled, _redrawn, _reversed):
        masks = [[torch.zeros(value.shape, dtype=torch.int64) for _, value in answers] for answers in before]
        for changed in ranks:
            others = [*inputs[:changed], change(problem, case, changed, inputs[changed], shared), *inputs[changed + 1 :]]
            for rank in ranks:
                after = list(_values(problem, case, others, rank))
                for mask, difference in zip(masks[rank], _differences(before[rank], after), strict=True):
                    mask |= difference.long() << changed
        needs = tuple(_members(_union(masks[rank])) for rank in ranks)
        if any(needs[rank] - {rank} for rank in ranks):
            break
    names = [name for name, _ in max(before, key=len)]
    maps = [[_condensed(mask) for mask in answers] + [None] * (len(names) - len(answers)) for answers in masks]
    return Dependence(
        ranks=case.world_size,
        held=tuple(_held(problem, inputs[0], shared)),
        answers=tuple(Answer(name, tuple(maps[rank][place] for rank in ranks)) for place, name in enumerate(names)),
        needs=needs,
    )


def _drawn(problem: Problem, case: Case, rank: int) -> tuple[object, ...]:
    draw = Draw(secret="picture", case_key=case.key, slot=0, block=0, rank=rank)
    return _finite(problem.inputs(case, rank, draw))


def _redrawn(problem: Problem, case: Case, rank: int, _: tuple[object, ...], __: Sequence[bool]) -> tuple[object, ...]:
    """Returns other contents for one rank, beside the same contents of what all ranks draw alike."""
    draw = Draw(secret="another", case_key=case.key, slot=0, block=0, rank=rank)
    draw.shared = Draw(secret="picture", case_key=case.key, slot=0, block=0, rank=rank).shared
    return _finite(problem.inputs(case, rank, draw))


def _reversed(_: Problem, __: Case, ___: int, arguments: tuple[object, ...], shared: Sequence[bool]) -> tuple[object, ...]:
    """Returns the arguments with one tensor in reverse order: of those that this rank alone holds the largest that is not sorted, as row
    pointers are."""
    tensors = list(leaves(arguments))
    integers = [place for place, tensor in enumerate(tensors) if not (shared[place] or tensor.is_floating_point() or tensor.is_complex())]
    loose = [place for place in integers if tensors[place].dim() and bool((tensors[place].diff() < 0).any())]
    largest = max(loose, key=lambda place: tensors[place].numel(), default=None)
    places = iter(range(len(tensors)))
    result: tuple[object, ...] = map_leaves(arguments, lambda tensor: tensor.flip(-1) if next(places) == largest else tensor)
    return result


def _finite(arguments: tuple[object, ...]) -> tuple[object, ...]:
    """Returns the arguments without NaN and infinities, which would not show that they changed."""

    def finite(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or bool(tensor.float().isfinite().all()):
            return tensor
        return tensor.float().nan_to_num(1.0, 3.0, -3.0).clamp(-1e3, 1e3).to(tensor.dtype)

    result: tuple[object, ...] = map_leaves(arguments, finite)
    return result


def _scaled(_: Problem, __: Case, ___: int, arguments: tuple[object, ...], shared: Sequence[bool]) -> tuple[object, ...]:
    """Returns the arguments with every float of this rank alone times a random factor above one; what all ranks hold alike stays."""
    places, generator = iter(shared), torch.Generator().manual_seed(1)

    def scaled(tensor: torch.Tensor) -> torch.Tensor:
        if next(places) or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        return (tensor.to(wide) * (1.5 + torch.rand(tensor.shape, generator=generator, dtype=torch.float64))).to(tensor.dtype)

    result: tuple[object, ...] = map_leaves(arguments, scaled)
    return result


def _values(problem: Problem, case: Case, inputs: Sequence[tuple[object, ...]], rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    for expected in expected_leaves(problem.oracle(case, inputs, rank)):
        wide = torch.complex128 if expected.value.is_complex() else torch.float64
        yield expected.name, torch.nan_to_num(expected.value.detach().to(wide))


def _differences(before: Sequence[tuple[str, torch.Tensor]], after: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Returns for each answer which elements changed; all of them where the shape did."""
    return [
        old != new if old.shape == new.shape else torch.ones(old.shape, dtype=torch.bool)
        for (_, old), (_, new) in zip(before, after, strict=True)
    ]


def _equal_at(place: int, mine: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(mine) == len(others) and mine[place].dtype == others[place].dtype and same_bits(mine[place], others[place])


def _held(problem: Problem, arguments: tuple[object, ...], shared: Sequence[bool]) -> Iterator[Held]:
    place = 0
    for name, value in zip(problem.parameters, arguments, strict=False):
        count = len(list(leaves(value)))
        if count:
            yield Held(name, all(shared[place : place + count]))
        place += count


def _condensed(mask: torch.Tensor) -> tuple[tuple[frozenset[int], ...], ...] | None:
    """Returns a map of at most ``ROWS`` by ``COLUMNS`` cells, along the first and the last axis in which ranks differ."""
    if not mask.numel():
        return None
    varying = [axis for axis in range(mask.dim()) if (mask != mask.select(axis, 0).unsqueeze(axis)).any()]
    last = varying[-1] if varying and (len(varying) > 1 or varying[-1] == mask.dim() - 1 > 0) else None
    first = varying[0] if varying and varying[0] != last else None
    rows = [mask] if first is None else _slices(mask, first, ROWS)
    cells = [[_union([cell]) for cell in ([row] if last is None else _slices(row, last, COLUMNS))] for row in rows]
    whole = _union([mask])
    if 2 * sum(row.count(whole) for row in cells) >= sum(map(len, cells)):
        return ((_members(whole),),)  # the rest is chance: a gradient that is zero, a sum that rounds to the same
    return tuple(tuple(map(_members, row)) for row in cells)


def _slices(mask: torch.Tensor, axis: int, most: int) -> list[torch.Tensor]:
    return list(mask.tensor_split(min(most, mask.shape[axis]), axis))


def _union(masks: Sequence[torch.Tensor]) -> int:
    found = 0
    for mask in masks:
        for value in set(mask.flatten().tolist()):
            found |= int(value)
    return found


def _members(bits: int) -> frozenset[int]:
    return frozenset(rank for rank in range(bits.bit_length()) if bits >> rank & 1)
