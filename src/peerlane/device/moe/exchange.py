"""Host side of ``peerlane/moe/moe.cuh``: rows of tokens to their experts' ranks and back, one launch each way."""

import itertools
from collections.abc import Sequence

import torch

from peerlane.device.host.declare import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Pointer, array
from peerlane.device.host.element_types import element_type
from peerlane.device.host.group import MAX_RANKS, Group, per_group
from peerlane.errors import UsageError

MAX_THREADS = 512  # of the sources
ROUNDS = 4
"""in which tokens travel: ``team_rounds`` of the sources"""
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
    const auto local = [&](u64 offset) { return reinterpret_cast<u32*>(arena.local(offset)); };
    const RowLists lists{reinterpret_cast<RowList*>(arena.local(args.lists)), local(args.lines), local(args.next)};
    u32* targets = local(args.targets);  // of a token: the ranks that get it, a bit each
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (u32 token = thread; token < args.room; token += step) targets[token] = 0;
    for (u32 i = thread; i < WORLD_SIZE * args.room; i += step) lists.clear(i);
    numbers.count();
    meet_blocks(peers, arena, 1, epoch);
    peers.wait_all(0, epoch);  // of a launch that all ranks have begun: they have done with the one before
    const bool told = block_arrived(arena);
    numbers.each([&](u32, u32 token, u32 row) {
        if (row >= args.start[WORLD_SIZE] || !told) return;
        args.mapping[row] = token;
        const int q = part_with<WORLD_SIZE>(args.start, row);
        const Moved* places = reinterpret_cast<const Moved*>(arena.local(args.places)) + q * args.own;
        const u32 within = row - args.start[q], entry = entry_with(places, args.own, within);
        atomicOr(targets + token, 1u << q);
        if (entry == args.own) return;  // not among the rows that q has told of
        reinterpret_cast<u32*>(arena.peer(q, args.origins))[within + places[entry].shift] = arena.rank * args.room + token;
    });
    meet_ranks(peers, arena, 1 + gridDim.x, epoch);
    const u32 rows = block_arrived(arena) ? args.received : 0;
    for (u32 row = thread; row < rows; row += step) {
        const u32 origin = local(args.origins)[row];
        if (origin < WORLD_SIZE * args.room) lists.add(origin, row);
    }
    meet_blocks(peers, arena, 1 + 2 * gridDim.x, epoch);
    const bool sends = TokenTeam<WORLD_SIZE>::caller_sends();
    const TokenTeam<WORLD_SIZE> team(arena, args.flags, sends, args.room, 1 + 3 * gridDim.x, epoch);
    const auto arrived = [&](u32 source, u32 token) { return args.arrived + (u64(source) * args.room + token) * args.row_bytes; };
    const auto spread = [&](u32 source, u32 token, const char* from) {
        copy_to_rows(from, arena.local(args.out), args.row_bytes, lists, source * args.room + token);
    };
    if (sends) {
        for (u32 round = 0; round < team_rounds; ++round) {
            team.each(round, [&](u32 token) {
                const char* from = args.x + u64(token) * args.row_bytes;
                for (int k = 1; k < WORLD_SIZE; ++k) {
                    const int q = rank_after<WORLD_SIZE>(arena.rank, k);
                    if (targets[token] >> q & 1) copy_bytes(Warp{}, arena.peer(q, arrived(arena.rank, token)), from, args.row_bytes);
                }
            });
            team.tell(round);
        }
        return;
    }
    for (u32 round = 0; round < team_rounds; ++round) {
        team.each(round, [&](u32 token) { spread(arena.rank, token, args.x + u64(token) * args.row_bytes); });
    }
    for (u32 round = 0; round < team_rounds; ++round) {
        team.hear(round);
        team.each(round, [&](u32 token) {
            for (int k = 1; k < WORLD_SIZE; ++k) {
                const u32 q = rank_after<WORLD_SIZE>(arena.rank, k);
                spread(q, token, arena.local(arrived(q, token)));
            }
        });
    }
}
"""
MOE_DISPATCH = DeclaredKernel(
    "moe_dispatch", DISPATCH, x=Pointer("const char*"), map=Pointer("const MAP*"), mapping=Pointer("long long*"),
    lengths=Pointer("const long long*"), out=Buffer(), arrived=Buffer(), origins=Buffer(), places=Buffer(), counts=Buffer(),
    targets=Buffer(), lists=Buffer(), lines=Buffer(), next=Buffer(), flags=Flags(), epochs=Epochs(), start=array(U32, MAX_RANKS + 1),
    tokens=U32, room=U32, received=U32, experts=U32, own=U32, row_bytes=U32,
)  # fmt: skip
"""A token goes to a rank once, however many of its experts are there, and the number of a row's token for each row. Rows are made there,
while other tokens are on their way."""

COMBINE = r"""
#include <peerlane/moe/moe.cuh>
using namespace peerlane;

struct Term {
    u32 token;  // of all ranks
    float weight;
};

extern "C" __global__ void __launch_bounds__(512)
    moe_combine(const __grid_constant__ Arena arena, const __grid_constant__ MoeCombine args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const auto local = [&](u64 offset) { return reinterpret_cast<u32*>(arena.local(offset)); };
    const RowNumbers<MAP> numbers{args.map, args.experts, args.tokens, local(args.counts)};
    const RowLists lists{reinterpret_cast<RowList*>(arena.local(args.lists)), local(args.lines), local(args.next)};
    u32* targets = local(args.targets);  // of a token: the ranks that have rows of it, a bit each
    if (blockIdx.x == 0) {
        each_chunk<WORLD_SIZE>(args.lengths, args.own, [&](u32 source, u32 expert, const Chunk& chunk) {
            Moved* places = reinterpret_cast<Moved*>(arena.peer(source, args.places)) + arena.rank * args.own;
            places[expert] = {chunk.in_source + chunk.length, chunk.in_all - chunk.in_source};
        });
        peers.signal_all(0, epoch);
    }
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (u32 token = thread; token < args.room; token += step) targets[token] = 0;
    for (u32 i = thread; i < WORLD_SIZE * args.room; i += step) lists.clear(i);
    numbers.count();
    meet_blocks(peers, arena, 1, epoch);
    peers.wait_all(0, epoch);  // of a launch that all ranks have begun: they have done with the one before
    const bool told = block_arrived(arena);
    numbers.each([&](u32 expert, u32 token, u32 row) {
        if (row >= args.start[WORLD_SIZE] || !told) return;
        float weight = 0;
        for (u32 slot = u32(token * args.slots); slot < (token + 1) * args.slots; ++slot) {
            if (args.selected[slot] == expert) weight += element_of<WEIGHT>(args.weights, slot);
        }
        const int q = part_with<WORLD_SIZE>(args.start, row);
        const Moved* places = reinterpret_cast<const Moved*>(arena.local(args.places)) + q * args.own;
        const u32 within = row - args.start[q], entry = entry_with(places, args.own, within), target = u32(args.mapping[row]);
        if (entry == args.own || target >= args.room) return;  // not among the rows that q has told of
        atomicOr(targets + target, 1u << q);
        reinterpret_cast<Term*>(arena.peer(q, args.terms))[within + places[entry].shift] = {arena.rank * args.room + target, weight};
    });
    meet_ranks(peers, arena, 1 + gridDim.x, epoch);
    const Term* terms = reinterpret_cast<const Term*>(arena.local(args.terms));
    const u32 rows = block_arrived(arena) ? args.sent : 0;
    for (u32 row = thread; row < rows; row += step) {
        if (terms[row].token < WORLD_SIZE * args.room) lists.add(terms[row].token, row);
    }
    meet_blocks(peers, arena, 1 + 2 * gridDim.x, epoch);
    const bool sends = TokenTeam<WORLD_SIZE>::caller_sends();
    const TokenTeam<WORLD_SIZE> team(arena, args.flags, sends, args.room, 1 + 3 * gridDim.x, epoch);
    using Sums = float[eights_of_sums][row_lanes];
    const auto store = [&](char* matrix, u64 row, const auto& column_of, const Sums& sums) {
#pragma unroll
        for (int i = 0; i < eights_of_sums; ++i) {
            if (column_of(i) < args.columns) RowOf<RESULT>(matrix, row, args.columns).store(column_of(i), sums[i]);
        }
    };
    const auto sum_of = [&](u32 home, u32 token, const auto& use) {
        sum_rows<ROW>(args.x, args.columns, lists, home * args.room + token, [&](u32 row) { return terms[row].weight; }, use);
    };
    for (u32 round = 0; round < team_rounds; ++round) {
        if (!sends) team.hear(round);
        team.each(round, [&](u32 token) {
            for (int k = 1; k < WORLD_SIZE && sends; ++k) {
                const int q = rank_after<WORLD_SIZE>(arena.rank, k);
                if (lists.of[q * args.room + token].count == 0) continue;
                const u64 row = u64(arena.rank) * args.room + token;
                sum_of(q, token, [&](const auto& column_of, const Sums& sums) { store(arena.peer(q, args.parts), row, column_of, sums); });
            }
            if (sends || token >= args.tokens) return;
            sum_of(arena.rank, token, [&](const auto& column_of, Sums& sums) {
                for (u32 q = 0; q < WORLD_SIZE; ++q) {
                    if (q == arena.rank || (targets[token] >> q & 1) == 0) continue;
                    const auto place = [&](int i, u32& row, u32& column) { row = q * args.room + token, column = column_of(i); };
                    Sums part;
                    load_together<RESULT, eights_of_sums>(arena.local(args.parts), args.columns, place, part);
#pragma unroll
                    for (int i = 0; i < eights_of_sums; ++i) {
#pragma unroll
                        for (int e = 0; e < row_lanes; ++e) sums[i][e] += part[i][e];
                    }
                }
                store(args.y, token, column_of, sums);
            });
        });
        if (sends) team.tell(round);
    }
}
"""
MOE_COMBINE = DeclaredKernel(
    "moe_combine", COMBINE, x=Pointer("const char*"), weights=Pointer("const char*"), selected=Pointer("const long long*"),
    map=Pointer("const MAP*"), mapping=Pointer("const long long*"), lengths=Pointer("const long long*"), y=Pointer(),
    parts=Buffer(), places=Buffer(), counts=Buffer(), targets=Buffer(), lists=Buffer(), lines=Buffer(), next=Buffer(), terms=Buffer(),
    flags=Flags(), epochs=Epochs(), start=array(U32, MAX_RANKS + 1), sent=U32, tokens=U32, room=U32, slots=U32, experts=U32, own=U32,
    columns=U32,
)  # fmt: skip
"""The home of a token tells where its rows are what they weigh. A rank adds up what it has of a token, and one row of it travels."""


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


def _lists(group: Group, room: int, rows: int) -> dict[str, int]:
    """Returns the sizes of ``RowLists`` of all ranks' tokens."""
    tokens = group.world_size * room
    return {"lists": 8 * tokens, "lines": 128 * tokens, "next": 4 * rows}


@per_group
def _dispatch(group: Group, tokens: int, slots: int, experts: int, row_bytes: int, map_type: str) -> BoundKernel:
    """Collective: makes the launch for as many tokens as there is room for: that changes on all ranks together, or on none."""
    own, grid = _own_experts(group, experts), group.sm_count
    of_ranks = group.exchange(tokens * slots)
    rows, room = max(1, sum(of_ranks)), max(1, *group.exchange(tokens))
    sizes = {
        "out": rows * row_bytes, "arrived": group.world_size * room * row_bytes, "origins": 4 * rows, "places": 8 * experts,
        "counts": 4 * experts, "targets": 4 * room, "flags": 1 + (3 + ROUNDS) * grid, **_lists(group, room, rows),
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
    rows, room, result = max(1, sum(of_ranks)), max(1, *group.exchange(tokens)), torch.promote_types(row, weight)
    sizes = {
        "parts": group.world_size * room * columns * result.itemsize, "places": 8 * experts, "counts": 4 * experts, "targets": 4 * room,
        "terms": 8 * rows, "flags": 1 + (3 + ROUNDS) * grid, **_lists(group, room, rows),
    }  # fmt: skip
    defines = {"MAP": map_type, "ROW": element_type(row), "WEIGHT": element_type(weight), "RESULT": element_type(result)}
    return MOE_COMBINE.bind(
        group, grid=grid, block=_threads(group, sum(of_ranks) * columns * row.itemsize), defines=defines, sizes=sizes, resident=True,
        tokens=tokens, room=room, slots=slots, experts=experts, own=own, columns=columns,
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
    """Collective: adds up rows by token, and sends home what :func:`dispatch` sent. ``rows`` lie as it delivers them, ``returned`` of each
    rank, in the order of the map's rows. Row i counts with the sum of ``weights`` (T, slots) in whose slots ``selected`` names its expert,
    for token ``mapping[i]``. A rank takes sums in fp32 in the order of the rows, and rounds once where they travel; the result (tokens, H)
    has the dtype of a product."""
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
