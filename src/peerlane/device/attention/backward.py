"""Gradients of attention on one rank: by the fused kernel, or by the two of ``attention_backward.cuh``, which shards use."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from peerlane.device.attention.forward import KEYS_IN_L2, Sizes, aligned, check_operands, check_scale, operand_map
from peerlane.device.attention.fused_backward import fused_gradients, gradient_scale
from peerlane.device.host.declare import F32, I32, U32, U64, BoundKernel, LocalKernel, Map, Pointer, array, layouts, roles_source
from peerlane.device.host.group import Group
from peerlane.device.host.group_of import group_of
from peerlane.device.host.roles import GROUP_THREADS
from peerlane.device.products.gemm import ELEMENT_BYTES, ELEMENT_TYPES, PANEL
from peerlane.errors import UsageError

PADDING = 128
"""Queries that numbers of a head are padded to a multiple of: at least a block."""

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class BackwardTiling:
    """One instance of ``peerlane::BackwardShape``: tiles of 64 ``groups`` rows, blocks of ``columns`` rows, heads of at most ``depth``
    elements, ``slots`` blocks and ``output_slots`` pieces of results of each group in flight. ``of_keys``: gradients of keys and values,
    else of queries."""

    of_keys: bool
    groups: int
    columns: int
    depth: int
    slots: int
    output_slots: int = 1

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return GROUP_THREADS * (1 + self.groups)

    @property
    def shared_bytes(self) -> int:
        """``sizeof(RoleMemory)``: two kept operands, blocks with 1024 bytes of numbers, results on their way out, and barriers."""
        output = self.groups * self.output_slots * 64 * PANEL
        elements = 2 * self.rows * self.depth + self.slots * self.columns * self.depth + output
        return elements * ELEMENT_BYTES + 1024 * (self.slots + 1)

    def defines(self, dtype: torch.dtype) -> dict[str, str | int]:
        numbers = f"{self.groups}, {self.columns}, {self.depth}, {self.slots}, {self.output_slots}, {str(self.of_keys).lower()}"
        return {"SHAPE": f"peerlane::BackwardShape<{ELEMENT_TYPES[dtype]}, {numbers}>"}


TILINGS = (
    BackwardTiling(True, 2, 64, 128, 6),
    BackwardTiling(True, 2, 128, 64, 6),
    BackwardTiling(False, 2, 128, 128, 4),
    BackwardTiling(False, 2, 128, 64, 6, 2),
    *(BackwardTiling(of_keys, 1, 32, depth, 4) for of_keys in (False, True) for depth in (64, 128)),
)


def choose_tiling(of_keys: bool, rows: int, depth: int) -> BackwardTiling:
    """Returns the tiling for ``rows`` keys or queries."""
    wanted = of_keys, 1 if rows <= 64 else 2, 2 * PANEL if depth > PANEL else PANEL
    return next(item for item in TILINGS if (item.of_keys, item.groups, item.depth) == wanted)


SOURCE = roles_source("attention_backward", "attention/attention_backward.cuh", "AttentionBackwardRoles", local=True, clusters=False)
ATTENTION_BACKWARD = LocalKernel(
    "attention_backward",
    SOURCE,
    **dict.fromkeys(("x", "y", "a", "b"), Map()),
    out=Map(2),
    numbers=Pointer("const float*"),
    claims=Pointer("u32*"),
    scale=F32,
    gradient_scale=F32,
    **dict.fromkeys(("batch", "heads", "key_heads", "queries", "keys", "padded", "causal"), U32),
    offset=I32,
    lines_at_once=U32,
)


def bind(
    group: Group,
    tensors: Mapping[str, torch.Tensor],
    sizes: Sizes,
    scale: float | None,
    of_keys: bool,
    tiling: BackwardTiling | None = None,
) -> BoundKernel:
    """The launch that writes ``dk`` and ``dv``, or ``dq``, of ``tensors``: q, k, v, dout and the results, all ``aligned``.

    They also have numbers, as ``query_numbers`` gives them, and claims (1; int32, zero), which launches of one stream may share. The launch
    holds addresses, not tensors."""
    depths = [tensors[name].shape[3] for name in ("q", "v")]
    lengths = (sizes.keys, sizes.queries) if of_keys else (sizes.queries, sizes.keys)
    tiling = tiling or choose_tiling(of_keys, lengths[0], max(depths))
    kept, streamed = (("k", "v"), ("q", "dout")) if of_keys else (("q", "dout"), ("k", "v"))
    rows = (*((name, tiling.rows) for name in kept), *((name, tiling.columns) for name in streamed))
    operands = [operand_map(group.place(tensors[name]), count) for name, count in rows]
    maps: dict[str, Any] = dict(zip(("x", "y", "a", "b"), operands, strict=True))
    results = [operand_map(group.place(tensors[name]), 64) for name in (("dk", "dv") if of_keys else ("dq", "dq"))]
    lines = sizes.batch * (sizes.key_heads if of_keys else sizes.heads)
    share = 1 if of_keys else sizes.heads // sizes.key_heads
    streamed_bytes = lengths[1] * sum(depths) * ELEMENT_BYTES * (sizes.heads // sizes.key_heads if of_keys else 1)
    return ATTENTION_BACKWARD.bind(
        group,
        grid=min(group.sm_count, lines * -(-lengths[0] // tiling.rows)),
        block=tiling.threads,
        shared_bytes=tiling.shared_bytes,
        defines=tiling.defines(tensors["q"].dtype),
        **maps,
        out=results,
        numbers=tensors["numbers"],
        claims=tensors["claims"],
        scale=check_scale(scale, depths[0]),
        gradient_scale=gradient_scale(scale, depths[0]),
        padded=tensors["numbers"].shape[-1],
        lines_at_once=min(lines, share * max(1, KEYS_IN_L2 // streamed_bytes)) if sizes.causal else 1,
        **sizes.fields(),
    )


NUMBERS_SOURCE = r"""
#include <peerlane/attention/attention_backward.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(THREADS) attention_numbers(const __grid_constant__ AttentionNumbers args) {
    write_numbers<ELEMENT>(args);
}
"""
ATTENTION_NUMBERS = LocalKernel(
    "attention_numbers",
    NUMBERS_SOURCE,
    dout=Pointer("const char*", strided=True),
    out=Pointer("const char*", strided=True),
    logarithms=Pointer("const float*"),
    numbers=Pointer("float*"),
    dout_strides=array(U64, 3),
    out_strides=array(U64, 3),
    **dict.fromkeys(("batch", "heads", "queries", "depth", "padded"), U32),
)
_NUMBERS_THREADS, _NUMBERS_BLOCKS_PER_SM, _ROWS_AT_ONCE = 256, 8, 4


def _bind_numbers(group: Group, dout: torch.Tensor, out: torch.Tensor, logarithms: torch.Tensor, numbers: torch.Tensor) -> BoundKernel:
    batch, queries, heads, depth = dout.shape
    padded = numbers.shape[-1]
    blocks = -(-batch * heads * padded * 16 // (_ROWS_AT_ONCE * _NUMBERS_THREADS))
    return ATTENTION_NUMBERS.bind(
        group,
        grid=min(_NUMBERS_BLOCKS_PER_SM * group.sm_count, blocks),
        block=_NUMBERS_THREADS,
        defines={"ELEMENT": ELEMENT_TYPES[dout.dtype], "THREADS": _NUMBERS_THREADS},
        dout=dout,
        out=out,
        logarithms=logarithms,
        numbers=numbers,
        dout_strides=[stride * ELEMENT_BYTES for stride in dout.stride()[:3]],
        out_strides=[stride * ELEMENT_BYTES for stride in out.stride()[:3]],
        batch=batch,
        heads=heads,
        queries=queries,
        depth=depth,
        padded=padded,
    )


def query_numbers(
    group: Group, dout: torch.Tensor, out: torch.Tensor, logarithms: torch.Tensor, numbers: torch.Tensor | None = None
) -> torch.Tensor:
    """What the kernels know of queries: (2, B, h, padded S; float32), by one launch; in ``numbers``, if that is given.

    dout and out (B, S, h, D); logarithms of sums of exponentials (B, h, S; float32)."""
    dout, out, logarithms = aligned(dout), aligned(out.to(dout.dtype)), logarithms.float().contiguous()
    batch, queries, heads, _ = dout.shape
    if numbers is None:
        numbers = logarithms.new_empty((2, batch, heads, -(-queries // PADDING) * PADDING))
    key = layouts(group, dout, out, logarithms, numbers)
    ATTENTION_NUMBERS.reserve(group).launches.get(key, lambda: _bind_numbers(group, dout, out, logarithms, numbers))()
    return numbers


def pad_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers (2, B, h, S) of queries as ``query_numbers`` gives them."""
    missing = -numbers.shape[3] % PADDING
    if missing == 0:
        return numbers.contiguous()
    return torch.stack((pad(numbers[0], (0, missing), value=math.inf), pad(numbers[1], (0, missing))))


def gradients(
    group: Group, known: Mapping[str, torch.Tensor], sizes: Sizes, scale: float | None, *, of_keys: bool
) -> tuple[torch.Tensor, ...]:
    """dk and dv, or dq, by one launch. ``known``: q, k, v, dout and numbers, as ``query_numbers`` gives them; also claims (1; int32, zero),
    dq, dk and dv if the caller keeps them from call to call, so that the launch need not be bound anew."""
    tensors = {name: aligned(known[name]) for name in ("q", "k", "v", "dout")}
    names = ("k", "v") if of_keys else ("q",)
    results = {f"d{name}": known[f"d{name}"] if f"d{name}" in known else tensors[name].new_empty(known[name].shape) for name in names}
    claims = known["claims"] if "claims" in known else torch.zeros(1, dtype=torch.int32, device=known["q"].device)
    tensors |= {**results, "numbers": known["numbers"], "claims": claims}
    key = of_keys, sizes, scale, layouts(group, *tensors.values())
    ATTENTION_BACKWARD.reserve(group).launches.get(key, lambda: bind(group, tensors, sizes, scale, of_keys))()
    return tuple(results.values())


def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logarithms: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    offset: int | None = None,
    group: Group | None = None,
    fused: bool = True,
    ordered: bool = True,
) -> Gradients:
    """Gradients of :func:`peerlane.device.attention.forward.attention` with respect to q, k and v, from that of its result, ``dout``.

    ``out`` and ``logarithms`` are what it returned for the other arguments. ``fused``: by one kernel, for more than 64 queries and keys;
    else by two. The gradients are the same in every call, unless ``fused`` is not ``ordered``."""
    check_operands(q, k, v)
    if dout.shape != out.shape or out.shape != (*q.shape[:3], v.shape[3]) or dout.dtype != q.dtype:
        raise UsageError(
            f"gradients of attention with dout {tuple(dout.shape)} in {dout.dtype} and out {tuple(out.shape)}: expected "
            f"{(*q.shape[:3], v.shape[3])} in {q.dtype} both"
        )
    sizes, member = Sizes.of(q, k, causal, offset), group or group_of()
    known = {"q": q, "k": k, "v": v, "dout": dout, "numbers": query_numbers(member, dout, out, logarithms)}
    if fused and min(sizes.queries, sizes.keys) > 64:
        return fused_gradients(member, known, sizes, scale, ordered=ordered)
    (dq,) = gradients(member, known, sizes, scale, of_keys=False)
    dk, dv = gradients(member, known, sizes, scale, of_keys=True)
    return dq, dk, dv
