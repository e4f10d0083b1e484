"""Reductions: what a collective makes of all ranks' elements, and the element types that its kernels are compiled for.

The device side is ``collectives/reductions.cuh``."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from peerlane.device.host.element_types import ELEMENT_TYPES
from peerlane.errors import UsageError

INTEGERS = {
    torch.int8: "peerlane::Integer<signed char>",
    torch.uint8: "peerlane::Integer<unsigned char>",
    torch.int16: "peerlane::Integer<short>",
    torch.int32: "peerlane::Integer<int>",
    torch.int64: "peerlane::Integer64",
}
_FORMS = {
    "sum": "{}",
    "max": "peerlane::Maximum<{}>",
    "min": "peerlane::Minimum<{}>",
    "avg": "peerlane::Mean<{}, WORLD_SIZE>",
    "premul_sum": "peerlane::Scaled<{}>",
}
OPERATIONS = tuple(_FORMS)
_OF_FLOATS = ("avg", "premul_sum")


@dataclass(frozen=True)
class Reduction:
    """An operation of :data:`OPERATIONS`. ``factor`` is that of ``premul_sum``, the same on all ranks: the sum is multiplied by it."""

    name: str = "sum"
    factor: float = 1.0


SUM = Reduction()


@cache
def _kinds() -> dict[int, tuple[Any, Reduction]]:
    """Returns PyTorch's kinds of reductions and ours, by their hashes."""
    return {hash(kind): (kind, Reduction(name.lower())) for name, kind in dist.ReduceOp.RedOpType.__members__.items()}


def reduction_of(op: Any) -> Reduction:
    """Returns the reduction of a name or of a ``ReduceOp``, which the kit may not have. Raises UsageError for a factor that is a tensor."""
    if isinstance(op, str):
        return Reduction(op)
    kind, reduction = _kinds().get(hash(op), (None, SUM))  # every eager collective asks: two look-ups, no comparison with each kind
    if kind is None or op != kind:
        return Reduction(str(op).lower())
    if reduction.name != "premul_sum":
        return reduction
    _, factor = op.__getstate__()
    if isinstance(factor, torch.Tensor):
        raise UsageError("ReduceOp.PREMUL_SUM with a tensor as its factor; the kit takes a number")
    return Reduction(reduction.name, float(factor))


@cache
def refusal(name: str, dtype: torch.dtype) -> str:
    """Returns the reason why the kit does not reduce ``dtype`` with the operation ``name``; empty if it does."""
    if name not in _FORMS:
        return f"the reduction {name}; the kit reduces with {', '.join(OPERATIONS)}"
    if dtype not in ELEMENT_TYPES and dtype not in INTEGERS:
        known = sorted(str(known).removeprefix("torch.") for known in {**ELEMENT_TYPES, **INTEGERS})
        return f"a reduction of {dtype}; the kit reduces {', '.join(known)}"
    if name in _OF_FLOATS and dtype in INTEGERS:
        return f"the reduction {name} of {dtype}; the kit has it for floating point"
    return ""


def reduced_type(name: str, dtype: torch.dtype) -> str:
    """Returns the C++ element type that reduces ``dtype`` with ``name``; raises UsageError where there is none."""
    if reason := refusal(name, dtype):
        raise UsageError(reason)
    if name == "sum" and dtype in ELEMENT_TYPES:
        return ELEMENT_TYPES[dtype]
    return _FORMS[name].format(INTEGERS.get(dtype) or ELEMENT_TYPES[dtype])


def fills_packets(dtype: torch.dtype) -> bool:
    """Tells whether packets hold whole elements of ``dtype``, so that they can be reduced as they come."""
    return dtype.itemsize <= 4
