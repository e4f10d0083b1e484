"""Host side of ``peerlane/attention/ring_attention.cuh``: attention over a sequence that is sharded across ranks, in one launch."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from peerlane.device.attention import forward
from peerlane.device.attention.forward import AttentionTiling, check_operands, merge, operand_map, supports, wide_attention
from peerlane.device.attention.shards import ShardAttention, ShardPlan, parcel_map, piece_tokens, plain_place, transposed_place
from peerlane.device.collectives.communicator import communicator
from peerlane.device.host.declare import F32, U32, Buffer, DeclaredKernel, Epochs, Flags, Map, Reserved, roles_source
from peerlane.device.host.group import Group, per_group
from peerlane.device.host.group_of import group_of
from peerlane.device.host.tensor_map import TensorMapSpec, TensorPlace
from peerlane.device.products.gemm import ELEMENT_BYTES
from peerlane.errors import UsageError

_BALANCED_BLOCKS = 4
"""Tiles of a head from which on ranks compute each other's: with fewer, the launch is over before queries and results have travelled."""

SOURCE = roles_source("ring_attention", "attention/ring_attention.cuh", "RingAttentionRoles", "WORLD_SIZE", clusters=False)
RING_ATTENTION = DeclaredKernel(
    "ring_attention",
    SOURCE,
    **dict.fromkeys(("q", "k", "v", "out", "gathered_k", "gathered_v", "guest_q", "guest_out"), Map()),
    **dict.fromkeys(("parcels_k", "parcels_v", "parcels_q"), Map()),
    scale=F32,
    **dict.fromkeys(("batch", "heads", "key_heads", "length", "depth", "value_depth", "causal"), U32),
    **dict.fromkeys(("own_blocks", "guest_rank", "first_guest", "guest_blocks", "host_rank", "first_hosted", "hosted_blocks"), U32),
    **dict.fromkeys(("lines_at_once", "piece_tokens", "targets"), U32),
    **dict.fromkeys(("gathered_k_at", "gathered_v_at", "guest_q_at", "result"), Buffer(align=1024)),
    logarithms=Buffer(),
    flags=Flags(),
    epochs=Epochs(),
    claims=Buffer(),
)


@dataclass(frozen=True)
class Shape:
    """What all ranks agree on: their shards q (batch, length, heads, depth), k and v (batch, length, key_heads, depth or value_depth)."""

    batch: int
    length: int
    heads: int
    key_heads: int
    depth: int
    value_depth: int
    dtype: torch.dtype
    causal: bool

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> "Shape":
        check_operands(q, k, v)
        if q.shape[1] != k.shape[1]:
            raise UsageError(f"ring attention of q {tuple(q.shape)} and k {tuple(k.shape)}: expected shards of one length")
        return cls(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype, causal)


@dataclass(frozen=True)
class Share:
    """What a rank computes: the first ``own`` tiles of each of its heads, and ``count`` tiles of rank ``owner`` from tile ``first`` on."""

    own: int
    owner: int = 0
    first: int = 0
    count: int = 0


def shares(shape: Shape, tiling: AttentionTiling, world_size: int, balanced: bool) -> list[Share]:
    """Returns the share of each rank. Under a causal mask rank W - 1 - r has more work than rank r, which takes over some last tiles."""
    blocks, shard = tiling.tiles(shape.length), -(-shape.length // tiling.keys)
    result = [Share(blocks)] * world_size
    if not (shape.causal and balanced):
        return result

    def steps(rank: int, block: int) -> int:
        return rank * shard - (-min((block + 1) * tiling.queries, shape.length) // tiling.keys)

    for light in range(world_size // 2):
        heavy = world_size - 1 - light
        costs = [sum(steps(rank, block) for block in range(blocks)) for rank in (light, heavy)]
        count = 0
        while count + 1 < blocks:
            moved = steps(heavy, blocks - 1 - count)
            if max(costs[0] + moved, costs[1] - moved) >= max(costs):
                break
            costs, count = [costs[0] + moved, costs[1] - moved], count + 1
        if count:
            result[light], result[heavy] = Share(blocks, heavy, blocks - count, count), Share(blocks - count)
    return result


@dataclass(frozen=True)
class RingPlan(ShardPlan):
    """Shards of one shape, and which tiles each rank computes."""

    shape: Shape
    world_size: int
    tiling: AttentionTiling
    dtype: torch.dtype
    shares: tuple[Share, ...]

    @classmethod
    def of(cls, shape: Shape, world_size: int, tiling: AttentionTiling | None = None, balanced: bool | None = None) -> "RingPlan":
        chosen = tiling or forward.choose_tiling(
            shape.length, shape.length, max(shape.depth, shape.value_depth), shape.causal, parcels=True
        )
        balance = chosen.tiles(shape.length) >= _BALANCED_BLOCKS if balanced is None else balanced
        return cls(shape, world_size, chosen, shape.dtype, tuple(shares(shape, chosen, world_size, balance)))

    @property
    def lines(self) -> int:
        return self.shape.batch * self.shape.heads

    @property
    def piece_tokens(self) -> int:
        return piece_tokens(self.tiling, self.shape.depth + self.shape.value_depth)

    @property
    def pieces(self) -> int:
        """Returns the pieces of all key heads."""
        return self.shape.batch * self.shape.key_heads * -(-self.shape.length // self.piece_tokens)

    @property
    def result_shape(self) -> tuple[int, int, int, int]:
        return self.shape.batch, self.shape.length, self.shape.heads, self.shape.value_depth

    @property
    def sizes(self) -> dict[str, int]:
        shape, tiles = self.shape, self.lines * self.tiling.tiles(self.shape.length)
        keys = 2 * self.world_size * shape.batch * shape.key_heads * shape.length * ELEMENT_BYTES
        queries = self.lines * shape.length * ELEMENT_BYTES
        return {
            "gathered_k_at": keys * shape.depth,
            "gathered_v_at": keys * shape.value_depth,
            "guest_q_at": 2 * queries * shape.depth if any(share.count for share in self.shares) else 1024,
            "result": queries * shape.value_depth,
            "logarithms": self.lines * shape.length * 4,
            "flags": 1 + self.pieces + tiles * (1 + self.tiling.groups),
            "claims": 8,
        }

    def needed(self, rank: int) -> int:
        """The last rank whose keys ``rank`` needs."""
        share = self.shares[rank]
        if not self.shape.causal:
            return self.world_size - 1
        return share.owner if share.count else rank

    def targets(self, rank: int) -> int:
        """The ranks that need the keys of ``rank``, as bits."""
        return sum(1 << other for other in range(self.world_size) if other != rank and self.needed(other) >= rank)

    def grid(self, rank: int, sm_count: int) -> int:
        """Blocks: no more than there is work for."""
        share = self.shares[rank]
        return min(sm_count, max(self.lines * (share.own + share.count), self.pieces))

    def fixed(self, reserved: Reserved) -> dict[str, Any]:
        shape, rank = self.shape, reserved.group.rank
        share, results = self.shares[rank], reserved.addresses("result")
        host = next((other for other, theirs in enumerate(self.shares) if theirs.count and theirs.owner == rank), 0)
        hosted = self.shares[host] if self.shares[host].count and self.shares[host].owner == rank else Share(0)

        def pushed(name: str, batches: int, heads: int, depth: int, rows: int) -> TensorMapSpec:
            place = transposed_place(reserved.addresses(name)[rank], self.dtype, (batches, shape.length, heads, depth))
            return operand_map(place, rows)

        keys = 2 * self.world_size * shape.batch, shape.key_heads
        fields = {
            **{name: getattr(shape, name) for name in ("batch", "heads", "key_heads", "length", "depth", "value_depth")},
            "causal": int(shape.causal),
            "own_blocks": share.own,
            "guest_rank": share.owner,
            "first_guest": share.first,
            "guest_blocks": share.count,
            "host_rank": host,
            "first_hosted": hosted.first,
            "hosted_blocks": hosted.count,
            "lines_at_once": min(self.lines, -(-reserved.group.sm_count // (share.own + share.count))),
            "piece_tokens": self.piece_tokens,
            "targets": self.targets(rank),
            "out": operand_map(plain_place(results[rank], self.dtype, self.result_shape), 64),
            "gathered_k": pushed("gathered_k_at", *keys, shape.depth, self.tiling.keys),
            "gathered_v": pushed("gathered_v_at", *keys, shape.value_depth, self.tiling.keys),
        }
        if share.count:
            fields["guest_q"] = pushed("guest_q_at", 2 * shape.batch, shape.heads, shape.depth, self.tiling.queries)
            fields["guest_out"] = operand_map(plain_place(results[share.owner], self.dtype, self.result_shape), 64)
        return fields

    def maps(self, q: TensorPlace, k: TensorPlace, v: TensorPlace) -> dict[str, Any]:
        return {
            "q": operand_map(q, self.tiling.queries),
            "k": operand_map(k, self.tiling.keys),
            "v": operand_map(v, self.tiling.keys),
            "parcels_k": parcel_map(k),
            "parcels_v": parcel_map(v),
            "parcels_q": parcel_map(q),
        }

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if (given := Shape.of(q, k, v, self.shape.causal)) != self.shape:
            raise UsageError(f"ring attention of {given}: expected {self.shape}; create a RingAttention for each shape")


class RingAttention(ShardAttention):
    """``call(q, k, v, scale)`` for one shape of shards: attention to the keys of all ranks, in rank order, and logarithms of sums of
    exponentials.

    q (B, S, h, D), k (B, S, h_kv, D), v (B, S, h_kv, D_v): bfloat16 or float16, of one shape on all ranks. ``causal``: a query sees the
    keys up to its own place in the whole sequence. The results (B, S, h, D_v) and (B, h, S; float32) lie in the arena and are valid until
    the next call. Creating one is collective. Calls in one stream need no barrier between them and can be captured in a graph."""

    def __init__(
        self,
        shape: Shape,
        group: Group | dist.ProcessGroup | None = None,
        *,
        timeout_s: float | None = None,
        tiling: AttentionTiling | None = None,
        balanced: bool | None = None,
    ) -> None:
        ranks = group_of(group)
        super().__init__(RING_ATTENTION, RingPlan.of(shape, ranks.world_size, tiling, balanced), ranks, timeout_s)
        self.logarithms = self.reserved.tensor("logarithms", (shape.batch, shape.heads, shape.length), torch.float32)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        self.launch(q, k, v, scale)
        return self.out, self.logarithms


@per_group
def ring_attention(group: Group, shape: Shape) -> RingAttention:
    """The group's one :class:`RingAttention` of this shape; the first call is collective."""
    return RingAttention(shape, group)


def attend_over_ranks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    group: Group | dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective: attention of this rank's queries to the keys of all ranks of ``group``, as :class:`RingAttention` has it, for any dtype.

    What the tensor cores' kernel does not take, such as float32, is gathered and computed by torch. A result of the kernel is valid until
    the group's next call with this shape."""
    member = group_of(group)
    if supports(q, k, v):
        if member.world_size == 1:
            return forward.attention(q, k, v, scale=scale, causal=causal, group=member)
        return ring_attention(member, Shape.of(q, k, v, causal))(q, k, v, scale)
    shards = [own.unsqueeze(0) if member.world_size == 1 else communicator(member).all_gather(own) for own in (k, v)]
    seen = range(member.rank + 1 if causal else member.world_size)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    parts = [wide_attention(q, shards[0][i], shards[1][i], scale=factor, causal=causal and i == member.rank) for i in seen]
    out, logarithms = merge(parts)
    return out.to(q.dtype), logarithms


def attention_layer(
    hidden_states: torch.Tensor,
    w_qkv: torch.Tensor,
    w_o: torch.Tensor,
    heads: int,
    *,
    scale: float | None = None,
    causal: bool = False,
    group: Group | dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Collective: hidden_states (B, S, H) projected by w_qkv (3 h D, H; rows of Q, of K and of V, each head by head), attention over the
    ranks of ``group``, and the result projected by w_o (H_out, h D): (B, S, H_out)."""
    q, k, v = torch.matmul(hidden_states, w_qkv.t()).view(*hidden_states.shape[:2], 3, heads, -1).unbind(2)
    context, _ = attend_over_ranks(q, k, v, scale=scale, causal=causal, group=group)
    return torch.matmul(context.flatten(2), w_o.t())
