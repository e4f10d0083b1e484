// The gated delta rule in chunks of 64 tokens on tensor cores, for bfloat16.
//
// Within a chunk that begins with state M (channels x values), with G_t the decay since its start, A_ts = k_t (G_t / G_s) k_s and
// S = strictly lower part of diag(beta) A, the writes are U = (1 + S)^-1 diag(beta) (V - (G k) M), the outputs (G q) M + W U with W the lower part of
// q (G_t / G_s) k, and the next state G_64 M + (k G_64 / G_t)^T U (Yang et al., "Gated Delta Networks"; "Kimi Linear" for decay by channel).
//
// Two roles share the GPU. Teams of preparing blocks make what does not depend on the state, a part for each chunk. A scanning block takes some values
// of a line (a head of a batch entry) and runs through its parts. It keeps M transposed in registers as the sum of wgmmas; rounded, the same registers
// are the left operand of the next ones. Parts pass through a ring in the arena.
//
// Decay by channel is divided among factors: a part is -G k, G q, k G_64 / G_t, (1 + S)^-1 diag(beta), W and G_64. Each block of 16 tokens refers to its
// middle, so that factors stay below e^40 for decays of e^-5 a token.
//
// A decay that all channels share is a factor of at most 1 for each token, and so are norms. They are applied to products of raw keys and queries,
// which the scan loads itself: a part is (1 + S)^-1 diag(beta), W and three factors a token. Lines that share keys and queries share these products.
#pragma once

#include <peerlane/tiles/pipeline.cuh>
#include <peerlane/peers/peers.cuh>
#include <peerlane/tiles/roles.cuh>
#include <peerlane/rows.cuh>
#include <peerlane/tiles/tile.cuh>

namespace peerlane {

constexpr int chunk_tokens = 64, block_tokens = 16, chunk_blocks = chunk_tokens / block_tokens;
constexpr float log2_of_e = 1.4426950408889634f, least_log_decay = -5.0f;

struct alignas(8) FloatPair {
    float x, y;
};
struct alignas(16) FloatQuad {
    float x[4];
};
__device__ inline FloatPair pair_at(const float* address) { return *reinterpret_cast<const FloatPair*>(address); }

template <bool first, class A, class B>
struct Choose {
    using Type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
    using Type = B;
};
template <bool first, class A, class B>
using ChosenType = typename Choose<first, A, B>::Type;

constexpr int max_sharing = 4;  // lines with the same keys and queries that a team prepares at a time

// `Depth` channels; `Groups` warpgroups of a scanning block, each with 64 values; `Slots` chunks that it copies ahead.
template <int Depth, int Groups, int Slots, bool ByChannel, u32 SharedBytes, u32 ParameterRanks>
struct DeltaShape {
    using E = BFloat16;
    static constexpr int depth = Depth, groups = Groups, slots = Slots;
    static constexpr u32 parameter_ranks = ParameterRanks;
    static constexpr bool by_channel = ByChannel;
    static constexpr bool rounds_once = Depth <= 128;  // registers hold the whole rounded state
    using Tokens = SharedTile<E, chunk_tokens, Depth>;
    using Square = SharedTile<E, chunk_tokens, chunk_tokens>;

    // Of a part, in bytes: tiles of keys, queries and carriers only if channels have decays of their own.
    static constexpr u32 solution_at = 0, weights_at = Square::bytes, factors_at = 2 * Square::bytes, keys_at = factors_at + 1024;
    static constexpr u32 queries_at = keys_at + Tokens::bytes, carriers_at = queries_at + Tokens::bytes;
    static constexpr u32 part_bytes = ByChannel ? carriers_at + Tokens::bytes : keys_at;

    // What a scan needs of a part at first, and then.
    struct OwnFront {
        Tokens keys, queries;
        Square solution, values[Groups];
    };
    struct SharedFront {
        Tokens queries;
        Square solution, values[Groups];
    };
    using Front = ChosenType<ByChannel, OwnFront, SharedFront>;
    struct Back {
        Tokens carriers;
        Square weights;
        alignas(1024) float factors[256];  // G_64 of all channels; or of tokens, see `TokenFactors`
    };
    static constexpr u32 front_bytes = (ByChannel ? 2 : 1) * Tokens::bytes + (1 + Groups) * Square::bytes;
    static constexpr u32 factor_bytes = ByChannel ? Depth * 4 : (3 * chunk_tokens + 4) * 4;
    static constexpr u32 back_bytes = Square::bytes + Tokens::bytes + factor_bytes;
    struct Scan {
        Front front[Slots];
        Back back[Slots];
        Square output[Groups];
        Ring<Slots> front_ring, back_ring;
    };

    // What a team that prepares keeps in shared memory.
    struct Inverse {
        Square solution, weights;
        float system[chunk_tokens][chunk_tokens + 8];
        float inverse[chunk_blocks][block_tokens][block_tokens + 8];
    };
    struct alignas(1024) OwnPreparation : Inverse {
        struct Tiles {
            Tokens keys, queries, right;  // right: gates at first, and then keys again
        } tiles;
        float scale[2][chunk_tokens], beta[1][chunk_tokens];
        float sum[chunk_blocks][Depth], middle[chunk_blocks][Depth];  // of logarithms, in a block
        float from_start[chunk_blocks][Depth], to_end[chunk_blocks][Depth];
        float between[6][Depth];
        Ring<1> ring;
    };
    struct alignas(1024) SharedPreparation : Inverse {
        struct Tiles {
            Tokens keys, queries;
        } tiles;
        float scale[2][chunk_tokens], beta[max_sharing][chunk_tokens], decay[max_sharing][chunk_tokens];  // decay: logarithms, added up
        Ring<1> ring;
    };
    using Preparation = ChosenType<ByChannel, OwnPreparation, SharedPreparation>;
    static constexpr u32 team_threads = ByChannel ? 2 * Depth : group_threads, max_teams = SharedBytes / sizeof(Preparation);
};

// What keys and queries of tokens are multiplied by where all channels decay alike: to read the state for writes and for outputs, and to write it.
struct TokenFactors {
    static constexpr int held = 0, read = chunk_tokens, carried = 2 * chunk_tokens, decay = 3 * chunk_tokens;
};

// Which chunk of which line, and how parts are numbered.
struct DeltaChunk {
    u32 line, chunk;
};

// Number of the pair of blocks row > column.
__device__ inline constexpr int block_pair(int row, int column) { return row * (row - 1) / 2 + column; }

// Until `enough(lane)` is so for the first `least` lanes of the warp, or more: for how many.
template <class Enough>
__device__ inline u32 wait_local(const Arena& arena, u32 slot, u32 least, const Enough& enough) {
    Deadline deadline;
    while (true) {
        const u32 missing = ~__ballot_sync(0xffffffffu, enough(Warp{}.thread())), count = missing ? __ffs(missing) - 1 : 32;
        const bool ends = count < least && Warp{}.thread() == 0 && deadline.ends(arena, Awaited{whole_block, arena.rank, slot, least}, count);
        const bool given_up = __any_sync(0xffffffffu, ends);
        if (count < least && !given_up) continue;
        ptx::fence_gpu();
        ptx::fence_proxy_async();
        __syncwarp();
        return max(count, least);
    }
}

// Counts `count` more. All that the team has written and read comes before what follows a wait for that count. Who counts may change, so it adds.
template <class Team>
__device__ inline void count_local(const Team& team, u32* counter, u32 count = 1) {
    team.sync();
    if (team.thread() != 0) return;
    ptx::fence_proxy_async();
    ptx::fence_gpu();
    ptx::add_relaxed_gpu(counter, count);
}

// How often the chunk's slot in a ring has been filled when it holds this chunk of launch `launch`; at most `chunks` slots.
__device__ inline u32 filled(u32 launch, u32 chunks, u32 ring, u32 chunk) {
    return launch * ((chunks - 1 - chunk % ring) / ring + 1) + chunk / ring + 1;
}

// An element that is fetched ahead: its conversion would wait for it.
__device__ inline u16 raw_element(const char* elements, u64 index) { return reinterpret_cast<const u16*>(elements)[index]; }
__device__ inline float number_of(u16 raw) { return __uint_as_float(u32(raw) << 16); }

__device__ inline float sigmoid(float x) { return ptx::reciprocal(1.0f + ptx::exp2(-log2_of_e * x)); }

// What a key, or a query, is multiplied by that has this sum of squares.
template <class Args>
__device__ inline float token_scale(const Args& args, float square, bool query) {
    return fminf(rsqrtf(square), ptx::reciprocal(args.floor)) * (query ? rsqrtf(float(args.depth)) : 1.0f);
}

// A pair of numbers as two bfloat16 each, which add up to them but for 2^-17.
__device__ inline void split(float x, float y, u32& high, u32& low) {
    high = ptx::pack_bf16x2(x, y);
    low = ptx::pack_bf16x2(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
}

// d += a b of operands in two parts.
struct SplitLeft {
    u32 high[4], low[4];
};
__device__ inline void multiply_split(float (&d)[4], const SplitLeft& a, FloatPair first, FloatPair second) {
    u32 high[2], low[2];
    split(first.x, first.y, high[0], low[0]);
    split(second.x, second.y, high[1], low[1]);
    ptx::mma<MmaType::bf16>(d, a.low, high);
    ptx::mma<MmaType::bf16>(d, a.high, low);
    ptx::mma<MmaType::bf16>(d, a.high, high);
}

// (1 + S)^-1 diag(beta) of the system S in shared memory, and what becomes of it.
template <class Shape>
struct Solving {
    using Square = typename Shape::Square;
    const Warps team;
    typename Shape::Inverse& memory;

    static constexpr u32 vectors = 2 * Square::bytes / sizeof(Vec16);

    // Zeros above the diagonals, which nobody writes.
    __device__ void clear() const {
        for (u32 v = team.thread(); v < vectors; v += Shape::team_threads) reinterpret_cast<Vec16*>(&memory)[v] = Vec16{};
    }

    // Inverses of the system's blocks on the diagonal, each by half a warp, which has a column in each lane.
    __device__ void invert_blocks(const float* beta) const {
        const u32 warp = team.thread() / 32, lane = threadIdx.x % 32;
        if (warp >= chunk_blocks || lane >= block_tokens) return;
        const u32 first = warp * block_tokens;
        const float scale = beta[first + lane];
        float x[block_tokens];
#pragma unroll
        for (int i = 0; i < block_tokens; ++i) {
            float sum = i == lane ? 1.0f : 0.0f;
#pragma unroll
            for (int k = 0; k < i; k += 4) {
                const FloatQuad row = *reinterpret_cast<const FloatQuad*>(&memory.system[first + i][first + k]);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (k + e < i) sum -= row.x[e] * x[k + e];
                }
            }
            x[i] = sum;
            memory.inverse[warp][i][lane] = sum;
            if (i >= lane) {
                const u32 rounded = ptx::pack_bf16x2(sum * scale, 0.0f);
                *reinterpret_cast<u16*>(memory.solution.data + Square::offset(first + i, first + lane)) = static_cast<u16>(rounded);
            }
        }
    }

    // The blocks below them, transposed: warp j solves for 16 columns, block by block.
    __device__ void solve(const float* beta) const {
        const int column = team.thread() / 32, lane = threadIdx.x % 32, m = lane / 4, n = 2 * (lane % 4);
        if (column >= chunk_blocks - 1) return;
        const float scale[2] = {beta[block_tokens * column + m], beta[block_tokens * column + m + 8]};
        SplitLeft solved[chunk_blocks - 1];  // blocks of rows 0 to 2
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const auto& block = memory.inverse[column];
            const int row = n + w / 2 * 8, at = m + w % 2 * 8;
            const float x = block[row][at], y = block[row + 1][at];
#pragma unroll
            for (int k = 0; k < chunk_blocks - 1; ++k) {
                if (k == column) split(x, y, solved[k].high[w], solved[k].low[w]);
            }
        }
#pragma unroll
        for (int row = 1; row < chunk_blocks; ++row) {
            if (row <= column) continue;
            float sum[2][4] = {}, result[2][4] = {};
#pragma unroll
            for (int k = 0; k < row; ++k) {
                if (k < column) continue;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float* from = &memory.system[block_tokens * row + 8 * half + m][block_tokens * k + n];
                    multiply_split(sum[half], solved[k], pair_at(from), pair_at(from + 8));
                }
            }
            SplitLeft negated;
            u32 word[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) split(-sum[w / 2][w % 2 * 2], -sum[w / 2][w % 2 * 2 + 1], negated.high[w], negated.low[w]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* from = &memory.inverse[row][8 * half + m][n];
                multiply_split(result[half], negated, pair_at(from), pair_at(from + 8));
#pragma unroll
                for (int w = 0; w < 2; ++w) word[2 * half + w] = ptx::pack_bf16x2(scale[w] * result[half][2 * w], scale[w] * result[half][2 * w + 1]);
            }
            ptx::store_matrices_transposed(
                memory.solution.data + Square::offset(block_tokens * row + lane / 16 * 8 + lane % 8, block_tokens * column + lane / 8 % 2 * 8), word);
            if (row < chunk_blocks - 1) {
#pragma unroll
                for (int w = 0; w < 4; ++w) split(result[w / 2][w % 2 * 2], result[w / 2][w % 2 * 2 + 1], solved[row].high[w], solved[row].low[w]);
            }
        }
    }

    // Solution and weights, which follow each other here and there.
    __device__ void copy_squares(char* part) const {
#pragma unroll
        for (u32 i = 0; i < vectors / Shape::team_threads; ++i) {
            const u32 v = i * Shape::team_threads + team.thread();
            reinterpret_cast<Vec16*>(part + Shape::solution_at)[v] = reinterpret_cast<const Vec16*>(&memory)[v];
        }
    }
};

// Which rank's parameters a head has, and its number among that rank's heads. Divisions take longer than they look.
template <class Shape>
struct HeadParameters {
    u32 heads, owner, head;
    __device__ HeadParameters(u32 all, u32 number)
        : heads(all / Shape::parameter_ranks), owner(Shape::parameter_ranks > 1 ? number / heads : 0), head(number - owner * heads) {}
};

// ---- preparing ---------------------------------------------------------------------------------------------------------------------------

// A team's work on a chunk whose channels have decays of their own. Every thread has two channels of the 16 tokens of one block.
template <class Shape, class Args>
struct OwnPreparing {
    static constexpr int depth = Shape::depth, pairs = depth / 2, warps = Shape::team_threads / 32;
    using Memory = typename Shape::Preparation;
    using Tokens = typename Shape::Tokens;
    using Square = typename Shape::Square;

    const Args& args;
    const Warps team;
    Memory& memory;
    u16 beta, rate, bias[2];
    float decay[block_tokens][2];  // logarithms to base 2, added up within the block

    __device__ u32 block() const { return team.thread() / pairs; }
    __device__ u32 channel() const { return team.thread() % pairs * 2; }

    __device__ void load(const DeltaChunk& at, typename Memory::Tiles& tiles, u64* full) const {
        const int head = at.line % args.heads, key_head = head / (args.heads / args.key_heads);
        const int first = at.chunk * chunk_tokens, batch = at.line / args.heads;
        tiles.keys.load(&args.k, full, Place4{0, key_head, first, batch});
        tiles.queries.load(&args.q, full, Place4{0, key_head, first, batch});
        tiles.right.load(&args.decays, full, Place4{0, head, first, batch});
    }

    __device__ void fetch(const char* params, const DeltaChunk& at) {
        const u32 head = at.line % args.heads, batch = at.line / args.heads, token = at.chunk * chunk_tokens + team.thread();
        const HeadParameters<Shape> own(args.heads, head);
        const char* of_owner = params + u64(own.owner) * args.parameter_bytes;
        const bool inside = team.thread() < chunk_tokens && token < args.tokens;
        beta = inside ? raw_element(args.beta, (u64(batch) * args.tokens + token) * args.heads + head) : 0;
        rate = raw_element(of_owner, own.head);
        for (int e = 0; e < 2; ++e) bias[e] = channel() < args.depth ? raw_element(of_owner, own.heads + own.head * args.depth + channel() + e) : 0;
    }

    // Scales of tokens, logarithms of decays, beta.
    __device__ void reduce(const DeltaChunk& at) {
        const u32 thread = team.thread(), lane = thread % 32;
        for (u32 unit = thread / 32; unit < 2 * chunk_blocks; unit += warps) {  // squares are products of tokens with themselves
            const int which = unit / chunk_blocks, first = unit % chunk_blocks * block_tokens;
            const Tokens& tile = which ? memory.tiles.queries : memory.tiles.keys;
            float sum[2][4] = {};
#pragma unroll
            for (int step = 0; step < depth / mma_depth; ++step) {
                u32 a[4];
                ptx::load_matrices(a, tile.data + Tokens::offset(first + lane % 16, mma_depth * step + lane / 16 * 8));
                ptx::mma<MmaType::bf16>(sum[0], a, {a[0], a[2]});
                ptx::mma<MmaType::bf16>(sum[1], a, {a[1], a[3]});
            }
            if (lane % 4 == lane / 8) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float square = lane / 4 % 2 ? sum[half][2 * half + 1] : sum[half][2 * half];
                    memory.scale[which][first + 8 * half + lane / 4] = token_scale(args, square, which);
                }
            }
        }
        const int valid = min(args.tokens - at.chunk * chunk_tokens, u32(chunk_tokens)) - block() * block_tokens;
        const bool inside = channel() < args.depth;
        const float factor = -log2_of_e * expf(number_of(rate)), shift[2] = {factor * number_of(bias[0]), factor * number_of(bias[1])};
        float total[2] = {};
#pragma unroll
        for (int i = 0; i < block_tokens; ++i) {
            float x[2];
            BFloat16::widen(*reinterpret_cast<const u32*>(memory.tiles.right.data + Tokens::offset(block() * block_tokens + i, channel())), x);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float share = ptx::reciprocal(1.0f + ptx::exp2(factor * x[e] + shift[e]));  // the sigmoid
                if (inside && i < valid) total[e] += least_log_decay * log2_of_e * share;
                decay[i][e] = total[e];
            }
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            memory.sum[block()][channel() + e] = decay[block_tokens - 1][e];
            memory.middle[block()][channel() + e] = decay[block_tokens / 2 - 1][e];
        }
        const bool token = thread < chunk_tokens && at.chunk * chunk_tokens + thread < args.tokens;
        if (thread < chunk_tokens) memory.beta[0][thread] = token ? sigmoid(number_of(beta)) : 0.0f;
    }

    // Factors of decay between blocks, from the chunk's start and to its end, which go to the part.
    __device__ void scale(float* last) {
        for (u32 c = team.thread(); c < depth; c += team.size()) {
            float middle[chunk_blocks], end = 0.0f;
#pragma unroll
            for (int b = 0; b < chunk_blocks; ++b) middle[b] = end + memory.middle[b][c], end += memory.sum[b][c];
#pragma unroll
            for (int row = 0; row < chunk_blocks; ++row) {
                memory.from_start[row][c] = ptx::exp2(middle[row]), memory.to_end[row][c] = ptx::exp2(end - middle[row]);
#pragma unroll
                for (int column = 0; column < row; ++column) {
                    memory.between[block_pair(row, column)][c] = ptx::exp2(middle[row] - middle[column]);
                }
            }
            last[c] = ptx::exp2(end);
        }
    }

    // Operands of the chunk's products to shared memory; the part's keys, queries and carriers.
    __device__ void spread(char* part) {
        const u32 c = channel();
        const FloatPair starts = pair_at(&memory.from_start[block()][c]), ends = pair_at(&memory.to_end[block()][c]);
        const float from[2] = {starts.x, starts.y}, to[2] = {ends.x, ends.y};
#pragma unroll
        for (int i = 0; i < block_tokens; ++i) {
            const u32 t = block() * block_tokens + i, at = Tokens::offset(t, c);
            float k[2], q[2], right[2], key[2], query[2], carried[2];
            BFloat16::widen(*reinterpret_cast<const u32*>(memory.tiles.keys.data + at), k);
            BFloat16::widen(*reinterpret_cast<const u32*>(memory.tiles.queries.data + at), q);
            const float k_scale = memory.scale[0][t], q_scale = memory.scale[1][t];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float shift = decay[i][e] - decay[block_tokens / 2 - 1][e], factor = ptx::exp2(shift);
                k[e] *= k_scale, right[e] = k[e] * ptx::exp2(-shift), k[e] *= factor, q[e] *= q_scale * factor;
                key[e] = -from[e] * k[e], query[e] = from[e] * q[e], carried[e] = to[e] * right[e];
            }
            *reinterpret_cast<u32*>(memory.tiles.keys.data + at) = ptx::pack_bf16x2(k[0], k[1]);
            *reinterpret_cast<u32*>(memory.tiles.queries.data + at) = ptx::pack_bf16x2(q[0], q[1]);
            *reinterpret_cast<u32*>(memory.tiles.right.data + at) = ptx::pack_bf16x2(right[0], right[1]);
            *reinterpret_cast<u32*>(part + Shape::keys_at + at) = ptx::pack_bf16x2(key[0], key[1]);
            *reinterpret_cast<u32*>(part + Shape::queries_at + at) = ptx::pack_bf16x2(query[0], query[1]);
            *reinterpret_cast<u32*>(part + Shape::carriers_at + at) = ptx::pack_bf16x2(carried[0], carried[1]);
        }
    }

    // Products of keys and queries with keys, a pair of blocks for a warp at a time: the system and the weights. Pairs of different blocks come first.
    __device__ void multiply() {
        constexpr int apart = chunk_blocks * (chunk_blocks - 1) / 2;
        const u32 lane = threadIdx.x % 32, warp = team.thread() / 32;
        const u32 stride = warps <= apart ? warps : warp < apart ? apart + chunk_blocks : warps - apart;
        for (u32 unit = warp; unit < apart + chunk_blocks; unit += stride) {
            const bool differ = unit < apart;
            const int row = differ ? 1 + (unit >= 1) + (unit >= 3) : unit - apart, column = differ ? unit - row * (row - 1) / 2 : row;
            float system[2][4] = {}, weights[2][4] = {};
#pragma unroll
            for (int step = 0; step < depth / mma_depth; ++step) {
                u32 key[4], query[4], b[4];
                const u32 left = Tokens::offset(block_tokens * row + lane % 16, mma_depth * step + lane / 16 * 8);
                ptx::load_matrices(key, memory.tiles.keys.data + left);
                ptx::load_matrices(query, memory.tiles.queries.data + left);
                ptx::load_matrices(
                    b, memory.tiles.right.data + Tokens::offset(block_tokens * column + lane / 16 * 8 + lane % 8, mma_depth * step + lane / 8 % 2 * 8));
                if (differ) {
                    const float* between = &memory.between[unit][mma_depth * step + 2 * (lane % 4)];
#pragma unroll
                    for (int w = 0; w < 4; ++w) {
                        const FloatPair factor = pair_at(between + w % 2 * 8);
                        float x[2];
                        BFloat16::widen(b[w], x);
                        b[w] = ptx::pack_bf16x2(x[0] * factor.x, x[1] * factor.y);
                    }
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    ptx::mma<MmaType::bf16>(system[half], key, {b[2 * half], b[2 * half + 1]});
                    ptx::mma<MmaType::bf16>(weights[half], query, {b[2 * half], b[2 * half + 1]});
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int t = block_tokens * row + lane / 4 + i / 2 * 8, s = block_tokens * column + i % 2 * 8 + 2 * (lane % 4);
                const float *own = system[i % 2] + i / 2 * 2, *read = weights[i % 2] + i / 2 * 2, beta_of = memory.beta[0][t];
                *reinterpret_cast<FloatPair*>(&memory.system[t][s]) = {t > s ? beta_of * own[0] : 0.0f, t > s + 1 ? beta_of * own[1] : 0.0f};
                *reinterpret_cast<u32*>(memory.weights.data + Square::offset(t, s)) =
                    ptx::pack_bf16x2(t >= s ? read[0] : 0.0f, t > s ? read[1] : 0.0f);
            }
        }
    }
};

// A team's work on a chunk of one to four lines that share keys and queries. Channels decay alike, so that factors of decay, and norms, are left to
// the products of raw tokens.
template <class Shape, class Args>
struct SharedPreparing {
    using Memory = typename Shape::Preparation;
    using Tokens = typename Shape::Tokens;
    using Square = typename Shape::Square;

    const Args& args;
    const Warps team;
    Memory& memory;
    u16 rate, bias, gate[2], beta[2];    // of two tokens in each lane; a line for every warp
    SumTile<64> system, weights;         // of raw keys and queries

    __device__ void load(const DeltaChunk& at, typename Memory::Tiles& tiles, u64* full) const {
        const int key_head = at.line % args.heads / (args.heads / args.key_heads), first = at.chunk * chunk_tokens, batch = at.line / args.heads;
        tiles.keys.load(&args.k, full, Place4{0, key_head, first, batch});
        tiles.queries.load(&args.q, full, Place4{0, key_head, first, batch});
    }

    __device__ void fetch(const char* params, const DeltaChunk& at) {
        const u32 warp = team.thread() / 32, lane = threadIdx.x % 32;
        if (warp >= args.sharing) return;
        const u32 head = (at.line + warp) % args.heads, batch = at.line / args.heads;
        const HeadParameters<Shape> own(args.heads, head);
        const char* of_owner = params + u64(own.owner) * args.parameter_bytes;
        rate = raw_element(of_owner, own.head), bias = raw_element(of_owner, own.heads + own.head);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const u32 token = at.chunk * chunk_tokens + 2 * lane + e;
            const u64 row = (u64(batch) * args.tokens + token) * args.heads + head;
            gate[e] = token < args.tokens ? raw_element(args.decay, row) : 0;
            beta[e] = token < args.tokens ? raw_element(args.beta, row) : 0;
        }
    }

    // Logarithms of decays, added up, and beta.
    __device__ void reduce(const DeltaChunk& at) {
        const u32 warp = team.thread() / 32, lane = threadIdx.x % 32;
        if (warp >= args.sharing) return;
        float part[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float x = number_of(gate[e]) + number_of(bias);
            part[e] = -log2_of_e * expf(number_of(rate)) * (x > 20.0f ? x : log1pf(expf(x)));
            if (at.chunk * chunk_tokens + 2 * lane + e >= args.tokens) part[e] = 0.0f;
        }
        float total = part[0] + part[1];
        for (u32 back = 1; back < 32; back *= 2) {
            const float before = __shfl_sync(0xffffffffu, total, lane >= back ? lane - back : 0);
            if (lane >= back) total += before;
        }
        *reinterpret_cast<FloatPair*>(&memory.decay[warp][2 * lane]) = {total - part[1], total};
        *reinterpret_cast<FloatPair*>(&memory.beta[warp][2 * lane]) = {number_of(beta[0]), number_of(beta[1])};
    }

    __device__ static void product(SumTile<64>& sum, const Tokens& left, const Tokens& right) {
        const auto a = left.along_columns(0), b = right.along_columns(0);
#pragma unroll
        for (int step = 0; step < Shape::depth / mma_depth; ++step) {
            ptx::wgmma<MmaType::bf16, 64, Major::k, Major::k>(sum.value, a[step], b[step], step > 0);
        }
    }

    // Scales of tokens: squares are on the diagonal of a tile's product with itself.
    __device__ void scale(const SumTile<64>& squares, int which) {
        const int warp = team.thread() / 32, lane = threadIdx.x % 32;
        if (lane % 4 != lane / 8) return;
        float square[2] = {};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float* pair = squares.value + 4 * j + j % 2 * 2;
            if (j / 2 == warp) square[j % 2] = lane / 4 % 2 ? pair[1] : pair[0];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            memory.scale[which][block_tokens * warp + 8 * half + lane / 4] = token_scale(args, square[half], which);
        }
    }

    __device__ void multiply() {
        const Tokens &keys = memory.tiles.keys, &queries = memory.tiles.queries;
        ptx::wgmma_hold(system.value);
        ptx::wgmma_hold(weights.value);
        ptx::wgmma_fence();
        product(weights, queries, queries);
        product(system, keys, keys);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(weights.value);
        ptx::wgmma_hold(system.value);
        scale(weights, 1);
        scale(system, 0);
        ptx::wgmma_hold(weights.value);
        ptx::wgmma_fence();
        product(weights, queries, keys);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(weights.value);
    }

    // The system and the weights of line `line` of those that share.
    __device__ void weigh(u32 line) {
        const int warp = team.thread() / 32, lane = threadIdx.x % 32;
        const float* decay = memory.decay[line];
        float until[2], key[2], query[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int t = block_tokens * warp + 8 * half + lane / 4;
            until[half] = decay[t], key[half] = memory.beta[line][t] * memory.scale[0][t], query[half] = memory.scale[1][t];
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j / 2 > warp) continue;
            const int s = 8 * j + 2 * (lane % 4);
            const FloatPair since = pair_at(decay + s), scale = pair_at(memory.scale[0] + s);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int t = block_tokens * warp + 8 * half + lane / 4;
                const float *own = system.value + 4 * j + 2 * half, *read = weights.value + 4 * j + 2 * half;
                const float x = t >= s ? scale.x * ptx::exp2(until[half] - since.x) : 0.0f, y = t > s ? scale.y * ptx::exp2(until[half] - since.y) : 0.0f;
                *reinterpret_cast<FloatPair*>(&memory.system[t][s]) = {t > s ? key[half] * x * own[0] : 0.0f, t > s + 1 ? key[half] * y * own[1] : 0.0f};
                *reinterpret_cast<u32*>(memory.weights.data + Square::offset(t, s)) = ptx::pack_bf16x2(query[half] * x * read[0], query[half] * y * read[1]);
            }
        }
    }

    // What keys and queries are multiplied by, to the part.
    __device__ void put_factors(u32 line, float* factors) {
        const u32 t = team.thread();
        if (t >= chunk_tokens) return;
        const float *decay = memory.decay[line], head = ptx::exp2(decay[t]), end = decay[chunk_tokens - 1];
        factors[TokenFactors::held + t] = -head * memory.scale[0][t];
        factors[TokenFactors::read + t] = head * memory.scale[1][t];
        factors[TokenFactors::carried + t] = ptx::exp2(end - decay[t]) * memory.scale[0][t];
        if (t == 0) factors[TokenFactors::decay] = ptx::exp2(end);
    }
};

// The work of a preparing block, in the order in which scans need it: wave by wave of lines that are scanned at a time, chunk by chunk, line by line.
template <class Shape, class Args>
__device__ inline void prepare_chunks(const Arena& arena, const Args& args, const char* params, u32 epoch) {
    const u32 number = threadIdx.x / Shape::team_threads, teams = min(blockDim.x / Shape::team_threads, Shape::max_teams);
    if (number >= teams) return;
    const Warps team{number * Shape::team_threads / 32, Shape::team_threads / 32, 1 + number};
    using Memory = typename Shape::Preparation;
    auto& memory = reinterpret_cast<Memory*>(ptx::dynamic_shared())[number];
    u32* const ready = reinterpret_cast<u32*>(arena.local(args.ready));
    const u32* const taken = reinterpret_cast<const u32*>(arena.local(args.taken));
    const u32 sharing = Shape::by_channel ? 1 : args.sharing, units = args.batch * args.heads / sharing, at_once = args.scan_blocks / args.slices / sharing;
    const u32 chunks = (args.tokens + chunk_tokens - 1) / chunk_tokens, stride = (gridDim.x - args.scan_blocks) * teams;
    const auto chunk_of = [&](u32 index) {
        const u32 first = index / (at_once * chunks) * at_once, width = min(at_once, units - first), within = index - first * chunks;
        return DeltaChunk{(first + within % width) * sharing, within / width};
    };
    const Solving<Shape> solving{team, memory};
    if (team.thread() == 0) {
        memory.ring.init(1, team.count);
        ptx::mbarrier_init_fence();
    }
    solving.clear();
    team.sync();
    CopyProducer<typename Memory::Tiles, 1> producer(&memory.tiles, memory.ring);
    Consumer<typename Memory::Tiles, 1> consumer(&memory.tiles, memory.ring);
    ChosenType<Shape::by_channel, OwnPreparing<Shape, Args>, SharedPreparing<Shape, Args>> work{args, team, memory};
    const auto start = [&](u32 index) {
        if (index >= units * chunks) return DeltaChunk{};
        const DeltaChunk at = chunk_of(index);
        work.fetch(params, at);
        if (team.thread() / 32 == team.count - 1) {
            producer.fill(sizeof(typename Memory::Tiles), [&](auto& tiles, u64* full) { work.load(at, tiles, full); });
        }
        return at;
    };
    u32 index = (blockIdx.x - args.scan_blocks) * teams + number;
    DeltaChunk at, next = start(index);
    for (; index < units * chunks; index += stride) {
        at = next;
        const u32 before = (epoch - first_epoch) * chunks + at.chunk;  // of the line, all parts that come earlier
        const auto part_of = [&](u32 line) { return arena.local(args.parts + u64(line * args.ring + at.chunk % args.ring) * Shape::part_bytes); };
        const auto wait_taken = [&](u32 line) {
            if (team.thread() / 32 != team.count - 1) return;  // the warp that has nothing to solve
            wait_local(arena, line * args.ring + at.chunk % args.ring, args.slices, [&](u32 lane) {
                return lane >= args.slices || reached(ptx::load_relaxed_gpu(taken + line * args.slices + lane), before + 1 - args.ring);
            });
        };
        consumer.wait();
        if constexpr (Shape::by_channel) {
            char* const part = part_of(at.line);
            wait_taken(at.line);
            work.reduce(at);
            team.sync();
            work.scale(reinterpret_cast<float*>(part + Shape::factors_at));
            team.sync();
            work.spread(part);
            team.sync();
            work.multiply();
            ptx::fence_proxy_async_shared();
        } else {
            work.reduce(at);
            work.multiply();
        }
        consumer.release();
        next = start(index + stride);
        for (u32 line = 0; line < sharing; ++line) {
            char* const part = part_of(at.line + line);
            if constexpr (!Shape::by_channel) {
                if (line == 0) team.sync();
                work.weigh(line);
            }
            const float* beta = memory.beta[line];
            team.sync();
            solving.invert_blocks(beta);
            team.sync();
            solving.solve(beta);
            if constexpr (!Shape::by_channel) wait_taken(at.line + line);
            team.sync();
            solving.copy_squares(part);
            if constexpr (!Shape::by_channel) work.put_factors(line, reinterpret_cast<float*>(part + Shape::factors_at));
            count_local(team, ready + (at.line + line) * args.ring + at.chunk % args.ring);
        }
    }
}

// ---- scanning ----------------------------------------------------------------------------------------------------------------------------

template <class Shape>
using FrontProducer = CopyProducer<typename Shape::Front, Shape::slots>;
template <class Shape>
using BackProducer = CopyProducer<typename Shape::Back, Shape::slots>;
template <class Shape>
using FrontConsumer = Consumer<typename Shape::Front, Shape::slots>;
template <class Shape>
using BackConsumer = Consumer<typename Shape::Back, Shape::slots>;

// What a scanning block does with a line: its first value of those that the block has.
struct DeltaLine {
    u32 line, slice, chunks, launch;
};

// By one warp: the line's parts and values to shared memory.
template <class Shape, class Args>
__device__ inline void load_line(const Arena& arena, const Args& args, const DeltaLine& at, FrontProducer<Shape>& front, BackProducer<Shape>& back) {
    const u32* const ready = reinterpret_cast<const u32*>(arena.local(args.ready)) + at.line * args.ring;
    const int head = at.line % args.heads, batch = at.line / args.heads, value = at.slice * Shape::groups * 64;
    const int key_head = head / (args.heads / args.key_heads);
    u32 known = 0;
    for (u32 chunk = 0; chunk < at.chunks; ++chunk) {
        if (chunk == known) {
            const u32 later = chunk + Warp{}.thread(), number = filled(at.launch, at.chunks, args.ring, min(later, at.chunks - 1));
            known += wait_local(arena, at.line * args.ring + chunk % args.ring, 1, [&](u32 lane) {
                return lane < args.ring && later < at.chunks && reached(ptx::load_relaxed_gpu(ready + later % args.ring), number);
            });
        }
        const char* part = arena.local(args.parts + u64(at.line * args.ring + chunk % args.ring) * Shape::part_bytes);
        const Place4 tokens{0, key_head, static_cast<int>(chunk * chunk_tokens), batch};
        front.fill(Shape::front_bytes, [&](auto& buffer, u64* full) {
            if constexpr (Shape::by_channel) {
                ptx::bulk_load(buffer.keys.data, part + Shape::keys_at, Shape::Tokens::bytes, full);
                ptx::bulk_load(buffer.queries.data, part + Shape::queries_at, Shape::Tokens::bytes, full);
            } else {
                buffer.queries.load(&args.q, full, tokens);
            }
#pragma unroll
            for (int group = 0; group < Shape::groups; ++group) {
                buffer.values[group].load(&args.v, full, Place4{value + 64 * group, head, tokens.z, batch});
            }
            ptx::bulk_load(buffer.solution.data, part + Shape::solution_at, Shape::Square::bytes, full);
        });
        back.fill(Shape::back_bytes, [&](auto& buffer, u64* full) {
            if constexpr (Shape::by_channel) {
                ptx::bulk_load(buffer.carriers.data, part + Shape::carriers_at, Shape::Tokens::bytes, full);
            } else {
                buffer.carriers.load(&args.k, full, tokens);
            }
            ptx::bulk_load(buffer.weights.data, part + Shape::weights_at, Shape::Square::bytes, full);
            ptx::bulk_load(buffer.factors, part + Shape::factors_at, Shape::factor_bytes, full);
        });
    }
}

// By one warp: tells the preparing blocks which parts have been copied.
template <class Shape, class Args>
__device__ inline void free_line(const Arena& arena, const Args& args, const DeltaLine& at, FrontConsumer<Shape>& front, BackConsumer<Shape>& back) {
    u32* const taken = reinterpret_cast<u32*>(arena.local(args.taken)) + at.line * args.slices + at.slice;
    const u32 step = args.ring < 8 ? 1 : 4;  // a count takes about as long as a chunk
    for (u32 chunk = 0; chunk < at.chunks; ++chunk) {
        front.wait();
        front.release();
        back.wait();
        back.release();
        if (chunk % step == step - 1 || chunk + 1 == at.chunks) count_local(Warp{}, taken, chunk % step + 1);
    }
}

// Named barriers of the first group's outputs; the next two are the second group's.
constexpr u32 output_free = 1, output_full = 2, first_free_barrier = 5;

// By the group's storer, a warp: its outputs of the line to the tensor.
template <class Shape, class Args>
__device__ inline void store_line(const Args& args, const DeltaLine& at, u32 group, const typename Shape::Square& tile) {
    const int head = at.line % args.heads, batch = at.line / args.heads, value = (at.slice * Shape::groups + group) * 64;
    for (u32 chunk = 0; chunk < at.chunks; ++chunk) {
        ptx::barrier_arrive(output_free + 2 * group, group_threads + 32);
        ptx::barrier_sync(output_full + 2 * group, group_threads + 32);
        if (ptx::elect_one()) {
            tile.store(&args.out, Place4{value, head, static_cast<int>(chunk * chunk_tokens), batch});
            ptx::bulk_commit();
            ptx::bulk_wait_read<0>();
        }
        __syncwarp();
    }
}

// A warpgroup's 64 values of the state, transposed, and what it does with a chunk.
template <class Shape>
struct Scanning {
    static constexpr int depth = Shape::depth, steps = depth / mma_depth, width = depth < 128 ? depth : 128;
    using E = typename Shape::E;
    using Tokens = typename Shape::Tokens;
    using Square = typename Shape::Square;

    float state[depth / width][width / 2];  // channels in parts of which one product takes the registers

    __device__ float& number(int i) { return state[2 * i / width][i % (width / 2)]; }

    // The warp's row of matrix lane / 8, of four whose words are 16 tokens of 16 values.
    __device__ static u32 square_at(int tokens) {
        const u32 lane = threadIdx.x % 32;
        return Square::offset(tokens + lane / 16 * 8 + lane % 8, threadIdx.x / 32 % 4 * 16 + lane / 8 % 2 * 8);
    }

    template <int count>
    __device__ static void round(u32 (&operand)[count][4], const float* sum) {
#pragma unroll
        for (int step = 0; step < count; ++step) {
#pragma unroll
            for (int w = 0; w < 4; ++w) operand[step][w] = E::narrow(sum + 8 * step + 2 * w);
        }
    }

    // Starts sum = (or +=) the operand times what `right` reads, from step `first` on.
    template <int count, int N, Major major = Major::k, class Right>
    __device__ static void start(float (&sum)[N / 2], const u32 (&left)[count][4], const Right& right, int first, bool adds) {
#pragma unroll
        for (int step = 0; step < count; ++step) ptx::wgmma<MmaType::bf16, N, major>(sum, left[step], right[first + step], adds || step > 0);
        ptx::wgmma_commit();
    }

    // sum = the state times a tile's tokens, some channels at a time.
    __device__ void read(SumTile<64>& sum, const Tokens& tile) const {
#pragma unroll
        for (int first = 0; first < steps; first += 4) {
            u32 left[4][4];
            round(left, state[16 * first / width] + 8 * first % (width / 2));
            ptx::wgmma_hold(sum.value);
            ptx::wgmma_fence();
            start<4, 64>(sum.value, left, tile.along_columns(0), first, first > 0);
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(sum.value);
        }
    }

    // The state, or its channels, times its decay.
    __device__ void decay(const float* factors) {
#pragma unroll
        for (int i = 0; i < depth / 2; i += 4) {
            FloatPair factor;
            if constexpr (Shape::by_channel) {
                factor = pair_at(factors + 2 * i + 2 * (threadIdx.x % 4));
            } else {
                factor.x = factor.y = factors[TokenFactors::decay];
            }
            float* x = state[2 * i / width] + i % (width / 2);
            x[0] *= factor.x, x[1] *= factor.y, x[2] *= factor.x, x[3] *= factor.y;
        }
    }

    // Factors of the tokens that a thread has values of.
    __device__ static void load(FloatPair (&to)[8], const float* factors) {
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = pair_at(factors + 8 * i + 2 * (threadIdx.x % 4));
    }

    // Every token's values times its factor.
    __device__ static void scale(float (&x)[32], const FloatPair (&factors)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[4 * i] *= factors[i].x, x[4 * i + 1] *= factors[i].y, x[4 * i + 2] *= factors[i].x, x[4 * i + 3] *= factors[i].y;
        }
    }

    static __device__ void load(u32 (&words)[4][4], const Square& values) {
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::load_matrices_transposed(words[i], values.data + square_at(16 * i));
    }

    // Adds values to what the state holds for the keys.
    __device__ static void add(SumTile<64>& sum, const u32 (&words)[4][4]) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float x[2];
            E::widen(words[i / 4][i % 4], x);
            sum.value[2 * i] += x[0], sum.value[2 * i + 1] += x[1];
        }
    }

    // `emit(out)` gets the chunk's outputs, values x tokens.
    template <class Emit>
    __device__ void step(u32 group, FrontConsumer<Shape>& fronts, BackConsumer<Shape>& backs, const Emit& emit) {
        SumTile<64> rest, written, out;
        u32 values[4][4], operand[4][4], writes[4][4], carried[4][4];
        FloatPair factors[8];  // of tokens, if channels decay alike
        const auto& front = fronts.wait();
        const auto& back = backs.wait();  // nothing diverges while products have operands in registers: the compiler would wait for them
        const auto load_factors = [&](int which) {
            if constexpr (!Shape::by_channel) load(factors, back.factors + which);
        };
        const auto scale_by_factors = [&](SumTile<64>& sum) {
            if constexpr (!Shape::by_channel) scale(sum.value, factors);
        };
        const Tokens* keys;
        if constexpr (Shape::by_channel) {
            keys = &front.keys;
        } else {
            keys = &back.carriers;
        }
        // What is loaded and multiplied beside products is not on the way from state to state.
        if constexpr (Shape::rounds_once) {
            u32 left[steps][4];
            round(left, state[0]);
            if constexpr (Shape::by_channel) decay(back.factors);  // later, the compiler would wait for the products
            ptx::wgmma_hold(rest.value);
            ptx::wgmma_hold(out.value);
            ptx::wgmma_fence();
            start<steps, 64>(rest.value, left, keys->along_columns(0), 0, false);
            start<steps, 64>(out.value, left, front.queries.along_columns(0), 0, false);
            if constexpr (!Shape::by_channel) decay(back.factors);
            load(values, front.values[group]);
            load_factors(TokenFactors::held);
            ptx::wgmma_wait<1>();
            ptx::wgmma_hold(rest.value);
        } else {
            read(rest, *keys);
            load(values, front.values[group]);
            load_factors(TokenFactors::held);
        }
        scale_by_factors(rest);
        add(rest, values);
        round(operand, rest.value);
        if constexpr (!Shape::rounds_once) {
            read(out, front.queries);
            load_factors(TokenFactors::read);
            scale_by_factors(out);
            decay(back.factors);
        }
        ptx::wgmma_hold(written.value);
        ptx::wgmma_fence();
        start<4, 64>(written.value, operand, front.solution.along_columns(0), 0, false);
        if constexpr (Shape::rounds_once) {
            load_factors(TokenFactors::read);
            ptx::wgmma_wait<1>();
            ptx::wgmma_hold(out.value);
            scale_by_factors(out);
        }
        load_factors(TokenFactors::carried);
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(written.value);
        round(writes, written.value);
        scale_by_factors(written);
        if constexpr (!Shape::by_channel) round(carried, written.value);
        fronts.release();
        ptx::wgmma_hold(out.value);
#pragma unroll
        for (auto& part : state) ptx::wgmma_hold(part);
        ptx::wgmma_fence();
        start<4, 64>(out.value, writes, back.weights.along_columns(0), 0, true);
#pragma unroll
        for (int part = 0; part < depth / width; ++part) {
            const auto channels = back.carriers.along_rows(part * width / panel_columns);
            if constexpr (Shape::by_channel) {
                start<4, width, Major::mn>(state[part], writes, channels, 0, true);
            } else {
                start<4, width, Major::mn>(state[part], carried, channels, 0, true);
            }
        }
        ptx::wgmma_wait<depth / width>();
        ptx::wgmma_hold(out.value);
        emit(out);
        ptx::wgmma_wait<0>();
#pragma unroll
        for (auto& part : state) ptx::wgmma_hold(part);
        backs.release();
    }

    // Rounds results for the group's storer.
    __device__ static void hand_out(const SumTile<64>& out, Square& tile, u32 group) {
        ptx::barrier_sync(output_free + 2 * group, group_threads + 32);
#pragma unroll
        for (int tokens = 0; tokens < chunk_tokens; tokens += 16) {
            u32 word[4];
            out.template round<E>(word, tokens);
            ptx::store_matrices_transposed(tile.data + square_at(tokens), word);
        }
        ptx::fence_proxy_async_shared();
        ptx::barrier_arrive(output_full + 2 * group, group_threads + 32);
    }
};

}  // namespace peerlane
