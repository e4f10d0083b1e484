"""Rows that go to all ranks in parts: gathered on their way out, or added up where they come (problems 65 and 66).

One kernel each. A block's first warps send, the others see to what stays on the rank. Every rank tells the others where their rows begin
in its memory; where a rank has told that, it has begun the launch, hence has done with what came in the one before.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from peerlane.device import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, per_group
from peerlane.device.host.declare import array
from peerlane.device.host.group import MAX_RANKS
from peerlane.device.moe.exchange import room_for

_COMMON = r"""
#include <peerlane/moe/moe.cuh>
using namespace peerlane;

// Of a block: the warps that send, or the others.
struct Side {
    bool sends;
    Warps warps;
};
__device__ inline Side side_of_caller() {
    const u32 warps = blockDim.x / warp_threads, senders = (warps + 3) / 4;
    if (threadIdx.x / warp_threads < senders) return {true, {0, senders, 1}};
    return {false, {senders, warps - senders, 2}};
}

// Flags of slot 0: where the rows of each rank go here.
template <class Parameters>
__device__ inline u32* tell_places(const Arena& arena, const Parameters& args, u32 epoch) {
    if (blockIdx.x == 0) {
        if (const u32 q = threadIdx.x; q < WORLD_SIZE) reinterpret_cast<u32*>(arena.peer(q, args.places))[arena.rank] = args.receive_at[q];
        Peers<WORLD_SIZE>(arena, args.flags).signal_all(0, epoch);
    }
    return reinterpret_cast<u32*>(arena.local(args.places));
}
"""
_PARTS = {name: array(U32, MAX_RANKS) for name in ("send_at", "send_count", "receive_at", "receive_count")}
"""Of every rank: where what goes there, or comes from there, begins, and how many rows it has."""

GATHER = (
    _COMMON
    + r"""
extern "C" __global__ void __launch_bounds__(512)
    gather_rows(const __grid_constant__ Arena arena, const __grid_constant__ GatherRows args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs))), *places = tell_places(arena, args, epoch);
    const auto [sends, team] = side_of_caller();
    const Peers<WORLD_SIZE, Warps> peers(arena, args.flags, team);
    const bool vectors = (reinterpret_cast<u64>(args.features) | args.row_bytes) % sizeof(Vec16) == 0;
    const auto push = [&](int q, u32 count, u32 place) {
        const long long* ids = args.ids + args.send_at[q];
        char* to = arena.peer(q, args.out) + u64(place) * args.row_bytes;
        copy_rows(share_of(team), count, args.row_bytes, vectors, [&](u32 i) { return args.features + u64(ids[i]) * args.row_bytes; },
                  [&](u32 i) { return to + u64(i) * args.row_bytes; });
    };
    if (sends) {
        peers.wait_all(0, epoch);
        for (int k = 1; k < WORLD_SIZE; ++k) {
            const int q = rank_after<WORLD_SIZE>(arena.rank, k);
            push(q, all_arrived(arena) ? args.send_count[q] : 0, places[q]);
        }
        peers.signal_all(1 + blockIdx.x, epoch);
    } else {
        push(arena.rank, args.send_count[arena.rank], args.receive_at[arena.rank]);
        peers.wait_all_slots(1 + blockIdx.x, 1, epoch);
    }
}
"""
)
GATHER_ROWS = DeclaredKernel(
    "gather_rows", GATHER, features=Pointer("const char*"), ids=Pointer("const long long*"), out=Buffer(), places=Buffer(), flags=Flags(),
    epochs=Epochs(), row_bytes=U32, **_PARTS,
)  # fmt: skip

ADD = (
    _COMMON
    + r"""
// Rows of a block's part of a chunk, to the rows of `sums` that their ids name.
__device__ inline void add_part(const Warps& team, const float* rows, const long long* ids, Part part, float* sums, u32 columns) {
    const u32 count = static_cast<u32>(part.end - part.first);
    rows += part.first * columns, ids += part.first;
    if ((reinterpret_cast<u64>(rows) | reinterpret_cast<u64>(sums) | columns * sizeof(float)) % sizeof(Vec16) == 0) {
        const auto from = [&](u32 i) { return reinterpret_cast<const char*>(rows + u64(i) * columns); };
        each_vector(Share{team.thread(), team.size()}, count, columns / 4, from, [&](u32 i, u32 v, const Vec16& value) {
            ptx::add_floats_relaxed_gpu(sums + u64(ids[i]) * columns + 4 * v, value);
        });
        return;
    }
    for (u64 at = team.thread(); at < u64(count) * columns; at += team.size()) {
        atomicAdd(sums + u64(ids[at / columns]) * columns + at % columns, rows[at]);
    }
}

// Block b of every rank has the same part of a chunk in the same round.
extern "C" __global__ void __launch_bounds__(512) add_rows(const __grid_constant__ Arena arena, const __grid_constant__ AddRows args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs))), *places = tell_places(arena, args, epoch);
    const auto [sends, team] = side_of_caller();
    const Peers<WORLD_SIZE, Warps> peers(arena, args.flags, team);
    const auto slot_of = [&](u32 round) { return 1 + (1 + round) * gridDim.x + blockIdx.x; };
    const auto part_in = [&](u32 count, u32 round) { return part_of(count, round * gridDim.x + blockIdx.x, ROUNDS * gridDim.x); };
    const u64 row_bytes = args.columns * sizeof(float);
    if (sends) {
        peers.wait_all(0, epoch);
        for (u32 round = 0; round < ROUNDS; ++round) {
            for (int k = 1; k < WORLD_SIZE; ++k) {
                const int q = rank_after<WORLD_SIZE>(arena.rank, k);
                const auto [first, end] = part_in(all_arrived(arena) ? args.send_count[q] : 0, round);
                const char* from = reinterpret_cast<const char*>(args.rows) + (args.send_at[q] + first) * row_bytes;
                copy_bytes(team, arena.peer(q, args.inbox) + (places[q] + first) * row_bytes, from, (end - first) * row_bytes);
            }
            peers.signal_all(slot_of(round), epoch);
        }
        return;
    }
    const u64 elements = u64(args.sums_count) * args.columns;
    const Share share = share_of(team);
    for (u64 at = share.thread * 4; at < elements; at += share.threads * 4) {
        store_words(reinterpret_cast<char*>(args.sums), at * sizeof(float), elements * sizeof(float), {0, 0, 0, 0});
    }
    meet_blocks(peers, arena, 1, epoch);
    const u32 own = arena.rank;
    for (u32 round = 0; round < ROUNDS; ++round) {
        const float* rows = args.rows + u64(args.send_at[own]) * args.columns;
        add_part(team, rows, args.ids + args.receive_at[own], part_in(args.send_count[own], round), args.sums, args.columns);
    }
    for (u32 round = 0; round < ROUNDS; ++round) {
        peers.wait_all_slots(slot_of(round), 1, epoch);
        for (int k = 1; k < WORLD_SIZE; ++k) {
            const int q = rank_after<WORLD_SIZE>(arena.rank, k);
            const float* rows = reinterpret_cast<const float*>(arena.local(args.inbox)) + u64(args.receive_at[q]) * args.columns;
            add_part(team, rows, args.ids + args.receive_at[q], part_in(args.receive_count[q], round), args.sums, args.columns);
        }
    }
}
"""
)
ADD_ROWS = DeclaredKernel(
    "add_rows", ADD, rows=Pointer("const float*"), ids=Pointer("const long long*"), sums=Pointer("float*"), inbox=Buffer(),
    places=Buffer(), flags=Flags(), epochs=Epochs(), columns=U32, sums_count=U32, **_PARTS,
)  # fmt: skip
ROUNDS = 4
Parts = Sequence[tuple[int, int]]


@per_group
def _gather(group: Group, room: int, row_bytes: int) -> BoundKernel:
    grid = group.sm_count
    sizes = {"out": room * row_bytes, "places": 4 * MAX_RANKS, "flags": 1 + grid}
    return GATHER_ROWS.bind(group, grid=grid, block=_threads(group), sizes=sizes, resident=True, row_bytes=row_bytes)


@per_group
def _add(group: Group, room: int, columns: int) -> BoundKernel:
    grid = group.sm_count
    sizes = {"inbox": 4 * room * columns, "places": 4 * MAX_RANKS, "flags": 1 + (1 + ROUNDS) * grid}
    return ADD_ROWS.bind(group, grid=grid, block=_threads(group), defines={"ROUNDS": ROUNDS}, sizes=sizes, resident=True, columns=columns)


def _threads(group: Group) -> int:
    return max(64, min(512, group.max_threads))


def gather_rows(group: Group, rows: torch.Tensor, ids: torch.Tensor, sends: Parts, receives: Parts, room: int) -> torch.Tensor:
    """Collective: returns the rows that come from all ranks, each part where ``receives`` says.

    A part of ``rows[ids]`` goes to every rank; parts are (first row, rows) by rank. No rank has a result of more than ``room`` rows. It
    lies in the arena and is valid until the next call for rows of this size."""
    row = torch.Size(rows.shape[1:])
    launch = _gather(group, room, row.numel() * rows.itemsize)
    launch(features=rows.contiguous(), ids=ids.contiguous(), **_fields(sends, receives))
    return launch.tensor("out", (sum(count for _, count in receives), *row), rows.dtype)


def add_rows(group: Group, rows: torch.Tensor, ids: torch.Tensor, count: int, sends: Parts, receives: Parts) -> torch.Tensor:
    """Collective: returns ``count`` float32 sums: row m of those that come, by their parts, is added to sum ``ids[m]``.

    A part of ``rows`` goes to every rank; parts are (first row, rows) by rank."""
    sums = rows.new_empty((count, *rows.shape[1:]))
    room = room_for(group, sum(count for _, count in receives))
    launch = _add(group, room, torch.Size(rows.shape[1:]).numel())
    launch(rows=rows.contiguous(), ids=ids.contiguous(), sums=sums, sums_count=count, **_fields(sends, receives))
    return sums


def parts(counts: Sequence[int], rank: int = 0) -> Parts:
    """Returns parts by rank that follow each other: number j, of ``counts[j]`` rows, is that of rank (rank + j) mod W."""
    begins = list(accumulate(counts, initial=0))
    return [(begins[place], counts[place]) for place in ((q - rank) % len(counts) for q in range(len(counts)))]


def _fields(sends: Parts, receives: Parts) -> dict[str, Any]:
    """Returns what both kernels want to know of parts."""
    fields = {}
    for name, its in (("send", sends), ("receive", receives)):
        filled = [*its, *[(0, 0)] * (MAX_RANKS - len(its))]
        fields[f"{name}_at"], fields[f"{name}_count"] = [at for at, _ in filled], [count for _, count in filled]
    return fields
