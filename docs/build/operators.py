"""The table of what the operators of ``peerlane.ops`` support, and the declarations that it shows. Tests verify them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from docs.build.tables import table
from peerlane.device.collectives.reductions import INTEGERS
from peerlane.device.host.element_types import ELEMENT_TYPES
from peerlane.device.moe.dispatch import DTYPES as _DISPATCHED
from peerlane.device.moe.dispatch import FP8_DTYPES as _DISPATCHED_FP8
from peerlane.device.products.gemm import ELEMENT_TYPES as PRODUCT_TYPES
from peerlane.ops.sharding import SHARDINGS, Sharding

ANY = "any"
_REDUCED = tuple(dict.fromkeys((*ELEMENT_TYPES, *INTEGERS)))
_COLLECTIVES = "one size"
_SHARDS = "with batch, tokens, heads and depth; each shape has its own"


@dataclass(frozen=True)
class Support:
    """An operator's row of the table."""

    fused: tuple[torch.dtype, ...] | str
    """dtypes that run as one kernel of the kit"""
    others: str
    """what other dtypes run on, where the kit serves the group"""
    casts: bool
    """whether autocast casts its operands, as those of torch.mm"""
    memory: str
    """how the kit's memory grows"""
    gradient: str = "yes"
    graph: str = "yes"
    """in CUDA graphs, after one call of the same shape"""


_PRODUCTS = (torch.bfloat16, torch.float16)
_ROUTED = "with tokens, hidden size and slots"
assert set(_PRODUCTS) == set(PRODUCT_TYPES)


def _product(memory: str) -> Support:
    return Support(_PRODUCTS, "a collective and a product", True, memory)


SUPPORT: Mapping[str, Support] = {
    "all_reduce": Support(_REDUCED, "torch.distributed", False, _COLLECTIVES, "of sum and avg"),
    "all_gather": Support(ANY, "", False, _COLLECTIVES),
    "reduce_scatter": Support(_REDUCED, "torch.distributed", False, _COLLECTIVES, "of sum and avg"),
    "all_to_all": Support(ANY, "", False, _COLLECTIVES),
    "all_gatherv": Support(ANY, "", False, _COLLECTIVES),
    "reduce_scatterv": Support(_REDUCED, "torch.distributed", False, _COLLECTIVES, "of sum and avg"),
    "all_gather_gemm": _product("with rows and depth; `prepare` sizes it"),
    "row_gather_gemm": _product("with rows and depth; `prepare` sizes it"),
    "gemm_reduce_scatter": _product("with rows and columns; `prepare` sizes it"),
    "gemm_all_reduce": _product("with rows and columns; `prepare` sizes it"),
    "gemm_all_gather": _product("with rows and columns; `prepare` sizes it"),
    **{
        name: Support((torch.float8_e4m3fn,), "none: they are refused", False, f"with rows and {depth}", "no")
        for name, depth in (("row_gather_gemm_fp8", "depth"), ("gemm_reduce_scatter_fp8", "columns"), ("gemm_all_reduce_fp8", "columns"))
    },
    "grouped_gemm_fp8": Support((torch.float8_e4m3fn,), "none: they are refused", False, "none", "no"),
    "quantize_fp8": Support('bfloat16, float16, float32, but by "tensor"', "torch", False, "none", "no"),
    "quantize_transposed_fp8": Support("bfloat16, float16, float32", "torch", False, "none", "no"),
    "all_reduce_rms_norm": Support(_PRODUCTS, "an all-reduce in float32 and a norm", False, "with hidden size"),
    "all_reduce_rms_norm_fp8": Support(_PRODUCTS, "an all-reduce in float32, a norm and a cast", False, "with hidden size", "no"),
    "reduce_scatter_rms_norm": Support(
        _PRODUCTS, "a reduce-scatter, a norm and an all-gather; so have rows over 32 KiB", False, _COLLECTIVES
    ),
    "reduce_scatter_rms_norm_fp8": Support(
        _PRODUCTS, "a reduce-scatter, a norm, a cast and an all-gather; so have rows over 32 KiB", False, _COLLECTIVES, "no"
    ),
    "ring_attention": Support(_PRODUCTS, "a gather of keys, and torch", True, _SHARDS),
    "ulysses_attention": Support(_PRODUCTS, "two exchanges, and torch", True, _SHARDS),
    "dispatch": Support(_DISPATCHED, "collectives that move, and indexing", False, _ROUTED),
    "dispatch_fp8": Support(_DISPATCHED_FP8, "a cast, collectives that move, and indexing", False, _ROUTED, "no"),
    "combine": Support(_DISPATCHED, "collectives that move, and indexing", False, _ROUTED),
    "gated_experts": Support(_PRODUCTS, "dispatch, torch and combine", True, "with tokens and hidden size", graph="in one-kernel dtypes"),
}


def operators_table() -> str:
    """Returns a row for each operator, in Markdown."""
    columns: dict[str, Callable[[str], str]] = {
        "operator": lambda name: f"`{name}`",
        "one kernel in": lambda name: _dtypes(SUPPORT[name].fused),
        "other dtypes": lambda name: SUPPORT[name].others or "-",
        "layout of DTensors": lambda name: _layout(SHARDINGS[name]) if name in SHARDINGS else "none",
        "kit's ranks": lambda name: "1 to 8",
        "CUDA graph": lambda name: SUPPORT[name].graph,
        "gradient": lambda name: SUPPORT[name].gradient,
        "`torch.compile`": lambda name: "yes",
        "autocast": lambda name: "casts as `torch.mm`" if SUPPORT[name].casts else "leaves dtypes",
        "the kit's memory": lambda name: SUPPORT[name].memory,
    }
    return table(SUPPORT, columns, words=columns)


def _dtypes(fused: tuple[torch.dtype, ...] | str) -> str:
    return fused if isinstance(fused, str) else ", ".join(str(dtype).removeprefix("torch.") for dtype in fused)


def _layout(sharding: Sharding) -> str:
    inputs = [_letter(placement) for placement in sharding.inputs]
    shown = f"{len(inputs)} x {inputs[0]}" if len(inputs) > 2 and len({*inputs}) == 1 else ", ".join(inputs)
    return f"{shown} to {_letter(sharding.result)}"


def _letter(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return "R" if isinstance(placement, Replicate) else "P"
