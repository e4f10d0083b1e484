"""Transport faults, which every problem must refuse: messages that are missing, late, exchanged, cut, coarse, or of another group.

Each is made in one process: the arguments of other ranks are changed as the fault would change them on their way, and the problem's oracle
answers. So no author writes them by hand. Where a fault changes nothing it raises :class:`DoesNotApply`. A problem for which the faulty
answer is right excuses the fault, see :attr:`Problem.excused`.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from peerlane.problems.contract.codes import BLOCK, eight_bits
from peerlane.problems.contract.judge import rounded, same_bits
from peerlane.problems.contract.spec import AnswerContext, Case, Inputs, KnownWrongAnswer, Problem
from peerlane.problems.contract.tree import Tree, leaves, map_leaves

TAIL = 8
"""elements that a lost or stale tail has"""

_Change = Callable[[AnswerContext, int], Tree]
"""The arguments of a rank as they arrive on the context's rank."""


class DoesNotApply(Exception):
    """The fault changes nothing in this case, or leaves arguments that contradict each other."""


def _answer(context: AnswerContext, inputs: Inputs, *, rank: int | None = None, case: Case | None = None) -> Tree:
    """The oracle's answer to these arguments, rounded."""
    assert context.problem is not None, "calibration names the problem"
    try:
        return rounded(context.problem.oracle(case or context.case, inputs, context.rank if rank is None else rank))
    except (ArithmeticError, AssertionError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise DoesNotApply(f"no implementation could answer: {error}") from error


def _must_receive(context: AnswerContext) -> None:
    assert context.problem is not None, "calibration names the problem"
    if not context.problem.cost(context.case, context.rank).receives:
        raise DoesNotApply("nothing has to arrive")


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _carries(inputs: Inputs) -> Callable[[torch.Tensor], bool]:
    """Which tensors are messages: those of floating point; if there are none, all. Integers beside them say what goes where."""
    floats = any(_is_float(tensor) and tensor.numel() for args in inputs for tensor in leaves(args))
    return _is_float if floats else lambda tensor: True


def _arriving(change: _Change, *, last_only: bool = False) -> Callable[[AnswerContext], Tree]:
    """The answer if other ranks' arguments, or those of the last rank alone, arrive changed."""

    def answer(context: AnswerContext) -> Tree:
        _must_receive(context)
        changed = {q for q in context.ranks if q != context.rank and (not last_only or q == context.case.world_size - 1)}
        inputs = [change(context, q) if q in changed else args for q, args in enumerate(context.inputs)]
        pairs = [pair for q in changed for pair in zip(leaves(inputs[q]), leaves(context.inputs[q]), strict=False)]
        if all(new is old or (new.shape == old.shape and same_bits(new, old)) for new, old in pairs):
            raise DoesNotApply("the fault changes no message")
        return _answer(context, inputs)

    return answer


def _each(change: Callable[[torch.Tensor], torch.Tensor]) -> _Change:
    """Changes every message of a rank."""

    def changed(context: AnswerContext, rank: int) -> Tree:
        carries = _carries(context.inputs)
        return map_leaves(context.inputs[rank], lambda tensor: change(tensor) if carries(tensor) else tensor)

    return changed


def _own(context: AnswerContext, rank: int) -> Tree:
    """The own messages in place of another rank's, repeated or cut to their sizes."""
    carries = _carries(context.inputs)
    own = iter([tensor for tensor in leaves(context.args) if carries(tensor)])

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        if not carries(tensor):
            return tensor
        source = next(own, tensor.new_zeros(0))
        if not source.numel() or source.shape == tensor.shape:
            return source if source.shape == tensor.shape else torch.zeros_like(tensor)
        places = torch.arange(tensor.numel(), device=tensor.device) % source.numel()
        return source.reshape(-1)[places].view(tensor.shape).to(tensor.dtype)

    return map_leaves(context.inputs[rank], fill)


def _without_tail(tensor: torch.Tensor) -> torch.Tensor:
    cut = tensor.clone(memory_format=torch.contiguous_format)
    cut.view(-1)[-TAIL:] = 0
    return cut


def _coded(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.complex(eight_bits(tensor.real), eight_bits(tensor.imag))
    return eight_bits(tensor) if tensor.is_floating_point() and tensor.itemsize > 1 else tensor


def _in_order(order: Callable[[int, int], Sequence[int]]) -> Callable[[AnswerContext], Tree]:
    """The answer if the arguments of rank ``order(rank, world_size)[q]`` are taken for those of rank q."""

    def answer(context: AnswerContext) -> Tree:
        _must_receive(context)
        places = order(context.rank, context.case.world_size)
        if list(places) == list(context.ranks):
            raise DoesNotApply("the order is right")
        return _answer(context, [context.inputs[q] for q in places])

    return answer


def _exchanged(rank: int, world: int) -> list[int]:
    """The last two of the other ranks in each other's place; of two ranks both."""
    order = list(range(world))
    first, second = [q for q in order if q != rank or world == 2][-2:]
    order[first], order[second] = second, first
    return order


def _stale_tail(context: AnswerContext) -> Tree:
    previous = leaves(context.previous)

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        stale, result = next(previous).reshape(-1), tensor.clone(memory_format=torch.contiguous_format)
        result.view(-1)[max(0, tensor.numel() - TAIL) :] = stale[max(0, tensor.numel() - TAIL) : tensor.numel()]
        return result

    if [tensor.shape for tensor in leaves(context.previous)] != [tensor.shape for tensor in leaves(context.answer)]:
        raise DoesNotApply("the previous answer had other shapes")
    return map_leaves(context.answer, spoil)


def _groups(problem: Problem, case: Case) -> list[list[int]]:
    """The groups that divide the world, where there is one kind of them and they are smaller than it; else none."""
    layouts = [[list(members) for members in groups] for groups in problem.process_groups(case).values()]
    return layouts[0] if len(layouts) == 1 and 1 < len(layouts[0]) < case.world_size else []


def _whole_world(context: AnswerContext) -> Tree:
    """The answer to the case without the parameter that asks for groups."""
    problem, case = context.problem, context.case
    assert problem is not None, "calibration names the problem"
    for name in case.params if _groups(problem, case) else ():
        whole = dataclasses.replace(case, params={key: value for key, value in case.params.items() if key != name})
        try:
            if not problem.process_groups(whole):
                return _answer(context, context.inputs, case=whole)
        except KeyError:  # the layout needs this parameter
            continue
    raise DoesNotApply("no parameter asks for groups that divide the world")


def _contiguous_group(context: AnswerContext) -> Tree:
    """The answer if the groups are taken for blocks of neighbouring ranks."""
    assert context.problem is not None, "calibration names the problem"
    groups = _groups(context.problem, context.case)
    members = [rank for group in groups for rank in group]
    if members in ([], list(context.ranks)) or len({len(group) for group in groups}) > 1:
        raise DoesNotApply("no groups that are not blocks")
    block, place = divmod(context.rank, len(groups[0]))
    return _answer(context, [context.inputs[members.index(q)] for q in context.ranks], rank=groups[block][place])


_zeros = _each(torch.zeros_like)


def _previous(context: AnswerContext, rank: int) -> Tree:
    return context.previous_inputs[rank]


GROUP_FAULTS: tuple[KnownWrongAnswer, ...] = (
    KnownWrongAnswer("whole_world", "the group is ignored: the whole world communicates", _whole_world),
    KnownWrongAnswer("contiguous_group", "blocks of neighbouring ranks are taken for the groups", _contiguous_group),
)
"""Those that apply to cases with process groups alone."""

TRANSPORT_FAULTS: tuple[KnownWrongAnswer, ...] = (
    KnownWrongAnswer("no_communication", "other ranks' messages are zero: none has arrived", _arriving(_zeros)),
    KnownWrongAnswer("own_repeated", "the rank's own message stands in for every other rank's", _arriving(_own)),
    KnownWrongAnswer("drop_last_rank", "the last rank's message is zero", _arriving(_zeros, last_only=True)),
    KnownWrongAnswer("late_messages", "other ranks' messages are those of the slot before", _arriving(_previous)),
    KnownWrongAnswer("late_rank", "the last rank's message is that of the slot before", _arriving(_previous, last_only=True)),
    KnownWrongAnswer("tails_lost", f"the last {TAIL} elements of other ranks' messages are zero", _arriving(_each(_without_tail))),
    KnownWrongAnswer("stale_tail", f"the last {TAIL} elements of every output are those of the slot before", _stale_tail),
    KnownWrongAnswer(
        "eight_bits", f"other ranks' messages come in 8-bit integers with a scale for every {BLOCK} neighbours", _arriving(_each(_coded))
    ),
    KnownWrongAnswer("neighbours_exchanged", "two ranks' messages are in each other's place", _in_order(_exchanged)),
    KnownWrongAnswer("ranks_reversed", "the last rank's message comes first", _in_order(lambda _, world: range(world)[::-1])),
    KnownWrongAnswer(
        "ring_order", "the rank's own message comes first", _in_order(lambda rank, world: [(rank + q) % world for q in range(world)])
    ),
    *GROUP_FAULTS,
)
