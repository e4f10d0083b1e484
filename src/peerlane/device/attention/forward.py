"""Host side of ``peerlane/attention/attention.cuh``: which tiles for which sizes, the maps of the operands, and attention on one rank."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from peerlane.device.host.declare import F32, I32, U32, BoundKernel, LocalKernel, Map, Pointer, layouts, roles_source
from peerlane.device.host.group import Group
from peerlane.device.host.group_of import group_of
from peerlane.device.host.roles import GROUP_THREADS
from peerlane.device.host.tensor_map import TensorMapSpec, TensorPlace
from peerlane.device.products.gemm import ELEMENT_BYTES, ELEMENT_TYPES, PANEL
from peerlane.errors import UsageError

MAX_DEPTH = 128
_LEAST_SCALE = 1e-30
KEYS_IN_L2 = 24 << 20
"""Bytes of keys and values that tiles at work at the same time should not exceed."""


@dataclass(frozen=True)
class AttentionTiling:
    """One instance of ``peerlane::AttentionShape``: tiles of 64 ``groups`` queries, blocks of ``keys`` keys, heads of at most ``depth``
    elements, ``slots`` blocks of keys or values and ``output_slots`` pieces of results of each group in flight."""

    groups: int
    keys: int
    depth: int
    slots: int
    output_slots: int = 2
    turns: bool = True

    @property
    def queries(self) -> int:
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return GROUP_THREADS * (1 + self.groups)

    @property
    def shared_bytes(self) -> int:
        """``sizeof(RoleMemory)``: queries, blocks, results on their way out, and barriers in the last 1024 bytes."""
        output = self.groups * self.output_slots * 64 * PANEL
        return (self.queries * self.depth + self.slots * self.keys * self.depth + output) * ELEMENT_BYTES + 1024

    def define(self, dtype: torch.dtype) -> str:
        numbers = f"{self.groups}, {self.keys}, {self.depth}, {self.slots}, {self.output_slots}, {str(self.turns).lower()}"
        return f"peerlane::AttentionShape<{ELEMENT_TYPES[dtype]}, {numbers}>"

    def tiles(self, queries: int) -> int:
        """Tiles of one head."""
        return -(-queries // self.queries)


TILINGS = (
    AttentionTiling(2, 176, 128, 4, output_slots=1),
    AttentionTiling(2, 160, 128, 4),
    AttentionTiling(2, 128, 128, 5),
    AttentionTiling(3, 128, 64, 6),
    AttentionTiling(2, 128, 64, 8),
    AttentionTiling(1, 64, 128, 4),
    AttentionTiling(1, 64, 64, 4),
    AttentionTiling(1, 32, 128, 4),
    AttentionTiling(1, 32, 64, 4),
)


def choose_tiling(queries: int | None, keys: int, depth: int, causal: bool, *, parcels: bool = False) -> AttentionTiling:
    """Depends on its arguments alone, so ranks that must agree pass the same. The fastest of some on an H100, where tiles are large.
    ``queries``: None for one tiling of all numbers of queries and keys.

    ``parcels``: with some shared memory left for them, and a spare warp."""
    deep = depth > PANEL
    if queries is not None and queries <= 64:
        groups, block = (1, 32) if max(queries, keys) <= 32 else (1, 64)
    elif deep:
        groups, block = 2, 128 if causal else 160 if parcels else 176
    else:
        groups, block = 2 if parcels else 3, 128
    wanted = groups, block, 2 * PANEL if deep else PANEL
    chosen = next(item for item in TILINGS if (item.groups, item.keys, item.depth) == wanted)
    return replace(chosen, output_slots=1) if parcels else chosen


def check_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise UsageError unless there is a kernel for q (B, S_q, h, D), k (B, S_k, h_kv, D), v (B, S_k, h_kv, D_v)."""
    if len({q.dtype, k.dtype, v.dtype}) > 1 or q.dtype not in ELEMENT_TYPES:
        raise UsageError(f"attention of {q.dtype}, {k.dtype} and {v.dtype}: expected all bfloat16 or all float16; convert the tensors")
    shapes = f"attention of q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
    if not (q.dim() == k.dim() == v.dim() == 4) or 0 in (*q.shape, *k.shape, *v.shape):
        raise UsageError(f"{shapes}: expected (batch, tokens, heads, depth) each, none of them 0")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise UsageError(f"{shapes}: expected one batch, one depth of q and k, one length of k and v, and heads of q a multiple of k's")
    if max(q.shape[3], v.shape[3]) > MAX_DEPTH or q.shape[3] % 8 or v.shape[3] % 8:
        raise UsageError(f"{shapes}: expected depths that are multiples of 8 up to {MAX_DEPTH}; pad them with zeros")


def supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether ``check_operands`` finds nothing."""
    try:
        check_operands(q, k, v)
    except UsageError:
        return False
    return True


def check_scale(scale: float | None, depth: int) -> float:
    """The scale of scores, as powers of two; None stands for depth^-0.5."""
    value = depth**-0.5 if scale is None else float(scale)
    if not 0 <= value < math.inf:
        raise UsageError(f"a softmax scale of {value}: expected a finite number that is not negative; scale q instead")
    return max(value, _LEAST_SCALE) * math.log2(math.e)  # 0 times an infinite score would not be a number


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a contiguous copy, with rows that the copy unit can address."""
    *strides, innermost = tensor.stride()
    fits = innermost == 1 and math.gcd(8, *strides) == 8 and tensor.data_ptr() % 16 == 0
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def operand_map(place: TensorPlace, rows: int) -> TensorMapSpec:
    """The map of a tensor (batch, tokens, heads, depth), for ``rows`` tokens of one head."""
    return place.map((rows, 1, PANEL))


SOURCE = roles_source("attention", "attention/attention.cuh", "AttentionRoles", "CAUSAL", local=True, clusters=False)
ATTENTION = LocalKernel(
    "attention",
    SOURCE,
    **dict.fromkeys(("q", "k", "v", "out"), Map()),
    logarithms=Pointer("float*"),
    claims=Pointer("u32*"),
    scale=F32,
    **dict.fromkeys(("batch", "heads", "key_heads", "queries", "keys", "causal"), U32),
    offset=I32,
    lines_at_once=U32,
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call: ``q`` (B, S_q, h, D), ``k`` (B, S_k, h_kv, D)."""

    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    causal: bool
    offset: int

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, causal: bool, offset: int | None) -> "Sizes":
        chosen = k.shape[1] - q.shape[1] if offset is None else offset
        return cls(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], causal, chosen)

    def lines_at_once(self, depths: int) -> int:
        """Heads whose tiles come side by side: one, but under a causal mask as many as keep their keys in L2, of ``depths`` in all."""
        share, held = self.heads // self.key_heads, KEYS_IN_L2 // (self.keys * depths * ELEMENT_BYTES)
        return min(self.heads * self.batch, share * max(1, held)) if self.causal else 1

    def fields(self) -> dict[str, Any]:
        """The sizes as the kernels' structures have them."""
        return {**vars(self), "causal": int(self.causal)}


def defines(tiling: AttentionTiling, dtype: torch.dtype, causal: bool) -> dict[str, str | int]:
    return {"SHAPE": tiling.define(dtype), "CAUSAL": int(causal)}


def bind(
    group: Group, tensors: Mapping[str, torch.Tensor], sizes: Sizes, scale: float, tiling: AttentionTiling | None = None
) -> BoundKernel:
    """The launch for ``tensors`` q, k, v and out, all ``aligned``; under a causal mask claims (1; int32, zero), which launches of one
    stream may share; and logarithms, if they are wanted. ``scale`` as ``check_scale`` gives it. The launch holds addresses, not tensors."""
    depths = [tensors[name].shape[3] for name in ("q", "v")]
    tiling = tiling or choose_tiling(sizes.queries, sizes.keys, max(depths), sizes.causal)
    rows = {"q": tiling.queries, "k": tiling.keys, "v": tiling.keys, "out": 64}
    maps: dict[str, Any] = {name: operand_map(group.place(tensors[name]), count) for name, count in rows.items()}
    return ATTENTION.bind(
        group,
        grid=min(group.sm_count, tiling.tiles(sizes.queries) * sizes.heads * sizes.batch),
        block=tiling.threads,
        shared_bytes=tiling.shared_bytes,
        defines=defines(tiling, tensors["q"].dtype, sizes.causal),
        **maps,
        logarithms=tensors.get("logarithms"),
        claims=tensors.get("claims"),
        scale=scale,
        lines_at_once=sizes.lines_at_once(sum(depths)),
        **sizes.fields(),
    )


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    offset: int | None = None,
    group: Group | None = None,
    tiling: AttentionTiling | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v on this rank alone, and the natural logarithm of the sum of exponentials: (B, S_q, h, D_v) and (B, h, S_q).

    q (B, S_q, h, D), k (B, S_k, h_kv, D), v (B, S_k, h_kv, D_v): bfloat16 or float16; h / h_kv consecutive query heads share a key head.
    ``causal``: key j counts for query i if j <= i + ``offset``, by default S_k - S_q. Queries without keys get 0 and -inf.
    ``batch_invariant``: a query has the same bits whatever other queries, heads and sequences stand beside it.
    """
    check_operands(q, k, v)
    member, sizes, power = group or group_of(), Sizes.of(q, k, causal, offset), check_scale(scale, q.shape[3])
    out = v.new_empty((*q.shape[:3], v.shape[3]))
    logarithms = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    tensors = {"q": aligned(q), "k": aligned(k), "v": aligned(v), "out": out, "logarithms": logarithms}
    if causal:
        tensors["claims"] = torch.zeros(1, dtype=torch.int32, device=q.device)
    if batch_invariant:
        tiling = choose_tiling(None, sizes.keys, max(q.shape[3], v.shape[3]), causal)
    key = power, causal, sizes.offset, tiling, layouts(member, *tensors.values())
    ATTENTION.reserve(member).launches.get(key, lambda: bind(member, tensors, sizes, power, tiling))()
    return out, logarithms


def wide_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`attention` of any dtype by torch, in float32, for as many keys as queries if ``causal``. It holds all scores at a time."""
    share = q.shape[2] // k.shape[2]
    queries, keys, values = (tensor.transpose(1, 2).float() for tensor in (q, k, v))
    keys, values = (tensor.repeat_interleave(share, 1) for tensor in (keys, values))
    scores = torch.matmul(queries, keys.transpose(-1, -2)) * scale
    if causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1), -math.inf)
    logarithms = scores.logsumexp(-1)
    return torch.matmul(torch.exp(scores - logarithms.unsqueeze(-1)), values).transpose(1, 2), logarithms


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to all keys from that to several sets of them: results (B, S, h, D) and logarithms (B, h, S), as :func:`attention` gives
    them. Both in float32; queries without any key get 0 and -inf."""
    logarithms = torch.stack([part for _, part in parts])
    whole = logarithms.logsumexp(0)
    weights = torch.exp(logarithms - whole).masked_fill(whole == -math.inf, 0.0).transpose(-1, -2).unsqueeze(-1)
    return sum((out.float() * weight for (out, _), weight in zip(parts, weights, strict=True)), start=torch.zeros(())), whole
