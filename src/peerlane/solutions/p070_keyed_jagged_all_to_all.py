"""Problem 70, a keyed jagged tensor handed to its features' owners: one kernel sums lengths, tells the sums, and stores bags in place.

Ranks send each other the sums as packets. From all ranks' sums every block computes where each feature's lengths, values and weights lie
here and at their owner, and the host learns the results' sizes while bags travel. Bound by the links, which carry each bag once,
uncompressed. If bags do not fit, all ranks see so, make room and launch again.

The next call overwrites the results, which lie in the arena."""

import functools
import itertools

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
    Packets,
    Pointer,
    array,
    group_of,
    per_group,
)
from peerlane.device.collectives.counts import HostWords
from peerlane.device.host.group import MAX_RANKS

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr u32 piece_bytes = 2048;
struct Segment { u64 from, to, count; };  // elements
struct Sum { u32 lengths, low, high; };   // how many lengths a feature has, and part of their sum

// By a warp. Where source and target lie differently in their vectors, words are read and vectors stored: links carry few large stores.
__device__ inline void copy_piece(char* target, const char* source, u32 bytes) {
    const u64 both = reinterpret_cast<u64>(target) | reinterpret_cast<u64>(source);
    if (both % sizeof(u32) != 0 || both % sizeof(Vec16) == 0) return copy_bytes(Warp{}, target, source, bytes);
    const u32 before = min(bytes, u32(-reinterpret_cast<u64>(target) % sizeof(Vec16)));
    copy_bytes(Warp{}, target, source, before);
    const u32* words = reinterpret_cast<const u32*>(source + before);
    Vec16* vectors = reinterpret_cast<Vec16*>(target + before);
    const u32 count = (bytes - before) / sizeof(Vec16), done = before + count * sizeof(Vec16);
    constexpr u32 at_once = 4;
    for (u32 first = Warp{}.thread(); first < count; first += at_once * warp_threads) {
        Vec16 value[at_once];
#pragma unroll
        for (u32 k = 0; k < at_once; ++k) {
            const u32 v = first + k * warp_threads;
#pragma unroll
            for (u32 w = 0; w < 4; ++w) value[k].word[w] = v < count ? words[4 * v + w] : 0;
        }
#pragma unroll
        for (u32 k = 0; k < at_once; ++k) {
            if (const u32 v = first + k * warp_threads; v < count) vectors[v] = value[k];
        }
    }
    copy_bytes(Warp{}, target + done, source + done, bytes - done);
}

extern "C" __global__ void __launch_bounds__(512)
    jagged_exchange(const __grid_constant__ Arena arena, const __grid_constant__ JaggedExchange args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs))), features = args.first[WORLD_SIZE];
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const u32 warp = threadIdx.x / warp_threads, warps = blockDim.x / warp_threads, lane = Warp{}.thread();

    const SmallExchange<WORLD_SIZE, Sum> sums(arena, args.sums, epoch);
    const u32 items = features * PIECES;
    __shared__ u64 scratch[32], sizes[2][WORLD_SIZE];
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
        const u64 begin = args.starts[item / PIECES], count = args.starts[item / PIECES + 1] - begin;
        const Part part = part_of(count, item % PIECES, PIECES);
        u64 sum = 0;
        const INDEX* lengths = reinterpret_cast<const INDEX*>(args.lengths) + begin;
        constexpr u32 at_once = 4;  // loads of a thread that are under way together
        for (u64 first = part.first + threadIdx.x; first < part.end; first += at_once * blockDim.x) {
            INDEX value[at_once] = {};
#pragma unroll
            for (u32 k = 0; k < at_once; ++k) {
                if (first + k * blockDim.x < part.end) value[k] = lengths[first + k * blockDim.x];
            }
#pragma unroll
            for (u32 k = 0; k < at_once; ++k) sum += value[k];
        }
        sum = block_reduce(sum, [](u64 a, u64 b) { return a + b; }, scratch);
        if (threadIdx.x == 0) sums.send_everywhere(item, Sum{u32(count), u32(sum), u32(sum >> 32)});
    }
    u64* table = reinterpret_cast<u64*>(ptx::dynamic_shared());  // [rank][lengths or values][feature]
    Segment* segments = reinterpret_cast<Segment*>(table + WORLD_SIZE * 2 * features);
    const auto count_of = [&](u32 rank, u32 kind, u32 feature) -> u64& { return table[(rank * 2 + kind) * features + feature]; };
    for (u32 i = threadIdx.x; i < WORLD_SIZE * 2 * features; i += blockDim.x) table[i] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < WORLD_SIZE * items; i += blockDim.x) {
        const u32 rank = i / items, item = i % items;
        const Sum sum = sums.receive_from(rank, item);
        if (item % PIECES == 0) count_of(rank, 0, item / PIECES) = sum.lengths;
        atomicAdd(&count_of(rank, 1, item / PIECES), sum.low | u64(sum.high) << 32);
    }
    __syncthreads();
    for (u32 item = warp; item < 2 * WORLD_SIZE; item += warps) {
        const u32 kind = item / WORLD_SIZE, q = item % WORLD_SIZE;
        u64 sum = 0;
        for (u32 i = lane; i < (args.first[q + 1] - args.first[q]) * WORLD_SIZE; i += warp_threads) {
            sum += count_of(i % WORLD_SIZE, kind, args.first[q] + i / WORLD_SIZE);
        }
        sum = warp_sum(sum);
        if (lane == 0) sizes[kind][q] = sum;
    }
    const bool told = block_arrived(arena);  // all ranks have begun the launch: their callers have read the results of the one before
    bool fits = true;
    for (u32 kind = 0; kind < 2; ++kind) {
        u64 most = 0;
        for (u32 q = 0; q < WORLD_SIZE; ++q) most = max(most, sizes[kind][q]);
        fits &= most <= args.capacity[kind];
        if (blockIdx.x == 0 && threadIdx.x == 0) args.host[1 + kind] = sizes[kind][arena.rank], args.host[3 + kind] = most;
    }
    if (told && blockIdx.x == 0 && threadIdx.x == 0) tell_host(args.host, args.stamp);
    if (!told || !fits) return;  // all ranks alike

    // The owner wants sources in the order (x, y) of x + WORLD_SIZE / STAGGER y.
    constexpr u32 outer = WORLD_SIZE / STAGGER;
    const auto own_place = [](u32 rank) { return rank % outer * STAGGER + rank / outer; };
    const auto owner_of = [&](u32 feature) {
        int owner = 0;
        while (feature >= args.first[owner + 1]) ++owner;
        return owner;
    };
    for (u32 item = warp; item < 2 * features; item += warps) {
        const u32 kind = item / features, feature = item % features, first = args.first[owner_of(feature)];
        u64 from = 0, to = 0;
        for (u32 i = lane; i < feature; i += warp_threads) from += count_of(arena.rank, kind, i);
        for (u32 i = lane; i < (feature + 1 - first) * WORLD_SIZE; i += warp_threads) {
            const u32 rank = i % WORLD_SIZE, of = first + i / WORLD_SIZE;
            if (of < feature || own_place(rank) < own_place(arena.rank)) to += count_of(rank, kind, of);
        }
        from = warp_sum(from), to = warp_sum(to);
        if (lane == 0) segments[item] = Segment{from, to, count_of(arena.rank, kind, feature)};
    }
    if (blockIdx.x == 0) {
        // By own feature and source, or the sum and every rank's.
        const u32 own = args.first[arena.rank];
        for (u32 i = threadIdx.x; args.per_key && i < (args.first[arena.rank + 1] - own) * WORLD_SIZE; i += blockDim.x) {
            const u32 place = i % WORLD_SIZE;
            args.strides[i] = count_of(place / STAGGER + outer * (place % STAGGER), 0, own + i / WORLD_SIZE);
        }
        if (!args.per_key && threadIdx.x <= WORLD_SIZE) {
            u64 sum = 0;
            for (u32 q = 0; q < WORLD_SIZE; ++q) sum += threadIdx.x == 0 || q + 1 == threadIdx.x ? count_of(q, 0, 0) : 0;
            args.strides[threadIdx.x] = sum;
        }
    }
    __syncthreads();

    // Warps take pieces of the segments in turn, beginning with those for the next rank.
    const auto feature_of = [&](u32 step) { return (step / 3 + args.first[arena.rank + 1]) % features; };
    const auto bytes_of = [&](u32 step) { return segments[(step % 3 > 0) * features + feature_of(step)].count * args.bytes[step % 3]; };
    const u32 steps = 3 * features;
    u32* ends = reinterpret_cast<u32*>(segments + 2 * features);  // of steps, in pieces
    if (warp == 0) {
        u32 before = 0;
        for (u32 first = 0; first < steps; first += warp_threads) {
            const u32 step = first + lane, pieces = step < steps ? u32((bytes_of(step) + piece_bytes - 1) / piece_bytes) : 0;
            const u32 end = before + warp_prefix(pieces);
            if (step < steps) ends[step] = end;
            before = __shfl_sync(full_warp, end, warp_threads - 1);
        }
    }
    __syncthreads();
    for (u32 piece = warp * gridDim.x + blockIdx.x; piece < ends[steps - 1]; piece += gridDim.x * warps) {
        u32 step = 0;  // the first that ends behind the piece
        for (u32 rest = steps; rest > 0;) {
            const u32 half = rest / 2;
            if (piece < ends[step + half]) {
                rest = half;
            } else {
                step += half + 1, rest -= half + 1;
            }
        }
        const u32 tensor = step % 3, feature = feature_of(step), bytes = args.bytes[tensor];
        const Segment segment = segments[(tensor > 0) * features + feature];
        const u64 out = tensor == 0 ? args.lengths_out : tensor == 1 ? args.values_out : args.weights_out;
        const char* in = tensor == 0 ? args.lengths : tensor == 1 ? args.values : args.weights;
        const u64 at = u64(piece - (step == 0 ? 0 : ends[step - 1])) * piece_bytes;
        char* target = arena.peer(owner_of(feature), out + segment.to * bytes + at);
        copy_piece(target, in + segment.from * bytes + at, u32(min(bytes_of(step) - at, u64(piece_bytes))));
    }
    peers.barrier(blockIdx.x, epoch);
}
"""
JAGGED_EXCHANGE = DeclaredKernel(
    "jagged_exchange", SOURCE, epochs=Epochs(), flags=Flags(), sums=Packets(), lengths_out=Buffer(), values_out=Buffer(),
    weights_out=Buffer(), lengths=Pointer("const char*"), values=Pointer("const char*"), weights=Pointer("const char*"),
    starts=Pointer("const u64*"), strides=Pointer("u64*"), host=Pointer("u64*"), capacity=array(U64, 2), first=array(U32, MAX_RANKS + 1),
    bytes=array(U32, 3), per_key=U32, stamp=U32,
)  # fmt: skip
NAMES = ("lengths", "values", "weights")
INDEX_TYPES = {torch.int32: "int", torch.int64: "long long"}


@per_group
def room(group: Group) -> list[int]:
    """Returns the lengths and values of a rank that memory is made for: what all ranks have seen of the calls before."""
    return [1024, 4096]


@per_group
def jagged_exchange(
    group: Group, features: int, dtypes: tuple[torch.dtype, ...], capacity: tuple[int, int], stagger: int
) -> tuple[BoundKernel, HostWords, dict[str, torch.Tensor]]:
    """Makes the launch of a group. ``capacity``: of results, in lengths and in values. The host gets how many come of both, and the most
    that come anywhere. Also returns the results' memory."""
    widths = [dtype.itemsize for dtype in dtypes] + [0] * (3 - len(dtypes))
    rooms = [count * width for count, width in zip((capacity[0], capacity[1], capacity[1]), widths, strict=True)]
    told, pieces = HostWords(group, 4), max(1, group.sm_count // features)
    launch = JAGGED_EXCHANGE.bind(
        group,
        grid=group.sm_count,
        block=min(512, group.max_threads),
        defines={"STAGGER": stagger, "PIECES": pieces, "INDEX": INDEX_TYPES[dtypes[0]]},
        sizes={"flags": group.sm_count, "sums": features * pieces, **dict(zip((f"{name}_out" for name in NAMES), rooms, strict=True))},
        shared_bytes=(60 + 16 * group.world_size) * features,
        resident=True,
        bytes=widths,
        capacity=capacity,
        host=told.words,
    )  # fmt: skip
    places = zip(NAMES, (capacity[0], capacity[1], capacity[1]), dtypes, strict=False)
    return launch, told, {name: launch.tensor(f"{name}_out", (count,), dtype) for name, count, dtype in places}


@functools.lru_cache(maxsize=64)
def on_device(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, device=device)


def solution(
    lengths: torch.Tensor,
    values: torch.Tensor,
    key_splits: list[int],
    batch_size: int,
    pg: dist.ProcessGroup | None = None,
    weights: torch.Tensor | None = None,
    stride_per_key: list[int] | None = None,
    stagger: int = 1,
) -> dict[str, torch.Tensor]:
    group, features = group_of(pg), sum(key_splits)
    starts = on_device(tuple(itertools.accumulate(stride_per_key or [batch_size] * features, initial=0)), lengths.device)
    first = list(itertools.accumulate(key_splits, initial=0))
    strides = starts.new_empty((key_splits[group.rank], group.world_size) if stride_per_key else 1 + group.world_size)
    tensors = [tensor.contiguous() for tensor in (lengths, values, weights) if tensor is not None]
    sources = dict(zip(NAMES, [*tensors, None], strict=False))
    fits = room(group)
    while True:
        launch, told, results = jagged_exchange(group, features, tuple(tensor.dtype for tensor in tensors), (fits[0], fits[1]), stagger)
        launch(
            **sources, starts=starts, strides=strides, first=first + [0] * (MAX_RANKS - group.world_size), per_key=bool(stride_per_key),
            stamp=told.stamp(),
        )  # fmt: skip
        *sizes, most_lengths, most_values = told.read()
        if most_lengths <= fits[0] and most_values <= fits[1]:
            break
        fits[:] = [max(size, 1 << most.bit_length()) for size, most in zip(fits, (most_lengths, most_values), strict=True)]
    received = {name: result[: sizes[name != "lengths"]] for name, result in results.items()}
    if stride_per_key is None:
        stride_fields = {"stride": strides[0], "stride_per_rank": strides[1:]}
    else:
        stride_fields = {"stride_per_key_per_rank": strides}
    return {"lengths": received.pop("lengths"), "values": received.pop("values"), **stride_fields, **received}
