// Dispatch and combine: rows of tokens to the ranks of their experts, and sums of rows home, each in one launch that knows all counts on the device.
//
// A token has `k` slots, each with an expert's number over all ranks, or none. Rank r holds experts [r own, (r + 1) own). What a rank receives lies by
// own expert, then source, then slot; an expert's first row is a multiple of `alignment`. Rows from `capacity` on are dropped.
//
// Dispatch pulls. Every rank numbers its slots, expert by expert, and puts tokens and numbers into its own arena. Behind one meeting of all ranks each
// reads what is for its experts: a token crosses a link once for each rank that it goes to, and lies in its result at once. Combine pushes: a rank adds
// the rows that it has of a token, and stores the sum at the token's rank, which adds up what all ranks have sent.
//
// Between calls. What dispatch keeps has two buffers, used in turn. A rank that writes in call e + 2 has met the others in call e + 1, when all had done
// with call e. Combine has one: a rank stores at its peers when all have begun the call, so that they have done with the one before.
#pragma once

#include <peerlane/comm.cuh>
#include <peerlane/moe/moe.cuh>

namespace peerlane {

constexpr u32 no_row = ~0u, dropped_row = ~1u;  // of a slot, as its expert's rank has it
constexpr u32 number_bits = 22;                 // of a route: the row's number among its source's rows for its expert, below the expert
constexpr u32 most_experts = 1023;              // of all ranks
constexpr u32 scale_columns = 128;              // that share a scale where tokens are quantised
constexpr float largest_e4m3 = 448, smallest_scale = 1e-12f;

__device__ inline u32 expert_of(u32 route) { return route >> number_bits; }
__device__ inline u32 number_of(u32 route) { return route & ((1u << number_bits) - 1); }

// Where rows of a rank's experts begin.
template <int W>
struct ReceivedRows {
    u32 first[most_experts + max_ranks];  // of own expert e and source s, at e W + s
    u32 begin[most_experts + 1], end[most_experts];  // of own expert e; of its rows, without what fills up

    // `counts` (W, own + 1): rows of each source for each own expert. By all threads of a block.
    __device__ void fill(const u32* counts, u32 own, u32 alignment) {
        for (u32 e = threadIdx.x; e < own; e += blockDim.x) {
            u32 sum = 0;
            for (u32 s = 0; s < W; ++s) first[e * W + s] = sum, sum += counts[s * (own + 1) + e];
            end[e] = sum;
        }
        __syncthreads();
        for (u32 e = threadIdx.x; e <= own; e += blockDim.x) {
            u32 sum = 0;
            for (u32 before = 0; before < e; ++before) sum += (end[before] + alignment - 1) / alignment * alignment;
            begin[e] = sum;
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < own * W; i += blockDim.x) first[i] += begin[i / W];
        for (u32 e = threadIdx.x; e < own; e += blockDim.x) end[e] += begin[e];
        __syncthreads();
    }
};

// A row of whole vectors to some places, by a warp: `each` calls what it gets with every one. Several vectors of a lane are on their way at a time.
template <class Each>
__device__ inline void copy_row(const char* source, u32 bytes, const Each& each) {
    constexpr u32 at_once = 8, step = warp_threads * sizeof(Vec16);
    for (u32 first = 0; first < bytes; first += at_once * step) {
        const u32 own = first + Warp{}.thread() * sizeof(Vec16);
        Vec16 vectors[at_once];
#pragma unroll
        for (u32 i = 0; i < at_once; ++i) {
            if (own + i * step < bytes) vectors[i] = *reinterpret_cast<const Vec16*>(source + own + i * step);
        }
        each([&](char* to) {
#pragma unroll
            for (u32 i = 0; i < at_once; ++i) {
                if (own + i * step < bytes) *reinterpret_cast<Vec16*>(to + own + i * step) = vectors[i];
            }
        });
    }
}

// use(lane) for each lane of a set, in order.
template <class Use>
__device__ inline void each_lane(u32 lanes, const Use& use) {
    for (; lanes != 0; lanes &= lanes - 1) use(__ffs(lanes) - 1);
}

// Parameters have
//   const char* x; const long long* topk_idx; const float* topk_weights   (tokens, row), (tokens, k) twice; weights may be null
//   char* recv_x; float *recv_weights, *recv_scales; int *ends, *dropped   (capacity, row), (capacity), (capacity, row / 128), (own), (1)
//   u32* sources       (W, most, k): the row of every rank's slots here; read where the call follows the routes of another one
//   u32 tokens, most, room, k, own, row_bytes, stride, capacity, alignment   most: tokens of any rank; room: those that there is memory for, stride: bytes of them
//   u64 rows, routes, weights, counts, flags, epochs   in the arena; a slot of the flags for each block
// Where Quantised is an element type, x has that one, and rows are e4m3, with a scale for each 128 columns behind them in the arena.
struct AsTheyAre {};
template <int W, class Parameters, class Quantised>
struct Dispatch {
    static constexpr bool quantises = requires { Quantised::lanes; };
    const Parameters& args;
    const Arena& arena;
    const u32 epoch;

    __device__ Dispatch(const Parameters& p, const Arena& a) : args(p), arena(a), epoch(next_epoch(reinterpret_cast<u32*>(a.local(p.epochs)))) {}

    // By all threads of all blocks. `routed`: slots are numbered; else `sources` says where rows go.
    template <bool routed>
    __device__ void run(ReceivedRows<W>& received) const {
        each_row(args.tokens, [&](u32 token) {
            char* to = arena.local(row_at(token));
            if constexpr (quantises) quantise(token, to);
            else copy_row(args.x + u64(token) * args.row_bytes, args.row_bytes, [&](const auto& store) { store(to); });
        });
        if constexpr (routed) {
            number_slots();
            if (blockIdx.x == 0 && threadIdx.x < W) *counts_at(arena.peer(threadIdx.x, 0), args.own) = args.tokens;
        }
        meet_ranks(Peers<W>(arena, args.flags), arena, 0, epoch);
        const bool whole = block_arrived(arena);
        if constexpr (routed) {
            if (!whole) return receive_nothing();
            const u32* counts = counts_at(arena.local(0), 0) - arena.rank * (args.own + 1);
            received.fill(counts, args.own, args.alignment);
            tell_ends(received);
            fill_up(received);
            each_token([&](u32 source, u32 token) {
                const bool has_slot = Warp{}.thread() < args.k && token < counts[source * (args.own + 1) + args.own];
                const u64 slot = u64(token) * args.k + Warp{}.thread();
                const u32 route = has_slot ? routes_of(source)[slot] : no_row;
                u32 row = no_row;
                if (route != no_row && expert_of(route) / args.own == arena.rank) {
                    row = received.first[expert_of(route) % args.own * W + source] + number_of(route);
                    if (row >= args.capacity) row = dropped_row;
                }
                if (Warp{}.thread() < args.k) args.sources[(u64(source) * args.most + token) * args.k + Warp{}.thread()] = row;
                if (args.recv_weights != nullptr && row < dropped_row) args.recv_weights[row] = weights_of(source)[slot];
                pull(source, token, row);
            });
        } else if (whole) {
            each_token([&](u32 source, u32 token) {
                const u64 slot = (u64(source) * args.most + token) * args.k + Warp{}.thread();
                pull(source, token, Warp{}.thread() < args.k ? args.sources[slot] : no_row);
            });
        }
    }

  private:
    __device__ u64 turn() const { return epoch & 1; }
    __device__ u64 row_at(u32 token) const { return args.rows + (turn() * args.room + token) * args.stride; }
    __device__ u32* routes_of(int rank) const { return reinterpret_cast<u32*>(arena.peer(rank, args.routes)) + turn() * args.room * args.k; }
    __device__ float* weights_of(int rank) const { return reinterpret_cast<float*>(arena.peer(rank, args.weights)) + turn() * args.room * args.k; }
    // Of this rank's rows for expert `e` of the rank whose arena begins at `base`.
    __device__ u32* counts_at(char* base, u32 e) const {
        return reinterpret_cast<u32*>(base + args.counts) + (turn() * W + arena.rank) * (args.own + 1) + e;
    }

    // use(source, token) for every token of every rank, by warps; all links are busy at once.
    template <class Use>
    __device__ void each_token(const Use& use) const {
        each_row(W * args.most, [&](u32 i) { use(rank_after<W>(arena.rank, i % W), i / W); });
    }

    // A token to its rows here: each lane has a slot's.
    __device__ void pull(u32 source, u32 token, u32 row) const {
        const u32 kept = __ballot_sync(full_warp, row < dropped_row);
        if (kept == 0) return;
        const char* from = arena.peer(source, row_at(token));
        if constexpr (quantises) {
            for (u32 first = 0; first < scales(); first += warp_threads) {
                const u32 i = first + Warp{}.thread();
                const float scale = i < scales() ? reinterpret_cast<const float*>(from + args.row_bytes)[i] : 0;
                each_lane(kept, [&](u32 lane) {
                    const u64 to = u64(__shfl_sync(full_warp, row, lane)) * scales() + i;
                    if (i < scales()) args.recv_scales[to] = scale;
                });
            }
        }
        copy_row(from, args.row_bytes, [&](const auto& store) {
            each_lane(kept, [&](u32 lane) { store(args.recv_x + u64(__shfl_sync(full_warp, row, lane)) * args.row_bytes); });
        });
    }

    __device__ u32 scales() const { return args.row_bytes / scale_columns; }

    // A token as e4m3, each 128 columns by a scale that makes the largest of them the type's largest number.
    __device__ void quantise(u32 token, char* to) const {
        const RowOf<Quantised> from(args.x, token, args.row_bytes);
        for (u32 first = 0; first < args.row_bytes; first += row_lanes * warp_threads) {
            const u32 column = first + Warp{}.thread() * row_lanes;
            float value[row_lanes], most = 0;
            from.load(column, value);
#pragma unroll
            for (float v : value) most = fmaxf(most, fabsf(v));
            most = warp_reduce<scale_columns / row_lanes>(most, [](float a, float b) { return fmaxf(a, b); });
            const float scale = fmaxf(most / largest_e4m3, smallest_scale);
#pragma unroll
            for (float& v : value) v /= scale;
            if (column >= args.row_bytes) continue;
            RowOf<Float8E4M3>(to, 0, args.row_bytes).store(column, value);
            if (column % scale_columns == 0) reinterpret_cast<float*>(to + args.row_bytes)[column / scale_columns] = scale;
        }
    }

    // A warp counts an expert's slots at a time, all warps of all blocks together.
    __device__ void number_slots() const {
        constexpr u32 tile_slots = 4096;
        constexpr u16 none = 0xffff;
        __shared__ u16 tile[tile_slots];
        u32* routes = routes_of(arena.rank);
        const u32 experts = W * args.own, slots = args.tokens * args.k, warps = gridDim.x * (blockDim.x / warp_threads), lane = Warp{}.thread();
        for (u32 pass = 0; pass < experts; pass += warps) {
            const u32 expert = pass + threadIdx.x / warp_threads * gridDim.x + blockIdx.x;
            u32 count = 0;
            for (u32 begin = 0; begin < slots; begin += tile_slots) {
                const u32 inside = min(tile_slots, slots - begin);
                __syncthreads();
                for (u32 i = threadIdx.x; i < inside; i += blockDim.x) {
                    const long long given = args.topk_idx[begin + i];
                    const bool valid = given >= 0 && given < experts;
                    tile[i] = valid ? static_cast<u16>(given) : none;
                    if (pass != 0 || blockIdx.x != 0) continue;
                    if (!valid) routes[begin + i] = no_row;
                    if (args.topk_weights != nullptr) weights_of(arena.rank)[begin + i] = args.topk_weights[begin + i];
                }
                __syncthreads();
                for (u32 first = 0; first < inside && expert < experts; first += warp_threads) {
                    const bool is_row = first + lane < inside && tile[first + lane] == expert;
                    const u32 rows = __ballot_sync(full_warp, is_row);
                    if (is_row) routes[begin + first + lane] = expert << number_bits | (count + __popc(rows & ((1u << lane) - 1)));
                    count += __popc(rows);
                }
            }
            if (expert < experts && lane == 0) *counts_at(arena.peer(expert / args.own, 0), expert % args.own) = count;
        }
    }

    __device__ void tell_ends(const ReceivedRows<W>& received) const {
        if (blockIdx.x != 0) return;
        for (u32 e = threadIdx.x; e < args.own; e += blockDim.x) args.ends[e] = static_cast<int>(min(received.begin[e + 1], args.capacity));
        if (threadIdx.x != 0) return;
        u32 lost = 0;
        for (u32 e = 0; e < args.own; ++e) lost += max(received.end[e], args.capacity) - max(received.begin[e], args.capacity);
        *args.dropped = static_cast<int>(lost);
    }

    // Zeros behind each expert's rows, up to where the next one's begin.
    __device__ void fill_up(const ReceivedRows<W>& received) const {
        each_row(args.own * args.alignment, [&](u32 i) {
            const u32 e = i / args.alignment, row = received.end[e] + i % args.alignment;
            if (row >= min(received.begin[e + 1], args.capacity)) return;
            char* to = args.recv_x + u64(row) * args.row_bytes;
            for (u32 at = Warp{}.thread() * sizeof(Vec16); at < args.row_bytes; at += warp_threads * sizeof(Vec16)) {
                *reinterpret_cast<Vec16*>(to + at) = Vec16{};
            }
            if constexpr (quantises) {
                for (u32 i = Warp{}.thread(); i < scales(); i += warp_threads) args.recv_scales[u64(row) * scales() + i] = 0;
            }
            if (args.recv_weights != nullptr && Warp{}.thread() == 0) args.recv_weights[row] = 0;
        });
    }

    // Where counts have not come.
    __device__ void receive_nothing() const {
        const u32 first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
        for (u64 i = first; i < u64(W) * args.most * args.k; i += step) args.sources[i] = no_row;
        for (u32 e = first; e < args.own; e += step) args.ends[e] = 0;
        if (first == 0) *args.dropped = 0;
    }
};

// Parameters have
//   const char* x; const float *weights, *scalars   (capacity, columns) in E, (capacity) twice: of each row its factor, or null; and a value that goes home too, or null
//   const u32* sources; const long long* topk_idx    (W, most, k), of the dispatch; (tokens, k)
//   char* y; float* slot_scalars                     (tokens, columns), (tokens, k)
//   u32 tokens, most, room, k, own, columns
//   u64 home, home_scalars, flags, epochs            in the arena; slots: one, and one for each block
template <class E, int W, class Parameters>
struct Combine {
    const Parameters& args;
    const Arena& arena;
    const u32 epoch;

    __device__ Combine(const Parameters& p, const Arena& a) : args(p), arena(a), epoch(next_epoch(reinterpret_cast<u32*>(a.local(p.epochs)))) {}

    // By all threads of all blocks.
    __device__ void run() const {
        const Peers<W> peers(arena, args.flags);
        if (blockIdx.x == 0) peers.signal_all(0, epoch);
        peers.wait_all(0, epoch);  // all have read what came home in the call before
        each_row(W * args.most, [&](u32 i) { push(rank_after<W>(arena.rank, i % W), i / W); });
        meet_ranks(peers, arena, 1, epoch);
        if (block_arrived(arena)) each_row(args.tokens, [&](u32 token) { add(token); });
    }

  private:
    static constexpr u32 chunk = warp_threads * row_lanes, at_once = 4;  // columns of a warp's vectors; rows that are on their way at a time

    // The sum of what this rank has of a token, to its rank. Slots whose rows were dropped count as zeros.
    __device__ void push(int source, u32 token) const {
        const u32 lane = Warp{}.thread();
        const u32 row = lane < args.k ? args.sources[(u64(source) * args.most + token) * args.k + lane] : no_row;
        if (__ballot_sync(full_warp, row != no_row) == 0) return;
        const u32 kept = __ballot_sync(full_warp, row < dropped_row);
        const bool is_kept = row < dropped_row;
        if (args.scalars != nullptr && row != no_row) {
            reinterpret_cast<float*>(arena.peer(source, args.home_scalars))[u64(token) * args.k + lane] = is_kept ? args.scalars[row] : 0.0f;
        }
        const float weight = is_kept && args.weights != nullptr ? args.weights[row] : 1.0f;
        const RowOf<E> to(arena.peer(source, args.home), u64(arena.rank) * args.room + token, args.columns);
        for (u32 first = 0; first < args.columns; first += 2 * chunk) {
            float sum[2][row_lanes] = {};
            const u32 column = first + lane * row_lanes;
            for (u32 slots = kept; slots != 0;) {
                float factor[at_once], term[at_once][2][row_lanes];
                bool is_there[at_once];
#pragma unroll
                for (u32 r = 0; r < at_once; ++r) {  // behind the last slot the last one again, which is near by now
                    is_there[r] = slots != 0;
                    const u32 slot = slots != 0 ? __ffs(slots) - 1 : 31 - __clz(kept);
                    slots &= slots - 1;
                    factor[r] = __shfl_sync(full_warp, weight, slot);
                    const RowOf<E> from(args.x, __shfl_sync(full_warp, row, slot), args.columns);
#pragma unroll
                    for (int i = 0; i < 2; ++i) from.load(column + i * chunk, term[r][i]);
                }
#pragma unroll
                for (u32 r = 0; r < at_once; ++r) {
                    if (!is_there[r]) break;
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
#pragma unroll
                        for (int e = 0; e < row_lanes; ++e) sum[i][e] += factor[r] * term[r][i][e];
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (column + i * chunk < args.columns) to.store(column + i * chunk, sum[i]);
            }
        }
    }

    // What all ranks have of a token, added in their order.
    __device__ void add(u32 token) const {
        const u32 lane = Warp{}.thread();
        const u64 slot = u64(token) * args.k + lane;
        const long long expert = lane < args.k ? args.topk_idx[slot] : -1;
        const bool valid = expert >= 0 && expert < W * args.own;
        const u32 rank = valid ? static_cast<u32>(expert) / args.own : W;
        if (args.scalars != nullptr && lane < args.k) {
            args.slot_scalars[slot] = valid ? reinterpret_cast<const float*>(arena.local(args.home_scalars))[slot] : 0.0f;
        }
        u32 ranks = 0;
#pragma unroll
        for (int q = 0; q < W; ++q) ranks |= __ballot_sync(full_warp, rank == q) != 0 ? 1u << q : 0u;
        for (u32 first = 0; first < args.columns; first += 2 * chunk) {
            float sum[2][row_lanes] = {};
            const u32 column = first + lane * row_lanes;
#pragma unroll
            for (int q = 0; q < W; ++q) {
                if ((ranks >> q & 1) == 0) continue;
                const RowOf<E> from(arena.local(args.home), u64(q) * args.room + token, args.columns);
                float term[2][row_lanes];
#pragma unroll
                for (int i = 0; i < 2; ++i) from.load(column + i * chunk, term[i]);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int e = 0; e < row_lanes; ++e) sum[i][e] += term[i][e];
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (column + i * chunk < args.columns) RowOf<E>(args.y, token, args.columns).store(column + i * chunk, sum[i]);
            }
        }
    }
};

}  // namespace peerlane
