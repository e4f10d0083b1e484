// The kernel of rms_norm.py, which declares its arguments, AllReduceRmsNorm.
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int elements = 2 * packet_words;                 // of a packet
constexpr u32 team_threads = THREADS / TEAMS, at_once = 4;
constexpr float largest = 448, smallest_scale = 1e-12f;    // of e4m3; of a token of zeros
constexpr bool in_blocks = QUANTISATION == 3;             // a scale for every block_columns of a token
constexpr u32 block_columns = 128, most_packets = in_blocks ? PACKETS * team_threads : 1, most_blocks = most_packets * elements / block_columns + 1;
struct Words {
    u32 word[packet_words];
};

// Three words of a row from element 6 i on; zero behind its end.
__device__ inline Words words_of(const char* matrix, u32 row, u32 columns, u32 i) {
    Words words;
    const u32* from = reinterpret_cast<const u32*>(matrix + u64(row) * columns * 2) + packet_words * i;
#pragma unroll
    for (u32 w = 0; w < packet_words; ++w) words.word[w] = elements * i + 2 * w < columns ? from[w] : 0;
    return words;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    all_reduce_rms_norm(const __grid_constant__ Arena arena, const __grid_constant__ AllReduceRmsNorm args) {
    __shared__ float scratch[TEAMS][warp_threads];
    // Largest numbers of each packet's columns in the block where it begins, and in the next one; and the scales of blocks.
    __shared__ float peaks[TEAMS][2][most_packets], block_scales[TEAMS][most_blocks];
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs))), rank = arena.rank, columns = args.columns;
    const u32 packets = (columns + elements - 1) / elements, part = (packets + WORLD_SIZE - 1) / WORLD_SIZE;
    // Where in every arena packet i of a row lies that rank `source` pushes: of its token; of a rank's part of that; of a sum.
    const auto token_at = [&](u32 source, u32 row, u32 i) {
        return args.tokens + ((u64((epoch & 1) * WORLD_SIZE + source) * args.one_shot_rows + row) * packets + i) * sizeof(Vec16);
    };
    const auto part_at = [&](u32 source, u32 row, u32 i) {
        return args.parts + ((u64(source) * args.most_rows + row) * part + i) * sizeof(Vec16);
    };
    const auto sum_at = [&](u32 row, u32 i) { return args.sums + (u64(row) * packets + i) * sizeof(Vec16); };
    // All ranks' packets, which lie `stride` apart from `first` on, and the residual: added in rank order, rounded once.
    const auto sum_of = [&](u64 first, u64 stride, u32 row, u32 i) {
        u32 terms[WORLD_SIZE][packet_words];
        const Words own = words_of(args.x, row, columns, i);
        pull_packets<WORLD_SIZE>(arena, arena.local(first), stride, i, epoch, terms);
        Accumulator<X_TYPE, packet_words> total;
#pragma unroll
        for (int q = 0; q < WORLD_SIZE; ++q) {
            u32 term[packet_words];
#pragma unroll
            for (int w = 0; w < packet_words; ++w) term[w] = q == rank ? own.word[w] : terms[q][w];
            if (q == 0) {
                total.set(term);
            } else {
                total.add(term);
            }
        }
        if (args.residual != nullptr) total.add(words_of(args.residual, row, columns, i).word);
        Words sum;
        total.round(sum.word);
        return sum;
    };

    // Packet by packet of all of the block's rows; several of a thread are on their way at a time.
    const u32 own_rows = blockIdx.x < args.rows ? (args.rows - blockIdx.x - 1) / gridDim.x + 1 : 0;
    const auto row_of = [&](u32 number) { return blockIdx.x + number * gridDim.x; };
    const u32 pushes = own_rows * packets;
    for (u32 n = threadIdx.x; n < pushes; n += at_once * THREADS) {
        Words own[at_once];
#pragma unroll
        for (u32 u = 0; u < at_once; ++u) {
            const u32 m = n + u * THREADS;
            if (m < pushes) own[u] = words_of(args.x, row_of(m / packets), columns, m % packets);
        }
#pragma unroll
        for (u32 u = 0; u < at_once; ++u) {
            const u32 m = n + u * THREADS, row = row_of(m / packets), i = m % packets;
            if (m >= pushes) break;
            if constexpr (TWO_SHOT) {
                const u32 owner = i / part;
                if (owner != rank) push_packet(arena.peer(owner, part_at(rank, row, i % part)), own[u].word, epoch);
            } else {
                push_packet_to_all<WORLD_SIZE>(arena, token_at(rank, row, i), own[u].word, epoch);
            }
        }
    }
    if constexpr (TWO_SHOT) {
        const u32 before = rank * part, owned = before < packets ? min(part, packets - before) : 0;
        const u64 stride = part_at(1, 0, 0) - part_at(0, 0, 0);
        for (u32 n = threadIdx.x; n < own_rows * owned; n += THREADS) {
            const u32 row = row_of(n / owned), i = n % owned;
            const Words sum = sum_of(part_at(0, row, i), stride, row, before + i);
            const u64 place = sum_at(row, before + i);
            push_packet_to_all<WORLD_SIZE>(arena, place, sum.word, epoch);
            push_packet(arena.local(place), sum.word, epoch);
        }
    }
    // Row by row, a team each.
    const u32 number = threadIdx.x / team_threads, thread = threadIdx.x % team_threads, warp = thread / warp_threads;
    const Warps team{number * (team_threads / warp_threads), team_threads / warp_threads, 1 + number};
    const auto joined = [&](float value, const auto& join) {
        value = warp_reduce(value, join);
        team.sync();
        if (thread % warp_threads == 0) scratch[number][warp] = value;
        team.sync();
        float total = scratch[number][0];
        for (u32 w = 1; w < team_threads / warp_threads; ++w) total = join(total, scratch[number][w]);
        return total;
    };
    for (u32 turn = number; turn < own_rows; turn += TEAMS) {
        const u32 row = row_of(turn);
        float value[PACKETS][elements], squares = 0;
#pragma unroll
        for (int p = 0; p < PACKETS; ++p) {
            const u32 i = thread + p * team_threads;
            Words sum{};
            if (i < packets) {
                if constexpr (TWO_SHOT) {
                    pull_packet(arena, i / part, arena.local(sum_at(row, i)), i, epoch, sum.word);
                } else {
                    sum = sum_of(token_at(0, row, i), token_at(1, row, i) - token_at(0, row, i), row, i);
                }
                u32* to = reinterpret_cast<u32*>(args.total + u64(row) * columns * 2) + packet_words * i;
#pragma unroll
                for (u32 w = 0; w < packet_words; ++w) {
                    if (elements * i + 2 * w < columns) to[w] = sum.word[w];
                }
            }
#pragma unroll
            for (int w = 0; w < packet_words; ++w) X_TYPE::widen(sum.word[w], value[p] + 2 * w);
#pragma unroll
            for (float v : value[p]) squares += v * v;
        }
        const float all = joined(squares, [](float a, float b) { return a + b; });
        const float factor = rsqrtf(all / columns + args.epsilon);
        float most = 0;
#pragma unroll
        for (int p = 0; p < PACKETS; ++p) {
            const u32 i = thread + p * team_threads;
            if (i >= packets) continue;
            const Words gain = words_of(args.weight, 0, columns, i);
            float peak[2] = {0, 0};
#pragma unroll
            for (int w = 0; w < packet_words; ++w) {
                const bool next = (elements * i + 2 * w) / block_columns != elements * i / block_columns;
                float g[2];
                X_TYPE::widen(gain.word[w], g);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& v = value[p][2 * w + e];
                    v = v * factor * (g[e] + args.weight_offset);
                    most = fmaxf(most, fabsf(v));
                    if constexpr (in_blocks) peak[next] = fmaxf(peak[next], fabsf(v));
                }
            }
            if constexpr (in_blocks) peaks[number][0][i] = peak[0], peaks[number][1][i] = peak[1];
        }
        float scale = 1;
        if constexpr (QUANTISATION == 1) scale = *args.scale;
        if constexpr (QUANTISATION == 2) {
            scale = fmaxf(joined(most, [](float a, float b) { return fmaxf(a, b); }) / largest, smallest_scale);
            if (thread == 0) args.scales[row] = scale;
        }
        if constexpr (in_blocks) {
            const u32 blocks = columns / block_columns;
            team.sync();
            for (u32 b = thread; b < blocks; b += team_threads) {
                float largest_of_block = 0;
                for (u32 i = b * block_columns / elements; elements * i < (b + 1) * block_columns; ++i) {
                    largest_of_block = fmaxf(largest_of_block, peaks[number][elements * i / block_columns != b][i]);
                }
                block_scales[number][b] = args.scales[u64(row) * blocks + b] = fmaxf(largest_of_block / largest, smallest_scale);
            }
            team.sync();
        }
#pragma unroll
        for (int p = 0; p < PACKETS; ++p) {
            const u32 i = thread + p * team_threads;
#pragma unroll
            for (u32 w = 0; w < packet_words; ++w) {
                const u32 column = elements * i + 2 * w;
                if (column >= columns) continue;
                char* to = args.y + (u64(row) * columns + column) * (QUANTISATION ? 1 : 2);
                if constexpr (in_blocks) scale = block_scales[number][column / block_columns];
                if constexpr (QUANTISATION != 0) {
                    const float pair[4] = {value[p][2 * w] / scale, value[p][2 * w + 1] / scale};
                    *reinterpret_cast<u16*>(to) = static_cast<u16>(Float8E4M3::narrow(pair));
                } else {
                    *reinterpret_cast<u32*>(to) = X_TYPE::narrow(value[p] + 2 * w);
                }
            }
        }
    }
}
