"""RMSNorm between a reduce-scatter and an all-gather of rows, in one launch: what sequence-parallel layers do between their products.

    norm = sharded_rms_norm(group_of())                  the first call is collective; the memory is the communicator's
    y, total, scales = norm(x, weight, residual, reduces=True, gathers=True, epsilon=1e-6)

``reduces``: a rank gets its rows of the sum of all ranks' x; else x has this rank's rows already. It adds the residual's rows, which gives
``total``, and normalises them. ``gathers``: every rank gets all ranks' normalised rows; else its own. A gathered norm in fp8 travels with
its scales, so the gathering moves half the bytes.

The way is that of a large all-reduce (``relay.cuh``): tiles of some whole rows go to their owner through one set of rings, warps add them
and pass what they make of them on through another set. The norm is taken between the two, by warps that share a row and keep it in
registers. So the argument there that nobody can lock anybody holds here. Sums are taken in rank order in fp32, the residual behind them,
and are rounded once; the norm is that of the rounded sum, as in torch.

Bound: the port, (W - 1) / W of x's bytes for the sum and as many of y's for the gathering, in opposite directions at each port at a time.
Registers: at most 186 a thread, in blocks of 352.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

from peerlane.device.collectives import workspace
from peerlane.device.collectives.communicator import Communicator, communicator
from peerlane.device.host.declare import F32, U32, BoundKernel, DeclaredKernel, Pointer, structure
from peerlane.device.host.element_types import element_type
from peerlane.device.host.group import Group, per_group
from peerlane.errors import UsageError

DTYPES = torch.bfloat16, torch.float16
BLOCK_COLUMNS = 128
MOST_ROWS_OF_A_TILE = 8
Quantisation = Literal["none", "row", "block"]
"""Of y to e4m3: not; by a scale for every row; by one for every 128 columns of a row."""

SOURCE = r"""
#include <peerlane/collectives/relay.cuh>
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr u32 tile_rows = TILE_ROWS, row_warps = rings.summing_warps / tile_rows, row_threads = row_warps * warp_threads;
constexpr u32 row_bytes = COLUMNS * 2, vectors = COLUMNS / row_lanes, thread_vectors = (vectors + row_threads - 1) / row_threads;
constexpr u32 block_lanes = 16;  // whose columns have one scale
constexpr u32 row_scales = QUANTISATION == 0 ? 0 : QUANTISATION == 1 ? 1 : COLUMNS / (block_lanes * row_lanes);
constexpr u32 y_bytes = COLUMNS * (QUANTISATION == 0 ? 2 : 1), scale_bytes = row_scales * sizeof(float);
constexpr u32 packed_bytes = y_bytes + scale_bytes;  // of a row on its way: behind a tile's rows lie their scales
constexpr float largest = 448, smallest_scale = 1e-12f;  // of e4m3; of zeros
static_assert(rings.summing_warps % tile_rows == 0 && message_tile_bytes == tile_rows * row_bytes && packed_bytes <= row_bytes);

// Tiles of all other ranks' rows on their way here: as long as what is made of them.
struct GatheredTiles : Rounds<WORLD_SIZE, -1> {
    using Rounds<WORLD_SIZE, -1>::Rounds;
    __device__ u32 rows() const { return Rounds<WORLD_SIZE, -1>::length() / row_bytes; }
    __device__ u32 length() const { return rows() * packed_bytes; }
};

// By one warp: all other ranks' normalised rows and scales to their places.
__device__ inline void take_rows(
    const Arena& arena, const ShardedRmsNorm& args, const Messages& messages, Progress<WORLD_SIZE>& used, MoverState<WORLD_SIZE>& state,
    char* stages) {
    const BlockChannels<WORLD_SIZE> here{arena, args.space.copies};
    Mover<WORLD_SIZE> mover(arena, args.space.copies.flags, consumer, state, stages);
    mover.expect(used, 0);
    const auto source = [&](const GatheredTiles& tiles) -> const char* {
        const u32 number = used.first[tiles.peer()] + tiles.round();
        mover.wait(tiles.peer(), here.arrived_slot(), number + 1);
        return arena.local(here.place(tiles.peer(), arena.rank, number));
    };
    const auto deliver = [&](const GatheredTiles& tiles, const char* stage, auto& queue) {
        if (Warp{}.thread() == 0) post(used, tiles.done());  // the tile is in shared memory
        const u64 row = u64(tiles.peer()) * args.rows + tiles.at() / row_bytes;
        store_here(queue, Warp{}, args.y + row * y_bytes, stage, tiles.rows() * y_bytes);
        copy_bytes(Warp{}, args.scales + row * scale_bytes, stage + tiles.rows() * y_bytes, tiles.rows() * scale_bytes);
        queue.end_step();
    };
    mover.move(GatheredTiles(messages.receive_bytes, arena.rank), source, deliver);
}

__device__ inline void load_vector(const char* from, u32 i, u32 (&words)[4]) {
    const Vec16 whole = reinterpret_cast<const Vec16*>(from)[i];
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] = whole.word[w];
}

// The warps of one row of a tile: its sum over ranks and with the residual to `total`, its norm to `y`, scales to `scales`.
template <class Term>
__device__ inline void normalise(
    const ShardedRmsNorm& args, const Warps& team, int rank, float (&scratch)[row_warps], const char* own, const Term& term,
    const char* residual, char* total, char* y, float* scales) {
    constexpr int sources = REDUCES ? WORLD_SIZE : 1;
    constexpr u32 at_once = sources <= 2 ? 4 : sources <= 4 ? 2 : 1;
    const auto inside = [&](u32 v) { return (v + 1) * row_threads <= vectors || team.thread() + v * row_threads < vectors; };
    const auto joined = [&](float value, const auto& join) {
        value = warp_reduce(value, join);
        if constexpr (row_warps == 1) return value;
        team.sync();
        if (Warp{}.thread() == 0) scratch[team.thread() / warp_threads] = value;
        team.sync();
        value = scratch[0];
#pragma unroll
        for (u32 w = 1; w < row_warps; ++w) value = join(value, scratch[w]);
        return value;
    };
    float value[thread_vectors][row_lanes], squares = 0;
#pragma unroll
    for (u32 first = 0; first < thread_vectors; first += at_once) {
        u32 terms[at_once][sources][4], added[at_once][4];
#pragma unroll
        for (u32 k = 0; k < at_once; ++k) {
            const u32 v = first + k, i = team.thread() + v * row_threads;
            if (v >= thread_vectors || !inside(v)) continue;
#pragma unroll
            for (int q = 0; q < sources; ++q) load_vector(REDUCES == 0 || q == rank ? own : term(q), i, terms[k][q]);
            if (args.residual != nullptr) load_vector(residual, i, added[k]);
        }
#pragma unroll
        for (u32 k = 0; k < at_once; ++k) {
            const u32 v = first + k, i = team.thread() + v * row_threads;
            if (v >= thread_vectors) continue;
            u32 words[4] = {};
            if (inside(v)) {
                Accumulator<X_TYPE, 4> sum;
                sum.set(terms[k][0]);
#pragma unroll
                for (int q = 1; q < sources; ++q) sum.add(terms[k][q]);
                if (args.residual != nullptr) sum.add(added[k]);
                sum.round(words);
                reinterpret_cast<Vec16*>(total)[i] = Vec16{{words[0], words[1], words[2], words[3]}};
            }
#pragma unroll
            for (int w = 0; w < 4; ++w) X_TYPE::widen(words[w], value[v] + 2 * w);
#pragma unroll
            for (float one : value[v]) squares += one * one;
        }
    }
    const float factor = rsqrtf(joined(squares, [](float a, float b) { return a + b; }) / COLUMNS + args.epsilon);
    float most = 0;
#pragma unroll
    for (u32 v = 0; v < thread_vectors; ++v) {
        if (!inside(v)) continue;
        u32 words[4];
        load_vector(args.weight, team.thread() + v * row_threads, words);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float gain[2];
            X_TYPE::widen(words[w], gain);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& one = value[v][2 * w + e];
                one = one * factor * gain[e];
                most = fmaxf(most, fabsf(one));
            }
        }
    }
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    float scale = 1;
    if constexpr (QUANTISATION == 1) {
        scale = fmaxf(joined(most, larger) / largest, smallest_scale);
        if (team.thread() == 0) scales[0] = scale;
    }
#pragma unroll
    for (u32 v = 0; v < thread_vectors; ++v) {
        const u32 i = team.thread() + v * row_threads;
        if constexpr (QUANTISATION == 2) {
            float of_block = 0;
#pragma unroll
            for (float one : value[v]) of_block = fmaxf(of_block, fabsf(one));
            scale = fmaxf(warp_reduce<block_lanes>(of_block, larger) / largest, smallest_scale);
            if (inside(v) && i % block_lanes == 0) scales[i / block_lanes] = scale;
        }
        if (!inside(v)) continue;
        if constexpr (QUANTISATION == 0) {
            u32 words[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) words[w] = X_TYPE::narrow(value[v] + 2 * w);
            reinterpret_cast<Vec16*>(y)[i] = Vec16{{words[0], words[1], words[2], words[3]}};
        } else {
#pragma unroll
            for (float& one : value[v]) one /= scale;
            reinterpret_cast<u64*>(y)[i] = Float8E4M3::narrow(value[v]) | u64(Float8E4M3::narrow(value[v] + 4)) << 32;
        }
    }
}

// The adding warps: this rank's rows, tile by tile, each row by its own warps, and what is made of them on to all ranks.
__device__ inline void make_rows(const Arena& arena, const ShardedRmsNorm& args, RelayProgress<WORLD_SIZE>& progress, char* stages) {
    __shared__ float scratch[tile_rows][row_warps];
    const Warps team{2, rings.summing_warps, 1};
    const u32 slot = team.thread() / row_threads, thread = team.thread();
    const Warps row_team{2 + slot * row_warps, row_warps, 2 + slot};
    const int rank = arena.rank;
    const BlockChannels<WORLD_SIZE> terms{arena, args.space.sums}, totals{arena, args.space.copies};
    const Peers<WORLD_SIZE, Warps> givers(arena, args.space.sums.flags, team, consumer);
    const Peers<WORLD_SIZE, Warps> takers(arena, args.space.copies.flags, team, storer);
    StoreQueue<WORLD_SIZE, rings.in_flight, Warps, Post<WORLD_SIZE>> queue(arena, args.space.copies.flags, team, storer);
    const Progress<WORLD_SIZE>& sent = progress.totals_sent();
    const u32 first = progress.terms_used().first[rank_after<WORLD_SIZE>(rank, 1)];
    const u32 first_sent = thread < WORLD_SIZE ? sent.first[thread] : 0;
    u32 known_arrived = first, known_used = first_sent - rings.depth, turn = 0;
    const u64 bytes = u64(args.rows) * row_bytes;
    for (MessageTiles tile{bytes}; tile.any(); tile.next(), ++turn) {
        const u64 row = tile.at / row_bytes;
        const u32 rows = tile.length() / row_bytes, number = first + turn;
        char* stage = stages + turn % sum_stages * rings.tile_bytes;
        if constexpr (REDUCES) givers.wait_all(terms.arrived_slot(), number + 1, known_arrived);
        if (slot < rows) {
            const u64 at = tile.at + slot * row_bytes;
            const auto term = [&](int q) -> const char* { return arena.local(terms.place(q, rank, number)) + slot * row_bytes; };
            char* y = GATHERS ? stage + slot * y_bytes : args.y + (row + slot) * y_bytes;
            char* scales = GATHERS ? stage + rows * y_bytes + slot * scale_bytes : args.scales + (row + slot) * scale_bytes;
            normalise(
                args, row_team, rank, scratch[slot], args.x + (REDUCES ? rank * bytes : 0) + at, term, args.residual + at,
                args.total + at, y, reinterpret_cast<float*>(scales));
        }
        if constexpr (GATHERS) {
            takers.wait_all(totals.used_slot(), first_sent + turn + 1 - rings.depth, known_used);
        } else {
            team.sync();
        }
        if (REDUCES && thread == 0) post(progress.terms_used(), turn + 1);
        if constexpr (GATHERS) {
#pragma unroll 1
            for (int k = 1; k < WORLD_SIZE; ++k) {
                const int q = rank_after<WORLD_SIZE>(rank, k);
                queue.store(q, totals.place(rank, q, sent.first[q] + turn), stage, whole_vectors(rows * packed_bytes));
            }
            const u64 here = u64(rank) * args.rows + row;
            store_here(queue, team, args.y + here * y_bytes, stage, rows * y_bytes);
            copy_bytes(team, args.scales + here * scale_bytes, stage + rows * y_bytes, rows * scale_bytes);
            queue.end_step(Post<WORLD_SIZE>{&progress.totals_sent(), turn + 1});
        }
    }
    if constexpr (GATHERS) queue.flush();
}

extern "C" __global__ void __launch_bounds__(relay_threads, 1)
    sharded_rms_norm(const __grid_constant__ Arena arena, const __grid_constant__ ShardedRmsNorm args) {
    __shared__ MoverState<WORLD_SIZE> states[2];
    __shared__ RelayProgress<WORLD_SIZE> progress;
    __shared__ Messages messages;
    const u64 bytes = u64(args.rows) * row_bytes;
    if (const int q = threadIdx.x; q < WORLD_SIZE) {
        const u64 message = q == arena.rank ? 0 : bytes;
        messages.send_at[q] = q * bytes;
        messages.send_bytes[q] = REDUCES ? message : 0;
        messages.receive_bytes[q] = GATHERS ? message : 0;
        const BlockChannels<WORLD_SIZE> terms{arena, args.space.sums}, totals{arena, args.space.copies};
        terms.begin_sending(progress.terms_sent(), q, tiles_of(messages.send_bytes[q]));
        terms.begin_reading(progress.terms_used(), q, tiles_of(messages.send_bytes[q]));
        totals.begin_sending(progress.totals_sent(), q, tiles_of(messages.receive_bytes[q]));
        totals.begin_reading(progress.totals_used(), q, tiles_of(messages.receive_bytes[q]));
    }
    __syncthreads();
    char* stages = ptx::dynamic_shared();
    const u32 warp = threadIdx.x / warp_threads;
    if (warp == 0) {
        Progress<WORLD_SIZE>& sent = progress.terms_sent();
        if constexpr (REDUCES) send_messages<WORLD_SIZE>(arena, args.space.sums, messages, args.x, sent, states[0], stages);
    } else if (warp == 1) {
        if constexpr (GATHERS) take_rows(arena, args, messages, progress.totals_used(), states[1], stages + stages_bytes);
    } else if (warp < 2 + rings.summing_warps) {
        make_rows(arena, args, progress, stages + (GATHERS ? 2 * stages_bytes : 0));
    } else {
        tell_progress<WORLD_SIZE>(arena, progress.lines);
    }
}
"""
SHARDED_RMS_NORM = DeclaredKernel(
    "sharded_rms_norm", SOURCE, space=structure("CollectiveWorkspace", workspace.Workspace),
    **dict.fromkeys(("x", "residual", "weight"), Pointer("const char*")), **dict.fromkeys(("total", "y", "scales"), Pointer()),
    rows=U32, epsilon=F32,
)  # fmt: skip


def serves(columns: int, dtype: torch.dtype, quantisation: Quantisation, tile_bytes: int = workspace.RINGS.tile_bytes) -> bool:
    """Tells whether the kernel takes rows of so many elements: whole vectors that fit a tile, and whole blocks where these have scales."""
    fits = columns > 0 and not columns % 8 and 2 * columns <= tile_bytes
    return dtype in DTYPES and fits and (quantisation != "block" or not columns % BLOCK_COLUMNS)


class ShardedRmsNorm:
    """``call(x, weight, residual, reduces=, gathers=)`` for rows of any width that ``serves`` takes.

    x (W rows, columns) if it ``reduces``, else (rows, columns); residual (rows, columns) or None; weight (columns), the same on all ranks;
    all in one dtype, bfloat16 or float16. ``rows`` is the same on all ranks. Calls, in one stream, need no barrier between them and can be
    captured in a graph. The memory is that of ``kit``."""

    def __init__(self, kit: Communicator) -> None:
        self.kit, self.group = kit, kit.group
        self._reserved = SHARDED_RMS_NORM.inside(kit.group, kit.arena)
        self._bound = functools.cache(self._bind)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        reduces: bool,
        gathers: bool,
        epsilon: float = 1e-6,
        quantisation: Quantisation = "none",
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns y, (W rows, columns) if it ``gathers``, else (rows, columns); total (rows, columns); and y's scales, (rows of y) or (rows
        of y, columns / 128), by which y times its scale is the norm."""
        rows = self._check(x, weight, residual, reduces, quantisation)
        columns, of_y = x.shape[1], rows * (self.group.world_size if gathers else 1)
        y = x.new_empty((of_y, columns), dtype=x.dtype if quantisation == "none" else torch.float8_e4m3fn)
        total = x.new_empty((rows, columns))
        shape = {"none": (), "row": (of_y,), "block": (of_y, columns // BLOCK_COLUMNS)}[quantisation]
        scales = x.new_empty(shape, dtype=torch.float32) if shape else None
        if rows:
            launch = self._bound(x.dtype, columns, self._tile_rows(rows, columns), reduces, gathers, quantisation)
            given = {"x": x, "weight": weight, "residual": residual}
            read = {name: None if value is None else _aligned(value) for name, value in given.items()}
            launch(**read, total=total, y=y, scales=scales, rows=rows, epsilon=epsilon)
        return y, total, scales

    def _tile_rows(self, rows: int, columns: int) -> int:
        """Returns how many rows a tile has: what a place of a ring holds, and fewer where blocks would have no tile."""
        rings, found = self.kit.machine.rings, 1
        most = min(rings.tile_bytes // (2 * columns), rows // self._grid, rings.summing_warps, MOST_ROWS_OF_A_TILE)
        while 2 * found <= most and rings.summing_warps % (2 * found) == 0:
            found *= 2
        return found

    @property
    def _grid(self) -> int:
        machine = self.kit.machine
        return min(machine.rings.exchange_blocks(machine.world_size), machine.sm_count)

    def _bind(
        self, dtype: torch.dtype, columns: int, tile_rows: int, reduces: bool, gathers: bool, quantisation: Quantisation
    ) -> BoundKernel:
        rings = self.kit.machine.rings
        return self._reserved.bind(
            grid=self._grid,
            block=rings.relay_threads,
            shared_bytes=rings.relay_shared_bytes if gathers else rings.reduce_shared_bytes,
            resident=True,
            defines={
                **rings.defines(),
                "PEERLANE_TILE_BYTES": tile_rows * columns * 2,
                "X_TYPE": element_type(dtype),
                "COLUMNS": columns,
                "TILE_ROWS": tile_rows,
                "REDUCES": int(reduces),
                "GATHERS": int(gathers),
                "QUANTISATION": ("none", "row", "block").index(quantisation),
            },
            space=self.kit.workspace,
        )

    def _check(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, reduces: bool, quantisation: Quantisation
    ) -> int:
        """Returns the rows of a rank. Raises UsageError for what the kernel does not take."""
        parts = self.group.world_size if reduces else 1
        rows, columns = (x.shape[0] // parts, x.shape[1]) if x.dim() == 2 and not x.shape[0] % parts else (-1, 0)
        given, wanted = [x, weight], [(parts * rows, columns), (columns,)]
        if residual is not None:
            given, wanted = [*given, residual], [*wanted, (rows, columns)]
        right = all(tuple(value.shape) == size and value.dtype == x.dtype for value, size in zip(given, wanted, strict=True))
        if rows < 0 or not right or not serves(columns, x.dtype, quantisation, self.kit.machine.rings.tile_bytes):
            raise UsageError(
                f"RMSNorm of sharded rows got x, weight and residual of {[tuple(value.shape) for value in given]} in "
                f"{[value.dtype for value in given]}, quantisation {quantisation!r}: expected ({parts} x rows, columns), (columns,) and "
                f"(rows, columns) in bfloat16 or float16, columns a multiple of 8 (of 128 for 'block') and rows of at most "
                f"{self.kit.machine.rings.tile_bytes} bytes; use reduce_scatter, torch.nn.functional.rms_norm and all_gather otherwise"
            )
        return rows


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor contiguous, at an address of whole vectors."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


@per_group
def _norm(group: Group) -> ShardedRmsNorm:
    return ShardedRmsNorm(communicator(group))


def sharded_rms_norm(group: Group) -> ShardedRmsNorm:
    """The group's one :class:`ShardedRmsNorm`; the first call is collective."""
    return _norm(group)
