"""Gated experts of a mixture on their ranks, with gradients: the operator behind ``ops.gated_experts``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu

from peerlane.device.moe.exchange import room_for
from peerlane.device.moe.layer import MAX_GROUPS, ExpertSizes, expert_layer
from peerlane.device.products import gemm
from peerlane.errors import UsageError
from peerlane.ops.check import same_call
from peerlane.ops.groups import GroupLike, group_name, kit_group, world_size
from peerlane.ops.shapes import cast
from peerlane.ops.sharding import takes_dtensors
from peerlane.ops.transport import transport

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class _Routes(NamedTuple):
    """The routes of this rank's token rows, one for each token and slot, ordered by expert; and of the rows that come here."""

    tokens: torch.Tensor
    slots: torch.Tensor
    """of the rows that this rank sends: which of tokens x k they are"""
    sent: list[int]
    received: list[int]
    """rows for and from each rank"""
    of_experts: list[torch.Tensor]
    """of the rows that come here: those of each own expert"""
    group: str

    @staticmethod
    def of(experts: torch.Tensor, own: int, group: str) -> _Routes:
        ranks, flat = world_size(group), experts.flatten()
        sent = torch.bincount(flat, minlength=ranks * own)
        if sent.numel() > ranks * own:
            raise UsageError(
                f"gated_experts got expert {sent.numel() - 1}: expected 0 to {ranks * own - 1}, {own} on each of {ranks} ranks"
            )
        sent = sent.view(ranks, own)
        received = _exchanged(sent, [1] * ranks, [1] * ranks, group)
        numbers = torch.arange(own, device=flat.device).repeat(ranks).repeat_interleave(received.flatten())
        slots = flat.argsort(stable=True)
        of_experts = [(numbers == expert).nonzero().squeeze(1) for expert in range(own)]
        return _Routes(slots // experts.shape[1], slots, sent.sum(1).tolist(), received.sum(1).tolist(), of_experts, group)

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        return _exchanged(rows, self.sent, self.received, self.group)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        return _exchanged(rows, self.received, self.sent, self.group)

    def added(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns each token's sum of its rows, of shape and dtype as ``x``; sums are taken in float32 at least."""
        total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        return total.index_add_(0, self.tokens, rows.to(total.dtype)).to(x.dtype)


def _exchanged(rows: torch.Tensor, sent: list[int], received: list[int], group: str) -> torch.Tensor:
    rows, result = rows.contiguous(), rows.new_empty((sum(received), *rows.shape[1:]))
    transport(rows, group).all_to_all_single(result, rows, received, sent)
    return result


@torch.library.custom_op("peerlane::gated_experts", mutates_args=())
def _experts(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, group: str
) -> torch.Tensor:
    same_call("gated_experts", group, x[:0], experts[:0], weights[:0], gate, up, down)  # ranks may have different numbers of tokens
    kit, (own, inner, h), ranks = kit_group(x, group), gate.shape, world_size(group)
    fits = x.dtype in gemm.ELEMENT_TYPES and not h % 8 and not inner % 8 and own * ranks <= MAX_GROUPS
    if kit is not None and fits:
        layer = expert_layer(kit, ExpertSizes(room_for(kit, x.shape[0]), experts.shape[1], h, inner, own, 1, x.dtype))
        return layer(x, experts, weights, (gate.flatten(0, 1), up.flatten(0, 1), down.flatten(0, 1)))
    routes = _Routes.of(experts, own, group)
    rows = routes.there(x[routes.tokens])
    result = torch.empty_like(rows)
    for expert, at in enumerate(routes.of_experts):
        result[at] = (silu(rows[at] @ gate[expert].T) * (rows[at] @ up[expert].T)) @ down[expert].T
    return routes.added(routes.back(result) * weights.flatten()[routes.slots].unsqueeze(1), x)


@torch.library.custom_op("peerlane::gated_experts_backward", mutates_args=())
def _experts_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    group: str,
) -> Gradients:
    routes = _Routes.of(experts, gate.shape[0], group)
    slot_weights = weights.flatten()[routes.slots].unsqueeze(1)
    rows, d_rows, row_weights = (routes.there(value) for value in (x[routes.tokens], dy[routes.tokens], slot_weights))
    dx_rows, dw_rows = torch.empty_like(rows), torch.empty_like(row_weights)
    dgate, dup, ddown = (torch.empty_like(layer, memory_format=torch.contiguous_format) for layer in (gate, up, down))
    for expert, at in enumerate(routes.of_experts):
        r, d = rows[at], d_rows[at]
        a, b = r @ gate[expert].T, r @ up[expert].T
        share, d_hidden = torch.sigmoid(a), d @ down[expert]
        hidden = a * share * b
        dw_rows[at] = (hidden * d_hidden).sum(1, keepdim=True)
        d_hidden = d_hidden * row_weights[at]
        db, da = d_hidden * a * share, d_hidden * b * share * (1 + a * (1 - share))
        dx_rows[at] = da @ gate[expert] + db @ up[expert]
        dgate[expert], dup[expert], ddown[expert] = da.T @ r, db.T @ r, (d * row_weights[at]).T @ hidden
    dweights = torch.empty_like(weights, memory_format=torch.contiguous_format)
    dweights.view(-1)[routes.slots] = routes.back(dw_rows).squeeze(1)
    return routes.added(routes.back(dx_rows), x), dweights, dgate, dup, ddown


_experts.register_fake(lambda x, experts, weights, gate, up, down, group: torch.empty_like(x, memory_format=torch.contiguous_format))
_experts_backward.register_fake(
    lambda dy, x, experts, weights, gate, up, down, group: tuple(
        torch.empty_like(value, memory_format=torch.contiguous_format) for value in (x, weights, gate, up, down)
    )
)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.group = inputs[6]


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dx, dweights, dgate, dup, ddown = _experts_backward(dy.contiguous(), *ctx.saved_tensors, ctx.group)
    return dx, None, dweights, dgate, dup, ddown, None


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
) -> torch.Tensor:
    """Returns for every token the weighted sum of ``silu(x @ gate.T) * (x @ up.T) @ down.T`` of its experts: (T, H).

    x (T, H), experts (T, k) int64, different ones for a token, weights (T, k); T may be several axes. Rank r holds experts r E to
    r E + E - 1: gate and up (E, inner, H), down (E, H, inner). Ranks may have different numbers of tokens. All but experts in one dtype."""
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
    rows = [value.flatten(0, -2) for value in (x, experts, weights)]
    result: torch.Tensor = _experts(*rows, gate, up, down, group_name(group))
    return result.view(x.shape)
