"""All-gather and reduce-scatter of unequal parts, whose sizes every rank has on the host: what engines call before and after experts."""

from collections.abc import Sequence
from typing import Any

import torch

from peerlane.device.collectives.reductions import Reduction
from peerlane.errors import UsageError
from peerlane.ops import replicated
from peerlane.ops.check import same_call
from peerlane.ops.collectives import ReduceOp, _operation
from peerlane.ops.direct import operator
from peerlane.ops.groups import GroupLike, group_name, rank, world_size
from peerlane.ops.shapes import require_axis
from peerlane.ops.transport import transport


@operator("all_gatherv")
def _all_gatherv(x: torch.Tensor, sizes: Sequence[int], group: str) -> torch.Tensor:
    same_call(f"all_gatherv of {list(sizes)} rows", group, x[:0])
    x = x.contiguous()
    whole = x.new_empty((sum(sizes), *x.shape[1:]))
    transport(x, group).all_gather_parts(whole, x, sizes)
    return whole


@operator("reduce_scatterv")
def _reduce_scatterv(x: torch.Tensor, sizes: Sequence[int], group: str, op: str, factor: float) -> torch.Tensor:
    same_call(f"reduce_scatterv {op} of {list(sizes)} rows", group, x)
    x, reduction = x.contiguous(), Reduction(op, factor)
    part = x.new_empty((sizes[rank(group)], *x.shape[1:]))
    transport(x, group, reduction).reduce_scatter_parts(part, x, sizes, reduction)
    return part


_all_gatherv.register_fake(lambda x, sizes, group: x.new_empty((sum(sizes), *x.shape[1:])))
_reduce_scatterv.register_fake(lambda x, sizes, group, op, factor: x.new_empty((sizes[rank(group)], *x.shape[1:])))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.sizes, ctx.group, *reduction = inputs
    ctx.op, ctx.factor = reduction or ("sum", 1.0)


def _scatter_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return replicated.scaled(_all_gatherv(grad, ctx.sizes, ctx.group), ctx.op, ctx.factor, ctx.group), None, None, None, None


_all_gatherv.register_autograd(
    lambda ctx, grad: (_reduce_scatterv(grad, ctx.sizes, ctx.group, "sum", 1.0), None, None), setup_context=_remember
)
_reduce_scatterv.register_autograd(_scatter_gradient, setup_context=_remember)


def all_gatherv(x: torch.Tensor, sizes: Sequence[int], group: GroupLike = None) -> torch.Tensor:
    """Returns all ranks' ``x`` along axis 0, in rank order: rank r's has ``sizes[r]`` rows. ``sizes`` is the same on all ranks."""
    name = group_name(group)
    _check(x, sizes, name, "all_gatherv", sizes[rank(name)] if rank(name) < len(sizes) else -1)
    return _all_gatherv(x, list(sizes), name)


def reduce_scatterv(x: torch.Tensor, sizes: Sequence[int], group: GroupLike = None, *, reduce_op: ReduceOp = "sum") -> torch.Tensor:
    """Returns this rank's part, of ``sizes[r]`` rows on rank r, of the sum of all ranks' ``x``, or of a reduction as ``all_reduce``'s.

    Parts lie in rank order along axis 0. ``sizes`` is the same on all ranks."""
    name = group_name(group)
    _check(x, sizes, name, "reduce_scatterv", sum(sizes))
    return _reduce_scatterv(x, list(sizes), name, *_operation(reduce_op))


def _check(x: torch.Tensor, sizes: Sequence[int], group: str, name: str, rows: int) -> None:
    """Raises UsageError unless there is a size for each rank, and ``x`` has so many rows."""
    require_axis(x, name)
    ranks = world_size(group)
    if len(sizes) != ranks or min(sizes) < 0 or x.shape[0] != rows:
        raise UsageError(
            f"{name} got {x.shape[0]} rows on rank {rank(group)} and sizes {list(sizes)}: expected {ranks} sizes from 0 on, the same on "
            f"all ranks, and {'their sum of' if name == 'reduce_scatterv' else 'the own'} rows"
        )
