"""A data-parallel training step behind the gradient: sums over ranks, Adam and new parameters, in one kernel.

    parameters, exp_avg, exp_avg_sq = adam_step(group, gradient, state, adam, sharded=True, gather=True)        every rank updates a part

Gradients' parts go to their owners, which sum them in rank order, update their part, and, if asked, store the new parameters on all ranks.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peerlane.device import (
    F32,
    U32,
    U64,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Field,
    Flags,
    Group,
    LocalKernel,
    Pointer,
    array,
    communicator,
    element_type,
    per_group,
)
from peerlane.device.products import gemm

COMMON = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int bytes = 4 / ELEMENT::lanes;

// use(i, how many) for every eight elements of `count`; the same for a thread of one number on all ranks.
template <class Use>
__device__ void each_eight(u64 count, const Use& use) {
    for (u64 i = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * row_lanes; i < count; i += u64(gridDim.x) * blockDim.x * row_lanes) {
        use(i, u32(min(count - i, u64(row_lanes))));
    }
}
"""
SOURCE = (
    COMMON
    + r"""
extern "C" __global__ void __launch_bounds__(512) adam_step(const __grid_constant__ Arena arena, const __grid_constant__ AdamStep args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    // Terms lie in one of two buffers by the launch's parity. New parameters are stored behind the first barrier: callers have read the
    // last ones.
    const u64 terms = args.terms + (epoch & 1) * WORLD_SIZE * args.stride;
    if (SHARDED) {
        for (int k = 0; k < WORLD_SIZE; ++k) {
            const int q = rank_after<WORLD_SIZE>(arena.rank, k);
            each_eight(args.count, [&](u64 i, u32 some) {
                float value[row_lanes];
                RowOf<ELEMENT>(args.gradient + (q * args.count + i) * bytes, 0, some).load(0, value);
                RowOf<ELEMENT>(arena.peer(q, terms + arena.rank * args.stride + i * bytes), 0, some).store(0, value);
            });
        }
        peers.barrier(blockIdx.x, 2 * epoch);
    }
    each_eight(args.count, [&](u64 i, u32 some) {
        float g[row_lanes] = {}, p[row_lanes], m[row_lanes], v[row_lanes];
        const auto part = [&](const char* array) { return RowOf<ELEMENT>(array + i * bytes, 0, some); };
        for (int q = 0; q < (SHARDED ? WORLD_SIZE : 1); ++q) {
            float term[row_lanes];
            part(SHARDED ? arena.local(terms + q * args.stride) : args.gradient).load(0, term);
            for (int e = 0; e < row_lanes; ++e) g[e] += term[e];
        }
        part(args.parameters).load(0, p), part(args.first).load(0, m), part(args.second).load(0, v);
        for (int e = 0; e < row_lanes; ++e) {
            g[e] /= WORLD_SIZE;
            m[e] = args.beta1 * m[e] + args.rest1 * g[e], v[e] = args.beta2 * v[e] + args.rest2 * g[e] * g[e];
            p[e] = p[e] * args.kept - args.step_size * m[e] / (sqrtf(v[e] / args.correction2) + args.eps);
        }
        part(args.new_first).store(0, m), part(args.new_second).store(0, v);
        for (int k = 0; k < (GATHER ? WORLD_SIZE : 0); ++k) {
            part(arena.peer(rank_after<WORLD_SIZE>(arena.rank, k), args.out + arena.rank * args.count * bytes)).store(0, p);
        }
        if (!GATHER) part(args.new_parameters).store(0, p);
    });
    if (GATHER) peers.barrier(blockIdx.x, 2 * epoch + 1);
}
"""
)
SPREAD_SOURCE = (
    COMMON
    + r"""
// The tensors of each rank that gives any, to the state of all ranks, one behind the other.
extern "C" __global__ void __launch_bounds__(512)
    spread_state(const __grid_constant__ Arena arena, const __grid_constant__ SpreadState args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    if (args.waits) peers.barrier(blockIdx.x, 2 * epoch);
    u64 to = args.state + args.first * bytes;
    for (u32 t = 0; t < args.tensors; to += args.count[t++] * bytes) {
        each_eight(args.count[t], [&](u64 i, u32 some) {
            float value[row_lanes];
            RowOf<ELEMENT>(args.tensor[t] + i * bytes, 0, some).load(0, value);
            for (int k = 0; k < WORLD_SIZE; ++k) {
                RowOf<ELEMENT>(arena.peer(rank_after<WORLD_SIZE>(arena.rank, k), to + i * bytes), 0, some).store(0, value);
            }
        });
    }
    peers.barrier(blockIdx.x, 2 * epoch + 1);
}
"""
)
ADAM_STEP = DeclaredKernel(
    "adam_step", SOURCE, epochs=Epochs(), flags=Flags(), terms=Buffer(), out=Buffer(), gradient=Pointer("const char*"),
    parameters=Pointer("const char*"), first=Pointer("const char*"), second=Pointer("const char*"), new_parameters=Pointer(),
    new_first=Pointer(), new_second=Pointer(), count=U64, stride=U64, beta1=F32, rest1=F32, beta2=F32, rest2=F32, step_size=F32,
    correction2=F32, eps=F32, kept=F32,
)  # fmt: skip
MOST_TENSORS = 12
SPREAD_STATE = DeclaredKernel(
    "spread_state", SPREAD_SOURCE, epochs=Epochs(), flags=Flags(), state=Buffer(), count=array(U64, MOST_TENSORS), tensors=U32, first=U64,
    tensor=array(Field("const char*", ctypes.c_uint64), MOST_TENSORS), waits=U32,
)  # fmt: skip
SUMS_SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr u32 lanes = 4, strip = lanes * row_lanes, together = 8, warps = THREADS / warp_threads, step = THREADS / lanes;

// Sums of a strip of columns, times scale, by a block: of four neighbouring threads each has eight columns of a row.
extern "C" __global__ void __launch_bounds__(THREADS) column_sums(const __grid_constant__ ColumnSums args) {
    __shared__ float of_warps[warps][strip];
    const u32 column = blockIdx.x * strip + threadIdx.x % lanes * row_lanes;
    float sum[row_lanes] = {}, value[together][row_lanes];
    for (u32 row = threadIdx.x / lanes; row < args.rows; row += together * step) {
        const auto place = [&](int i, u32& at, u32& first) { at = min(row + i * step, args.rows - 1), first = column; };
        load_together<ELEMENT>(args.matrix, args.columns, place, value);
#pragma unroll
        for (u32 i = 0; i < together; ++i) {
            for (int e = 0; e < row_lanes; ++e) sum[e] += row + i * step < args.rows ? value[i][e] : 0.0f;
        }
    }
    for (int e = 0; e < row_lanes; ++e) {
        for (u32 bits = lanes; bits < warp_threads; bits *= 2) sum[e] += shuffle_xor(sum[e], bits);
        if (Warp{}.thread() < lanes) of_warps[threadIdx.x / warp_threads][Warp{}.thread() * row_lanes + e] = sum[e];
    }
    __syncthreads();
    for (u32 c = threadIdx.x; c < strip && blockIdx.x * strip + c < args.columns; c += THREADS) {
        float total = 0;
        for (u32 w = 0; w < warps; ++w) total += of_warps[w][c];
        set_element<ELEMENT>(args.out, blockIdx.x * strip + c, total * args.scale);
    }
}
"""
COLUMN_SUMS = LocalKernel("column_sums", SUMS_SOURCE, matrix=Pointer("const char*"), out=Pointer(), rows=U32, columns=U32, scale=F32)
RELU, RELU_GRADIENT = gemm.Epilogue("relu", bias=True), gemm.Epilogue("relu_gradient", residual=True, scale=True)


@dataclass(frozen=True)
class Adam:
    lr: float
    beta1: float
    beta2: float
    eps: float
    step: int
    weight_decay: float = 0.0


Pair = tuple[torch.Tensor, torch.Tensor]
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Parameters, first and second moments, flat."""


@per_group
def _bound(group: Group, count: int, dtype: torch.dtype, sharded: bool, gather: bool) -> tuple[BoundKernel, torch.Tensor]:
    block, stride = min(512, group.max_threads), -(-count * dtype.itemsize // 128) * 128
    grid = max(1, min(group.sm_count, math.ceil(count / (8 * block))))
    whole = group.world_size * count if gather else 0
    bound = ADAM_STEP.bind(
        group,
        grid=grid,
        block=block,
        defines={"ELEMENT": element_type(dtype), "SHARDED": int(sharded), "GATHER": int(gather)},
        sizes={"flags": grid, "terms": 2 * group.world_size * stride if sharded else 0, "out": whole * dtype.itemsize},
        count=count,
        stride=stride,
    )
    return bound, bound.tensor("out", (whole,), dtype)


def adam_step(group: Group, gradient: torch.Tensor, state: State, adam: Adam, *, sharded: bool, gather: bool) -> State:
    """Returns new parameters and moments, from the mean of all ranks' gradients.

    ``sharded``: collective; ``gradient`` is the rank's own, of W times as many elements as the state, of which a rank owns one part; else
    ``gradient`` is the sum over ranks. ``gather``: new parameters are those of all ranks, in the arena until the next call."""
    launch, whole = _bound(group, state[0].numel(), state[0].dtype, sharded, gather)
    parameters, first, second = (tensor.contiguous() for tensor in state)
    new = whole if gather else torch.empty_like(parameters), torch.empty_like(first), torch.empty_like(second)
    launch(
        gradient=gradient, parameters=parameters, first=first, second=second, new_parameters=None if gather else new[0], new_first=new[1],
        new_second=new[2], beta1=adam.beta1, rest1=1 - adam.beta1, beta2=adam.beta2, rest2=1 - adam.beta2, eps=adam.eps,
        step_size=adam.lr / (1 - adam.beta1**adam.step), correction2=1 - adam.beta2**adam.step, kept=1 - adam.lr * adam.weight_decay,
    )  # fmt: skip
    return new


@per_group
def _spread(group: Group, count: int, dtype: torch.dtype) -> tuple[BoundKernel, torch.Tensor]:
    block = min(512, group.max_threads)
    grid, defines = max(1, min(group.sm_count, math.ceil(count / (8 * block)))), {"ELEMENT": element_type(dtype)}
    sizes = {"flags": grid, "state": count * dtype.itemsize}
    bound = SPREAD_STATE.bind(group, grid=grid, block=block, defines=defines, sizes=sizes)
    return bound, bound.tensor("state", (count,), dtype)


def spread_state(
    group: Group, tensors: Sequence[torch.Tensor], count: int, dtype: torch.dtype, *, first: int = 0, waits: bool = False
) -> torch.Tensor:
    """Collective: returns ``count`` elements, the tensors of each rank that gives any, from its ``first`` on; in the arena until the next
    call. ``waits``: for the other ranks to come; else something must have shown since the last call that they have read the state."""
    launch, state = _spread(group, count, dtype)
    dense = [tensor.contiguous() for tensor in tensors]
    numbers = [tensor.numel() for tensor in dense]
    launch(tensor=[*map(group.address, dense)], count=numbers, tensors=len(dense), first=first, waits=int(waits))
    return state


def from_first_rank(group: Group, tensors: Sequence[torch.Tensor], count: int, *, waits: bool) -> torch.Tensor:
    """Collective: returns rank 0's tensors, flat, of ``count`` elements; see ``spread_state``."""
    if group.world_size == 2:  # nobody to share the work with
        return spread_state(group, () if group.rank else tensors, count, tensors[0].dtype, waits=waits)
    flat = tensors[0].new_empty(count)
    if group.rank == 0:
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat)
    communicator(group).broadcast(flat, 0)
    return flat


def unflatten(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Returns views of the flat tensor with these shapes, in order."""
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


@per_group
def column_sums(group: Group, dtype: torch.dtype, columns: int) -> BoundKernel:
    """Makes a launch."""
    threads = min(512, group.max_threads)
    defines = {"ELEMENT": element_type(dtype), "THREADS": threads}
    return COLUMN_SUMS.bind(group, grid=-(-columns // 32), block=threads, defines=defines, columns=columns)


def mlp_gradient(group: Group, x: torch.Tensor, y: torch.Tensor, flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> torch.Tensor:
    """Returns the flat gradient of the mean of (relu(x W1^T + b1) W2^T + b2 - y)^2 with respect to W1, b1, W2, b2, flat in ``flat``.

    The kit's products pass over the hidden units on the way: torch's own passes would take a fifth of the time."""
    w1, b1, w2, b2 = unflatten(flat, shapes)
    gradient = torch.empty_like(flat)
    to_w1, to_b1, to_w2, to_b2 = unflatten(gradient, shapes)
    scale, has_kernel = 2.0 / y.numel(), flat.dtype in gemm.ELEMENT_TYPES

    def multiply(a: torch.Tensor, b: torch.Tensor, epilogue: gemm.Epilogue, **terms: Any) -> torch.Tensor:
        return gemm.product(group, a.shape[0], b.shape[1], b.shape[0], a.dtype, epilogue)(gemm.aligned(a), b, **terms)

    hidden = multiply(x, w1.t(), RELU, bias=b1) if has_kernel else torch.addmm(b1, x, w1.t()).relu_()
    d_output = torch.addmm(b2, hidden, w2.t()).sub_(y)
    torch.addmm(to_w2, d_output.t(), hidden, beta=0, alpha=scale, out=to_w2)
    if has_kernel:
        d_hidden = multiply(d_output, w2, RELU_GRADIENT, residual=hidden, scale=scale)
    else:
        d_hidden = torch.ops.aten.threshold_backward(d_output @ w2, hidden, 0).mul_(scale)
    torch.mm(d_hidden.t(), x, out=to_w1)
    for matrix, sums, factor in ((d_output, to_b2, scale), (d_hidden, to_b1, 1.0)):
        launch = column_sums(group, matrix.dtype, matrix.shape[1])
        launch(matrix=matrix.contiguous(), out=sums, rows=matrix.shape[0], scale=factor)
    return gradient


def partitioned_mlp_step(group: Group, data: Pair, tensors: Sequence[torch.Tensor], moments: Pair, adam: Adam) -> tuple[torch.Tensor, ...]:
    """Collective: returns rank 0's W1, b1, W2, b2 and the rank's part of both moments, after a step on x and y (``data``) of every rank."""
    shapes, size = [tensor.shape for tensor in tensors], moments[0].numel()
    flat = from_first_rank(group, tensors, group.world_size * size, waits=False)  # the last call's kernel ended behind a barrier
    gradient = mlp_gradient(group, *data, flat, shapes)
    state = flat[group.rank * size : (group.rank + 1) * size], *moments
    parameters, *new_moments = adam_step(group, gradient, state, adam, sharded=True, gather=True)
    return (*unflatten(parameters, shapes), *new_moments)
