"""Attention whose heads are shared by the ranks, of sequences of a few tokens: one launch of plain loads and stores.

A block takes a line, that is a head of a batch entry. It pushes this rank's queries, keys and values of the line to the ranks that compute
it, waits for those of its own line, and stores every result where its token lives."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from peerlane.device.attention.forward import MAX_DEPTH, aligned, check_scale
from peerlane.device.host.declare import F32, U32, U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Field, Flags, array
from peerlane.device.host.element_types import element_type
from peerlane.device.host.group import Group, per_group

MAX_TOKENS = 32
"""The most tokens of all ranks. Longer sequences are for the tensor cores."""
_DTYPES = torch.bfloat16, torch.float16, torch.float32

SHORT_ATTENTION = DeclaredKernel(
    "short_attention",
    Path(__file__).with_name("short.cuh"),
    lines=Buffer(),
    out=Buffer(),
    flags=Flags(),
    epochs=Epochs(),
    operands=Field("const char*", ctypes.c_uint64, 3),
    strides=array(U64, 9),
    scale=F32,
    batch=U32,
    length=U32,
    heads=U32,
    depth=U32,
    causal=U32,
)


def is_short(group: Group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether :func:`short_attention` takes these shards, of one shape, whose heads divide by the ranks."""
    tokens, depth = q.shape[1] * group.world_size, q.shape[3]
    one_type = q.dtype in _DTYPES and q.dtype == k.dtype == v.dtype
    return one_type and q.numel() > 0 and tokens <= MAX_TOKENS and depth <= MAX_DEPTH and depth * q.element_size() % 16 == 0


@per_group
def _bound(
    group: Group, shape: tuple[int, int, int, int], dtype: torch.dtype, scale: float, causal: bool
) -> tuple[BoundKernel, torch.Tensor]:
    batch, length, heads, depth = shape
    tokens, own, nbytes = length * group.world_size, heads // group.world_size, batch * length * heads * depth * dtype.itemsize
    bound = SHORT_ATTENTION.bind(
        group,
        grid=min(batch * own, group.waiting_blocks),
        block=min(128 if tokens <= MAX_TOKENS // 2 else 256, group.max_threads),
        defines={"ELEMENT": element_type(dtype)},
        sizes={"lines": 3 * nbytes, "out": nbytes, "flags": 2 * batch * own},
        shared_bytes=4 * (3 * tokens * (depth + 4) + tokens * (tokens + 1)),
        resident=True,
        scale=scale,
        batch=batch,
        length=length,
        heads=own,
        depth=depth,
        causal=int(causal),
    )
    return bound, bound.tensor("out", shape, dtype)


def short_attention(group: Group, operands: Sequence[torch.Tensor], scale: float | None, causal: bool) -> torch.Tensor:
    """Collective: attention to the sequence of all ranks' shards q, k and v (batch, tokens, heads, depth), which ``is_short``.

    The result has their shape. It lies in the arena and is valid until the group's next call with this shape."""
    operands = [aligned(tensor) for tensor in operands]
    batch, length, heads, depth = operands[0].shape
    bound, out = _bound(group, (batch, length, heads, depth), operands[0].dtype, check_scale(scale, depth), causal)
    strides = [stride * out.element_size() for tensor in operands for stride in tensor.stride()[:3]]
    bound(operands=[group.address(tensor) for tensor in operands], strides=strides)
    return out
