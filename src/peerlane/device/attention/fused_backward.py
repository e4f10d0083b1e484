"""Host side of ``peerlane/attention/fused_attention_backward.cuh``: gradients of attention by one kernel, and a launch that rounds dq."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from peerlane.device.attention.forward import KEYS_IN_L2, Sizes, aligned, check_scale, operand_map
from peerlane.device.host.declare import F32, I32, U32, U64, BoundKernel, LocalKernel, Map, Pointer, array, layouts, roles_source
from peerlane.device.host.group import Group
from peerlane.device.host.roles import GROUP_THREADS
from peerlane.device.products.gemm import ELEMENT_BYTES, ELEMENT_TYPES, PANEL

_GROUPS = 2


@dataclass(frozen=True)
class FusedTiling:
    """One instance of ``peerlane::FusedBackwardShape``: blocks of ``columns`` queries, heads of at most ``depth`` elements, ``slots``
    blocks in flight. ``ordered``: tiles add to dq in a fixed order, so that calls with the same arguments give the same bits; else the
    caller zeroes the sums before each launch."""

    columns: int
    depth: int
    slots: int = 5
    ordered: bool = True

    rows = 64 * _GROUPS
    threads = GROUP_THREADS * (1 + _GROUPS)

    @property
    def shared_bytes(self) -> int:
        """``sizeof(RoleMemory)``: keys and values, ds of two steps, blocks with 1024 bytes of numbers, pieces of dq, and barriers."""
        elements = 2 * self.rows * (self.depth + self.columns) + self.slots * self.columns * self.depth
        return elements * ELEMENT_BYTES + _GROUPS * self.piece_floats * 4 + 1024 * (self.slots + 1)

    @property
    def piece_floats(self) -> int:
        """Returns the floats in the part of a block's dq that a group adds."""
        return self.columns * self.depth // _GROUPS

    def defines(self, dtype: torch.dtype) -> dict[str, str | int]:
        numbers = f"{self.columns}, {self.depth}, {self.slots}, {str(self.ordered).lower()}"
        return {"SHAPE": f"peerlane::FusedBackwardShape<{ELEMENT_TYPES[dtype]}, {numbers}>"}

    def pieces(self, sizes: Sizes) -> int:
        """Parts of dq that tiles of keys add to, each of ``piece_floats``."""
        return sizes.batch * sizes.heads * -(-sizes.queries // self.columns) * _GROUPS


TILINGS = FusedTiling(64, 128), FusedTiling(128, 64)


def choose_tiling(depth: int) -> FusedTiling:
    return TILINGS[depth <= PANEL]


SOURCE = roles_source(
    "fused_attention_backward", "attention/fused_attention_backward.cuh", "FusedBackwardRoles", local=True, clusters=False
)
FUSED_ATTENTION_BACKWARD = LocalKernel(
    "fused_attention_backward",
    SOURCE,
    **dict.fromkeys(("q", "k", "v", "dout"), Map()),
    out=Map(2),
    numbers=Pointer("const float*"),
    sums=Pointer("float*"),
    **dict.fromkeys(("turns", "claims"), Pointer("u32*")),
    scale=F32,
    gradient_scale=F32,
    **dict.fromkeys(("batch", "heads", "key_heads", "queries", "keys", "padded", "causal"), U32),
    offset=I32,
    lines_at_once=U32,
)

QUERIES_SOURCE = r"""
#include <peerlane/attention/fused_attention_backward.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(256) query_gradients(const __grid_constant__ QueryGradients args) {
    write_query_gradients<ELEMENT, COLUMNS, DEPTH>(args);
}
"""
QUERY_GRADIENTS = LocalKernel(
    "query_gradients",
    QUERIES_SOURCE,
    sums=Pointer("const float*"),
    dq=Pointer("char*", strided=True),
    dq_strides=array(U64, 3),
    gradient_scale=F32,
    **dict.fromkeys(("batch", "heads", "queries", "depth", "causal"), U32),
    offset=I32,
)


def bind(
    group: Group, tensors: Mapping[str, torch.Tensor], sizes: Sizes, scale: float | None, tiling: FusedTiling | None = None
) -> BoundKernel:
    """The launch that writes dk and dv of ``tensors``, and the sums of dq: q, k, v, dout, dk and dv, all ``aligned``.

    They also have numbers, as ``query_numbers`` gives them; sums (pieces, piece_floats; float32), zero if the tiling is not ordered; turns
    (pieces; int32, zero) and claims (1; int32, zero), which launches of one stream may share. The launch holds addresses, not tensors."""
    depths = [tensors[name].shape[3] for name in ("q", "v")]
    tiling = tiling or choose_tiling(max(depths))
    rows = {"q": tiling.columns, "dout": tiling.columns, "k": tiling.rows, "v": tiling.rows}
    maps: dict[str, Any] = {name: operand_map(group.place(tensors[name]), count) for name, count in rows.items()}
    lines, share = sizes.batch * sizes.key_heads, sizes.heads // sizes.key_heads
    streamed_bytes = sizes.queries * (sum(depths) * ELEMENT_BYTES + tiling.depth * 4) * share
    return FUSED_ATTENTION_BACKWARD.bind(
        group,
        grid=min(group.sm_count, lines * -(-sizes.keys // tiling.rows)),
        block=tiling.threads,
        shared_bytes=tiling.shared_bytes,
        defines=tiling.defines(tensors["q"].dtype),
        **maps,
        out=[operand_map(group.place(tensors[name]), 64) for name in ("dk", "dv")],
        numbers=tensors["numbers"],
        sums=tensors["sums"],
        turns=tensors["turns"],
        claims=tensors["claims"],
        scale=check_scale(scale, depths[0]),
        gradient_scale=gradient_scale(scale, depths[0]),
        padded=tensors["numbers"].shape[-1],
        lines_at_once=min(lines, max(1, KEYS_IN_L2 // streamed_bytes)) if sizes.causal else 1,
        **sizes.fields(),
    )


def bind_queries(
    group: Group, sums: torch.Tensor, dq: torch.Tensor, sizes: Sizes, scale: float | None, tiling: FusedTiling | None = None
) -> BoundKernel:
    """The launch that writes ``dq`` of the sums that a launch of ``bind`` has left."""
    tiling = tiling or choose_tiling(dq.shape[3])
    return QUERY_GRADIENTS.bind(
        group,
        grid=min(8 * group.sm_count, sums.shape[0] // 2),
        block=256,
        defines={"ELEMENT": ELEMENT_TYPES[dq.dtype], "COLUMNS": tiling.columns, "DEPTH": tiling.depth},
        sums=sums,
        dq=dq,
        dq_strides=[stride * ELEMENT_BYTES for stride in dq.stride()[:3]],
        gradient_scale=gradient_scale(scale, dq.shape[3]),
        depth=dq.shape[3],
        **{name: value for name, value in sizes.fields().items() if name not in ("key_heads", "keys")},
    )


def gradient_scale(scale: float | None, depth: int) -> float:
    return depth**-0.5 if scale is None else scale


def fused_gradients(
    group: Group, known: Mapping[str, torch.Tensor], sizes: Sizes, scale: float | None, *, ordered: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv. ``known``: q, k, v, dout and numbers, as ``query_numbers`` gives them. ``ordered``: the same bits in every call."""
    tensors = {name: aligned(known[name]) for name in ("q", "k", "v", "dout")}
    results = {f"d{name}": tensors[name].new_empty(known[name].shape) for name in ("q", "k", "v")}
    tiling = replace(choose_tiling(max(known["q"].shape[3], known["v"].shape[3])), ordered=ordered)
    pieces = tiling.pieces(sizes)
    sums = known["numbers"].new_empty((pieces, tiling.piece_floats))
    if not ordered:
        sums.zero_()
    zeros = torch.zeros(pieces + 1, dtype=torch.int32, device=sums.device)
    tensors |= {**results, "numbers": known["numbers"], "sums": sums, "turns": zeros[:pieces], "claims": zeros[pieces:]}
    key = tiling, sizes, scale, layouts(group, *tensors.values())
    FUSED_ATTENTION_BACKWARD.reserve(group).launches.get(key, lambda: bind(group, tensors, sizes, scale, tiling))()
    key = tiling, sizes, scale, layouts(group, sums, results["dq"])
    QUERY_GRADIENTS.reserve(group).launches.get(key, lambda: bind_queries(group, sums, results["dq"], sizes, scale, tiling))()
    return results["dq"], results["dk"], results["dv"]
