"""Problem 70, a keyed jagged tensor handed to its features' owners: one question to the device, and one kernel that stores bags in place.

From the table of all ranks' sizes every block computes where each feature's lengths, values and weights lie here and at their owner.
Bound by that question, as shapes follow from data, and at large sizes by the links, which carry each bag once, uncompressed.

The next call overwrites the results, which lie in the arena."""

import functools
import itertools

import torch
import torch.distributed as dist

from peerlane.device import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, array, group_of, per_group
from peerlane.device.collectives.counts import share_table
from peerlane.device.host.group import MAX_RANKS

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr u32 piece_bytes = 4096;
struct Segment { u64 from, to, count; };  // elements

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

    // Row q of the table: how many lengths and how many values rank q has of every feature. The owner wants sources in the order (x, y) of
    // x + WORLD_SIZE / STAGGER y.
    constexpr u32 outer = WORLD_SIZE / STAGGER;
    const auto own_place = [](u32 rank) { return rank % outer * STAGGER + rank / outer; };
    Segment* segments = reinterpret_cast<Segment*>(ptx::dynamic_shared());
    const u32 warp = threadIdx.x / warp_threads, warps = blockDim.x / warp_threads;
    const auto owner_of = [&](u32 feature) {
        int owner = 0;
        while (feature >= args.first[owner + 1]) ++owner;
        return owner;
    };
    for (u32 item = warp; item < 2 * features; item += warps) {
        const u32 kind = item / features, feature = item % features, first = args.first[owner_of(feature)];
        const auto count_of = [&](u32 rank, u32 of) { return u64(args.table[(rank * 2 + kind) * features + of]); };
        u64 from = 0, to = 0;
        for (u32 i = Warp{}.thread(); i < feature; i += warp_threads) from += count_of(arena.rank, i);
        for (u32 i = Warp{}.thread(); i < (feature + 1 - first) * WORLD_SIZE; i += warp_threads) {
            const u32 rank = i % WORLD_SIZE, of = first + i / WORLD_SIZE;
            if (of < feature || own_place(rank) < own_place(arena.rank)) to += count_of(rank, of);
        }
        from = warp_sum(from), to = warp_sum(to);
        if (Warp{}.thread() == 0) segments[item] = Segment{from, to, count_of(arena.rank, feature)};
    }
    __syncthreads();

    // Warps take pieces of the segments in turn, beginning with those for the next rank. Sizes have been shared since the callers of all
    // ranks read the results before: they may be overwritten.
    const u32 all_warps = gridDim.x * warps, turn = warp * gridDim.x + blockIdx.x;
    u32 before = 0;
    for (u32 step = 0; step < 3 * features; ++step) {
        const u32 tensor = step % 3, feature = (step / 3 + args.first[arena.rank + 1]) % features, bytes = args.bytes[tensor];
        const Segment segment = segments[(tensor > 0) * features + feature];
        const u64 total = segment.count * bytes;
        const u32 pieces = u32((total + piece_bytes - 1) / piece_bytes);
        const u64 out = tensor == 0 ? args.lengths_out : tensor == 1 ? args.values_out : args.weights_out;
        const char* in = tensor == 0 ? args.lengths : tensor == 1 ? args.values : args.weights;
        char* target = arena.peer(owner_of(feature), out + segment.to * bytes);
        for (u32 piece = (turn + all_warps - before % all_warps) % all_warps; piece < pieces; piece += all_warps) {
            const u64 at = u64(piece) * piece_bytes;
            copy_piece(target + at, in + segment.from * bytes + at, u32(min(total - at, u64(piece_bytes))));
        }
        before += pieces;
    }
    peers.barrier(blockIdx.x, epoch);
}
"""
JAGGED_EXCHANGE = DeclaredKernel(
    "jagged_exchange", SOURCE, epochs=Epochs(), flags=Flags(), lengths_out=Buffer(), values_out=Buffer(), weights_out=Buffer(),
    lengths=Pointer("const char*"), values=Pointer("const char*"), weights=Pointer("const char*"), table=Pointer("const long long*"),
    first=array(U32, MAX_RANKS + 1), bytes=array(U32, 3),
)  # fmt: skip


@per_group
def jagged_exchange(group: Group, features: int, dtypes: tuple[torch.dtype, ...], capacity: tuple[int, int], stagger: int) -> BoundKernel:
    """Makes the launch of a group. ``capacity``: of results, in lengths and in values."""
    room = [capacity[tensor > 0] * dtype.itemsize for tensor, dtype in enumerate(dtypes)] + [0] * (3 - len(dtypes))
    return JAGGED_EXCHANGE.bind(
        group,
        grid=group.sm_count,
        block=min(512, group.max_threads),
        defines={"STAGGER": stagger},
        sizes={"flags": group.sm_count, **dict(zip(("lengths_out", "values_out", "weights_out"), room, strict=True))},
        shared_bytes=48 * features,
        bytes=[dtype.itemsize for dtype in dtypes] + [0] * (3 - len(dtypes)),
    )


@functools.lru_cache(maxsize=64)
def on_device(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, device=device)


def counts_of(lengths: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """Returns every feature's number of lengths, and behind them every feature's number of values."""
    own = on_device(tuple(strides), lengths.device)
    if len(set(strides)) == 1:
        return torch.cat((own, lengths.view(len(strides), -1).sum(1, dtype=torch.int64)))
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))[torch.nn.functional.pad(own.cumsum(0), (1, 0))]
    return torch.cat((own, ends.diff()))


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
    counts = share_table(group, counts_of(lengths, stride_per_key or [batch_size] * features))
    first = [sum(key_splits[:rank]) for rank in range(group.world_size + 1)]
    # Received by every rank, lengths and values; arenas grow by powers of two, on all ranks alike.
    by_feature = counts.view(-1, 2, features).sum(0).tolist()
    sizes = [[sum(by_feature[kind][begin:end]) for begin, end in itertools.pairwise(first)] for kind in (0, 1)]
    capacity = 1 << max(sizes[0]).bit_length(), 1 << max(sizes[1]).bit_length()

    tensors = [tensor.contiguous() for tensor in (lengths, values, weights) if tensor is not None]
    launch = jagged_exchange(group, features, tuple(tensor.dtype for tensor in tensors), capacity, stagger)
    table = counts.to(lengths.device, non_blocking=True)
    sources = dict(zip(("lengths", "values", "weights"), [*tensors, None], strict=False))
    launch(**sources, table=table, first=first + [0] * (MAX_RANKS - group.world_size))
    received = {
        name: launch.tensor(f"{name}_out", (sizes[name != "lengths"][group.rank],), tensor.dtype)
        for name, tensor in sources.items()
        if tensor is not None
    }
    strides = table.view(group.world_size, 2, features)[:, 0]
    if stride_per_key is None:
        stride_fields = {"stride": strides[:, 0].sum(), "stride_per_rank": strides[:, 0].contiguous()}
    else:
        in_order = strides.view(stagger, -1, features).transpose(0, 1).reshape(group.world_size, features)
        stride_fields = {"stride_per_key_per_rank": in_order[:, first[group.rank] : first[group.rank + 1]].t().contiguous()}
    return {"lengths": received.pop("lengths"), "values": received.pop("values"), **stride_fields, **received}
