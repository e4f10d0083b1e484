"""Gated experts of a mixture on their ranks, with gradients: the operator behind ``ops.gated_experts``."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import silu

from peerlane.device.moe.exchange import room_for
from peerlane.device.moe.layer import MAX_GROUPS, ExpertSizes, expert_layer
from peerlane.device.products import gemm
from peerlane.errors import UsageError
from peerlane.ops.check import no_kernel, same_call
from peerlane.ops.direct import operator
from peerlane.ops.dispatch import DispatchConfig, _combine, _dispatch
from peerlane.ops.groups import GroupLike, group_name, kit_group, world_size
from peerlane.ops.shapes import cast
from peerlane.ops.sharding import takes_dtensors
from peerlane.ops.transport import gathered
from peerlane.settings import batch_invariant

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_grouped_mm: Callable[..., torch.Tensor] | None = getattr(torch.nn.functional, "grouped_mm", None)  # of PyTorch 2.10 on
ALIGNMENT = 16
"""Each expert's rows begin at a multiple of this, so that grouped products that add over rows may read whole vectors."""


@operator("gated_experts")
def _experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    capacity: int,
    group: str,
) -> torch.Tensor:
    same_call(f"gated_experts {capacity}", group, x[:0], experts[:0], weights[:0], gate, up, down)  # of any numbers of tokens
    kit, (own, inner, h), ranks = kit_group(x, group), gate.shape, world_size(group)
    fits = x.dtype in gemm.ELEMENT_TYPES and not h % 8 and not inner % 8 and own * ranks <= MAX_GROUPS
    if kit is not None and fits and not capacity:
        layer = expert_layer(kit, ExpertSizes(room_for(kit, x.shape[0]), experts.shape[1], h, inner, own, 1, x.dtype, batch_invariant()))
        return layer(x, experts, weights, (gate.flatten(0, 1), up.flatten(0, 1), down.flatten(0, 1)))
    no_kernel(f"gated_experts with capacity={capacity or None}", group, x, gate)
    sizes = _sizes(x, experts, own, capacity, group)
    rows, of_rows, ends, _, sources = _dispatch(x, experts, weights, sizes, group)
    hidden = silu(_grouped(rows, gate.mT, ends)) * _grouped(rows, up.mT, ends)
    y: torch.Tensor
    y, _ = _combine(_grouped(hidden, down.mT, ends), of_rows, None, experts, sources, sizes, group)
    return y


@operator("gated_experts_backward")
def _experts_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    capacity: int,
    group: str,
) -> Gradients:
    """Tokens and their gradients travel together. The host reads no counts where products are grouped by one kernel."""
    sizes = _sizes(x, experts, gate.shape[0], capacity, group)
    both, of_rows, ends, _, sources = _dispatch(torch.cat([x, dy], 1), experts, weights, sizes, group)
    rows, d_rows = both.chunk(2, 1)
    a, b = _grouped(rows, gate.mT, ends), _grouped(rows, up.mT, ends)
    share, d_hidden, of_rows = torch.sigmoid(a), _grouped(d_rows, down, ends), of_rows.unsqueeze(1)
    hidden = a * share * b
    dw_rows = (hidden * d_hidden).sum(1)
    d_hidden = d_hidden * of_rows
    db, da = d_hidden * a * share, d_hidden * b * share * (1 + a * (1 - share))
    dx_rows = _grouped(da, gate, ends) + _grouped(db, up, ends)
    dx, dweights = _combine(dx_rows, None, dw_rows, experts, sources, sizes, group)
    weighted = d_rows * of_rows
    return dx, dweights, _outer(da, rows, ends), _outer(db, rows, ends), _outer(weighted, hidden, ends)


def _sizes(x: torch.Tensor, experts: torch.Tensor, own: int, capacity: int, group: str) -> tuple[int, ...]:
    """Collective: returns the sizes of a dispatch of the tokens; room for all of them if ``capacity`` is 0."""
    kit, ranks, most = kit_group(x, group), world_size(group), x.shape[0]
    if kit is not None:
        most = room_for(kit, most)
    elif ranks > 1:
        most = int(gathered(x.new_full((1,), most, dtype=torch.int64), group).max())
    if kit is None and not x.is_cuda and experts.numel() and int(experts.max()) >= ranks * own:
        raise UsageError(f"gated_experts got expert {int(experts.max())}: expected 0 to {ranks * own - 1}, {own} on each of {ranks} ranks")
    room = None if not capacity else -(-capacity // ALIGNMENT) * ALIGNMENT
    config = DispatchConfig(ranks * own, max(1, most), room, expert_alignment=ALIGNMENT)
    return config.sizes(ranks, experts.shape[1])


def _has_kernel(*matrices: torch.Tensor) -> bool:
    return all(
        value.dtype in (torch.bfloat16, torch.float16, torch.float32) and value.shape[-1] * value.itemsize % 16 == 0 for value in matrices
    )


def _grouped(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Returns each expert's rows (ends[e] - ends[e - 1], k) times its matrix (k, n). Rows behind the last end are undefined."""
    if _grouped_mm is not None and _has_kernel(rows, matrices, matrices.mT):
        return _grouped_mm(rows, matrices, offs=ends)
    result, begin = rows.new_zeros((rows.shape[0], matrices.shape[2])), 0
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        result[begin:end], begin = rows[begin:end] @ matrix, end
    return result


def _outer(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Returns for each expert its rows of a (rows, n), transposed, times those of b (rows, k): (experts, n, k)."""
    if _grouped_mm is not None and _has_kernel(a, b):
        return _grouped_mm(a.t(), b, offs=ends)
    begins = [0, *ends.tolist()]
    return torch.stack([a[begin:end].T @ b[begin:end] for begin, end in pairwise(begins)])


_experts.register_fake(
    lambda x, experts, weights, gate, up, down, capacity, group: torch.empty_like(x, memory_format=torch.contiguous_format)
)
_experts_backward.register_fake(
    lambda dy, x, experts, weights, gate, up, down, capacity, group: tuple(
        torch.empty_like(value, memory_format=torch.contiguous_format) for value in (x, weights, gate, up, down)
    )
)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.capacity, ctx.group = inputs[6:]


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dx, dweights, dgate, dup, ddown = _experts_backward(dy.contiguous(), *ctx.saved_tensors, ctx.capacity, ctx.group)
    return dx, None, dweights, dgate, dup, ddown, None, None


_experts.register_autograd(_gradients, setup_context=_remember)


@takes_dtensors
def gated_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    group: GroupLike = None,
    *,
    capacity: int | None = None,
) -> torch.Tensor:
    """Returns for every token the weighted sum of ``silu(x @ gate.T) * (x @ up.T) @ down.T`` of its experts: (T, H).

    x (T, H), experts (T, k) int64, different ones for a token, weights (T, k); T may be several axes. Rank r holds experts r E to
    r E + E - 1: gate and up (E, inner, H), down (E, H, inner). Ranks may have different numbers of tokens. All but experts in one dtype.

    ``capacity``: the most rows that a rank takes, the same on all ranks; what is above it adds nothing. Each expert's rows are filled up to
    a multiple of 16, which counts too. None: room for all."""
    x, weights, gate, up, down = cast(x, weights, gate, up, down)
    shapes = [tuple(value.shape) for value in (x, experts, weights, gate, up, down)]
    (own, inner, h) = gate.shape if gate.dim() == 3 else (0, 0, 0)
    slots = (*x.shape[:-1], experts.shape[-1] if experts.dim() else 0)
    if (
        x.dim() < 2
        or shapes != [(*x.shape[:-1], h), slots, slots, (own, inner, h), (own, inner, h), (own, h, inner)]
        or experts.dtype != torch.int64
    ):
        raise UsageError(
            f"gated_experts got x, experts, weights, gate, up, down of {shapes}, experts in {experts.dtype}: expected "
            "(T, H), (T, k), (T, k), (E, inner, H), (E, inner, H), (E, H, inner), experts in torch.int64; T may be several axes"
        )
    if len({value.dtype for value in (x, weights, gate, up, down)}) > 1:
        raise UsageError(
            f"gated_experts got x in {x.dtype}, weights in {weights.dtype}, experts' layers in {gate.dtype}, {up.dtype}, {down.dtype}: "
            "expected one dtype; call .to(x.dtype) on the others"
        )
    if capacity is not None and capacity < 1:
        raise UsageError(f"gated_experts got capacity={capacity}: expected 1 row or more, or None for room for all")
    rows = [value.flatten(0, -2) for value in (x, experts, weights)]
    return _experts(*rows, gate, up, down, capacity or 0, group_name(group)).view(x.shape)
