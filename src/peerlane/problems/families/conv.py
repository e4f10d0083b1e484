"""What the convolutions share: zigzag layout, convolution in float64, exchange of borders with the neighbours, full float32 in cuDNN."""

import dataclasses
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.matmul import FP64


def full_float32() -> AbstractContextManager[None]:
    """Within it cuDNN convolves float32 as float32: by default it takes TensorFloat32, with 10 bits of fraction."""
    context: AbstractContextManager[None] = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    return context


def without_group(case: pc.Case) -> pc.Case:
    """The same case over the whole world: what an implementation computes that ignores its group."""
    return dataclasses.replace(case, params={key: value for key, value in case.params.items() if key != "group"})


def zigzag_chunks(rank: int, world: int) -> tuple[int, int]:
    """Which two of the 2 W chunks of a sequence a rank holds in zigzag layout, which balances causal work."""
    return rank, 2 * world - 1 - rank


def from_zigzag(shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The whole sequence from all ranks' shards, each with its two chunks back to back along ``dim``."""
    halves = [shard.chunk(2, dim) for shard in shards]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim)


def zigzag_shard(whole: torch.Tensor, rank: int, world: int, dim: int) -> torch.Tensor:
    """A rank's shard of the whole sequence."""
    chunks = whole.chunk(2 * world, dim)
    return torch.cat([chunks[place] for place in zigzag_chunks(rank, world)], dim)


def exchange_with_neighbours(
    to_previous: torch.Tensor, to_next: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends one tensor to the previous and one to the next rank of the group; returns what they send here, in the same shapes.

    Zeros come from beyond the first and the last rank: (from the previous rank, from the next rank).
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    from_previous, from_next = torch.zeros_like(to_next), torch.zeros_like(to_previous)
    transfers = []
    for peer, sent, received in ((rank - 1, to_previous, from_previous), (rank + 1, to_next, from_next)):
        if 0 <= peer < world and sent.numel():
            peer = peer if group is None else dist.get_global_rank(group, peer)
            transfers += [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
    if transfers:
        for request in dist.batch_isend_irecv(transfers):
            request.wait()
    return from_previous, from_next


def convolve(x: torch.Tensor, weight: torch.Tensor, *, stride: Sequence[int], dilation: Sequence[int], groups: int = 1) -> torch.Tensor:
    """Cross-correlation of x (B, C, *spatial) with weight (O, C / groups, *kernel) in float64, without padding: (B, O, *positions).

    One matrix product per tap, so that no unfolded copy of x is held and float64 runs at the speed of matrix products.
    """
    kernel, spatial = weight.shape[2:], x.shape[2:]
    positions = [_positions(*axis) for axis in zip(spatial, kernel, stride, dilation, strict=True)]
    result = torch.zeros((x.shape[0], weight.shape[0], *positions), dtype=FP64, device=x.device)
    inner, outer = weight.shape[1], weight.shape[0] // groups
    wide = weight.to(FP64).flatten(2)
    for number, tap in enumerate(itertools.product(*(range(taps) for taps in kernel))):
        window = [_window(*axis) for axis in zip(tap, positions, stride, dilation, strict=True)]
        for b, g in itertools.product(range(x.shape[0]), range(groups)):
            operand = x[(slice(b, b + 1), slice(g * inner, (g + 1) * inner), *window)].to(FP64).reshape(inner, -1)
            rows = slice(g * outer, (g + 1) * outer)
            result[b, rows].view(outer, -1).addmm_(wide[rows, :, number], operand)
    return result


def _positions(size: int, taps: int, stride: int, dilation: int) -> int:
    """How many positions a kernel has along an axis of this size."""
    return (size - dilation * (taps - 1) - 1) // stride + 1


def _window(tap: int, positions: int, stride: int, dilation: int) -> slice:
    """Which samples of an axis one tap of a kernel meets."""
    return slice(tap * dilation, tap * dilation + stride * (positions - 1) + 1, stride)


def terms_bound(x: torch.Tensor, weight: torch.Tensor, *, stride: Sequence[int], dilation: Sequence[int], groups: int = 1) -> torch.Tensor:
    """|w| |patch| of every output of :func:`convolve`: by Cauchy and Schwarz no less than the sum of its terms' absolute values."""
    energy = torch.stack([part.to(FP64).square().sum(1) for part in x.chunk(groups, 1)], 1)
    for axis, (taps, step, spread) in enumerate(zip(weight.shape[2:], stride, dilation, strict=True), start=2):
        positions = _positions(energy.shape[axis], taps, step, spread)
        windows = [_window(tap, positions, step, spread) for tap in range(taps)]
        energy = torch.stack([energy[(slice(None),) * axis + (window,)] for window in windows]).sum(0)
    patches = energy.sqrt_().repeat_interleave(weight.shape[0] // groups, 1)
    return patches.mul_(weight.to(FP64).flatten(1).norm(dim=1).view(-1, *[1] * (x.dim() - 2)))
