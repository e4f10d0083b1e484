"""Host side of ``peerlane/ring_attention.cuh``: attention over a sequence that is sharded across ranks, in one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from peerlane.device.attention import forward
from peerlane.device.attention.forward import (
    AttentionTiling,
    aligned,
    check_operands,
    check_scale,
    merge,
    operand_map,
    supports,
    wide_attention,
)
from peerlane.device.collectives.communicator import communicator
from peerlane.device.host.arena import Arena
from peerlane.device.host.group import DeviceLaunch, Group, per_group
from peerlane.device.host.group_of import group_of
from peerlane.device.host.layout import LINE_BYTES
from peerlane.device.host.roles import BlockNeeds, require_resident
from peerlane.device.host.tensor_map import MAX_BOX, TensorMap, TensorMapSpec, TensorPlace
from peerlane.device.products.gemm import ELEMENT_BYTES
from peerlane.errors import UsageError

MAX_EPOCH_BLOCKS = 256  # of arena.cuh
PARCEL_BYTES, PARCELS = 4096, 3  # of RingAttention
_PIECE_BYTES = 64 << 10
"""Of keys and values that one signal speaks for, if a block of keys is not more: a signal costs little, and pieces do not come late."""
_BALANCED_BLOCKS = 4
"""Tiles of a head from which on ranks compute each other's: with fewer, the launch is over before queries and results have travelled."""
_KEPT_LAUNCHES = 512


class Parameters(ctypes.Structure):
    """Mirrors ``peerlane::RingAttentionParameters``."""

    _fields_ = (
        *((name, TensorMap) for name in ("q", "k", "v", "out", "gathered_k", "gathered_v", "guest_q", "guest_out")),
        *((name, TensorMap) for name in ("parcels_k", "parcels_v", "parcels_q")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in ("batch", "heads", "key_heads", "length", "depth", "value_depth", "causal")),
        *((name, ctypes.c_uint32) for name in ("own_blocks", "guest_rank", "first_guest", "guest_blocks")),
        *((name, ctypes.c_uint32) for name in ("host_rank", "first_hosted", "hosted_blocks")),
        *((name, ctypes.c_uint32) for name in ("lines_at_once", "piece_tokens", "targets")),
        *((name, ctypes.c_uint64) for name in ("gathered_k_at", "gathered_v_at", "guest_q_at", "logarithms", "flags", "epochs", "claims")),
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
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Shape:
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
    """By rank. Under a causal mask rank W - 1 - r has more to do than rank r, which takes over some of its last tiles."""
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


def parcel_tokens(depth: int) -> int:
    """Tokens of one head that are copied at a time."""
    return min(MAX_BOX, PARCEL_BYTES // (depth * ELEMENT_BYTES))


@dataclass(frozen=True)
class Workspace:
    """Sizes of what lies in the arena, and a rank's part in a launch."""

    shape: Shape
    world_size: int
    tiling: AttentionTiling
    shares: tuple[Share, ...]

    @classmethod
    def of(cls, shape: Shape, world_size: int, tiling: AttentionTiling | None = None, balanced: bool | None = None) -> Workspace:
        chosen = tiling or forward.choose_tiling(
            shape.length, shape.length, max(shape.depth, shape.value_depth), shape.causal, parcels=True
        )
        balance = chosen.tiles(shape.length) >= _BALANCED_BLOCKS if balanced is None else balanced
        return cls(shape, world_size, chosen, tuple(shares(shape, chosen, world_size, balance)))

    @property
    def lines(self) -> int:
        return self.shape.batch * self.shape.heads

    @property
    def piece_tokens(self) -> int:
        block_bytes = self.tiling.keys * (self.shape.depth + self.shape.value_depth) * ELEMENT_BYTES
        return self.tiling.keys * max(1, _PIECE_BYTES // block_bytes)

    @property
    def pieces(self) -> int:
        """Of all key heads."""
        return self.shape.batch * self.shape.key_heads * -(-self.shape.length // self.piece_tokens)

    @property
    def shared_bytes(self) -> int:
        return self.tiling.shared_bytes + PARCELS * PARCEL_BYTES

    def line_bytes(self, depth: int) -> int:
        """Of one head of one batch entry."""
        return self.shape.length * depth * ELEMENT_BYTES

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Bytes and alignment of every part of the arena."""
        shape, tiles = self.shape, self.lines * self.tiling.tiles(self.shape.length)
        key_lines = 2 * self.world_size * shape.batch * shape.key_heads
        guests = any(share.count for share in self.shares)
        flags = 1 + self.pieces + tiles * (1 + self.tiling.groups)
        return {
            "gathered_k": (key_lines * self.line_bytes(shape.depth), 1024),
            "gathered_v": (key_lines * self.line_bytes(shape.value_depth), 1024),
            "guest_q": (2 * self.lines * self.line_bytes(shape.depth) if guests else 1024, 1024),
            "out": (self.lines * self.line_bytes(shape.value_depth), 1024),
            "logarithms": (self.lines * shape.length * 4, LINE_BYTES),
            "flags": (flags * self.world_size * LINE_BYTES, LINE_BYTES),
            "epochs": (4 * MAX_EPOCH_BLOCKS, LINE_BYTES),
            "claims": (8, LINE_BYTES),
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

    def stored(self, address: int, heads: int, depth: int, batches: int) -> TensorPlace:
        """Memory of the arena (batches, heads, length, depth), seen as (batches, length, heads, depth)."""
        length = self.shape.length
        return TensorPlace(address, self.shape.dtype, (batches, length, heads, depth), (heads * length * depth, depth, length * depth, 1))

    def result(self, address: int) -> TensorPlace:
        """The result in the arena at ``address``."""
        shape = self.shape
        strides = (shape.length * shape.heads * shape.value_depth, shape.heads * shape.value_depth, shape.value_depth, 1)
        return TensorPlace(address, shape.dtype, (shape.batch, shape.length, shape.heads, shape.value_depth), strides)

    def specs(self, places: Mapping[str, TensorPlace], bases: list[int], offsets: Mapping[str, int], rank: int) -> dict[str, TensorMapSpec]:
        """All maps of a launch: ``places`` are those of q, k and v, ``bases`` where every rank's arena lies."""
        shape, share, own = self.shape, self.shares[rank], bases[rank]
        key_batches = 2 * self.world_size * shape.batch
        gathered = {
            "gathered_k": self.stored(own + offsets["gathered_k"], shape.key_heads, shape.depth, key_batches),
            "gathered_v": self.stored(own + offsets["gathered_v"], shape.key_heads, shape.value_depth, key_batches),
        }
        guests = self.stored(own + offsets["guest_q"], shape.heads, shape.depth, 2 * shape.batch)
        rows = {"q": self.tiling.queries, "k": self.tiling.keys, "v": self.tiling.keys}
        return {
            **{name: operand_map(places[name], rows[name]) for name in rows},
            **{name: operand_map(place, self.tiling.keys) for name, place in gathered.items()},
            "out": operand_map(self.result(own + offsets["out"]), 64),
            "guest_q": operand_map(guests if share.count else places["q"], self.tiling.queries),
            "guest_out": operand_map(self.result(bases[share.owner if share.count else rank] + offsets["out"]), 64),
            **{
                f"parcels_{name}": place.map((parcel_tokens(place.shape[3]), 1, place.shape[3]), swizzled=False)
                for name, place in places.items()
            },
        }

    def parameters(self, maps: Mapping[str, TensorMap], scale: float, offsets: Mapping[str, int], rank: int, sm_count: int) -> Parameters:
        shape, share = self.shape, self.shares[rank]
        host = next((other for other, theirs in enumerate(self.shares) if theirs.count and theirs.owner == rank), 0)
        hosted = self.shares[host] if self.shares[host].count and self.shares[host].owner == rank else Share(0)
        return Parameters(
            **maps,
            scale=scale,
            batch=shape.batch,
            heads=shape.heads,
            key_heads=shape.key_heads,
            length=shape.length,
            depth=shape.depth,
            value_depth=shape.value_depth,
            causal=int(shape.causal),
            own_blocks=share.own,
            guest_rank=share.owner,
            first_guest=share.first,
            guest_blocks=share.count,
            host_rank=host,
            first_hosted=hosted.first,
            hosted_blocks=hosted.count,
            lines_at_once=min(self.lines, -(-sm_count // (share.own + share.count))),
            piece_tokens=self.piece_tokens,
            targets=self.targets(rank),
            gathered_k_at=offsets["gathered_k"],
            gathered_v_at=offsets["gathered_v"],
            guest_q_at=offsets["guest_q"],
            **{name: offsets[name] for name in ("logarithms", "flags", "epochs", "claims")},
        )


SOURCE = r"""
#include <peerlane/ring_attention.cuh>

using Shape = SHAPE;
using Fused = peerlane::RingAttention<Shape, WORLD_SIZE>;

extern "C" __global__ void __launch_bounds__(Shape::roles.threads(), 1) ring_attention(
    const __grid_constant__ Fused::Parameters parameters, const __grid_constant__ peerlane::Arena arena) {
    peerlane::run_roles(Fused(parameters, arena));
}
"""


class RingAttention:
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
        timeout_s: float = 10.0,
        tiling: AttentionTiling | None = None,
        balanced: bool | None = None,
    ) -> None:
        self.group, self.shape = group_of(group), shape
        world_size = self.group.world_size
        self.workspace = space = Workspace.of(shape, world_size, tiling, balanced)
        self.arena = Arena(
            sum(size + align for size, align in space.parts.values()), self.group, timeout_s=timeout_s, name="ring_attention"
        )
        self.offsets = {name: self.arena.take(size, align=align) for name, (size, align) in space.parts.items()}
        self.arena.seal()
        defines: dict[str, str | int] = {"SHAPE": space.tiling.define(shape.dtype), "WORLD_SIZE": world_size}
        self.kernel = self.group.kernel(SOURCE, "ring_attention", defines=defines, on_failure=self.arena.raise_fault)
        self.grid = space.grid(self.group.rank, self.arena.sm_count)
        needs = BlockNeeds(space.tiling.threads, self.kernel.attributes()["registers"], space.shared_bytes)
        require_resident("ring_attention", self.grid, needs, self.arena.sm_count)
        self.out = self.arena.tensor(self.offsets["out"], (shape.batch, shape.length, shape.heads, shape.value_depth), shape.dtype)
        self.logarithms = self.arena.tensor(self.offsets["logarithms"], (shape.batch, shape.heads, shape.length), torch.float32)
        self._launches: dict[tuple[int, int, int, float | None], DeviceLaunch] = {}

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = aligned(q), aligned(k), aligned(v)
        key = self.group.address(q), self.group.address(k), self.group.address(v), scale
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) == _KEPT_LAUNCHES:
                self._launches.clear()
            launch = self._launches[key] = self.bind(q, k, v, scale)
        launch()
        return self.out, self.logarithms

    def bind(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> DeviceLaunch:
        """The launch for these tensors. It holds their addresses, not them."""
        if (given := Shape.of(q, k, v, self.shape.causal)) != self.shape:
            raise UsageError(f"ring attention of {given}: expected {self.shape}; create a RingAttention for each shape")
        space, rank, sm_count = self.workspace, self.group.rank, self.arena.sm_count
        places = {name: self.group.place(tensor) for name, tensor in (("q", q), ("k", k), ("v", v))}
        specs = space.specs(places, list(self.arena.view.base), self.offsets, rank)
        maps = {name: self.group.encode(spec) for name, spec in specs.items()}
        arguments = space.parameters(maps, check_scale(scale, q.shape[3]), self.offsets, rank, sm_count), self.arena.view
        return self.kernel.bind(self.grid, space.tiling.threads, arguments, shared_bytes=space.shared_bytes)


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
