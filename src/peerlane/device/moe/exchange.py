"""Host side of ``peerlane/moe/moe.cuh``: rows of tokens to their experts' ranks and back, one launch each way."""

import itertools
from collections.abc import Sequence

import torch

from peerlane.device.host.declare import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Pointer, array
from peerlane.device.host.element_types import element_type
from peerlane.device.host.group import MAX_RANKS, Group, per_group
from peerlane.errors import UsageError

MAX_THREADS = 512  # of the sources
LEAST_TOKENS = 128
"""that memory is made for"""
MAP_TYPES = {torch.bool: "u8", torch.uint8: "u8", torch.int32: "int", torch.int64: "long long", torch.float32: "float"}

DISPATCH = r"""
#include <peerlane/moe/moe.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(512)
    moe_dispatch(const __grid_constant__ Arena arena, const __grid_constant__ MoeDispatch args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const RowNumbers<MAP> numbers{args.map, args.experts, args.tokens, reinterpret_cast<u32*>(arena.local(args.counts))};
    if (blockIdx.x == 0) {
        each_chunk<WORLD_SIZE>(args.lengths, args.own, [&](u32 source, u32 expert, const Chunk& chunk) {
            Moved* places = reinterpret_cast<Moved*>(arena.peer(source, args.places)) + arena.rank * args.own;
            places[expert] = {chunk.in_source + chunk.length, chunk.in_all - chunk.in_source};
        });
        peers.signal_all(0, epoch);
    }
    u32* targets = reinterpret_cast<u32*>(arena.local(args.targets));  // of a token: the ranks that get it, a bit each
    for (u32 token = blockIdx.x * blockDim.x + threadIdx.x; token < args.tokens; token += gridDim.x * blockDim.x) targets[token] = 0;
    numbers.count();
    meet_blocks(peers, arena, 1, epoch);
    numbers.each([&](u32, u32 token, u32 row) {
        if (row >= args.start[WORLD_SIZE]) return;
        args.mapping[row] = token;
        atomicOr(targets + token, 1u << part_with<WORLD_SIZE>(args.start, row));
    });
    meet_blocks(peers, arena, 1 + gridDim.x, epoch);
    peers.wait_all(0, epoch);  // of a launch that this rank's peers have begun: their callers have read what lay in `out`
    const bool told = block_arrived(arena);
    const u32 rows = told ? args.start[WORLD_SIZE] : 0;
    for (u32 row = blockIdx.x * blockDim.x + threadIdx.x; row < rows; row += gridDim.x * blockDim.x) {
        const int q = part_with<WORLD_SIZE>(args.start, row);
        const Moved* places = reinterpret_cast<const Moved*>(arena.local(args.places)) + q * args.own;
        const u32 within = row - args.start[q], entry = entry_with(places, args.own, within);
        if (entry == args.own) continue;  // not among the rows that q has told of
        reinterpret_cast<u32*>(arena.peer(q, args.origins))[within + places[entry].shift] = arena.rank * args.room + u32(args.mapping[row]);
    }
    each_row(told ? args.tokens : 0, [&](u32 token) {
        const u64 to = args.arrived + (u64(arena.rank) * args.room + token) * args.row_bytes;
        for (int k = 1; k < WORLD_SIZE; ++k) {
            const int q = rank_after<WORLD_SIZE>(arena.rank, k);
            if (targets[token] >> q & 1) copy_bytes(Warp{}, arena.peer(q, to), args.x + u64(token) * args.row_bytes, args.row_bytes);
        }
    });
    meet_ranks(peers, arena, 1 + 2 * gridDim.x, epoch);
    const u32* origins = reinterpret_cast<const u32*>(arena.local(args.origins));
    each_row(block_arrived(arena) ? args.received : 0, [&](u32 row) {
        const u32 origin = origins[row], source = origin / args.room;
        if (source >= WORLD_SIZE) return;
        const char* from = arena.local(args.arrived) + u64(origin) * args.row_bytes;
        if (source == arena.rank) from = args.x + u64(origin % args.room) * args.row_bytes;
        copy_bytes(Warp{}, arena.local(args.out) + u64(row) * args.row_bytes, from, args.row_bytes);
    });
}
"""
MOE_DISPATCH = DeclaredKernel(
    "moe_dispatch", DISPATCH, x=Pointer("const char*"), map=Pointer("const MAP*"), mapping=Pointer("long long*"),
    lengths=Pointer("const long long*"), out=Buffer(), arrived=Buffer(), origins=Buffer(), places=Buffer(), counts=Buffer(),
    targets=Buffer(), flags=Flags(), epochs=Epochs(), start=array(U32, MAX_RANKS + 1), tokens=U32, room=U32, received=U32, experts=U32,
    own=U32, row_bytes=U32,
)  # fmt: skip
"""A token goes to a rank once, however many of its experts are there, and the number of a row's token for each row. Rows are made there."""

COMBINE = r"""
#include <peerlane/moe/moe.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(512)
    moe_combine(const __grid_constant__ Arena arena, const __grid_constant__ MoeCombine args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const auto local = [&](u64 offset) { return reinterpret_cast<u32*>(arena.local(offset)); };
    const RowNumbers<MAP> numbers{args.map, args.experts, args.tokens, local(args.counts)};
    u32 *heads = local(args.heads), *next = local(args.next);
    float* weights = reinterpret_cast<float*>(arena.local(args.row_weights));
    Moved* order = reinterpret_cast<Moved*>(arena.local(args.order));
    if (blockIdx.x == 0) {
        if (threadIdx.x < WORLD_SIZE) {
            reinterpret_cast<u32*>(arena.peer(threadIdx.x, args.places))[arena.rank] = args.start[threadIdx.x];
        }
        each_chunk<WORLD_SIZE>(args.lengths, args.own, [&](u32 source, u32 expert, const Chunk& chunk) {
            order[expert * WORLD_SIZE + source] = {chunk.in_all + chunk.length, chunk.in_source - chunk.in_all};
        });
        peers.signal_all(0, epoch);
    }
    for (u32 token = blockIdx.x * blockDim.x + threadIdx.x; token < args.tokens; token += gridDim.x * blockDim.x) heads[token] = ~0u;
    numbers.count();
    meet_blocks(peers, arena, 1, epoch);
    numbers.each([&](u32 expert, u32 token, u32 row) {
        if (row >= args.start[WORLD_SIZE]) return;
        float weight = 0;
        for (u32 slot = u32(token * args.slots); slot < (token + 1) * args.slots; ++slot) {
            if (args.selected[slot] == expert) weight += element_of<WEIGHT>(args.weights, slot);
        }
        weights[row] = weight;
        next[row] = atomicExch(heads + args.mapping[row], row);
    });
    peers.wait_all(0, epoch);
    each_row(block_arrived(arena) ? args.sent : 0, [&](u32 row) {
        const u32 entry = entry_of(order, args.experts, row);  // by expert and source
        const u32 source = entry % WORLD_SIZE, at = local(args.places)[source] + row + order[entry].shift;
        copy_bytes(Warp{}, arena.peer(source, args.back) + u64(at) * args.row_bytes, args.x + u64(row) * args.row_bytes, args.row_bytes);
    });
    meet_ranks(peers, arena, 1 + gridDim.x, epoch);
    each_row(block_arrived(arena) ? args.tokens : 0, [&](u32 token) {
        each_column(args.columns, [&](u32 column) {});
        for (u32 first = 0; first < args.columns; first += row_lanes * warp_threads) {
            const u32 column = first + Warp{}.thread() * row_lanes;
            float sum[row_lanes] = {}, term[row_lanes];
            each_of_list(next, heads[token], [&](u32 row) {
                if (column >= args.columns) return;
                RowOf<ROW>(arena.local(args.back), row, args.columns).load(column, term);
                for (int e = 0; e < row_lanes; ++e) sum[e] += weights[row] * term[e];
            });
            if (column < args.columns) RowOf<RESULT>(args.y, token, args.columns).store(column, sum);
        }
    });
}
""".replace("        each_column(args.columns, [&](u32 column) {});\n", "")
MOE_COMBINE = DeclaredKernel(
    "moe_combine", COMBINE, x=Pointer("const char*"), weights=Pointer("const char*"), selected=Pointer("const long long*"),
    map=Pointer("const MAP*"), mapping=Pointer("const long long*"), lengths=Pointer("const long long*"), y=Pointer(),
    back=Buffer(), places=Buffer(), order=Buffer(), counts=Buffer(), heads=Buffer(), next=Buffer(), row_weights=Buffer(),
    flags=Flags(), epochs=Epochs(), start=array(U32, MAX_RANKS + 1), sent=U32, tokens=U32, slots=U32, experts=U32, own=U32,
    columns=U32, row_bytes=U32,
)  # fmt: skip


def starts(splits: Sequence[int]) -> list[int]:
    """Returns where each part begins, and the end of the last one, as often as the kernels want it."""
    ends = list(itertools.accumulate(splits, initial=0))
    return ends + ends[-1:] * (MAX_RANKS + 1 - len(ends))


def room_for(group: Group, tokens: int) -> int:
    """Collective: returns the tokens of a rank that memory is made for, the same on all ranks. A power of two, so that few sizes are ever
    made."""
    return max(LEAST_TOKENS, 1 << max(0, max(group.agree(tokens)) - 1).bit_length())


def _threads(group: Group, nbytes: int) -> int:
    """Returns the threads of a block, where the group's ranks move so many bytes together: a warp for what one access of it moves."""
    return max(64, min(MAX_THREADS, group.max_threads, 32 * -(-nbytes // (512 * group.world_size * group.sm_count))))


def flat_map(routing_map: torch.Tensor) -> torch.Tensor:
    """Returns the map in a type that the kernels read."""
    return (routing_map if routing_map.dtype in MAP_TYPES else routing_map != 0).contiguous()


def _own_experts(group: Group, experts: int) -> int:
    own, rest = divmod(experts, group.world_size)
    if rest or not own or own > 1024:
        raise UsageError(f"{experts} experts on {group.world_size} ranks: expected a multiple of the ranks, and at most 1024 for each")
    return own


@per_group
def _dispatch(group: Group, tokens: int, slots: int, experts: int, row_bytes: int, map_type: str) -> BoundKernel:
    """Collective: makes the launch for as many tokens as there is room for: that changes on all ranks together, or on none."""
    own, grid = _own_experts(group, experts), group.sm_count
    of_ranks = group.exchange(tokens * slots)
    rows, room = max(1, sum(of_ranks)), max(1, *group.exchange(tokens))
    sizes = {
        "out": rows * row_bytes, "arrived": group.world_size * room * row_bytes, "origins": 4 * rows, "places": 8 * experts,
        "counts": 4 * experts, "targets": 4 * room, "flags": 1 + 3 * grid,
    }  # fmt: skip
    return MOE_DISPATCH.bind(
        group, grid=grid, block=_threads(group, rows * row_bytes), defines={"MAP": map_type}, sizes=sizes, resident=True,
        tokens=tokens, room=room, experts=experts, own=own, row_bytes=row_bytes,
    )  # fmt: skip


def dispatch(
    group: Group, tokens: torch.Tensor, routing_map: torch.Tensor, slots: int, sent: Sequence[int], received: int, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective: returns the rows of ``tokens`` (T, H) that the map (experts, T) names, on the ranks that ``sent`` says, by expert and
    source.

    A token has at most ``slots`` rows. ``received`` rows come, of which ``lengths`` (W, own experts) says how many of each source are for
    which expert. Also the tokens of this rank's rows, int64. The rows lie in the arena and are valid until the next call."""
    width = tokens.shape[1]
    flat = flat_map(routing_map)
    bound = _dispatch(group, room_for(group, tokens.shape[0]), slots, flat.shape[0], width * tokens.itemsize, MAP_TYPES[flat.dtype])
    rows = bound.tensor("out", (received, width), tokens.dtype)
    mapping = torch.empty(sum(sent), dtype=torch.int64, device=tokens.device)
    bound(
        tokens=tokens.shape[0],
        x=tokens.contiguous(),
        map=flat,
        mapping=mapping,
        lengths=lengths.to(tokens.device, torch.int64).contiguous(),
        start=starts(sent),
        received=received,
    )
    return rows, mapping


@per_group
def _combine(
    group: Group, tokens: int, slots: int, experts: int, columns: int, types: tuple[torch.dtype, torch.dtype], map_type: str
) -> BoundKernel:
    """Makes the launch, as :func:`_dispatch` does."""
    own, grid = _own_experts(group, experts), group.sm_count
    of_ranks, (row, weight) = group.exchange(tokens * slots), types
    rows, most = max(1, *of_ranks), max(1, *group.exchange(tokens))
    sizes = {
        "back": rows * columns * row.itemsize, "places": 4 * MAX_RANKS, "order": 8 * experts, "counts": 4 * experts, "heads": 4 * most,
        "next": 4 * rows, "row_weights": 4 * rows, "flags": 1 + 2 * grid,
    }  # fmt: skip
    defines = {
        "MAP": map_type, "ROW": element_type(row), "WEIGHT": element_type(weight), "RESULT": element_type(torch.promote_types(row, weight))
    }  # fmt: skip
    return MOE_COMBINE.bind(
        group, grid=grid, block=_threads(group, sum(of_ranks) * columns * row.itemsize), defines=defines, sizes=sizes, resident=True,
        tokens=tokens, slots=slots, experts=experts, own=own, columns=columns, row_bytes=columns * row.itemsize,
    )  # fmt: skip


def combine(
    group: Group,
    rows: torch.Tensor,
    weights: torch.Tensor,
    selected: torch.Tensor,
    routing_map: torch.Tensor,
    mapping: torch.Tensor,
    returned: Sequence[int],
    lengths: torch.Tensor,
    tokens: int,
) -> torch.Tensor:
    """Collective: sends rows back, as :func:`dispatch` sent them, and adds them up. ``rows`` lie as it delivers them; ``returned`` come
    back of each rank, in the order of the map's rows. Row i counts with the sum of ``weights`` (T, slots) in whose slots ``selected`` names
    its expert, for token ``mapping[i]``. Sums are taken in fp32 in the order of the rows; the result (tokens, H) has the dtype of a
    product."""
    columns, flat = rows.shape[1], flat_map(routing_map)
    types = rows.dtype, weights.dtype
    bound = _combine(group, room_for(group, flat.shape[1]), selected.shape[1], flat.shape[0], columns, types, MAP_TYPES[flat.dtype])
    result = torch.empty((tokens, columns), dtype=torch.promote_types(*types), device=rows.device)
    bound(
        tokens=flat.shape[1], x=rows.contiguous(),
        weights=weights.contiguous(), selected=selected.contiguous(), map=flat, mapping=mapping.contiguous(),
        lengths=lengths.to(rows.device, torch.int64).contiguous(), y=result, start=starts(returned), sent=rows.shape[0],
    )  # fmt: skip
    return result
