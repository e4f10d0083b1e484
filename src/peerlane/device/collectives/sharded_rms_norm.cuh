// The kernel of sharded_rms_norm.py, which declares its arguments, ShardedRmsNorm.
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
