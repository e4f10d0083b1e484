"""Problem 85, a sort over all ranks: every rank sorts its shard, then merges its part straight from everybody's sorted shards.

A radix sort takes eight bits a pass: one kernel counts the digits of all passes, and in each pass a tile learns where its keys go from the
tiles before it (decoupled look-back), so that keys are read and written once. A rank then finds where its part begins in every shard, reads
that much of each, and merges. Bound by the passes over HBM and one trip over the links; small shards by one question to the device, as
shapes follow from it."""

from itertools import accumulate

import torch
import torch.distributed as dist

from peerlane.device import (
    U32,
    U64,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Flags,
    Group,
    LocalKernel,
    Pointer,
    array,
    group_of,
    per_group,
)
from peerlane.device.collectives.counts import share_counts
from peerlane.device.host.group import MAX_RANKS
from peerlane.errors import UsageError

KEYS = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr u32 bins = 256, tile_keys = THREADS * ITEMS;
constexpr KEY sign = KEY(KEY(1) << (8 * sizeof(KEY) - 1)), no_key = KEY(~KEY(0));  // which is behind all keys

// Bits of a float as an integer in the order of the floats: NaN last, and one zero.
__device__ inline KEY ordered(KEY bits) {
    const KEY size = bits & KEY(~sign);
    if (size > KEY(INFINITE)) return KEY(NOT_A_NUMBER) | sign;
    return size != 0 && bits & sign ? KEY(~bits) : KEY(size | sign);
}
__device__ inline KEY restored(KEY key) { return key & sign ? KEY(key ^ sign) : KEY(~key); }

// A warp's keys of a tile, a stretch in order: of item i those of all lanes. Behind the last key of all there is `no_key`.
__device__ inline void load_tile(const KEY* keys, u64 first, u64 count, bool floats, KEY (&key)[ITEMS]) {
    const u64 begin = first + threadIdx.x / warp_threads * ITEMS * warp_threads + Warp{}.thread();
    if (first + tile_keys <= count) {
#pragma unroll
        for (u32 i = 0; i < ITEMS; ++i) key[i] = keys[begin + i * warp_threads];
        if (!floats) return;
#pragma unroll
        for (u32 i = 0; i < ITEMS; ++i) key[i] = ordered(key[i]);
        return;
    }
#pragma unroll
    for (u32 i = 0; i < ITEMS; ++i) {
        const u64 at = begin + i * warp_threads;
        key[i] = at >= count ? no_key : floats ? ordered(keys[at]) : keys[at];
    }
}
"""
COUNT = (
    KEYS
    + r"""
// How often each digit of each pass occurs. Lanes count in copies of the bins, for many keys have the same first digit.
extern "C" __global__ void __launch_bounds__(THREADS) count_digits(const __grid_constant__ CountDigits args) {
    constexpr u32 digits = sizeof(KEY), copies = 32 / digits;
    __shared__ u32 found[digits * bins * copies];
    for (u32 i = threadIdx.x; i < digits * bins * copies; i += THREADS) found[i] = 0;
    __syncthreads();
    for (u64 first = u64(blockIdx.x) * tile_keys; first < args.count; first += u64(gridDim.x) * tile_keys) {
        KEY key[ITEMS];
        load_tile(args.keys, first, args.count, true, key);
#pragma unroll
        for (u32 i = 0; i < ITEMS; ++i) {
#pragma unroll
            for (u32 d = 0; d < digits; ++d) {
                atomicAdd_block(found + (d * bins + u32(key[i] >> 8 * d) % bins) * copies + Warp{}.thread() % copies, 1u);
            }
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < digits * bins; i += THREADS) {
        u32 sum = 0;
        for (u32 copy = 0; copy < copies; ++copy) sum += found[i * copies + copy];
        if (sum > 0) atomicAdd(args.found + i, sum);
    }
}
"""
)
COUNT_DIGITS = LocalKernel("count_digits", COUNT, keys=Pointer("const KEY*"), count=U64, found=Pointer("u32*"))

SORT = (
    KEYS
    + r"""
// What a tile says of a bin: the keys of its own, or those of all tiles up to it; zero: nothing yet.
constexpr u32 of_tile = 1u << 30, of_all = 1u << 31, most_keys = of_tile - 1, looks = 4;

struct Shared {
    KEY key[tile_keys];
    u16 of_warp[THREADS / warp_threads][bins];
    u32 first[bins];   // of a bin in the sorted tile
    u32 before[bins];  // keys of all tiles in lower bins
    u32 place[bins];   // of a bin's first key in the result, less `first`
    u32 tile, ended;
};

// Sums of what is before each bin, by a warp.
__device__ inline void scan(u32 (&count)[bins]) {
    constexpr u32 each = bins / warp_threads;
    u32 own[each], sum = 0;
#pragma unroll
    for (u32 i = 0; i < each; ++i) sum += own[i] = count[Warp{}.thread() * each + i];
    u32 before = sum;
#pragma unroll
    for (u32 by = 1; by < warp_threads; by *= 2) {
        const u32 lower = __shfl_up_sync(full_warp, before, by);
        if (Warp{}.thread() >= by) before += lower;
    }
    before -= sum;
#pragma unroll
    for (u32 i = 0; i < each; ++i) count[Warp{}.thread() * each + i] = before, before += own[i];
}

// Keys of a bin in the tiles before this one; `states` are the bin's. False where the wait ended early.
__device__ inline bool look_back(const Arena& arena, const u32* states, u32 tile, u32& sum) {
    Deadline deadline;
    while (tile > 0) {
        u32 state[looks];
#pragma unroll
        for (u32 k = 0; k < looks; ++k) state[k] = k < tile ? ptx::load_relaxed_gpu(states + u64(tile - 1 - k) * bins) : of_all;
        if (state[0] == 0 && deadline.ends(arena, Awaited{whole_block, arena.rank, tile, of_tile}, 0)) return false;
        bool goes_on = true;
#pragma unroll
        for (u32 k = 0; k < looks; ++k) {
            goes_on = goes_on && state[k] != 0;
            if (!goes_on) continue;
            sum += state[k] & most_keys;
            tile = state[k] & of_all ? 0 : tile - 1;
            goes_on = tile > 0;
        }
    }
    return true;
}

// A stable pass over one digit. Tiles are taken in order, so those before a tile are at work, and wait for nobody behind them.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    sort_digit(const __grid_constant__ Arena arena, const __grid_constant__ SortDigit args) {
    if (!block_arrived(arena)) return;  // keys of a pass that has ended early are not those that were counted
    Shared& shared = *reinterpret_cast<Shared*>(ptx::dynamic_shared());
    const u32 warp = threadIdx.x / warp_threads, shift = 8 * args.digit;
    auto& of_warp = shared.of_warp[warp];
    u32 next = 0;
    if (threadIdx.x == 0) shared.ended = 0, next = ptx::add_relaxed_gpu(args.taken, 1);
    while (true) {
        __syncthreads();
        if (threadIdx.x == 0) shared.tile = next;
        for (u32 bin = Warp{}.thread(); bin < bins; bin += warp_threads) of_warp[bin] = 0;
        __syncthreads();
        const u32 tile = shared.tile;
        const u64 first = u64(tile) * tile_keys;
        if (first >= args.count || shared.ended) return;
        KEY key[ITEMS];
        u16 rank[ITEMS];
        load_tile(args.keys, first, args.count, args.digit == 0, key);
#pragma unroll
        for (u32 i = 0; i < ITEMS; ++i) {
            const u32 digit = u32(key[i] >> shift) % bins;
            u32 same = full_warp;
#pragma unroll
            for (u32 bit = 1; bit < bins; bit *= 2) same = ptx::lanes_alike(same, digit, bit);
            const u32 lower = __popc(same & ((1u << Warp{}.thread()) - 1)), found = of_warp[digit];
            __syncwarp();
            if (lower == 0) of_warp[digit] = static_cast<u16>(found + __popc(same));
            __syncwarp();
            rank[i] = static_cast<u16>(found + lower);
        }
        __syncthreads();

        u32* const states = args.states + u64(tile) * bins;
        for (u32 bin = threadIdx.x; bin < bins; bin += THREADS) {
            u32 sum = 0;
            for (u32 w = 0; w < THREADS / warp_threads; ++w) sum += shared.of_warp[w][bin];
            if (tile > 0) ptx::store_relaxed_gpu(states + bin, of_tile | sum);
            shared.first[bin] = shared.place[bin] = sum;
            shared.before[bin] = tile == 0 ? args.found[bin] : 0;
        }
        __syncthreads();
        if (warp == 0) {
            scan(shared.first);
            if (tile == 0) scan(shared.before);
        }
        __syncthreads();
        for (u32 bin = threadIdx.x; bin < bins; bin += THREADS) {
            u32 sum = shared.first[bin];
            for (u32 w = 0; w < THREADS / warp_threads; ++w) {
                const u32 count = shared.of_warp[w][bin];
                shared.of_warp[w][bin] = static_cast<u16>(sum);
                sum += count;
            }
        }
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < ITEMS; ++i) shared.key[of_warp[u32(key[i] >> shift) % bins] + rank[i]] = key[i];
        for (u32 bin = threadIdx.x; bin < bins; bin += THREADS) {
            u32 before = shared.before[bin];
            if (look_back(arena, args.states + bin, tile, before)) {
                ptx::store_relaxed_gpu(states + bin, of_all | (before + shared.place[bin]));
                shared.place[bin] = before - shared.first[bin];
            } else {
                shared.ended = 1;
            }
        }
        __syncthreads();
        if (shared.ended) return;
        if (threadIdx.x == 0) next = ptx::add_relaxed_gpu(args.taken, 1);
        const u32 count = static_cast<u32>(min(args.count - first, u64(tile_keys)));
#pragma unroll
        for (u32 i = 0; i < ITEMS; ++i) {
            const u32 at = i * THREADS + threadIdx.x;
            const KEY own = shared.key[at];
            KEY* const to = args.sorted + (shared.place[u32(own >> shift) % bins] + at);
            if (at < count) *to = own;
        }
    }
}
"""
)
SORT_DIGIT = DeclaredKernel(
    "sort_digit", SORT, keys=Pointer("const KEY*"), sorted=Pointer("KEY*"), count=U64, found=Pointer("const u32*"),
    taken=Pointer("u32*"), states=Pointer("u32*"), digit=U32,
)  # fmt: skip

MERGE = (
    KEYS
    + r"""
constexpr u32 cuts_at_once = 64, in_flight = 8;

// at[q]: how many of sorted run q are among the first `wanted` keys of all runs; of equal keys those of lower runs come first. Two runs are
// bisected. More go from coarse steps to fine ones: of every step-th key the first are taken; half the step leaves one more to take, few
// to exchange.
template <class Index, class Run>
__device__ inline void split_runs(const Index (&count)[WORLD_SIZE], Index wanted, const Run& run, Index (&at)[WORLD_SIZE]) {
    if constexpr (WORLD_SIZE == 2) {
        Index low = wanted > count[1] ? wanted - count[1] : 0, high = min(wanted, count[0]);
        while (low < high) {
            const Index middle = low + (high - low) / 2;
            if (run(0, middle) <= run(1, wanted - 1 - middle)) low = middle + 1;
            else high = middle;
        }
        at[0] = low, at[1] = wanted - low;
        return;
    }
    Index step = 1, taken = 0;
    while (step <= wanted / 2) step *= 2;
    KEY next[WORLD_SIZE], last[WORLD_SIZE];
    const auto key_at = [&](int q, Index i) { return i < count[q] ? run(q, i) : no_key; };
#pragma unroll
    for (int q = 0; q < WORLD_SIZE; ++q) at[q] = 0;
#pragma unroll 1
    for (; step > 0; step /= 2) {
#pragma unroll
        for (int q = 0; q < WORLD_SIZE; ++q) next[q] = key_at(q, at[q] + step - 1);
        while (true) {
            int least = 0, most = -1;
            KEY low = next[0], high = 0;
#pragma unroll
            for (int q = 0; q < WORLD_SIZE; ++q) {
                if (next[q] < low) low = next[q], least = q;
                if (at[q] > 0 && last[q] >= high) high = last[q], most = q;
            }
            const bool takes = step <= wanted - taken;
            if (!takes && (least == most || low > high || (low == high && least > most))) break;
            taken += takes ? step : 0;
#pragma unroll
            for (int q = 0; q < WORLD_SIZE; ++q) {
                if (q == least) at[q] += step;
                else if (q == most && !takes) at[q] -= step;
                else continue;
                next[q] = key_at(q, at[q] + step - 1);
                if (at[q] > 0) last[q] = key_at(q, at[q] - 1);
            }
        }
    }
#pragma unroll
    for (int q = 0; q < WORLD_SIZE; ++q) at[q] = min(at[q], count[q]);  // more only of a run that is not sorted
}

// Part `args.part` of all ranks' keys, in order; a block takes tiles that follow each other.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    merge_shards(const __grid_constant__ Arena arena, const __grid_constant__ MergeShards args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    Peers<WORLD_SIZE>(arena, args.flags).barrier(blockIdx.x, epoch);
    if (!block_arrived(arena)) return;
    KEY* const tile = reinterpret_cast<KEY*>(ptx::dynamic_shared());
    __shared__ u64 cuts[cuts_at_once + 1][WORLD_SIZE];
    const auto shard = [&](int q) { return reinterpret_cast<const KEY*>(arena.peer(q, args.sorted)); };
    const Part own = part_of((args.count + tile_keys - 1) / tile_keys, blockIdx.x, gridDim.x);
    for (u64 begin = own.first; begin < own.end; begin += cuts_at_once) {
        const u32 tiles = static_cast<u32>(min(own.end - begin, u64(cuts_at_once)));
        __syncthreads();
        for (u32 t = threadIdx.x; t <= tiles; t += THREADS) {
            u64 of_shard[WORLD_SIZE], at[WORLD_SIZE];
#pragma unroll
            for (int q = 0; q < WORLD_SIZE; ++q) of_shard[q] = args.counts[q];
            split_runs(of_shard, args.first + min((begin + t) * tile_keys, args.count), [&](int q, u64 i) { return shard(q)[i]; }, at);
#pragma unroll
            for (int q = 0; q < WORLD_SIZE; ++q) cuts[t][q] = at[q];
        }
        for (u32 t = 0; t < tiles; ++t) {
            __syncthreads();
            // A rank whose wait has ended early leaves its shard unsorted. Keys are those of shards, and fit the tile, all the same.
            const u32 most = static_cast<u32>(min(args.count - (begin + t) * tile_keys, u64(tile_keys)));
            u32 count[WORLD_SIZE], from[WORLD_SIZE], at[WORLD_SIZE], total = 0;
            const KEY* origin[WORLD_SIZE];  // of the tile, if it were the run's
#pragma unroll
            for (int q = 0; q < WORLD_SIZE; ++q) {
                const u64 keys = max(cuts[t + 1][q], cuts[t][q]) - cuts[t][q];
                count[q] = static_cast<u32>(min(keys, u64(most - total))), from[q] = total, total += count[q];
                origin[q] = shard(q) + cuts[t][q] - from[q];
            }
#pragma unroll 1
            for (u32 first = threadIdx.x; first < total; first += in_flight * THREADS) {
                KEY key[in_flight];
#pragma unroll
                for (u32 k = 0; k < in_flight; ++k) {
                    const u32 place = min(first + k * THREADS, total - 1);
                    const KEY* run = origin[0];
#pragma unroll
                    for (int q = 1; q < WORLD_SIZE; ++q) run = place >= from[q] ? origin[q] : run;
                    key[k] = run[place];
                }
#pragma unroll
                for (u32 k = 0; k < in_flight; ++k) {
                    if (first + k * THREADS < total) tile[first + k * THREADS] = key[k];
                }
            }
            __syncthreads();
            split_runs(count, min(threadIdx.x * ITEMS, total), [&](int q, u32 i) { return tile[from[q] + i]; }, at);
            KEY head[WORLD_SIZE], merged[ITEMS];
#pragma unroll
            for (int q = 0; q < WORLD_SIZE; ++q) at[q] += from[q], head[q] = at[q] < from[q] + count[q] ? tile[at[q]] : no_key;
#pragma unroll
            for (u32 i = 0; i < ITEMS; ++i) {
                u32 least = 0, place = 0, end = 0;
                KEY low = head[0];
#pragma unroll
                for (u32 q = 1; q < WORLD_SIZE; ++q) {
                    if (head[q] < low) low = head[q], least = q;
                }
                merged[i] = restored(low);
#pragma unroll
                for (u32 q = 0; q < WORLD_SIZE; ++q) {
                    at[q] += q == least;
                    if (q == least) place = at[q], end = from[q] + count[q];
                }
                KEY next = tile[place];  // or what lies behind the runs
                if (place >= end) next = no_key;
#pragma unroll
                for (u32 q = 0; q < WORLD_SIZE; ++q) head[q] = q == least ? next : head[q];
            }
            // Threads' stretches are turned into the warps', a word apart for the banks.
            const auto turned = [](u32 place) { return place + place / ITEMS; };
            __syncthreads();  // all have read
#pragma unroll
            for (u32 i = 0; i < ITEMS; ++i) tile[turned(threadIdx.x * ITEMS + i)] = merged[i];
            __syncthreads();
            KEY* const out = args.out + (begin + t) * tile_keys;
#pragma unroll in_flight
            for (u32 place = threadIdx.x; place < total; place += THREADS) out[place] = tile[turned(place)];
        }
    }
}
"""
)
MERGE_SHARDS = DeclaredKernel(
    "merge_shards", MERGE, epochs=Epochs(), flags=Flags(), sorted=Buffer(), counts=array(U64, MAX_RANKS), first=U64, count=U64,
    out=Pointer("KEY*"),
)  # fmt: skip

BINS, WORDS = 256, {2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST = (1 << 30) - 1
"""Keys of a shard: what a tile says of a bin has two more bits."""
MOST_BLOCKS = 256


class Sorter:
    """The kernels for shards of up to ``capacity`` floats of one type."""

    def __init__(self, group: Group, capacity: int, dtype: torch.dtype) -> None:
        self.bytes = dtype.itemsize
        infinite, not_a_number = torch.tensor([float("inf"), float("nan")], dtype=dtype).view(WORDS[self.bytes]).tolist()
        threads, blocks = min(512, group.max_threads), min(MOST_BLOCKS, 2 * group.sm_count)
        defines = {"KEY": f"u{8 * self.bytes}", "THREADS": threads, "INFINITE": infinite, "NOT_A_NUMBER": not_a_number}
        items, merged_items = 32 // max(2, self.bytes // 2), 128 // max(4, self.bytes)
        self.tile = threads * items
        self.count = COUNT_DIGITS.bind(group, grid=2 * group.sm_count, block=threads, defines={**defines, "ITEMS": items})
        self.merge: BoundKernel = MERGE_SHARDS.bind(
            group, grid=blocks, block=threads, defines={**defines, "ITEMS": merged_items}, resident=True,
            shared_bytes=threads * (merged_items + 1) * self.bytes, sizes={"flags": blocks, "sorted": capacity * self.bytes},
        )  # fmt: skip
        self.sort = SORT_DIGIT.inside(group, self.merge.arena).bind(
            grid=2 * group.sm_count, block=threads, defines={**defines, "ITEMS": items},
            shared_bytes=self.tile * self.bytes + threads // 32 * BINS * 2 + 3 * BINS * 4 + 8,
        )  # fmt: skip

    def sort_shard(self, shard: torch.Tensor) -> None:
        """Sorts into the arena; the next call may come once no rank reads it."""
        count, digits = shard.numel(), self.bytes
        scratch = torch.zeros(digits, BINS * -(-count // self.tile) + 1, dtype=torch.int32, device=shard.device)
        found = torch.zeros(digits, BINS, dtype=torch.int32, device=shard.device)
        self.count(keys=shard, count=count, found=found)
        source, between, target = shard, torch.empty_like(shard), self.merge.tensor("sorted", (count,), shard.dtype)
        for digit, states in enumerate(scratch):
            to = target if digit % 2 else between
            self.sort(keys=source, sorted=to, count=count, found=found[digit], taken=states[-1:], states=states, digit=digit)
            source = to


sorter = per_group(Sorter)


def solution(local_shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    ranks, shard = group_of(group), local_shard.contiguous()
    # A rank that has shared its count has merged what the call before sorted.
    counts = [count for (count,) in share_counts(ranks, [shard.numel()])]
    total, parts = sum(counts), ranks.world_size
    if max(counts) > MOST:
        raise UsageError(f"a shard has {max(counts)} elements: expected at most {MOST}")
    ends = list(accumulate((total // parts + (rank < total % parts) for rank in range(parts)), initial=0))
    kernels = sorter(ranks, 1 << (max(counts) - 1).bit_length(), shard.dtype)
    kernels.sort_shard(shard)
    first, end = ends[ranks.rank : ranks.rank + 2]
    result = shard.new_empty(end - first)
    kernels.merge(counts=counts, first=first, count=end - first, out=result)
    return result
