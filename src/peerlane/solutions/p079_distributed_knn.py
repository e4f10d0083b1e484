"""Problem 79, neighbours in sharded features: one launch selects each shard's best and takes them, with labels, to the query's rank.

One question to the device tells how many queries every rank has, and one launch gathers them. Products are torch's, of features whose rows
begin at multiples of 16 bytes: a copy, where the shard's do not, costs less than a product without. A block finds a query's k-th
similarity eleven bits at a time by counts in shared memory, then sends those above it; only the last selection sorts. Bound by that
question, and at large sizes by the product and the selection, which reads similarities from HBM once, then from the L2 cache."""

from itertools import accumulate

import torch
import torch.distributed as dist

from peerlane.device import (
    U32,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Flags,
    Group,
    LocalKernel,
    Pointer,
    array,
    communicator,
    group_of,
    per_group,
)
from peerlane.device.collectives.counts import share_counts
from peerlane.device.host.group import MAX_RANKS

PAD = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

// Rows of `columns` elements, one behind the other, to rows of `stride`, filled with zeros.
extern "C" __global__ void __launch_bounds__(512) pad_rows(const __grid_constant__ PadRows args) {
    constexpr u32 each = 16;
    const u32 together = each * blockDim.x, parts = (args.stride + together - 1) / together;
    for (u32 item = blockIdx.x; item < args.rows * parts; item += gridDim.x) {
        const u32 first = item % parts * together + threadIdx.x;
        const u64 row = item / parts;
        BITS value[each];
#pragma unroll
        for (u32 i = 0; i < each; ++i) {
            const u32 column = first + i * blockDim.x;
            value[i] = column < args.columns ? args.given[row * args.columns + column] : BITS(0);
        }
#pragma unroll
        for (u32 i = 0; i < each; ++i) {
            const u32 column = first + i * blockDim.x;
            if (column < args.stride) args.padded[row * args.stride + column] = value[i];
        }
    }
}
"""
PAD_ROWS = LocalKernel("pad_rows", PAD, given=Pointer("const BITS*"), padded=Pointer("BITS*"), rows=U32, columns=U32, stride=U32)

SEND = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr u32 digit_bits = 11, bins = 1 << digit_bits, in_flight = 4, lanes = 4 / sizeof(BITS), in_vector = 4 * lanes;
constexpr u32 key_bits = 8 * sizeof(BITS), most = BITS(~BITS(0)), ones = lanes == 2 ? 0x10001 : 1;

// use(key, column, is_one) for a row's similarities, as integers in their order, and for some behind the last. Rows begin at
// multiples of 16 bytes.
template <class Use>
__device__ inline void each_key(const BITS* row, u32 columns, const Use& use) {
    for (u32 first = threadIdx.x * in_vector; first < columns; first += in_flight * in_vector * THREADS) {
        Vec16 vector[in_flight];
#pragma unroll
        for (u32 v = 0; v < in_flight; ++v) {
            const u32 column = first + v * in_vector * THREADS;
            if (column < columns) vector[v] = *reinterpret_cast<const Vec16*>(row + column);
        }
#pragma unroll
        for (u32 v = 0; v < in_flight; ++v) {
            const u32 column = first + v * in_vector * THREADS, count = column < columns ? min(columns - column, in_vector) : 0;
#pragma unroll
            for (u32 i = 0; i < in_vector; ++i) {
                const u32 word = vector[v].word[i / lanes], negative = word >> (key_bits - 1) & ones;
                const u32 ordered = word ^ (negative * most | ones << (key_bits - 1));
                use(lanes == 1 ? ordered : ordered >> (i % lanes * 16) & 0xffff, column + i, i < count);
            }
        }
    }
}

// A block takes a query: its `k` best here go to the rank that asks, in any order. Places are free: a rank that has shared how many queries
// it has has used what the launch before brought.
extern "C" __global__ void __launch_bounds__(THREADS)
    send_nearest(const __grid_constant__ Arena arena, const __grid_constant__ SendNearest args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    __shared__ u32 found[bins + warp_threads], of_warp[THREADS / warp_threads], digit, missing, above, equal;
    for (u32 row = blockIdx.x; row < args.ends[WORLD_SIZE - 1]; row += gridDim.x) {
        const BITS* const similarities = args.similarities + u64(row) * args.stride;
        u32 wanted = args.k, kth = 0, known = 0;  // the k-th similarity, as far as its bits are known
        for (u32 shift = key_bits; shift > 0;) {
            shift = shift > digit_bits ? shift - digit_bits : 0;
            for (u32 bin = threadIdx.x; bin < bins + warp_threads; bin += THREADS) found[bin] = 0;
            __syncthreads();
            each_key(similarities, args.columns, [&](u32 key, u32, bool is_one) {
                const bool counts = is_one && (key & known) == kth;  // the others count too, behind the bins: that costs less than a branch
                atomicAdd_block(found + (counts ? (key >> shift) % bins : bins + Warp{}.thread()), 1u);
            });
            __syncthreads();
            // Threads have bins from the highest on.
            constexpr u32 each = bins / THREADS;
            const u32 top = bins - 1 - threadIdx.x * each;
            u32 sum = 0;
#pragma unroll
            for (u32 i = 0; i < each; ++i) sum += found[top - i];
            u32 before = sum;
#pragma unroll
            for (u32 by = 1; by < warp_threads; by *= 2) {
                const u32 other = __shfl_up_sync(full_warp, before, by);
                if (Warp{}.thread() >= by) before += other;
            }
            if (Warp{}.thread() == warp_threads - 1) of_warp[threadIdx.x / warp_threads] = before;
            __syncthreads();
            before -= sum;
            for (u32 w = 0; w < threadIdx.x / warp_threads; ++w) before += of_warp[w];
            if (before < wanted && wanted <= before + sum) {
                u32 bin = top;
                for (; before + found[bin] < wanted; --bin) before += found[bin];
                digit = bin, missing = wanted - before;
            }
            __syncthreads();
            kth |= digit << shift, known |= (bins - 1) << shift, wanted = missing;
        }
        u32 q = 0;
        while (row >= args.ends[q]) ++q;
        const u64 to = (u64(row - (q == 0 ? 0 : args.ends[q - 1])) * WORLD_SIZE + arena.rank) * args.k;
        BITS* const values = reinterpret_cast<BITS*>(arena.peer(q, args.found)) + to;
        long long* const labels = reinterpret_cast<long long*>(arena.peer(q, args.found_labels)) + to;
        if (threadIdx.x == 0) above = 0, equal = args.k - wanted;
        __syncthreads();
        each_key(similarities, args.columns, [&](u32 key, u32 column, bool is_one) {
            if (!is_one || key < kth) return;
            const u32 place = atomicAdd_block(key > kth ? &above : &equal, 1u);
            if (place >= args.k) return;
            values[place] = similarities[column];
            labels[place] = args.labels[column];
        });
        __syncthreads();
    }
    Peers<WORLD_SIZE>(arena, args.flags).barrier(blockIdx.x, epoch);
}
"""
SEND_NEAREST = DeclaredKernel(
    "send_nearest", SEND, epochs=Epochs(), flags=Flags(), found=Buffer(), found_labels=Buffer(), similarities=Pointer("const BITS*"),
    labels=Pointer("const long long*"), columns=U32, stride=U32, k=U32, ends=array(U32, MAX_RANKS),
)  # fmt: skip


@per_group
def send_nearest(group: Group, capacity: int, max_k: int, itemsize: int) -> BoundKernel:
    candidates, threads = capacity * group.world_size * max_k, min(1024, group.max_threads)
    return SEND_NEAREST.bind(
        group,
        grid=group.sm_count,
        block=threads,
        defines={"BITS": f"u{8 * itemsize}", "THREADS": threads},
        sizes={"flags": group.sm_count, "found": candidates * itemsize, "found_labels": 8 * candidates},
        k=max_k,
    )


@per_group
def pad_rows(group: Group, itemsize: int) -> BoundKernel:
    return PAD_ROWS.bind(group, grid=4 * group.sm_count, block=min(512, group.max_threads), defines={"BITS": f"u{8 * itemsize}"})


def solution(
    test_features_rank: torch.Tensor,
    train_features_rank_T: torch.Tensor,
    train_labels_rank: torch.Tensor,
    max_k: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if max_k > train_features_rank_T.shape[1]:
        raise ValueError(f"max_k is {max_k}, and the shard has {train_features_rank_T.shape[1]} rows: expected no more than the shard has")
    ranks, (own, depth), size = group_of(group), test_features_rank.shape, test_features_rank.itemsize
    shard, columns = train_features_rank_T.contiguous(), train_features_rank_T.shape[1]
    table = share_counts(ranks, [own, columns])
    counts, ends, row_bytes = [count for count, _ in table], list(accumulate(count for count, _ in table)), depth * size
    queries = test_features_rank.new_empty((ends[-1], depth))
    if ends[-1]:
        places = [((end - count) * row_bytes, count * row_bytes) for count, end in zip(counts, ends, strict=True)]
        communicator(ranks).exchange(queries, test_features_rank.contiguous(), [(0, own * row_bytes)] * ranks.world_size, places)
    in_vector = 16 // size
    stride = -(-columns // in_vector) * in_vector
    if any(columns % in_vector for _, columns in table):
        shard = shard.new_empty((depth, stride))
        pad_rows(ranks, size)(given=train_features_rank_T.contiguous(), padded=shard, rows=depth, columns=columns, stride=stride)
    # Arenas grow by powers of two, on all ranks alike.
    launch = send_nearest(ranks, 1 << max(counts).bit_length(), max_k, size)
    similarities, labels = queries @ shard, train_labels_rank.to(torch.int64).contiguous()
    launch(similarities=similarities, labels=labels, columns=columns, stride=stride, ends=ends)
    candidates = own, ranks.world_size * max_k
    nearest = torch.topk(launch.tensor("found", candidates, queries.dtype), max_k, dim=1)
    return nearest.values, launch.tensor("found_labels", candidates, torch.int64).gather(1, nearest.indices)
