"""What the collective problems share: roots, process groups, summands with their error model, and answers with a stale part."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INT32, INT64 = torch.int32, torch.int64

# PyTorch 2.13 renamed these two and warns about the old names; 2.9 to 2.12 know only the old ones.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

SWEEP_KIB = (2, 16, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10)


def sweep(params: Callable[[int], Mapping[str, Any]]) -> tuple[pc.Preset, ...]:
    """The family ``sweep``: a preset per size, of one flat bfloat16 case, whose parameters for so many elements ``params`` gives.

    The size is that of nccl-tests, of the larger of a rank's two buffers. So it is the size of both buffers in all-reduce, broadcast,
    reduce and all-to-all, of what all-gather and gather return, and of what reduce-scatter and scatter are given.
    """
    made = []
    for kib in SWEEP_KIB:
        size = f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB"
        spec = pc.case("bf16", BF16, **params(kib * 1024 // BF16.itemsize))
        made.append(pc.preset(f"sweep_{size.replace(' ', '').lower()}", size, spec))
    return tuple(made)


def root_argument(case: pc.Case, draw: pc.Draw) -> tuple[int, ...]:
    """The root's rank as the last argument. ``case["root"]``: a rank, ``"last"``, or ``"any"`` (another one in every slot).

    Empty where the case names no root: the parameter is then left at its default, rank 0.
    """
    root = case.params.get("root")
    if root is None:
        return ()
    if root == "any":
        return (draw.layout.randrange(case.world_size),)
    return (case.world_size - 1 if root == "last" else root,)


def root_of(args: Sequence[Any]) -> int:
    """The root that ``(tensor, *root_argument(...))`` names."""
    return args[1] if len(args) > 1 else 0


def at_root(spoil: Callable[[pc.AnswerContext], pc.Tree]) -> Callable[[pc.AnswerContext], pc.Tree]:
    """A wrong answer: ``spoil(context)`` on the root, the right answer elsewhere."""
    return lambda context: spoil(context) if context.rank == root_of(context.args) else context.answer


def may_be_root(case: pc.Case, rank: int) -> bool:
    """Whether the cost of this rank is the root's.

    True for every rank of a case whose root changes between slots: the busiest rank, which alone bounds the time, is then right.
    """
    root = case.params.get("root", 0)
    return root == "any" or rank == (case.world_size - 1 if root == "last" else root)


def group_layout(case: pc.Case) -> pc.GroupLayout:
    """The process groups of a case. ``case["group"]``: absent (None is passed, the world), ``"world"``, or ``"strided"``.

    ``"strided"`` makes two groups, of the even and of the odd ranks, so that a rank's number in its group differs from its number in
    the world.
    """
    match case.params.get("group"):
        case None:
            return {}
        case "world":
            return {"world": [range(case.world_size)]}
        case "strided":
            return {"strided": [range(first, case.world_size, 2) for first in (0, 1)]}
        case other:
            raise ValueError(f"unknown group {other!r}: expected None, 'world' or 'strided'")


def group_members(case: pc.Case, rank: int) -> Sequence[int]:
    """World ranks of the group that ``rank`` is in, in group order."""
    for groups in group_layout(case).values():
        return next(members for members in groups if rank in members)
    return range(case.world_size)


def local_length(case: pc.Case, rank: int) -> int:
    """``local`` positions per rank, or ``length`` in the whole sequence, which the rank's group shares."""
    return int(case["local"] if "local" in case.params else case["length"] // len(group_members(case, rank)))


def group_size(case: pc.Case) -> int:
    """P: the number of ranks in a group."""
    return len(group_members(case, 0))


def neighbours(context: pc.AnswerContext) -> range:
    """Ranks that somebody would take for the rank's group who numbers groups by blocks."""
    size = len(context.members)
    first = context.rank // size * size
    return range(first, first + size)


def summand(case: pc.Case, rank: int, draw: pc.Draw, shape: Sequence[int]) -> torch.Tensor:
    """One rank's part of a sum. ``case["data"]``: absent (normal), ``cancelling``, ``special`` or ``same_sign``.

    * cancelling: rank 0 holds large values that rank 1 takes away again, so that the small rest decides; but not in every fourth
      element, so that each of many ranks counts there
    * special: a NaN and an infinity per rank, at positions that differ between ranks
    * same_sign: U[0.5, 2.5), so that a narrow accumulator drifts to one side
    """
    if draw.integer:
        # 32 values per rank and at most 8 ranks: every partial sum is an integer of size 256 or less, exact in bfloat16.
        return draw.integers(-16, 17, shape, case.dtype)
    match case.params.get("data"):
        case "cancelling":
            large = draw.shared.normal(shape, FP32, scale=64.0)
            large.view(-1)[::4] = 0.0
            sign = {0: 1.0, 1: -1.0}.get(rank, 0.0)
            return (sign * large + draw.normal(shape, FP32)).to(case.dtype)
        case "special":
            values = draw.normal(shape, case.dtype).reshape(-1)
            values[(7 * rank + 1) % values.numel()] = float("nan")
            values[(7 * rank + 4) % values.numel()] = float("inf")
            return values.reshape(tuple(shape))
        case "same_sign":
            return draw.uniform(shape, case.dtype, low=0.5, high=2.5)
        case _:
            return draw.normal(shape, case.dtype, scale=1.0 + 0.1 * rank)


def sum_expected(terms: Sequence[torch.Tensor], dtype: torch.dtype) -> pc.Expected:
    """The float64 sum of the terms, under the name ``sum``, with the sum of their absolute values as magnitude."""
    total = torch.zeros_like(terms[0], dtype=torch.float64)
    magnitude = torch.zeros_like(total)
    for term in terms:
        wide = term.to(torch.float64)
        total += wide
        magnitude += wide.abs()
    return pc.Expected("sum", total, dtype, magnitude=magnitude)


def sum_tolerance(case: pc.Case, elements: int) -> Mapping[str, pc.Tolerance]:
    """W - 1 additions, each rounded in the working dtype, on terms no larger than the sum of magnitudes; allowed twice for four ranks.

    The norm of all ``elements`` of an output is bounded too, unless it is small by cancellation: by design, or, among few elements, by
    chance.
    """
    u = pc.UNIT_ROUNDOFF[case.dtype]
    cancels = case.params.get("data") == "cancelling" or elements < 64
    normwise = None if cancels else {BF16: 1e-2, FP16: 2e-3, FP32: 1e-6}[case.dtype]
    return {"sum": pc.Tolerance(magnitude=(case.world_size + 2) * u, normwise=normwise)}


def shape_tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """W - 1 additions, in any order and grouping, each rounded in the working dtype: (W + 2) u of the sum of magnitudes."""
    return sum_tolerance(case, torch.Size(case["shape"]).numel())


def fitted(tensor: torch.Tensor, length: int, axis: int = 0) -> torch.Tensor:
    """``tensor`` repeated and cut to a length along an axis, so that its contents, not its shape, make an answer wrong; zeros if empty."""
    own = tensor.size(axis)
    if own == 0:
        shape = list(tensor.shape)
        shape[axis] = length
        return tensor.new_zeros(shape)
    return torch.cat([tensor] * max(1, -(-length // own)), axis).narrow(axis, 0, length)


def wide_sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum with a float32 accumulator and one rounding."""
    return torch.stack([term.to(FP32) for term in terms]).sum(0).to(terms[0].dtype)


def sequential_sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum from first to last, rounded to the terms' dtype after every addition."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def first_arguments(inputs: pc.Inputs) -> list[torch.Tensor]:
    """Every rank's tensor."""
    return [args[0] for args in inputs]


def stale_tail(context: pc.AnswerContext, length: int = 8) -> torch.Tensor:
    """The right answer but for its last ``length`` elements, which are left over from the slot before."""
    result: torch.Tensor = context.answer.clone(memory_format=torch.contiguous_format)
    result.view(-1)[-length:] = context.previous.reshape(-1)[-length:]
    return result


def stale_part(context: pc.AnswerContext) -> torch.Tensor:
    """The right answer but for the last of its W parts along axis 0, which is left over from the slot before."""
    result: torch.Tensor = context.answer.clone()
    result.chunk(context.case.world_size)[-1].copy_(context.previous.chunk(context.case.world_size)[-1])
    return result
