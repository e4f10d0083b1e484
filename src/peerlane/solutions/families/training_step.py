"""A data-parallel training step: rank 0's state, gradients of an MLP, sums over ranks, Adam and new parameters.

    tensors, arrive = from_first_rank(group, tensors, waits=False)        rank 0's, as this rank has them
    gradient, copied = mlp_gradient(group, x, y, tensors[:4], step, arrive)        step: step_of(..), who updates what
    parameters, exp_avg, exp_avg_sq = adam_step(step, gradient, copied, state, adam)

Copy engines move what nobody waits for while products run, which leave them no SM: state but the first layer's, and the first matrix of the
gradient. Its owners sum the rest in rank order behind the products, update, and, if asked, store the new parameters on all ranks.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

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
from peerlane.device.host.side_stream import side_stream
from peerlane.device.products import gemm

COPIED_BYTES = 1 << 20
"""The least that a copy engine moves beside products, chosen and not tuned: each copy costs the host a call."""

COMMON = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int bytes = 4 / ELEMENT::lanes;

// Threads of a block that share its part of a range: all of them, or some.
struct Sharers {
    u32 thread, threads;
};

// use(i, how many) for every eight elements from `first` to `end`. Which block has an element does not depend on the range.
template <class Use>
__device__ void each_eight(const Sharers& own, u64 first, u64 end, const Use& use) {
    const u64 each = u64(blockDim.x) * row_lanes;
    for (u64 at = (first / each / gridDim.x * gridDim.x + blockIdx.x) * each; at < end; at += gridDim.x * each) {
        for (u32 thread = own.thread; thread < blockDim.x; thread += own.threads) {
            const u64 i = max(at + thread * row_lanes, first), stop = min(at + (thread + 1) * row_lanes, end);
            if (i < stop) use(i, u32(stop - i));
        }
    }
}
"""
SOURCE = (
    COMMON
    + r"""
// Eight elements of each of some arrays, all of which are on their way at a time.
template <int arrays>
__device__ void load_all(const char* const (&from)[arrays], u32 some, float (&value)[arrays][row_lanes]) {
    u32 word[arrays][row_lanes / ELEMENT::lanes];
    u64 places = some % row_lanes;
    for (int a = 0; a < arrays; ++a) places |= reinterpret_cast<u64>(from[a]);
    if (places % sizeof(Vec16) == 0) {
#pragma unroll
        for (int a = 0; a < arrays; ++a) load_vectors(from[a], word[a]);
    } else {
        for (int a = 0; a < arrays; ++a) load_words(from[a], 0, u64(some) * bytes, word[a]);
    }
#pragma unroll
    for (int a = 0; a < arrays; ++a) widen_words<ELEMENT>(word[a], value[a]);
}

extern "C" __global__ void __launch_bounds__(512) adam_step(const __grid_constant__ Arena arena, const __grid_constant__ AdamStep args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const auto first = [](int q, u64 count) { return OWNS_PART ? q * count : u64(0); };  // of what rank q updates
    // The other ranks' parts of the gradient, but what copies have brought there.
    const auto push = [&](const Sharers& own) {
        for (int k = 1; k < WORLD_SIZE; ++k) {
            const int q = rank_after<WORLD_SIZE>(arena.rank, k);
            const u64 begin = first(q, args.count), end = begin + args.count;
            const auto send = [&](u64 i, u32 some) {
                float value[row_lanes];
                RowOf<ELEMENT>(args.gradient + (begin + i) * bytes, 0, some).load(0, value);
                RowOf<ELEMENT>(arena.peer(q, args.terms + arena.rank * args.stride + i * bytes), 0, some).store(0, value);
            };
            each_eight(own, 0, min(max(args.copied[0], begin), end) - begin, send);
            each_eight(own, min(max(args.copied[1], begin), end) - begin, args.count, send);
        }
    };
    // Elements [from, to) of the own part, a piece after the other.
    const auto update = [&](const Sharers& own, u64 from, u64 to) {
        u64 begin = 0;
        for (u32 s = 0; s < args.pieces; begin = args.ends[s++]) {
            each_eight(own, max(from, begin), min(to, args.ends[s]), [&](u64 i, u32 some) {
                constexpr int terms = EXCHANGES ? WORLD_SIZE : 1;
                const char* from[terms + 3];
                float value[terms + 3][row_lanes], g[row_lanes] = {};
                for (int q = 0; q < terms; ++q) {
                    const bool arrived = EXCHANGES && q != arena.rank;
                    const char* own = args.gradient + (EXCHANGES ? first(q, args.count) : 0) * bytes;
                    from[q] = (arrived ? arena.local(args.terms + q * args.stride) : own) + i * bytes;
                }
                const char* const state[3] = {args.parameters[s], args.first[s], args.second[s]};
                for (int k = 0; k < 3; ++k) from[terms + k] = state[k] + (i - begin) * bytes;
                load_all(from, some, value);
                float (&p)[row_lanes] = value[terms], (&m)[row_lanes] = value[terms + 1], (&v)[row_lanes] = value[terms + 2];
                const auto part = [&](const char* array) { return RowOf<ELEMENT>(array + i * bytes, 0, some); };
                for (int e = 0; e < row_lanes; ++e) {
                    for (int q = 0; q < terms; ++q) g[e] += value[q][e];
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
        }
    };
    const Sharers all{threadIdx.x, blockDim.x};
    u64 done[2] = {};
    if (EXCHANGES) {
        if (!OWNS_PART && args.copied[1] > 0) {  // half of the threads update what copies have brought while the others push
            peers.barrier(gridDim.x + blockIdx.x, epoch);
            const u32 half = blockDim.x / 2;
            if (threadIdx.x < half) push({threadIdx.x, half});
            else update({threadIdx.x - half, half}, args.copied[0], args.copied[1]);
            done[0] = args.copied[0], done[1] = args.copied[1];
        } else {
            push(all);
        }
        peers.barrier(blockIdx.x, 2 * epoch);  // also behind it: callers have read the last new parameters
    }
    update(all, 0, done[0]);
    update(all, done[1], args.count);
    if (GATHER) peers.barrier(blockIdx.x, 2 * epoch + 1);
}
"""
)
SPREAD_SOURCE = (
    COMMON
    + r"""
// The tensors of each rank that gives any, to their places in the state of all ranks, or of the others. Without tensors: all come here.
extern "C" __global__ void __launch_bounds__(512)
    spread_state(const __grid_constant__ Arena arena, const __grid_constant__ SpreadState args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    if (args.waits) peers.barrier(blockIdx.x, 2 * epoch);
    for (u32 t = 0; t < args.tensors; ++t) {
        each_eight({threadIdx.x, blockDim.x}, 0, args.count[t], [&](u64 i, u32 some) {
            float value[row_lanes];
            RowOf<ELEMENT>(args.tensor[t] + i * bytes, 0, some).load(0, value);
            for (int k = args.own ? 0 : 1; k < WORLD_SIZE; ++k) {
                const int q = rank_after<WORLD_SIZE>(arena.rank, k);
                RowOf<ELEMENT>(arena.peer(q, args.state + (args.place[t] + i) * bytes), 0, some).store(0, value);
            }
        });
    }
    peers.barrier(blockIdx.x, 2 * epoch + 1);
}
"""
)
MOST_TENSORS, MOST_PIECES = 12, 4
_ADDRESS = Field("const char*", ctypes.c_uint64)
ADAM_STEP = DeclaredKernel(
    "adam_step", SOURCE, epochs=Epochs(), flags=Flags(), terms=Buffer(), out=Buffer(), gradient=Pointer("const char*"),
    **{name: array(_ADDRESS, MOST_PIECES) for name in ("parameters", "first", "second")}, ends=array(U64, MOST_PIECES), pieces=U32,
    new_parameters=Pointer(), new_first=Pointer(), new_second=Pointer(), copied=array(U64, 2), count=U64, stride=U64, beta1=F32, rest1=F32,
    beta2=F32, rest2=F32, step_size=F32, correction2=F32, eps=F32, kept=F32,
)  # fmt: skip
SPREAD_STATE = DeclaredKernel(
    "spread_state", SPREAD_SOURCE, epochs=Epochs(), flags=Flags(), state=Buffer(), count=array(U64, MOST_TENSORS), tensors=U32,
    place=array(U64, MOST_TENSORS), tensor=array(_ADDRESS, MOST_TENSORS), waits=U32, own=U32,
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
        set_element<RESULT>(args.out, blockIdx.x * strip + c, total * args.scale);
    }
}
"""
COLUMN_SUMS = LocalKernel("column_sums", SUMS_SOURCE, matrix=Pointer("const char*"), out=Pointer(), rows=U32, columns=U32, scale=F32)
RELU = gemm.Epilogue("relu", bias=True)
DIFFERENCE = gemm.Epilogue("difference", bias=True, residual=True, column_sums=True)
RELU_GRADIENT = gemm.Epilogue("relu_gradient", residual=True, scale=True, column_sums=True)


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
Sharing = Literal["parts", "whole", "sums"]
"""What a rank updates: its part, of W equal ones, from all ranks' gradients; or the whole, from these, or from their sums."""


@dataclass(frozen=True)
class Step:
    """The update of ``count`` elements of this rank, and the memory where the other ranks' gradients of these meet its own."""

    group: Group
    launch: BoundKernel
    sharing: Sharing
    count: int
    stride: int
    """bytes from a rank's terms to the next's"""
    whole: torch.Tensor | None
    """all ranks' new parameters, if they are asked for"""

    def first(self, rank: int) -> int:
        """Returns where in the gradient the elements begin that a rank updates."""
        return rank * self.count if self.sharing == "parts" else 0

    def copy(self, gradient: torch.Tensor, begin: int, end: int) -> bool:
        """Copies elements of the gradient to the ranks that update them, on the current stream, if that is worth it; returns whether it is.
        No rank still reads those of the last call."""
        size, rank, terms = gradient.itemsize, self.group.rank, self.launch.addresses("terms")
        if self.sharing == "sums" or (end - begin) * size < COPIED_BYTES:
            return False
        for q, at in enumerate(terms):
            first = self.first(q)
            part = gradient[max(begin, first) : min(end, first + self.count)]
            if q != rank and part.numel():
                self.group.copy(at + rank * self.stride + max(begin - first, 0) * size, part)
        return True


@per_group
def step_of(group: Group, count: int, dtype: torch.dtype, sharing: Sharing, gather: bool = False) -> Step:
    """Returns the group's one :class:`Step` of this size. ``gather``: all ranks get new parameters, in the arena until the next call."""
    block, stride = min(512, group.max_threads), -(-count * dtype.itemsize // 128) * 128
    grid = max(1, min(group.sm_count, math.ceil(count / (8 * block))))
    terms, whole = 0 if sharing == "sums" else group.world_size * stride, group.world_size * count if gather else 0
    defines = {"OWNS_PART": int(sharing == "parts"), "EXCHANGES": int(sharing != "sums"), "GATHER": int(gather)}
    bound = ADAM_STEP.bind(
        group,
        grid=grid,
        block=block,
        defines={"ELEMENT": element_type(dtype), **defines},
        sizes={"flags": 2 * grid, "terms": terms, "out": whole * dtype.itemsize},
        count=count,
        stride=stride,
    )
    return Step(group, bound, sharing, count, stride, bound.tensor("out", (whole,), dtype) if gather else None)


def adam_step(step: Step, gradient: torch.Tensor, copied: tuple[int, int], state: Sequence[State], adam: Adam) -> State:
    """Returns new parameters and moments, flat, from the mean of all ranks' gradients. Collective, unless those are summed already.

    ``gradient``: flat; ``copied``: what of it, from where to where, went by ``step.copy``. ``state``: contiguous pieces of what the rank
    updates, in order."""
    parameters, first, second = (tuple(pieces) for pieces in zip(*state, strict=True))
    flat = first[0].new_empty(step.count)
    new = flat if step.whole is None else step.whole, torch.empty_like(flat), torch.empty_like(flat)
    addresses = {"parameters": parameters, "first": first, "second": second}
    step.launch(
        **{name: [*map(step.group.address, pieces)] for name, pieces in addresses.items()}, pieces=len(state), copied=copied,
        ends=[*accumulate(piece.numel() for piece in first)], gradient=gradient, new_parameters=flat, new_first=new[1], new_second=new[2],
        beta1=adam.beta1, rest1=1 - adam.beta1, beta2=adam.beta2, rest2=1 - adam.beta2, eps=adam.eps,
        step_size=adam.lr / (1 - adam.beta1**adam.step), correction2=1 - adam.beta2**adam.step, kept=1 - adam.lr * adam.weight_decay,
    )  # fmt: skip
    return new


@per_group
def _spread(group: Group, count: int, dtype: torch.dtype) -> tuple[BoundKernel, BoundKernel, torch.Tensor]:
    """Makes the launch that spreads state, the one that waits for all ranks, and the state's memory."""
    block = min(512, group.max_threads)
    grid, defines = max(1, min(group.sm_count, math.ceil(count / (8 * block)))), {"ELEMENT": element_type(dtype)}
    sizes = {"flags": grid, "state": count * dtype.itemsize}
    bound = SPREAD_STATE.bind(group, grid=grid, block=block, defines=defines, sizes=sizes)
    return bound, bound.reserved.bind(grid=1, block=block, defines=defines), bound.tensor("state", (count,), dtype)


def spread_parts(group: Group, part: torch.Tensor) -> torch.Tensor:
    """Collective: returns every rank's part, in rank order; in the arena until the next call. Something has shown since the last call that
    the other ranks have read the state."""
    launch, _, state = _spread(group, group.world_size * part.numel(), part.dtype)
    part = part.contiguous()
    launch(tensor=[group.address(part)], count=[part.numel()], place=[group.rank * part.numel()], tensors=1, waits=0, own=1)
    return state


def from_first_rank(group: Group, tensors: Sequence[torch.Tensor], *, waits: bool) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Collective: returns rank 0's tensors, W1, b1, W2, b2 and what more there is of these shapes, and what waits for W2; on other ranks in
    the arena until the next call. For what comes behind W2 all ranks wait that come to a barrier behind the side stream.

    ``waits``: for the other ranks to come; else something must have shown since the last call that they have read the state."""
    dense, shapes = [tensor.detach().contiguous() for tensor in tensors], [tensor.shape for tensor in tensors]
    places = [0, *accumulate(tensor.numel() for tensor in dense)]
    if group.world_size > 2:
        flat = dense[0].new_empty(places[-1])
        if group.rank == 0:
            torch.cat([tensor.view(-1) for tensor in dense], out=flat)
        communicator(group).broadcast(flat, 0)
        return unflatten(flat, shapes), lambda: None
    launch, meet, state = _spread(group, places[-1], dense[0].dtype)  # nobody to share the work with
    late = [number for number, tensor in enumerate(dense) if number > 1 and tensor.nbytes >= COPIED_BYTES]
    now = [number for number in range(len(dense)) if number not in late] if group.rank == 0 else []
    launch(
        tensor=[group.address(dense[n]) for n in now], count=[dense[n].numel() for n in now], place=[places[n] for n in now],
        tensors=len(now), waits=int(waits), own=0,
    )  # fmt: skip
    if not late:
        return dense if group.rank == 0 else unflatten(state, shapes), lambda: None
    side = side_stream(group, dense[0].is_cuda)
    side.follow()
    arrivals = []
    with side():
        for number in late if group.rank == 0 else ():
            group.copy(launch.addresses("state")[1] + places[number] * state.itemsize, dense[number])
            if number < 4:  # W2 and b2
                arrivals.append(side.behind())

    def arrive() -> None:
        for arrival in arrivals:
            arrival()
        meet(waits=0, tensors=0)

    return dense if group.rank == 0 else unflatten(state, shapes), arrive


def unflatten(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Returns views of the flat tensor with these shapes, in order."""
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


@per_group
def column_sums(group: Group, element: torch.dtype, dtype: torch.dtype, columns: int) -> BoundKernel:
    """Makes a launch for matrices of ``element`` and sums of ``dtype``."""
    threads = min(512, group.max_threads)
    defines = {"ELEMENT": element_type(element), "RESULT": element_type(dtype), "THREADS": threads}
    return COLUMN_SUMS.bind(group, grid=-(-columns // 32), block=threads, defines=defines, columns=columns)


def mlp_gradient(
    group: Group, x: torch.Tensor, y: torch.Tensor, weights: Sequence[torch.Tensor], step: Step, arrive: Callable[[], None] | None = None
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Returns the flat gradient of the mean of (relu(x W1^T + b1) W2^T + b2 - y)^2 with respect to ``weights``: W1, b1, W2, b2; and what of
    it ``step`` has copied. ``arrive`` waits for W2. What the side stream has so far has come to its end behind this.

    The kit's products pass over the hidden units and outputs on the way: torch's own passes would take a fifth of the time. The matrix that
    others update comes first, and travels while the other one is computed."""
    w1, b1, w2, b2 = weights
    gradient = w1.new_empty(sum(weight.numel() for weight in weights))
    to_w1, to_b1, to_w2, to_b2 = unflatten(gradient, [weight.shape for weight in weights])
    scale, has_kernel, side = 2.0 / y.numel(), w1.dtype in gemm.ELEMENT_TYPES, side_stream(group, x.is_cuda)
    second = w1.numel() + b1.numel()  # where W2 begins
    owns_second = 2 * step.first(group.rank) + step.count > 2 * second and step.sharing == "parts"
    copied = (0, 0)

    def multiply(a: torch.Tensor, b: torch.Tensor, epilogue: gemm.Epilogue, **terms: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sums = a.new_empty((-(-a.shape[0] // 16), b.shape[1]), dtype=torch.float32) if epilogue.column_sums else None
        product = gemm.product(group, a.shape[0], b.shape[1], b.shape[0], a.dtype, epilogue)(gemm.aligned(a), b, sums=sums, **terms)
        return product, product if sums is None else sums

    def send(begin: int, matrix: torch.Tensor) -> None:
        nonlocal copied
        side.follow()
        with side():
            if step.copy(gradient, begin, begin + matrix.numel()):
                copied = begin, begin + matrix.numel()

    hidden = multiply(x, w1.t(), RELU, bias=b1)[0] if has_kernel else torch.addmm(b1, x, w1.t()).relu_()
    if arrive is not None:
        arrive()
    if has_kernel:
        d_output, of_output = multiply(hidden, w2.t(), DIFFERENCE, bias=b2, residual=y)
    else:
        d_output = of_output = torch.addmm(b2, hidden, w2.t()).sub_(y)
    if not owns_second:
        torch.addmm(to_w2, d_output.t(), hidden, beta=0, alpha=scale, out=to_w2)
        send(second, w2)
    if has_kernel:
        d_hidden, of_hidden = multiply(d_output, w2, RELU_GRADIENT, residual=hidden, scale=scale)
    else:
        d_hidden = of_hidden = torch.ops.aten.threshold_backward(d_output @ w2, hidden, 0).mul_(scale)
    side.follow()
    with side():
        for matrix, sums, factor in ((of_output, to_b2, scale), (of_hidden, to_b1, 1.0)):
            column_sums(group, matrix.dtype, sums.dtype, sums.numel())(matrix=matrix, out=sums, rows=matrix.shape[0], scale=factor)
    torch.mm(d_hidden.t(), x, out=to_w1)
    if owns_second:
        send(0, w1)
        torch.addmm(to_w2, d_output.t(), hidden, beta=0, alpha=scale, out=to_w2)
    side.behind()()
    return gradient, copied


def partitioned_mlp_step(group: Group, data: Pair, tensors: Sequence[torch.Tensor], moments: Pair, adam: Adam) -> tuple[torch.Tensor, ...]:
    """Collective: returns rank 0's W1, b1, W2, b2 and the rank's part of both moments, after a step on x and y (``data``) of every rank."""
    step = step_of(group, moments[0].numel(), moments[0].dtype, "parts", True)
    weights, arrive = from_first_rank(group, tensors, waits=False)  # the last call's kernel ended behind a barrier
    gradient, copied = mlp_gradient(group, *data, weights, step, arrive)
    begin, pieces = step.first(group.rank), []
    for weight in weights:
        pieces.append(weight.view(-1)[max(begin, 0) : max(begin + step.count, 0)])
        begin -= weight.numel()
    sizes = [piece.numel() for piece in pieces]
    state = list(zip(pieces, *(torch.split(moment.contiguous(), sizes) for moment in moments), strict=True))
    parameters, *new_moments = adam_step(step, gradient, copied, state, adam)
    return (*unflatten(parameters, [tensor.shape for tensor in tensors]), *new_moments)
