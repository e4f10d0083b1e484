"""Host side of ``peerlane/ulysses_attention.cuh``: attention whose heads are shared by the ranks and whose sequence lies in shards."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from peerlane.device.attention import forward
from peerlane.device.attention.backward import Gradients, attention_backward
from peerlane.device.attention.forward import AttentionTiling, aligned, check_scale, operand_map, supports, wide_attention
from peerlane.device.attention.ring import MAX_EPOCH_BLOCKS, PARCEL_BYTES, PARCELS, attend_over_ranks, parcel_tokens
from peerlane.device.attention.ring_backward import attend_over_ranks_backward
from peerlane.device.attention.short import is_short, short_attention
from peerlane.device.collectives.strided import exchange_axes
from peerlane.device.host.arena import Arena
from peerlane.device.host.group import MAX_RANKS, DeviceLaunch, Group, per_group
from peerlane.device.host.group_of import group_of
from peerlane.device.host.layout import LINE_BYTES
from peerlane.device.host.roles import BlockNeeds, require_resident
from peerlane.device.host.tensor_map import TensorMap, TensorMapSpec, TensorPlace
from peerlane.device.products.gemm import ELEMENT_BYTES
from peerlane.errors import UsageError

_PIECE_BYTES = 64 << 10
"""Of keys and values that one signal speaks for, if a block of keys is not more."""
_KEPT_LAUNCHES = 512


class Parameters(ctypes.Structure):
    """Mirrors ``peerlane::UlyssesAttentionParameters``."""

    _fields_ = (
        *((name, TensorMap * 3) for name in ("own", "gathered", "parcels")),
        ("out", TensorMap * MAX_RANKS),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in ("batch", "heads", "length", "depth", "causal", "lines_at_once", "piece_tokens")),
        ("gathered_at", ctypes.c_uint64 * 3),
        *((name, ctypes.c_uint64) for name in ("flags", "epochs", "claims")),
        ("padding", ctypes.c_uint64 * 6),
    )


@dataclass(frozen=True)
class Workspace:
    """What all ranks agree on: shards of q, k and v (batch, length, world_size heads, depth), and what lies in the arena."""

    batch: int
    length: int
    heads: int
    """of a rank"""
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
        return self.tiling.keys * max(1, _PIECE_BYTES // (2 * self.tiling.keys * self.depth * ELEMENT_BYTES))

    @property
    def shared_bytes(self) -> int:
        return self.tiling.shared_bytes + PARCELS * PARCEL_BYTES

    @property
    def gathered_bytes(self) -> int:
        """Of one operand."""
        return 2 * self.world_size * self.lines * self.length * self.depth * ELEMENT_BYTES

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Bytes and alignment of every part of the arena."""
        blocks = self.tiling.tiles(self.length)
        flags = 1 + self.lines * (-(-self.length // self.piece_tokens) + blocks * (1 + self.tiling.groups))
        return {
            **{f"gathered_{operand}": (self.gathered_bytes, 1024) for operand in "qkv"},
            "out": (self.world_size * self.lines * self.length * self.depth * ELEMENT_BYTES, 1024),
            "flags": (flags * self.world_size * LINE_BYTES, LINE_BYTES),
            "epochs": (4 * MAX_EPOCH_BLOCKS, LINE_BYTES),
            "claims": (8, LINE_BYTES),
        }

    @property
    def result_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.length, self.world_size * self.heads, self.depth

    def grid(self, sm_count: int) -> int:
        """Blocks: no more than there is work for."""
        return min(sm_count, self.lines * self.world_size * self.tiling.tiles(self.length))

    def specs(
        self, places: Sequence[TensorPlace], bases: Sequence[int], offsets: Mapping[str, int], rank: int
    ) -> dict[str, list[TensorMapSpec]]:
        """All maps of a launch: ``places`` are those of q, k and v, ``bases`` where every rank's arena lies."""
        rows = (self.tiling.queries, self.tiling.keys, self.tiling.keys)
        line = self.length * self.depth
        gathered = [
            TensorPlace(
                bases[rank] + offsets[f"gathered_{operand}"],
                self.dtype,
                (2 * self.world_size * self.batch, self.length, self.heads, self.depth),
                (self.heads * line, self.depth, line, 1),
            )
            for operand in "qkv"
        ]
        row = self.world_size * self.heads * self.depth
        results = [
            TensorPlace(bases[other] + offsets["out"], self.dtype, self.result_shape, (self.length * row, row, self.depth, 1))
            for other in range(self.world_size)
        ]
        return {
            "own": [operand_map(place, count) for place, count in zip(places, rows, strict=True)],
            "gathered": [operand_map(place, count) for place, count in zip(gathered, rows, strict=True)],
            "parcels": [place.map((parcel_tokens(self.depth), 1, self.depth), swizzled=False) for place in places],
            "out": [operand_map(place, 64) for place in results],
        }

    def parameters(self, maps: Mapping[str, list[TensorMap]], scale: float, offsets: Mapping[str, int], sm_count: int) -> Parameters:
        return Parameters(
            **{name: (TensorMap * 3)(*maps[name]) for name in ("own", "gathered", "parcels")},
            out=(TensorMap * MAX_RANKS)(*maps["out"]),
            scale=scale,
            batch=self.batch,
            heads=self.heads,
            length=self.length,
            depth=self.depth,
            causal=int(self.causal),
            lines_at_once=min(self.lines, -(-sm_count // (self.world_size * self.tiling.tiles(self.length)))),
            piece_tokens=self.piece_tokens,
            gathered_at=(ctypes.c_uint64 * 3)(*(offsets[f"gathered_{operand}"] for operand in "qkv")),
            **{name: offsets[name] for name in ("flags", "epochs", "claims")},
        )


SOURCE = r"""
#include <peerlane/ulysses_attention.cuh>

using Shape = SHAPE;
using Fused = peerlane::UlyssesAttention<Shape, WORLD_SIZE>;

extern "C" __global__ void __launch_bounds__(Shape::roles.threads(), 1) ulysses_attention(
    const __grid_constant__ Fused::Parameters parameters, const __grid_constant__ peerlane::Arena arena) {
    peerlane::run_roles(Fused(parameters, arena));
}
"""


class UlyssesAttention:
    """``call(q, k, v, scale)`` for one shape of shards: attention over the sequence of all ranks, in rank order.

    q, k and v (B, S, h, D): bfloat16 or float16, of one shape on all ranks, h divisible by the ranks. ``causal``: a query sees the keys up
    to its own place in the whole sequence. The result (B, S, h, D) lies in the arena and is valid until the next call. Creating one is
    collective. Calls in one stream need no barrier between them and can be captured in a graph."""

    def __init__(self, workspace: Workspace, group: Group | dist.ProcessGroup | None = None, *, timeout_s: float = 10.0) -> None:
        self.group, self.workspace = group_of(group), workspace
        self.arena = Arena(
            sum(size + align for size, align in workspace.parts.values()), self.group, timeout_s=timeout_s, name="ulysses_attention"
        )
        self.offsets = {name: self.arena.take(size, align=align) for name, (size, align) in workspace.parts.items()}
        self.arena.seal()
        defines: dict[str, str | int] = {"SHAPE": workspace.tiling.define(workspace.dtype), "WORLD_SIZE": workspace.world_size}
        self.kernel = self.group.kernel(SOURCE, "ulysses_attention", defines=defines, on_failure=self.arena.raise_fault)
        self.grid = workspace.grid(self.arena.sm_count)
        needs = BlockNeeds(workspace.tiling.threads, self.kernel.attributes()["registers"], workspace.shared_bytes)
        require_resident("ulysses_attention", self.grid, needs, self.arena.sm_count)
        self.out = self.arena.tensor(self.offsets["out"], workspace.result_shape, workspace.dtype)
        self._launches: dict[tuple[int, int, int, float | None], DeviceLaunch] = {}

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        q, k, v = aligned(q), aligned(k), aligned(v)
        key = self.group.address(q), self.group.address(k), self.group.address(v), scale
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) == _KEPT_LAUNCHES:
                self._launches.clear()
            launch = self._launches[key] = self.bind(q, k, v, scale)
        launch()
        return self.out

    def bind(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> DeviceLaunch:
        """The launch for these tensors. It holds their addresses, not them."""
        space = self.workspace
        for tensor in (q, k, v):
            if tuple(tensor.shape) != space.result_shape or tensor.dtype != space.dtype:
                raise UsageError(
                    f"Ulysses attention of {tuple(tensor.shape)} in {tensor.dtype}: expected {space.result_shape} in {space.dtype}; "
                    "create a UlyssesAttention for each shape"
                )
        places = [self.group.place(tensor) for tensor in (q, k, v)]
        specs = space.specs(places, list(self.arena.view.base), self.offsets, self.group.rank)
        maps = {name: [self.group.encode(spec) for spec in several] for name, several in specs.items()}
        arguments = space.parameters(maps, check_scale(scale, space.depth), self.offsets, self.arena.sm_count), self.arena.view
        return self.kernel.bind(self.grid, space.tiling.threads, arguments, shared_bytes=space.shared_bytes)


@per_group
def ulysses_attention(group: Group, batch: int, length: int, heads: int, depth: int, dtype: torch.dtype, causal: bool) -> UlyssesAttention:
    """The group's one :class:`UlyssesAttention` of this shape; ``heads`` are all heads. The first call is collective."""
    tiling = forward.choose_tiling(length, length, depth, causal, parcels=True)
    return UlyssesAttention(Workspace(batch, length, heads // group.world_size, depth, dtype, causal, group.world_size, tiling), group)


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
