"""Problem 63, a layer-wise Kalman filter step: one question to the device, and one kernel for gains, their global sum and all updates.

A warp takes a row of a covariance. Blocks of a rank meet once, ranks exchange one number, and the second pass begins with the rows that the
first one read last, which still lie in L2. New weights go straight to all ranks. Bound by HBM."""

import ctypes
import functools

import torch

from peerlane.device import (
    F64,
    U32,
    U64,
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
from peerlane.device.collectives.counts import MOST_GIVEN, share_counts
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/moe/moe.cuh>
using namespace peerlane;

constexpr u32 at_once = 16;  // entries of a lane that are on their way together

// The caller's lane's entries of a row and of a vector from `first` on; all loads stand before what uses them. Zero behind the end.
using Entries = double[at_once];
__device__ inline void load_both(const double* row, const double* vector, u32 first, u32 size, Entries& entry, Entries& other) {
#pragma unroll
    for (u32 k = 0; k < at_once; ++k) {
        const u32 column = first + k * warp_threads;
        entry[k] = column < size ? row[column] : 0.0, other[k] = column < size ? vector[column] : 0.0;
    }
}

// use(block of the filter, row, row among all) for the rows of the caller's warp; backward begins with the last one.
template <bool backward, class Use>
__device__ inline void each_filter_row(const KalmanStep& args, const Use& use) {
    const u32 warps = blockDim.x / warp_threads;
    u32 begin = 0, number = threadIdx.x / warp_threads * gridDim.x + blockIdx.x;
    for (u32 n = 0; n < args.filters; ++n) {
        const u32 filter = backward ? args.filters - 1 - n : n, size = args.size[filter];
        for (; number < begin + size; number += gridDim.x * warps) {
            use(filter, backward ? size - 1 - (number - begin) : number - begin, backward ? args.rows - 1 - number : number);
        }
        begin += size;
    }
}

extern "C" __global__ void __launch_bounds__(512)
    kalman_step(const __grid_constant__ Arena arena, const __grid_constant__ KalmanStep args) {
    __shared__ double scratch[32], everywhere;
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const SmallExchange<WORLD_SIZE, double> totals(arena, args.totals, epoch);
    const auto add = [](double a, double b) { return a + b; };
    double own = 0.0;
    each_filter_row<false>(args, [&](u32 filter, u32 row, u32 at) {
        const u32 size = args.size[filter];
        const double *p = args.covariance[filter] + u64(row) * size, *h = args.jacobian[filter];
        double gain = 0.0, entry[at_once], factor[at_once];
        for (u32 first = Warp{}.thread(); first < size; first += at_once * warp_threads) {
            load_both(p, h, first, size, entry, factor);
#pragma unroll
            for (u32 k = 0; k < at_once; ++k) gain += entry[k] * factor[k];
        }
        gain = warp_sum(gain);
        if (Warp{}.thread() == 0) args.gains[at] = gain, own += gain * h[row];
    });
    own = block_reduce(own, add, scratch);
    double* of_block = reinterpret_cast<double*>(arena.local(args.of_blocks));
    if (threadIdx.x == 0) of_block[blockIdx.x] = own;
    meet_blocks(peers, arena, 0, epoch);

    double sum = 0.0;
    for (u32 block = threadIdx.x; block < gridDim.x; block += blockDim.x) sum += of_block[block];
    sum = block_reduce(sum, add, scratch) + args.forget * args.filters;
    if (blockIdx.x == 0 && threadIdx.x == 0) totals.send(0, sum);
    if (threadIdx.x == 0) everywhere = totals.receive(0, sum, add);
    __syncthreads();
    const double total = everywhere, step = *args.error / total, inverse = 1.0 / args.forget;
    if (blockIdx.x == 0 && threadIdx.x == 0) *args.next = args.nue * args.forget + 1.0 - args.nue;

    // Sizes have been shared since the callers of all ranks read the weights before: they may be overwritten.
    each_filter_row<true>(args, [&](u32 filter, u32 row, u32 at) {
        const u32 size = args.size[filter];
        double* p = args.covariance[filter] + u64(row) * size;
        const double *gains = args.gains + (at - row), own_gain = gains[row], factor = own_gain / total;
        for (u32 first = Warp{}.thread(); first < size; first += at_once * warp_threads) {
            double entry[at_once], gain[at_once];
            load_both(p, gains, first, size, entry, gain);
#pragma unroll
            for (u32 k = 0; k < at_once; ++k) {
                const u32 column = first + k * warp_threads;
                if (column < size) p[column] = (entry[k] - factor * gain[k]) * inverse;
            }
        }
        const double weight = args.weight[filter][row] + own_gain * step;
        __syncwarp();
        if (Warp{}.thread() == 0) args.weight[filter][row] = weight;
        if (Warp{}.thread() < WORLD_SIZE) reinterpret_cast<double*>(arena.peer(Warp{}.thread(), args.out))[args.first + at] = weight;
    });
    peers.barrier(gridDim.x + blockIdx.x, epoch);
}
"""
MOST_FILTERS = 1000
DOUBLES = Field("double*", ctypes.c_uint64)
KALMAN_STEP = DeclaredKernel(
    "kalman_step", SOURCE, epochs=Epochs(), flags=Flags(), totals=Packets(), of_blocks=Buffer(), out=Buffer(),
    covariance=array(DOUBLES, MOST_FILTERS), jacobian=array(DOUBLES, MOST_FILTERS), weight=array(DOUBLES, MOST_FILTERS),
    size=array(U32, MOST_FILTERS), filters=U32, rows=U32, first=U64, gains=Pointer("double*"), error=Pointer("const double*"),
    next=Pointer("double*"), forget=F64, nue=F64,
)  # fmt: skip


@per_group
def kalman_step(group: Group, capacity: int) -> BoundKernel:
    """Makes the launch of a group. ``capacity``: weights of all ranks."""
    sizes = {"flags": 2 * group.sm_count, "totals": 1, "of_blocks": 8 * group.sm_count, "out": 8 * capacity}
    return KALMAN_STEP.bind(group, grid=group.sm_count, block=min(512, group.max_threads), sizes=sizes, resident=True)


@per_group
def numbers_per_exchange(group: Group) -> list[int]:
    """Returns how many numbers of its filters a rank sends. The count grows on all ranks together: all see the same answers."""
    return [MOST_GIVEN]


@functools.lru_cache(maxsize=64)
def on_device(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, device=device)


def filters_of_all(group: Group, sizes: list[int]) -> list[list[int]]:
    """Returns every rank's sizes."""
    room = numbers_per_exchange(group)
    while True:
        numbers = [len(sizes), *sizes, *[0] * room[0]][: room[0]]
        table = share_counts(group, numbers if room[0] <= MOST_GIVEN else on_device(tuple(numbers), group.device))
        most = max(row[0] for row in table)
        if most < room[0]:
            return [row[1 : 1 + row[0]] for row in table]
        room[0] = 1 << most.bit_length()


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
    group, sizes = group_of(), [weight.numel() for weight in weights]
    by_rank = filters_of_all(group, sizes)
    totals = [sum(row) for row in by_rank]
    launch = kalman_step(group, 1 << sum(totals).bit_length())
    lists = [[tensor.contiguous() for tensor in tensors] for tensors in (P, H, weights)]
    gains = torch.empty(sum(sizes), dtype=torch.float64, device=group.device)
    following = torch.empty((), dtype=torch.float64, device=group.device)
    covariances, jacobians, dense = ([*map(group.address, tensors)] for tensors in lists)
    launch(
        covariance=covariances, jacobian=jacobians, weight=dense, size=sizes, filters=len(P), rows=sum(sizes),
        first=sum(totals[: group.rank]), gains=gains, error=error.to(torch.float64), next=following, forget=kalman_lambda, nue=kalman_nue,
    )  # fmt: skip
    for tensors, used in ((P, lists[0]), (weights, lists[2])):
        for tensor, copy in zip(tensors, used, strict=True):
            if copy.data_ptr() != tensor.data_ptr():
                tensor.copy_(copy)
    everywhere = launch.tensor("out", (sum(totals), 1), torch.float64).clone()  # little beside the covariances
    return list(torch.split(everywhere, [size for row in by_rank for size in row])), P, following
