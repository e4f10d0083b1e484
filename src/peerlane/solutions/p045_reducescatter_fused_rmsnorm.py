"""Problem 45, reduce-scatter of rows and RMSNorm: some warps of a block send rows to their owners, others sum and normalise what comes.

Bound by the links: (W - 1) / W of the input leaves every rank, and sums follow a few rows behind. The owner's sums are float32, in rank
order, and rounded with the result; a team of warps holds a row's in registers. Rows lie in one of two buffers by the launch's parity: a
rank that has finished a launch has had a signal of it from every other rank, so all of them have finished the launch before."""

import torch

from peerlane.device import (
    F32,
    U32,
    U64,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Flags,
    Group,
    Pointer,
    element_type,
    group_of,
    per_group,
)

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr u32 most_warps = 16, strip = TEAM_WARPS * warp_threads * VECTORS * row_lanes;

extern "C" __global__ void __launch_bounds__(most_warps * warp_threads)
    reduce_norm(const __grid_constant__ Arena arena, const __grid_constant__ ReduceNorm args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)), args.numbers);
    const u64 row_bytes = u64(args.columns) * (4 / ELEMENT::lanes), terms = args.terms + (epoch & 1) * WORLD_SIZE * args.stride;
    const u32 warp = threadIdx.x / warp_threads, count = (args.rows - blockIdx.x + gridDim.x - 1) / gridDim.x;
    const auto row_of = [&](u32 i) { return blockIdx.x + i * gridDim.x; };  // a row has the same block on every rank
    if (warp < SENDERS) {
        const Warps team{0, SENDERS, 1};
        const Peers<WORLD_SIZE, Warps> peers(arena, args.flags, team, storer);
        for (u32 first = 0; first < count; first += args.chunk) {
            for (int k = 1; k < WORLD_SIZE; ++k) {
                const int q = rank_after<WORLD_SIZE>(arena.rank, k);
                char* const target = arena.peer(q, terms + arena.rank * args.stride);
                for (u32 i = first; i < min(first + args.chunk, count); ++i) {
                    copy_bytes(team, target + row_of(i) * row_bytes, args.x + (u64(q) * args.rows + row_of(i)) * row_bytes, row_bytes);
                }
            }
            peers.signal_all(blockIdx.x, epoch + first / args.chunk);
        }
        return;
    }
    __shared__ float square_sums[2][most_warps];
    const u32 number = (warp - SENDERS) / TEAM_WARPS;
    const Warps team{SENDERS + number * TEAM_WARPS, TEAM_WARPS, 2 + number};
    const Peers<WORLD_SIZE, Warps> peers(arena, args.flags, team, consumer + roles_per_group * number);
    for (u32 i = number, here = 0, turn = 0; i < count && number < TEAMS; i += TEAMS, turn ^= 1) {
        if (i >= here) {
            peers.wait_all(blockIdx.x, epoch + i / args.chunk);
            here = (i / args.chunk + 1) * args.chunk;
        }
        u32 first = 0;
        const auto place = [&](int v, u32& row, u32& column) {
            row = row_of(i), column = first + (v * team.size() + team.thread()) * row_lanes;
        };
        float total[VECTORS][row_lanes], value[row_lanes], sum = 0.0f;
        const auto mean = [&] {
#pragma unroll
            for (int q = 0; q < WORLD_SIZE; ++q) {
                const char* rows = q == arena.rank ? args.x + q * args.rows * row_bytes : arena.local(terms + q * args.stride);
                u32 words[VECTORS][row_lanes / ELEMENT::lanes];
                load_words_together<ELEMENT>(rows, args.columns, place, words);
#pragma unroll
                for (int v = 0; v < VECTORS; ++v) {
                    widen_words<ELEMENT>(words[v], value);
                    for (int e = 0; e < row_lanes; ++e) total[v][e] = q == 0 ? value[e] : total[v][e] + value[e];
                }
            }
            for (auto& values : total) {
                for (float& one : values) one /= WORLD_SIZE;
            }
        };
        // The strip that is summed last is the first to be stored; few rows have more than one.
        for (first = (args.columns - 1) / strip * strip;; first -= strip) {
            mean();
            for (const auto& values : total) {
                for (float one : values) sum += one * one;
            }
            if (first == 0) break;
        }
        sum = warp_sum(sum);
        if (Warp{}.thread() == 0) square_sums[turn][warp] = sum;
        team.sync();
        sum = 0.0f;
        for (u32 w = 0; w < TEAM_WARPS; ++w) sum += square_sums[turn][team.first + w];
        const float factor = rsqrtf(sum / args.columns + args.eps);
        for (; first < args.columns; first += strip) {
            if (first > 0) mean();
            u32 row, column, gains[VECTORS][row_lanes / GAIN::lanes];
            const auto of_gains = [&](int v, u32& at, u32& from) { place(v, at, from), at = 0; };
            load_words_together<GAIN>(args.gamma, args.columns, of_gains, gains);
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                place(v, row, column);
                widen_words<GAIN>(gains[v], value);
                for (int e = 0; e < row_lanes; ++e) value[e] = total[v][e] * (factor * value[e]);
                if (column < args.columns) RowOf<ELEMENT>(args.out, row, args.columns).store(column, value);
            }
        }
    }
}
"""
REDUCE_NORM = DeclaredKernel(
    "reduce_norm", SOURCE, epochs=Epochs(), flags=Flags(), terms=Buffer(), x=Pointer("const char*"), gamma=Pointer("const char*"),
    out=Pointer(), rows=U32, columns=U32, stride=U64, chunk=U32, numbers=U32, eps=F32,
)  # fmt: skip


CHUNK_BYTES, MOST_CHUNKS, MOST_VECTORS = 32768, 16, 4
"""What a block sends between signals, at least; its signals, at most; and what a thread holds of a row."""
STRIP = 256
"""Columns that a warp takes at a time."""


@per_group
def reduce_norm(group: Group, rows: int, columns: int, dtype: torch.dtype, gain: torch.dtype) -> BoundKernel:
    grid, row_bytes = min(group.sm_count, rows), columns * dtype.itemsize
    stride, of_block = -(-rows * row_bytes // 16) * 16, -(-rows // grid)
    warps = min(512, group.max_threads) // 32
    senders = max(1, warps // 4)
    team = min(warps - senders, -(-columns // STRIP))
    chunk = max(-(-of_block // MOST_CHUNKS), -(-CHUNK_BYTES // row_bytes))
    return REDUCE_NORM.bind(
        group,
        grid=grid,
        block=32 * warps,
        defines={
            "ELEMENT": element_type(dtype),
            "GAIN": element_type(gain),
            "SENDERS": senders,
            "TEAMS": (warps - senders) // team,
            "TEAM_WARPS": team,
            "VECTORS": min(MOST_VECTORS, -(-columns // (STRIP * team))),
        },
        sizes={"flags": grid, "terms": 2 * group.world_size * stride},
        rows=rows,
        columns=columns,
        stride=stride,
        chunk=chunk,
        numbers=-(-of_block // chunk) | 1,  # odd, so that launches' parities alternate
    )


def solution(rs_input_1d: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    ranks, columns = group_of(), gamma.numel()
    rows = rs_input_1d.numel() // ranks.world_size // columns
    out = rs_input_1d.new_empty((rows, columns))
    if rows:
        launch = reduce_norm(ranks, rows, columns, rs_input_1d.dtype, gamma.dtype)
        launch(x=rs_input_1d.contiguous(), gamma=gamma.contiguous(), out=out, eps=eps)
    return out
