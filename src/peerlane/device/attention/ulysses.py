"""Host side of ``peerlane/attention/ulysses_attention.cuh``: attention over sharded sequences, each rank for its heads."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from peerlane.device.attention import forward
from peerlane.device.attention.backward import Gradients, attention_backward
from peerlane.device.attention.forward import AttentionTiling, operand_map, supports, wide_attention
from peerlane.device.attention.ring import attend_over_ranks
from peerlane.device.attention.ring_backward import attend_over_ranks_backward
from peerlane.device.attention.shards import ShardAttention, ShardPlan, parcel_map, piece_tokens, plain_place, transposed_place
from peerlane.device.attention.short import is_short, short_attention
from peerlane.device.collectives.strided import exchange_axes
from peerlane.device.host.declare import F32, U32, Buffer, DeclaredKernel, Epochs, Flags, Map, Reserved, roles_source
from peerlane.device.host.group import MAX_RANKS, Group, per_group
from peerlane.device.host.group_of import group_of
from peerlane.device.host.tensor_map import TensorMapSpec, TensorPlace
from peerlane.device.products.gemm import ELEMENT_BYTES
from peerlane.errors import UsageError

SOURCE = roles_source("ulysses_attention", "attention/ulysses_attention.cuh", "UlyssesAttentionRoles", "WORLD_SIZE", clusters=False)
ULYSSES_ATTENTION = DeclaredKernel(
    "ulysses_attention",
    SOURCE,
    **dict.fromkeys(("own", "gathered", "parcels"), Map(3)),
    out=Map(MAX_RANKS),
    scale=F32,
    **dict.fromkeys(("batch", "heads", "length", "depth", "causal", "lines_at_once", "piece_tokens"), U32),
    **dict.fromkeys(("gathered_q_at", "gathered_k_at", "gathered_v_at", "result"), Buffer(align=1024)),
    flags=Flags(),
    epochs=Epochs(),
    claims=Buffer(),
)


@dataclass(frozen=True)
class UlyssesPlan(ShardPlan):
    """Shards of q, k and v: (batch, length, world_size heads, depth)."""

    batch: int
    length: int
    heads: int
    """The heads of a rank."""
    depth: int
    dtype: torch.dtype
    causal: bool
    world_size: int
    tiling: AttentionTiling

    @property
    def lines(self) -> int:
        return self.batch * self.heads

    @property
    def piece_tokens(self) -> int:
        return piece_tokens(self.tiling, 2 * self.depth)

    @property
    def sizes(self) -> dict[str, int]:
        blocks, shard = self.tiling.tiles(self.length), self.world_size * self.lines * self.length * self.depth * ELEMENT_BYTES
        return {
            **dict.fromkeys(("gathered_q_at", "gathered_k_at", "gathered_v_at"), 2 * shard),
            "result": shard,
            "flags": 1 + self.lines * (-(-self.length // self.piece_tokens) + blocks * (1 + self.tiling.groups)),
            "claims": 8,
        }

    @property
    def result_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.length, self.world_size * self.heads, self.depth

    def grid(self, rank: int, sm_count: int) -> int:
        return min(sm_count, self.lines * self.world_size * self.tiling.tiles(self.length))

    def fixed(self, reserved: Reserved) -> dict[str, Any]:
        shape = 2 * self.world_size * self.batch, self.length, self.heads, self.depth
        pushed = [reserved.addresses(f"gathered_{name}_at")[reserved.group.rank] for name in "qkv"]
        return {
            **{name: getattr(self, name) for name in ("batch", "heads", "length", "depth")},
            "causal": int(self.causal),
            "lines_at_once": min(self.lines, -(-reserved.group.sm_count // (self.world_size * self.tiling.tiles(self.length)))),
            "piece_tokens": self.piece_tokens,
            "gathered": self._operand_maps(transposed_place(address, self.dtype, shape) for address in pushed),
            "out": [operand_map(plain_place(address, self.dtype, self.result_shape), 64) for address in reserved.addresses("result")],
        }

    def maps(self, q: TensorPlace, k: TensorPlace, v: TensorPlace) -> dict[str, Any]:
        return {"own": self._operand_maps((q, k, v)), "parcels": [parcel_map(place) for place in (q, k, v)]}

    def _operand_maps(self, places: Iterable[TensorPlace]) -> list[TensorMapSpec]:
        rows = self.tiling.queries, self.tiling.keys, self.tiling.keys
        return [operand_map(place, count) for place, count in zip(places, rows, strict=True)]

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for tensor in (q, k, v):
            if tuple(tensor.shape) != self.result_shape or tensor.dtype != self.dtype:
                raise UsageError(
                    f"Ulysses attention of {tuple(tensor.shape)} in {tensor.dtype}: expected {self.result_shape} in {self.dtype}; "
                    "create a UlyssesAttention for each shape"
                )


class UlyssesAttention(ShardAttention):
    """``call(q, k, v, scale)`` for one shape of shards: attention over the sequence of all ranks, in rank order.

    q, k and v (B, S, h, D): bfloat16 or float16, of one shape on all ranks, h divisible by the ranks. ``causal``: a query sees the keys up
    to its own place in the whole sequence. The result (B, S, h, D) lies in the arena and is valid until the next call. Creating one is
    collective. Calls in one stream need no barrier between them and can be captured in a graph."""

    def __init__(self, plan: UlyssesPlan, group: Group | dist.ProcessGroup | None = None, *, timeout_s: float | None = None) -> None:
        super().__init__(ULYSSES_ATTENTION, plan, group_of(group), timeout_s)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        self.launch(q, k, v, scale)
        return self.out


@per_group
def ulysses_attention(group: Group, batch: int, length: int, heads: int, depth: int, dtype: torch.dtype, causal: bool) -> UlyssesAttention:
    """The group's one :class:`UlyssesAttention` of this shape; ``heads`` are all heads. The first call is collective."""
    tiling = forward.choose_tiling(length, length, depth, causal, parcels=True)
    return UlyssesAttention(UlyssesPlan(batch, length, heads // group.world_size, depth, dtype, causal, group.world_size, tiling), group)


def attend_by_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    group: Group | dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Collective: attention as :class:`UlyssesAttention` has it, for any dtype.

    Sequences of a few tokens have a kernel of their own. What the tensor cores' kernel does not take, such as float32, is exchanged by the
    kit and computed by torch. A result is valid until the group's next call with this shape."""
    member = group_of(group)
    if len({q.shape, k.shape, v.shape}) > 1 or q.dim() != 4 or q.shape[2] % member.world_size:
        raise UsageError(
            f"Ulysses attention of {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)} on {member.world_size} ranks: expected "
            "one shape (batch, tokens, heads, depth), heads divisible by the ranks; repeat key heads that are shared"
        )
    if member.world_size == 1 and supports(q, k, v):
        return forward.attention(q, k, v, scale=scale, causal=causal, group=member)[0]
    if member.world_size > 1 and is_short(member, q, k, v):
        return short_attention(member, (q, k, v), scale, causal)
    if supports(q, k, v):
        batch, length, heads, depth = q.shape
        return ulysses_attention(member, batch, length, heads, depth, q.dtype, causal)(q, k, v, scale)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    if member.world_size == 1:
        return wide_attention(q, k, v, scale=factor, causal=causal)[0].to(q.dtype)
    whole = exchange_axes(member, torch.stack((q, k, v), 2), joined=1, cut=3)
    out = wide_attention(*whole.unbind(2), scale=factor, causal=causal)[0].to(q.dtype)
    return exchange_axes(member, out, joined=2, cut=1)


def attend_by_heads_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    group: Group | dist.ProcessGroup | None = None,
) -> Gradients:
    """Collective: gradients of :func:`attend_by_heads` with respect to q, k and v, from that of its result.

    Two exchanges; between them each rank computes attention of its heads and its gradients. Valid until the group's next exchange of this
    shape."""
    member = group_of(group)
    if not supports(q, k, v):  # the same function of the shards, without exchanges of heads
        out, logarithms = attend_over_ranks(q, k, v, scale=scale, causal=causal, group=member)
        return attend_over_ranks_backward(dout, q, k, v, out, logarithms, scale=scale, causal=causal, group=member)
    whole = torch.stack((dout, q, k, v), 2)
    if member.world_size > 1:
        whole = exchange_axes(member, whole, joined=1, cut=3)
    all_dout, all_q, all_k, all_v = whole.unbind(2)
    out, logarithms = forward.attention(all_q, all_k, all_v, scale=scale, causal=causal, group=member)
    found = attention_backward(all_dout, all_q, all_k, all_v, out, logarithms, scale=scale, causal=causal, group=member)
    if member.world_size == 1:
        return found
    dq, dk, dv = exchange_axes(member, torch.stack(found, 2), joined=3, cut=1).unbind(2)
    return dq, dk, dv
