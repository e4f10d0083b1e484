// The gated delta rule in chunks of 64 tokens on tensor cores, for bfloat16.
//
// Within a chunk that begins with state M (channels x values), with G_t the decay since its start, A_ts = k_t (G_t / G_s) k_s and
// S = strictly lower part of diag(beta) A, the writes are U = (1 + S)^-1 diag(beta) (V - (G k) M), the outputs (G q) M + W U with W the lower part of
// q (G_t / G_s) k, and the next state G_64 M + (k G_64 / G_t)^T U (Yang et al., "Gated Delta Networks"; "Kimi Linear" for decay by channel).
//
// Two roles share the GPU. Teams of preparing blocks make what does not depend on the state, a part for each chunk: -G k, G q, k G_64 / G_t,
// (1 + S)^-1 diag(beta), W and G_64. A scanning block takes some values of a line (a head of a batch entry) and runs through its parts. It keeps
// M transposed in registers as the sum of wgmmas; rounded, the same registers are the left operand of the next ones. Parts pass through a ring
// in the arena that stays in L2.
//
// Decay by channel is divided among factors. Each block of 16 tokens refers to its middle, so that factors stay below e^40 for decays of e^-5 a token.
// A decay that all channels share is applied to products, as a factor of at most 1.
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

// `Depth` channels; `Groups` warpgroups of a scanning block, each with 64 values; `Slots` chunks that it copies ahead.
template <int Depth, int Groups, int Slots, bool ByChannel>
struct DeltaShape {
    using E = BFloat16;
    static constexpr int depth = Depth, groups = Groups, slots = Slots;
    static constexpr bool by_channel = ByChannel;
    static constexpr bool rounds_once = Depth <= 128;  // registers hold the whole rounded state
    using Tokens = SharedTile<E, chunk_tokens, Depth>;
    using Channels = SharedTile<E, Depth, chunk_tokens>;
    using Square = SharedTile<E, chunk_tokens, chunk_tokens>;

    // Of a part, in bytes.
    static constexpr u32 keys_at = 0, queries_at = Tokens::bytes, carriers_at = 2 * Tokens::bytes, solution_at = 3 * Tokens::bytes;
    static constexpr u32 weights_at = solution_at + Square::bytes, decay_at = weights_at + Square::bytes, part_bytes = decay_at + 1024;

    // What a scan needs of a part at first, and then.
    struct Front {
        Tokens keys, queries;
        Square solution, values[Groups];
    };
    struct Back {
        Square weights;
        Channels carriers;
        alignas(1024) float decay[Depth];
    };
    static constexpr u32 front_bytes = 2 * Tokens::bytes + (1 + Groups) * Square::bytes;
    static constexpr u32 back_bytes = Square::bytes + Channels::bytes + Depth * 4;
    struct Scan {
        Front front[Slots];
        Back back[Slots];
        Square output[Groups];
        Ring<Slots> front_ring, back_ring;
    };

    // What a team that prepares keeps in shared memory.
    struct alignas(1024) Preparation {
        Tokens keys, queries, right;  // right: if channels have decays of their own
        Square solution, weights;
        float system[chunk_tokens][chunk_tokens + 4];
        float inverse[chunk_blocks][block_tokens][block_tokens + 4];
        float squares[2][chunk_tokens][Depth / 64], scale[2][chunk_tokens], beta[chunk_tokens];
        float decay[chunk_tokens], head[chunk_tokens], tail[chunk_tokens];                       // of tokens: if all channels decay alike
        float sum[chunk_blocks][ByChannel ? Depth : 1], middle[chunk_blocks][ByChannel ? Depth : 1];  // of logarithms, in a block
        float from_start[chunk_blocks][ByChannel ? Depth : 1], to_end[chunk_blocks][ByChannel ? Depth : 1];
        float between[6][ByChannel ? Depth : 1];
    };
    static constexpr u32 team_threads = 2 * Depth;
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

// Counts one more. All that the team has written and read comes before what follows a wait for that count. Who counts may change, so it adds.
template <class Team>
__device__ inline void count_local(const Team& team, u32* counter) {
    team.sync();
    if (team.thread() != 0) return;
    ptx::fence_proxy_async();
    ptx::fence_gpu();
    ptx::add_relaxed_gpu(counter, 1);
}

// How often the chunk's slot in a ring has been filled when it holds this chunk of launch `launch`; at most `chunks` slots.
__device__ inline u32 filled(u32 launch, u32 chunks, u32 ring, u32 chunk) {
    return launch * ((chunks - 1 - chunk % ring) / ring + 1) + chunk / ring + 1;
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

// ---- preparing ---------------------------------------------------------------------------------------------------------------------------

// A team's work on one chunk. Every thread has two channels of the 16 tokens of one block.
template <class Shape, class Args>
struct Preparing {
    static constexpr int depth = Shape::depth, pairs = depth / 2;
    static constexpr bool by_channel = Shape::by_channel;
    using Memory = typename Shape::Preparation;
    using Tokens = typename Shape::Tokens;
    using Square = typename Shape::Square;

    const Args& args;
    const Warps team;
    Memory& memory;
    u32 words[2][block_tokens];                              // of k and q
    float decay[by_channel ? block_tokens : 1][2];           // logarithms to base 2, added up within the block

    __device__ u32 block() const { return team.thread() / pairs; }
    __device__ u32 channel() const { return team.thread() % pairs * 2; }
    __device__ static float sigmoid(float x) { return ptx::reciprocal(1.0f + ptx::exp2(-log2_of_e * x)); }

    // The chunk's tokens to registers.
    __device__ void load(const char* params, u32 line, u32 chunk) {
        const u32 head = line % args.heads, batch = line / args.heads, own = args.heads / args.parameter_ranks;
        const u32 key_head = head / (args.heads / args.key_heads), first = chunk * chunk_tokens;
        const u32 count = min(args.tokens - first, u32(chunk_tokens)), begin = block() * block_tokens;
        const u64 row = u64(batch) * args.tokens + first + begin;
        const bool inside = channel() < args.depth;
        const u64 at = (row * args.key_heads + key_head) * args.depth + channel();
        const u32 stride = args.key_heads * args.depth;
        const char* of_owner = params + u64(head / own) * args.parameter_bytes;
        const u32* k = reinterpret_cast<const u32*>(args.k + 2 * at);
        const u32* q = reinterpret_cast<const u32*>(args.q + 2 * at);
#pragma unroll
        for (int i = 0; i < block_tokens; ++i) {
            const bool valid = inside && begin + i < count;
            words[0][i] = valid ? *k : 0;
            words[1][i] = valid ? *q : 0;
            k += stride / 2, q += stride / 2;
        }
        if constexpr (by_channel) {
            const u32 decay_stride = args.heads * args.depth;
            const u32* g = reinterpret_cast<const u32*>(args.decay + 2 * ((row * args.heads + head) * args.depth + channel()));
            const float rate = expf(element_of<BFloat16>(of_owner, head % own));
            float bias[2] = {}, total[2] = {};
            if (inside) {
                for (int e = 0; e < 2; ++e) bias[e] = element_of<BFloat16>(of_owner, own + head % own * args.depth + channel() + e);
            }
#pragma unroll
            for (int i = 0; i < block_tokens; ++i) {
                const bool valid = inside && begin + i < count;
                float x[2];
                BFloat16::widen(valid ? *g : 0, x);
                g += decay_stride / 2;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    total[e] += valid ? least_log_decay * log2_of_e * sigmoid(rate * (x[e] + bias[e])) : 0.0f;
                    decay[i][e] = total[e];
                }
            }
        }
    }

    // Adds up over the lanes, which share the sums: lane l gets sum l, first.
    template <int half>
    __device__ static void halve(float (&sum)[2 * block_tokens], u32 lane) {
        const bool upper = lane & half;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float sent = upper ? sum[i] : sum[i + half], kept = upper ? sum[i + half] : sum[i];
            sum[i] = kept + __shfl_xor_sync(0xffffffffu, sent, half);
        }
        if constexpr (half > 1) halve<half / 2>(sum, lane);
    }

    // Sums of squares, logarithms of decays, beta; and zeros above the diagonals.
    __device__ void reduce(const char* params, u32 line, u32 chunk) {
        const u32 thread = team.thread(), lane = thread % 32;
        const u32 head = line % args.heads, batch = line / args.heads, own = args.heads / args.parameter_ranks;
        const u32 first = chunk * chunk_tokens, count = min(args.tokens - first, u32(chunk_tokens));
        const u64 row = (u64(batch) * args.tokens + first) * args.heads + head;
        float square[2 * block_tokens];
#pragma unroll
        for (int i = 0; i < 2 * block_tokens; ++i) {
            float x[2];
            BFloat16::widen(words[i / block_tokens][i % block_tokens], x);
            square[i] = x[0] * x[0] + x[1] * x[1];
            // Until this thread puts products' operands there: registers are short.
            char* tile = i < block_tokens ? memory.keys.data : memory.queries.data;
            *reinterpret_cast<u32*>(tile + Tokens::offset(block() * block_tokens + i % block_tokens, channel())) = words[i / block_tokens][i % block_tokens];
        }
        halve<block_tokens>(square, lane);
        memory.squares[lane / block_tokens][block() * block_tokens + lane % block_tokens][thread / 32 % (depth / 64)] = square[0];
        if constexpr (by_channel) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                memory.sum[block()][channel() + e] = decay[block_tokens - 1][e];
                memory.middle[block()][channel() + e] = decay[block_tokens / 2 - 1][e];
            }
        }
        if (thread < chunk_tokens) {
            float beta = 0.0f;
            if (thread < count) {
                beta = element_of<BFloat16>(args.beta, row + u64(thread) * args.heads);
                if (by_channel) beta = sigmoid(beta);
            }
            memory.beta[thread] = beta;
        }
        if (!by_channel && thread < 32) {
            const char* of_owner = params + u64(head / own) * args.parameter_bytes;
            const float rate = log2_of_e * expf(element_of<BFloat16>(of_owner, head % own)), bias = element_of<BFloat16>(of_owner, own + head % own);
            float part[2];
            for (int e = 0; e < 2; ++e) {
                part[e] = 0.0f;
                if (2 * lane + e >= count) continue;
                const float x = element_of<BFloat16>(args.decay, row + u64(2 * lane + e) * args.heads) + bias;
                part[e] = -rate * (x > 20.0f ? x : log1pf(expf(x)));
            }
            float total = part[0] + part[1];
            for (u32 back = 1; back < 32; back *= 2) {
                const float before = __shfl_sync(0xffffffffu, total, lane >= back ? lane - back : 0);
                if (lane >= back) total += before;
            }
            const float end = __shfl_sync(0xffffffffu, total, 31);
            for (int e = 0; e < 2; ++e) {
                const float sum = e == 0 ? total - part[1] : total;
                const u32 t = 2 * lane + e;
                memory.decay[t] = sum, memory.head[t] = ptx::exp2(sum), memory.tail[t] = ptx::exp2(end - sum);
            }
        }
        for (u32 v = thread; v < Square::bytes / sizeof(Vec16); v += team.size()) {
            reinterpret_cast<Vec16*>(memory.solution.data)[v] = Vec16{};
            reinterpret_cast<Vec16*>(memory.weights.data)[v] = Vec16{};
        }
    }

    // What keys and queries are multiplied by; factors of decay between blocks, from the chunk's start and to its end, which goes to `last`.
    __device__ void scale(float* last) {
        const u32 thread = team.thread();
        if (thread < 2 * chunk_tokens) {
            const u32 which = thread / chunk_tokens, t = thread % chunk_tokens;
            float sum = 0.0f;
            for (int part = 0; part < depth / 64; ++part) sum += memory.squares[which][t][part];
            memory.scale[which][t] = (which ? rsqrtf(float(args.depth)) : 1.0f) / fmaxf(sqrtf(sum), args.floor);
        }
        for (u32 c = thread; c < depth; c += team.size()) {
            if constexpr (by_channel) {
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
            } else {
                last[c] = memory.head[chunk_tokens - 1];
            }
        }
    }

    // Operands of the chunk's products to shared memory; the part's keys, queries and carriers.
    __device__ void spread(char* part) {
        const u32 c = channel();
        float from[2] = {1.0f, 1.0f}, to[2] = {1.0f, 1.0f};
        if constexpr (by_channel) {
            for (int e = 0; e < 2; ++e) from[e] = memory.from_start[block()][c + e], to[e] = memory.to_end[block()][c + e];
        }
        float carried[2][2];
        u32 carriers[2][block_tokens / 2];
#pragma unroll
        for (int i = 0; i < block_tokens; ++i) {
            const u32 t = block() * block_tokens + i;
            float k[2], q[2], right[2], key[2], query[2];
            const u32 at = Tokens::offset(t, c);
            BFloat16::widen(*reinterpret_cast<const u32*>(memory.keys.data + at), k);
            BFloat16::widen(*reinterpret_cast<const u32*>(memory.queries.data + at), q);
            const float k_scale = memory.scale[0][t], q_scale = memory.scale[1][t];
            if constexpr (!by_channel) from[0] = from[1] = memory.head[t], to[0] = to[1] = memory.tail[t];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                k[e] *= k_scale, q[e] *= q_scale, right[e] = k[e];
                if constexpr (by_channel) {
                    const float shift = decay[i][e] - decay[block_tokens / 2 - 1][e], factor = ptx::exp2(shift);
                    k[e] *= factor, q[e] *= factor, right[e] *= ptx::exp2(-shift);
                }
                key[e] = -from[e] * k[e], query[e] = from[e] * q[e], carried[e][i % 2] = to[e] * right[e];
                if (i % 2) carriers[e][i / 2] = ptx::pack_bf16x2(carried[e][0], carried[e][1]);
            }
            *reinterpret_cast<u32*>(memory.keys.data + at) = ptx::pack_bf16x2(k[0], k[1]);
            *reinterpret_cast<u32*>(memory.queries.data + at) = ptx::pack_bf16x2(q[0], q[1]);
            if constexpr (by_channel) *reinterpret_cast<u32*>(memory.right.data + at) = ptx::pack_bf16x2(right[0], right[1]);
            *reinterpret_cast<u32*>(part + Shape::keys_at + at) = ptx::pack_bf16x2(key[0], key[1]);
            *reinterpret_cast<u32*>(part + Shape::queries_at + at) = ptx::pack_bf16x2(query[0], query[1]);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Vec16 row;
                for (int w = 0; w < 4; ++w) row.word[w] = carriers[e][4 * half + w];
                const u32 at = Shape::Channels::offset(c + e, block() * block_tokens + 8 * half);
                *reinterpret_cast<Vec16*>(part + Shape::carriers_at + at) = row;
            }
        }
    }

    // Products of keys and queries with keys, a pair of blocks for a warp at a time: the system and the weights.
    __device__ void multiply() {
        constexpr int count = chunk_blocks * (chunk_blocks + 1) / 2;
        const u32 lane = threadIdx.x % 32;
        const Tokens& right = by_channel ? memory.right : memory.keys;
        for (u32 unit = team.thread() / 32; unit < 2 * count; unit += team.count) {
            const bool weighs = unit >= count;
            const int pair = unit % count, row = (pair >= 1) + (pair >= 3) + (pair >= 6), column = pair - row * (row + 1) / 2;
            const Tokens& left = weighs ? memory.queries : memory.keys;
            float sum[2][4] = {};
#pragma unroll
            for (int step = 0; step < depth / mma_depth; ++step) {
                u32 a[4], b[4];
                ptx::load_matrices(a, left.data + Tokens::offset(block_tokens * row + lane % 16, mma_depth * step + lane / 16 * 8));
                ptx::load_matrices(b, right.data + Tokens::offset(block_tokens * column + lane / 16 * 8 + lane % 8, mma_depth * step + lane / 8 % 2 * 8));
                if (by_channel && row > column) {
#pragma unroll
                    for (int w = 0; w < 4; ++w) {
                        const float* between = &memory.between[block_pair(row, column)][mma_depth * step + 2 * (lane % 4) + w / 2 * 8];
                        const FloatPair factor = *reinterpret_cast<const FloatPair*>(between);
                        float x[2];
                        BFloat16::widen(a[w], x);
                        a[w] = ptx::pack_bf16x2(x[0] * factor.x, x[1] * factor.y);
                    }
                }
                ptx::mma<MmaType::bf16>(sum[0], a, {b[0], b[1]});
                ptx::mma<MmaType::bf16>(sum[1], a, {b[2], b[3]});
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int t = block_tokens * row + lane / 4 + i / 2 * 8, s = block_tokens * column + i % 2 * 8 + 2 * (lane % 4);
                float x[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    x[e] = sum[i % 2][i / 2 * 2 + e];
                    const bool past = weighs ? t >= s + e : t > s + e;
                    if constexpr (!by_channel) x[e] *= ptx::exp2(fminf(memory.decay[t] - memory.decay[s + e], 0.0f));
                    if (!past) x[e] = 0.0f;
                }
                if (weighs) {
                    *reinterpret_cast<u32*>(memory.weights.data + Square::offset(t, s)) = ptx::pack_bf16x2(x[0], x[1]);
                } else {
                    const float beta = memory.beta[t];
                    *reinterpret_cast<FloatPair*>(&memory.system[t][s]) = {beta * x[0], beta * x[1]};
                }
            }
        }
    }

    __device__ void put_solution(int row, int column, float value) {
        const float scaled = value * memory.beta[column];
        *reinterpret_cast<u16*>(memory.solution.data + Square::offset(row, column)) = static_cast<u16>(ptx::pack_bf16x2(scaled, 0.0f));
    }

    // Inverses of the system's blocks on the diagonal, each by half a warp, which has a column in each lane.
    __device__ void invert_blocks() {
        const u32 warp = team.thread() / 32, lane = threadIdx.x % 32;
        if (warp >= chunk_blocks || lane >= block_tokens) return;
        const u32 first = warp * block_tokens;
        float x[block_tokens];
#pragma unroll
        for (int i = 0; i < block_tokens; ++i) {
            float sum = i == lane ? 1.0f : 0.0f;
#pragma unroll
            for (int k = 0; k < i; ++k) sum -= memory.system[first + i][first + k] * x[k];
            x[i] = sum;
            memory.inverse[warp][i][lane] = sum;
            if (i >= lane) put_solution(first + i, first + lane, sum);
        }
    }

    // The blocks below them, transposed: warp j solves for 16 columns, block by block.
    __device__ void solve() {
        const int column = team.thread() / 32, lane = threadIdx.x % 32, m = lane / 4, n = 2 * (lane % 4);
        if (column >= chunk_blocks - 1) return;
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
#pragma unroll
            for (int w = 0; w < 4; ++w) split(-sum[w / 2][w % 2 * 2], -sum[w / 2][w % 2 * 2 + 1], negated.high[w], negated.low[w]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* from = &memory.inverse[row][8 * half + m][n];
                multiply_split(result[half], negated, pair_at(from), pair_at(from + 8));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    put_solution(block_tokens * row + 8 * half + n + i % 2, block_tokens * column + m + i / 2 * 8, result[half][i]);
                }
            }
            if (row < chunk_blocks - 1) {
#pragma unroll
                for (int w = 0; w < 4; ++w) split(result[w / 2][w % 2 * 2], result[w / 2][w % 2 * 2 + 1], solved[row].high[w], solved[row].low[w]);
            }
        }
    }
    __device__ static FloatPair pair_at(const float* address) { return *reinterpret_cast<const FloatPair*>(address); }

    __device__ void copy_squares(char* part) {
        constexpr u32 vectors = Square::bytes / sizeof(Vec16);
        for (u32 v = team.thread(); v < vectors; v += team.size()) {
            reinterpret_cast<Vec16*>(part + Shape::solution_at)[v] = reinterpret_cast<const Vec16*>(memory.solution.data)[v];
            reinterpret_cast<Vec16*>(part + Shape::weights_at)[v] = reinterpret_cast<const Vec16*>(memory.weights.data)[v];
        }
    }
};

// The work of a preparing block, in the order in which scans need it: wave by wave of lines that are scanned at a time, chunk by chunk, line by line.
template <class Shape, class Args>
__device__ inline void prepare_chunks(const Arena& arena, const Args& args, const char* params, u32 epoch) {
    const u32 number = threadIdx.x / Shape::team_threads, teams = blockDim.x / Shape::team_threads;
    if (number >= teams) return;
    const Warps team{number * Shape::team_threads / 32, Shape::team_threads / 32, 1 + number};
    auto& memory = reinterpret_cast<typename Shape::Preparation*>(ptx::dynamic_shared())[number];
    u32* const ready = reinterpret_cast<u32*>(arena.local(args.ready));
    const u32* const taken = reinterpret_cast<const u32*>(arena.local(args.taken));
    const u32 lines = args.batch * args.heads, at_once = args.scan_blocks / args.slices;
    const u32 chunks = (args.tokens + chunk_tokens - 1) / chunk_tokens;
    for (u32 index = (blockIdx.x - args.scan_blocks) * teams + number; index < lines * chunks; index += (gridDim.x - args.scan_blocks) * teams) {
        const u32 first = index / (at_once * chunks) * at_once, width = min(at_once, lines - first), within = index - first * chunks;
        const u32 chunk = within / width, line = first + within % width, slot = line * args.ring + chunk % args.ring;
        const u32 before = (epoch - first_epoch) * chunks + chunk;  // of the line, all parts that come earlier
        char* const part = arena.local(args.parts + u64(slot) * Shape::part_bytes);
        Preparing<Shape, Args> work{args, team, memory};
        work.load(params, line, chunk);
        if (team.thread() < 32) {
            wait_local(arena, slot, args.slices, [&](u32 lane) {
                return lane >= args.slices || reached(ptx::load_relaxed_gpu(taken + line * args.slices + lane), before + 1 - args.ring);
            });
        }
        team.sync();
        work.reduce(params, line, chunk);
        team.sync();
        work.scale(reinterpret_cast<float*>(part + Shape::decay_at));
        team.sync();
        work.spread(part);
        team.sync();
        work.multiply();
        team.sync();
        work.invert_blocks();
        team.sync();
        work.solve();
        team.sync();
        work.copy_squares(part);
        count_local(team, ready + slot);
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
    u32 known = 0;
    for (u32 chunk = 0; chunk < at.chunks; ++chunk) {
        if (chunk == known) {
            const u32 later = chunk + Warp{}.thread(), number = filled(at.launch, at.chunks, args.ring, min(later, at.chunks - 1));
            known += wait_local(arena, at.line * args.ring + chunk % args.ring, 1, [&](u32 lane) {
                return lane < args.ring && later < at.chunks && reached(ptx::load_relaxed_gpu(ready + later % args.ring), number);
            });
        }
        const char* part = arena.local(args.parts + u64(at.line * args.ring + chunk % args.ring) * Shape::part_bytes);
        front.fill(Shape::front_bytes, [&](auto& buffer, u64* full) {
            ptx::bulk_load(buffer.keys.data, part + Shape::keys_at, Shape::Tokens::bytes, full);
#pragma unroll
            for (int group = 0; group < Shape::groups; ++group) {
                buffer.values[group].load(&args.v, full, Place4{value + 64 * group, head, static_cast<int>(chunk * chunk_tokens), batch});
            }
            ptx::bulk_load(buffer.solution.data, part + Shape::solution_at, Shape::Square::bytes, full);
            ptx::bulk_load(buffer.queries.data, part + Shape::queries_at, Shape::Tokens::bytes, full);
        });
        back.fill(Shape::back_bytes, [&](auto& buffer, u64* full) {
            ptx::bulk_load(buffer.weights.data, part + Shape::weights_at, Shape::Square::bytes, full);
            ptx::bulk_load(buffer.carriers.data, part + Shape::carriers_at, Shape::Channels::bytes, full);
            ptx::bulk_load(buffer.decay, part + Shape::decay_at, Shape::depth * 4, full);
        });
    }
}

// By one warp: tells the preparing blocks which parts have been copied.
template <class Shape, class Args>
__device__ inline void free_line(const Arena& arena, const Args& args, const DeltaLine& at, FrontConsumer<Shape>& front, BackConsumer<Shape>& back) {
    u32* const taken = reinterpret_cast<u32*>(arena.local(args.taken)) + at.line * args.slices + at.slice;
    for (u32 chunk = 0; chunk < at.chunks; ++chunk) {
        front.wait();
        front.release();
        back.wait();
        back.release();
        count_local(Warp{}, taken);
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
    static constexpr int depth = Shape::depth, steps = depth / mma_depth, width = depth < 128 ? depth : 128, at_once = width / mma_depth;
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

    // Starts sum = (or +=) the operand times N of a tile's rows, from row `row` and column 16 `first` on.
    template <int count, int N, class Tile>
    __device__ static void start(float (&sum)[N / 2], const u32 (&left)[count][4], const Tile& tile, int first, bool adds, int row = 0) {
        const auto right = tile.along_columns(row);
#pragma unroll
        for (int step = 0; step < count; ++step) {
            ptx::wgmma<MmaType::bf16, N, Major::k>(sum, left[step], right[first + step], adds || step > 0);
        }
        ptx::wgmma_commit();
    }

    // sum = (or +=) the state times a tile's tokens, some channels at a time.
    __device__ void read(SumTile<64>& sum, const Tokens& tile, bool adds) const {
#pragma unroll
        for (int first = 0; first < steps; first += at_once) {
            u32 left[at_once][4];
            round(left, state[first / at_once]);
            ptx::wgmma_hold(sum.value);
            ptx::wgmma_fence();
            start<at_once, 64>(sum.value, left, tile, first, adds || first > 0);
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(sum.value);
        }
    }

    __device__ void decay(const float* factors) {
#pragma unroll
        for (int i = 0; i < depth / 2; i += 4) {
            const FloatPair factor = *reinterpret_cast<const FloatPair*>(factors + 2 * i + 2 * (threadIdx.x % 4));
            float* x = state[2 * i / width] + i % (width / 2);
            x[0] *= factor.x, x[1] *= factor.y, x[2] *= factor.x, x[3] *= factor.y;
        }
    }

    // `emit(out)` gets the chunk's outputs, values x tokens.
    template <class Emit>
    __device__ void step(u32 group, FrontConsumer<Shape>& fronts, BackConsumer<Shape>& backs, const Emit& emit) {
        SumTile<64> sums[Shape::rounds_once ? 3 : 1];  // of what lives at a time
        SumTile<64>&rest = sums[0], &written = sums[Shape::rounds_once ? 1 : 0], &out = sums[Shape::rounds_once ? 2 : 0];
        u32 operand[4][4];
        const auto& front = fronts.wait();
        const auto& back = backs.wait();  // nothing diverges while products have operands in registers: the compiler would wait for them
#pragma unroll
        for (int tokens = 0; tokens < chunk_tokens; tokens += 16) {
            u32 word[4];
            ptx::load_matrices_transposed(word, front.values[group].data + square_at(tokens));
#pragma unroll
            for (int w = 0; w < 4; ++w) E::widen(word[w], rest.value + tokens / 2 + 2 * w);
        }
        if constexpr (Shape::rounds_once) {
            u32 left[steps][4];
            round(left, state[0]);
            decay(back.decay);
            ptx::wgmma_hold(rest.value);
            ptx::wgmma_hold(out.value);
            ptx::wgmma_fence();
            start<steps, 64>(rest.value, left, front.keys, 0, true);
            start<steps, 64>(out.value, left, front.queries, 0, false);
            ptx::wgmma_wait<1>();
            ptx::wgmma_hold(rest.value);
        } else {
            read(rest, front.keys, true);
        }
        round(operand, rest.value);
        ptx::wgmma_hold(written.value);
        ptx::wgmma_fence();
        start<4, 64>(written.value, operand, front.solution, 0, false);
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(written.value);
        if constexpr (Shape::rounds_once) ptx::wgmma_hold(out.value);
        u32 writes[4][4];
        round(writes, written.value);
        if constexpr (!Shape::rounds_once) {
            read(out, front.queries, false);
            decay(back.decay);
        }
        fronts.release();
        ptx::wgmma_hold(out.value);
#pragma unroll
        for (auto& part : state) ptx::wgmma_hold(part);
        ptx::wgmma_fence();
        start<4, 64>(out.value, writes, back.weights, 0, true);
#pragma unroll
        for (int part = 0; part < depth / width; ++part) start<4, width>(state[part], writes, back.carriers, 0, true, width * part);
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
#pragma unroll
            for (int w = 0; w < 4; ++w) word[w] = E::narrow(out.value + tokens / 2 + 2 * w);
            ptx::store_matrices_transposed(tile.data + square_at(tokens), word);
        }
        ptx::fence_proxy_async_shared();
        ptx::barrier_arrive(output_full + 2 * group, group_threads + 32);
    }
};

}  // namespace peerlane
