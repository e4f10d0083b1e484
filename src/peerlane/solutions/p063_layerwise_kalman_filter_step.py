"""Problem 63, a layer-wise Kalman filter step: one kernel for gains, their global sum and all updates.

A block takes some rows of a covariance at a time, so that the vectors that all rows need come from L2 once for these. Blocks of a rank meet
once, ranks exchange one number, and the second pass begins with the rows that the first one read last, which still lie in L2. The host
learns all ranks' sizes while that pass runs. New weights go straight to all ranks; if there is no room for them, all ranks see so before
they change anything, make room and launch again. Bound by HBM."""

import ctypes

import torch

from peerlane.device import (
    F64,
    U32,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Field,
    Flags,
    Group,
    Packets,
    Pointer,
    array,
    group_of,
    per_group,
)
from peerlane.device.collectives.counts import HostWords
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/moe/moe.cuh>
using namespace peerlane;

struct RankPart { u32 low, high, rows; };  // the bits of a sum, and how many weights there are

// Entries that a thread loads together: some columns of ROWS rows, and of a vector. The last row stands for those behind it.
struct Entries {
    double entry[ROWS][COLUMNS], other[COLUMNS];

    __device__ Entries(const double* covariance, const double* vector, u32 row, u32 first, u32 size) {
#pragma unroll
        for (u32 k = 0; k < COLUMNS; ++k) other[k] = first + k * warp_threads < size ? (vector + first)[k * warp_threads] : 0.0;
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            const double* from = covariance + u64(min(row + r, size - 1)) * size + first;
#pragma unroll
            for (u32 k = 0; k < COLUMNS; ++k) entry[r][k] = first + k * warp_threads < size ? from[k * warp_threads] : 0.0;
        }
    }
};

// The caller's first column; the others of its warp are 32 apart.
__device__ inline u32 own_column() { return threadIdx.x / warp_threads * COLUMNS * warp_threads + Warp{}.thread(); }

// use(block of the filter, first row, the block's first weight) for the caller's rows; backward begins with the last ones.
template <bool backward, class Use>
__device__ inline void each_rows(const KalmanStep& args, const Use& use) {
    u32 begin = 0, number = blockIdx.x, at = backward ? args.rows : 0;
    for (u32 n = 0; n < args.filters; ++n) {
        const u32 filter = backward ? args.filters - 1 - n : n, size = args.size[filter], parts = (size + ROWS - 1) / ROWS;
        if (backward) at -= size;
        for (; number < begin + parts; number += gridDim.x) {
            use(filter, ROWS * (backward ? begin + parts - 1 - number : number - begin), at);
        }
        begin += parts;
        if (!backward) at += size;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    kalman_step(const __grid_constant__ Arena arena, const __grid_constant__ KalmanStep args) {
    __shared__ double scratch[32], of_warps[2][32][ROWS];
    __shared__ RankPart of_rank[WORLD_SIZE];
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const SmallExchange<WORLD_SIZE, RankPart> totals(arena, args.totals, epoch);
    const auto add = [](double a, double b) { return a + b; };
    if (blockIdx.x == 0) {
        for (u32 i = threadIdx.x; i < WORLD_SIZE * (1 + args.filters); i += blockDim.x) {
            const u32 q = i % WORLD_SIZE, k = i / WORLD_SIZE;
            reinterpret_cast<u32*>(arena.peer(q, args.sizes))[arena.rank * SIZES + k] = k == 0 ? args.filters : args.size[k - 1];
        }
        peers.signal_all(2 * gridDim.x, epoch);
    }

    double own = 0.0;
    u32 turn = 0;
    each_rows<false>(args, [&](u32 filter, u32 row, u32 at) {
        const u32 size = args.size[filter], own_row = row + threadIdx.x;
        const double* h = args.jacobian[filter];
        double gain[ROWS] = {};
        for (u32 first = own_column(); first < size; first += COLUMNS * blockDim.x) {
            const Entries p(args.covariance[filter], h, row, first, size);
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) {
#pragma unroll
                for (u32 k = 0; k < COLUMNS; ++k) gain[r] += p.entry[r][k] * p.other[k];
            }
        }
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            gain[r] = warp_sum(gain[r]);
            if (Warp{}.thread() == 0) of_warps[turn][threadIdx.x / warp_threads][r] = gain[r];
        }
        __syncthreads();
        if (threadIdx.x < ROWS && own_row < size) {
            double sum = 0.0;
            for (u32 warp = 0; warp < blockDim.x / warp_threads; ++warp) sum += of_warps[turn][warp][threadIdx.x];
            args.gains[at + own_row] = sum, own += sum * h[own_row];
        }
        turn ^= 1;
    });
    own = block_reduce(own, add, scratch);
    double* of_block = reinterpret_cast<double*>(arena.local(args.of_blocks));
    if (threadIdx.x == 0) of_block[blockIdx.x] = own;
    meet_blocks(peers, arena, 0, epoch);

    double sum = 0.0;
    for (u32 block = threadIdx.x; block < gridDim.x; block += blockDim.x) sum += of_block[block];
    sum = block_reduce(sum, add, scratch) + args.forget * args.filters;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        const u64 bits = __builtin_bit_cast(u64, sum);
        totals.send_everywhere(0, {static_cast<u32>(bits), static_cast<u32>(bits >> 32), args.rows});
    }
    for (u32 q = threadIdx.x; q < WORLD_SIZE; q += blockDim.x) of_rank[q] = totals.receive_from(q, 0);
    const bool arrived = block_arrived(arena);
    double total = 0.0;
    u32 rows = 0, before = 0;
    for (u32 q = 0; q < WORLD_SIZE; ++q) {
        total += __builtin_bit_cast(double, of_rank[q].low | u64(of_rank[q].high) << 32);
        rows += of_rank[q].rows, before += q < arena.rank ? of_rank[q].rows : 0;
    }
    if (blockIdx.x == 0) {
        peers.wait_all(2 * gridDim.x, epoch);
        const u32* sizes = reinterpret_cast<const u32*>(arena.local(args.sizes));
        if (threadIdx.x == 0 && all_arrived(arena)) {
            for (u32 q = 0; q < WORLD_SIZE; ++q) {
                for (u32 k = 0; k <= sizes[q * SIZES]; ++k) args.host[1 + q * SIZES + k] = sizes[q * SIZES + k];
            }
            tell_host(args.host, args.stamp);
        }
    }
    if (arrived && rows <= args.capacity) {
        const double step = *args.error / total, inverse = 1.0 / args.forget;
        if (blockIdx.x == 0 && threadIdx.x == 0) *args.next = args.nue * args.forget + 1.0 - args.nue;
        each_rows<true>(args, [&](u32 filter, u32 row, u32 at) {
            const u32 size = args.size[filter];
            const double* gains = args.gains + at;
            double *p = args.covariance[filter], factor[ROWS];
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) factor[r] = gains[min(row + r, size - 1)] / total;
            for (u32 first = own_column(); first < size; first += COLUMNS * blockDim.x) {
                const Entries old(p, gains, row, first, size);
#pragma unroll
                for (u32 r = 0; r < ROWS; ++r) {
                    double* to = p + u64(row + r) * size + first;
#pragma unroll
                    for (u32 k = 0; k < COLUMNS; ++k) {
                        if (row + r >= size || first + k * warp_threads >= size) continue;
                        to[k * warp_threads] = (old.entry[r][k] - factor[r] * old.other[k]) * inverse;
                    }
                }
            }
            const u32 own_row = row + threadIdx.x;
            if (threadIdx.x >= ROWS || own_row >= size) return;
            double& weight = args.weight[filter][own_row];
            weight += gains[own_row] * step;
            for (int q = 0; q < WORLD_SIZE; ++q) reinterpret_cast<double*>(arena.peer(q, args.out))[before + at + own_row] = weight;
        });
    }
    peers.barrier(gridDim.x + blockIdx.x, epoch);
}
"""
MOST_FILTERS = 1000
SIZES = 1 + MOST_FILTERS  # of a rank: how many, and then these
ROWS, COLUMNS, THREADS, BLOCKS = 4, 4, 256, 3
"""Rows of a block at a time, columns of a thread; threads, and blocks of an SM, which has 96 KiB on their way."""
DOUBLES = Field("double*", ctypes.c_uint64)
KALMAN_STEP = DeclaredKernel(
    "kalman_step", SOURCE, epochs=Epochs(), flags=Flags(), totals=Packets(), of_blocks=Buffer(), sizes=Buffer(), out=Buffer(),
    covariance=array(DOUBLES, MOST_FILTERS), jacobian=array(DOUBLES, MOST_FILTERS), weight=array(DOUBLES, MOST_FILTERS),
    size=array(U32, MOST_FILTERS), filters=U32, rows=U32, capacity=U32, stamp=U32, host=Pointer("u64*"), gains=Pointer("double*"),
    error=Pointer("const double*"), next=Pointer("double*"), forget=F64, nue=F64,
)  # fmt: skip


@per_group
def room(group: Group) -> list[int]:
    """Returns the weights of all ranks that memory is made for, in a list: what all ranks have seen of the calls before."""
    return [1024]


@per_group
def kalman_step(group: Group, capacity: int) -> tuple[BoundKernel, HostWords]:
    """Makes the launch of a group. ``capacity``: weights of all ranks."""
    told, block, world = HostWords(group, group.world_size * SIZES), min(THREADS, group.max_threads), group.world_size
    grid = BLOCKS * group.sm_count
    sizes = {"flags": 2 * grid + 1, "totals": 1, "of_blocks": 8 * grid, "sizes": 4 * world * SIZES, "out": 8 * capacity}
    defines = {"ROWS": ROWS, "COLUMNS": COLUMNS, "THREADS": THREADS, "BLOCKS": BLOCKS, "SIZES": SIZES}
    launch = KALMAN_STEP.bind(
        group, grid=grid, block=block, sizes=sizes, defines=defines, resident=True, host=told.words, capacity=capacity
    )  # fmt: skip
    return launch, told


def solution(
    H: list[torch.Tensor],
    error: torch.Tensor,
    weights: list[torch.Tensor],
    P: list[torch.Tensor],
    kalman_lambda: float,
    kalman_nue: float = 0.9987,
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    if len(P) > MOST_FILTERS:
        raise UsageError(f"{len(P)} filters on a rank; expected at most {MOST_FILTERS}: join small ones")
    group, sizes, fits = group_of(), [weight.numel() for weight in weights], room(group_of())
    lists = [[tensor.contiguous() for tensor in tensors] for tensors in (P, H, weights)]
    gains = torch.empty(sum(sizes), dtype=torch.float64, device=group.device)
    following = torch.empty((), dtype=torch.float64, device=group.device)
    covariances, jacobians, dense = ([*map(group.address, tensors)] for tensors in lists)
    error = error.to(torch.float64)
    while True:
        launch, told = kalman_step(group, fits[0])
        launch(
            covariance=covariances, jacobian=jacobians, weight=dense, size=sizes, filters=len(P), rows=sum(sizes), gains=gains, error=error,
            next=following, forget=kalman_lambda, nue=kalman_nue, stamp=told.stamp(),
        )  # fmt: skip
        told.wait()
        tables = told.words[1:].view(-1, SIZES)
        by_rank = [size for table in tables for size in table[1 : 1 + int(table[0])].tolist()]
        if sum(by_rank) <= fits[0]:
            break
        fits[0] = 1 << sum(by_rank).bit_length()
    for tensors, used in ((P, lists[0]), (weights, lists[2])):
        for tensor, copy in zip(tensors, used, strict=True):
            if copy.data_ptr() != tensor.data_ptr():
                tensor.copy_(copy)
    everywhere = launch.tensor("out", (sum(by_rank), 1), torch.float64).clone()  # little beside the covariances
    return list(torch.split(everywhere, by_rank)), P, following
