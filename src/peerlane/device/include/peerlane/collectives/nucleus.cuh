// The filter of a token's logits, of which every rank holds a shard: top-k keeps those no smaller than the k-th largest, and top-p of these the
// fewest whose probabilities, from the largest down, reach p. A team of warps does a token; no logit crosses a link but the largest ones.
//
// Here: rows, rounds of packets, sums over what a threshold keeps, and top-k with short lists. nucleus_search.cuh finds any other filter.
#pragma once

#include <peerlane/rows.cuh>

namespace peerlane {

// What is kept: logits of at least `threshold`, as probabilities exp(logit - maximum) / mass. The same bits on all ranks. If a logit of the
// token is NaN, the mass is NaN.
struct KeptLogits {
    float maximum, threshold, mass;
    float target;  // the target's logit
};

__device__ inline float mass_of(float logit, float maximum) { return logit == -infinity ? 0.0f : expf(logit - maximum); }
// The same in three instructions, for sums over rows.
__device__ inline float fast_mass_of(float logit, float maximum) { return ptx::exp2((logit - maximum) * 1.44269504f); }

// Numbers in the order of floats. The lower bits of all bfloat16 of one sign are the same.
template <class E>
constexpr int unused_bits = 0;
template <>
constexpr int unused_bits<BFloat16> = 16;
__device__ inline u32 ordered(float value) {
    const u32 bits = __float_as_uint(value + 0.0f);  // there is one zero
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
// Of any key with an E's upper bits.
template <class E>
__device__ inline float from_ordered(u32 key) {
    constexpr u32 lower = (1ull << unused_bits<E>) - 1;
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu & ~lower : ~(key | lower));
}

// ---- rows by teams -----------------------------------------------------------------------------------------------------------------------

template <u32 words>
struct alignas(4 * words) VectorOf {
    u32 word[words];
};

// One row of a shard, and the token's target if it is here: a column, or anything else.
template <class E>
struct ShardRow {
    static constexpr u32 bytes = 4 / E::lanes, lanes = 16 / bytes;
    const char* data;
    u32 columns;
    long long target;

    // use(column, value) for some words of entries at a time, the team's threads taking turns; behind the row's end entries are -inf. Several
    // loads of a thread are under way.
    template <u32 words = 4, class Team, class Use>
    __device__ void each(const Team& team, const Use& use) const {
        constexpr int at_once = 4, entries = words * E::lanes;
        using Vector = VectorOf<words>;
        const u32 step = team.size() * entries;
        if (aligned_for<Vector>(data) && columns % entries == 0) {
            for (u32 first = team.thread() * entries; first < columns; first += at_once * step) {
                Vector vector[at_once] = {};
#pragma unroll
                for (int v = 0; v < at_once; ++v) {
                    if (first + v * step < columns) vector[v] = *reinterpret_cast<const Vector*>(data + u64(first + v * step) * bytes);
                }
#pragma unroll
                for (int v = 0; v < at_once; ++v) {
                    if (first + v * step >= columns) break;
                    float value[entries];
                    widen(vector[v].word, value);
                    use(first + v * step, value);
                }
            }
            return;
        }
        for (u32 column = team.thread() * entries; column < columns; column += step) {
            u32 word[words];
            float value[entries];
            load_words(data, u64(column) * bytes, u64(columns) * bytes, word);
            widen(word, value);
#pragma unroll
            for (u32 e = 0; e < entries; ++e) value[e] = column + e < columns ? value[e] : -infinity;
            use(column, value);
        }
    }

    __device__ float target_logit() const {
        return target < 0 || target >= columns ? -infinity : element_of<E>(data, static_cast<u64>(target));
    }

  private:
    template <u32 words>
    __device__ static void widen(const u32 (&word)[words], float (&value)[words * E::lanes]) {
#pragma unroll
        for (u32 w = 0; w < words; ++w) E::widen(word[w], value + w * E::lanes);
    }
};

// ---- rounds: what the teams of one number on every rank tell each other ------------------------------------------------------------------

constexpr u32 round_packets = 32, round_words = packet_words * round_packets;

// A team's part of shared memory, apart from what it counts.
template <int W>
struct alignas(sizeof(Vec16)) RoundMemory {
    float said[round_words], of_rank[W][round_words], sums[round_words];
    float of_warp[32][2];
    u32 count, equal;
};

// A place is written again two rounds later: its writer has then had a packet of the round between from every other rank's team of this
// number, which had read this one. So a launch takes an even number of epochs, and of rounds: `close`.
template <int W>
class Rounds {
    struct Words {
        float word[packet_words];
    };

  public:
    // `first` of the team's packets in `space`; `epoch` is the launch's first.
    __device__ Rounds(const Arena& arena, const PacketSpace& space, u32 first, u32 epoch, const Warps& team, RoundMemory<W>& memory)
        : arena_(arena), space_(space), first_(first), epoch_(epoch), team_(team), memory_(memory) {}

    // The first packets of memory.said, of every rank, come to be in memory.of_rank. The team meets before and after.
    __device__ void exchange(u32 packets) {
        const SmallExchange<W, Words> round(arena_, space_, epoch_ + used_++);
        team_.sync();
        const u32 own = team_.thread();
        if (own < packets) round.send_everywhere(first_ + own, words_at(memory_.said, own));
        for (u32 i = own; i < W * packets; i += team_.size()) {
            const u32 q = i / packets, packet = i % packets;
            const Words words = round.receive_from(q, first_ + packet);
#pragma unroll
            for (int w = 0; w < packet_words; ++w) memory_.of_rank[q][packet_words * packet + w] = words.word[w];
        }
        team_.sync();
    }
    // At the end of a launch.
    __device__ void close() {
        if (used_ % 2) exchange(1);
    }

    __device__ const Warps& team() const { return team_; }
    __device__ RoundMemory<W>& memory() const { return memory_; }

  private:
    __device__ static Words words_at(const float* said, u32 packet) {
        Words words;
#pragma unroll
        for (int w = 0; w < packet_words; ++w) words.word[w] = said[packet_words * packet + w];
        return words;
    }

    const Arena& arena_;
    const PacketSpace& space_;
    u32 first_, epoch_, used_ = 0;
    const Warps& team_;
    RoundMemory<W>& memory_;
};

// ---- sums over all logits of at least a threshold -----------------------------------------------------------------------------------------

struct MassAt {
    float maximum, mass;
};
__device__ inline MassAt operator+(const MassAt& a, const MassAt& b) {
    const float maximum = fmaxf(a.maximum, b.maximum);
    const float left = a.maximum == maximum ? 1.0f : mass_of(a.maximum, maximum), right = b.maximum == maximum ? 1.0f : mass_of(b.maximum, maximum);
    return {maximum, a.mass * left + b.mass * right};
}

// Of the caller's entries, each with a share of a team's row; NaN counts as large.
template <class E, class Team>
__device__ inline MassAt masses_from(const Team& team, const ShardRow<E>& shard, float threshold) {
    MassAt own{-infinity, 0.0f};
    shard.each(team, [&](u32, const float (&value)[ShardRow<E>::lanes]) {
        float largest = own.maximum;
#pragma unroll
        for (u32 e = 0; e < ShardRow<E>::lanes; ++e) largest = fmaxf(largest, value[e]);
        if (largest > own.maximum) own = {largest, own.mass == 0.0f ? 0.0f : own.mass * fast_mass_of(own.maximum, largest)};
        const float base = largest > -infinity ? largest : 0.0f;
#pragma unroll
        for (u32 e = 0; e < ShardRow<E>::lanes; ++e) own.mass += value[e] < threshold ? 0.0f : fast_mass_of(value[e], base);
    });
    return own;
}

// One pass, one round.
template <class E, int W>
__device__ inline KeptLogits sum_kept(Rounds<W>& rounds, const ShardRow<E>& shard, float threshold) {
    const Warps& team = rounds.team();
    RoundMemory<W>& memory = rounds.memory();
    MassAt own = masses_from(team, shard, threshold);
    own = warp_reduce(own, [](const MassAt& a, const MassAt& b) { return a + b; });
    const u32 warp = team.thread() / warp_threads;
    if (Warp{}.thread() == 0) memory.of_warp[warp][0] = own.maximum, memory.of_warp[warp][1] = own.mass;
    team.sync();
    if (team.thread() == 0) {
        for (u32 w = 1; w < team.count; ++w) own = own + MassAt{memory.of_warp[w][0], memory.of_warp[w][1]};
        memory.said[0] = own.maximum, memory.said[1] = own.mass, memory.said[2] = shard.target_logit();
    }
    rounds.exchange(1);
    MassAt all{-infinity, 0.0f};
    float target = -infinity;
    for (int q = 0; q < W; ++q) {
        all = all + MassAt{memory.of_rank[q][0], memory.of_rank[q][1]};
        target = fmaxf(target, memory.of_rank[q][2]);
    }
    return {all.maximum, threshold, all.mass, target};
}

// ---- up to `longest_list` of top-k: ranks send their own k largest -------------------------------------------------------------------------

constexpr u32 longest_list = round_words - packet_words;

// The largest key, of which the bits below `lowest` are zero, that at least k of the warp's keys reach; 0 if there are fewer.
template <int count>
__device__ inline u32 reached_by(const u32 (&key)[count], u32 k, int lowest) {
    u32 found = 0;
    for (int bit = 31; bit >= lowest; --bit) {
        const u32 next = found | 1u << bit;
        u32 above = 0;
#pragma unroll
        for (int i = 0; i < count; ++i) above += key[i] >= next;
        if (__reduce_add_sync(0xffffffffu, above) >= k) found = next;
    }
    return found;
}

// memory.said gets the target's logit, how many entries equal the k-th largest and are not sent, whether a logit is NaN, and the k largest in
// descending order, -inf behind the row's end. `candidates` has room for `capacity` numbers, and for one of each thread.
//
// A row of m threads has at least k entries that are no smaller than the k-th largest of the threads' largest, and hardly more. So the second
// look at the row is for a few vectors, of those threads alone.
template <int team_threads, class E, int W>
__device__ inline void find_largest(const Rounds<W>& rounds, const ShardRow<E>& shard, u32 k, float* candidates, u32 capacity) {
    constexpr u32 lanes = ShardRow<E>::lanes;
    const Warps& team = rounds.team();
    RoundMemory<W>& memory = rounds.memory();
    const u32 own = team.thread();
    float top = -infinity;
    bool has_nan = false;
    shard.each(team, [&](u32, const float (&value)[lanes]) {
#pragma unroll
        for (u32 e = 0; e < lanes; ++e) top = fmaxf(top, value[e]), has_nan |= value[e] != value[e];
    });
    candidates[own] = top;
    if (own == 0) memory.said[0] = shard.target_logit(), memory.said[2] = 0.0f;
    team.sync();
    if (has_nan) atomicMax_block(reinterpret_cast<u32*>(&memory.said[2]), __float_as_uint(1.0f));
    if (own < warp_threads) {
        u32 key[team_threads / warp_threads];
#pragma unroll
        for (int i = 0; i < team_threads / warp_threads; ++i) key[i] = ordered(candidates[i * warp_threads + own]);
        const u32 found = reached_by(key, k, unused_bits<E>);
        if (own == 0) memory.sums[0] = found == 0 ? -infinity : from_ordered<E>(found);
    }
    team.sync();
    float bound = memory.sums[0];
    const auto collect = [&] {  // what is larger than `bound`; the number of those that equal it
        team.sync();
        if (own == 0) memory.count = memory.equal = 0;
        team.sync();
        u32 equal = 0;
        if (top >= bound) {
            shard.each(team, [&](u32 column, const float (&value)[lanes]) {
                float largest = value[0];
#pragma unroll
                for (u32 e = 1; e < lanes; ++e) largest = fmaxf(largest, value[e]);
                if (!(largest >= bound)) return;
#pragma unroll
                for (u32 e = 0; e < lanes; ++e) {
                    equal += value[e] == bound;
                    if (!(value[e] > bound)) continue;
                    const u32 at = atomicAdd_block(&memory.count, 1u);
                    if (at < capacity) candidates[at] = value[e];
                }
            });
        }
        if (equal > 0) atomicAdd_block(&memory.equal, equal);
        team.sync();
    };
    collect();
    if (memory.count > capacity) {  // many of one thread's entries are among the largest: bit by bit, by counts over the row
        u32 found = 0;
        for (int bit = 31; bit >= unused_bits<E>; --bit) {
            const u32 next = found | 1u << bit;
            team.sync();
            if (own == 0) memory.count = 0;
            team.sync();
            u32 above = 0;
            shard.each(team, [&](u32, const float (&value)[lanes]) {
                for (u32 e = 0; e < lanes; ++e) above += ordered(value[e]) >= next;
            });
            atomicAdd_block(&memory.count, above);
            team.sync();
            if (memory.count >= k) found = next;
        }
        bound = from_ordered<E>(found);
        collect();
    }
    const u32 count = memory.count, equal = memory.equal;
    for (u32 i = own; i < count; i += team.size()) {
        const float value = candidates[i];
        u32 before = 0;
        for (u32 j = 0; j < count; ++j) before += candidates[j] > value || (candidates[j] == value && j < i);
        if (before < k) memory.said[packet_words + before] = value;
    }
    for (u32 j = own; j < (k + packet_words - 1) / packet_words * packet_words; j += team.size()) {
        if (j >= min(count, k)) memory.said[packet_words + j] = j < k && j - count < equal ? bound : -infinity;
    }
    team.sync();
    if (own == 0) memory.count = 0;
    team.sync();
    const float last = memory.said[packet_words + k - 1];
    u32 ties = own == 0 && last == bound ? equal : 0;
    for (u32 i = own; i < count; i += team.size()) ties += candidates[i] == last;
    for (u32 j = own; j < k; j += team.size()) ties -= memory.said[packet_words + j] == last;
    if (ties != 0) atomicAdd_block(&memory.count, ties);
    team.sync();
    if (own == 0) memory.said[1] = float(memory.count);
}

// Of k <= longest_list, the same on all ranks.
template <int team_threads, class E, int W>
__device__ inline KeptLogits merge_largest(
    Rounds<W>& rounds, const ShardRow<E>& shard, u32 owner, u32 k, float top_p, float* candidates, u32 capacity) {
    const Warps& team = rounds.team();
    RoundMemory<W>& memory = rounds.memory();
    find_largest<team_threads>(rounds, shard, k, candidates, capacity);
    rounds.exchange(1 + (k + packet_words - 1) / packet_words);
    // Entry j of rank q: how many of all ranks' come before it, equal ones in the order of ranks.
    if (team.thread() == 0) memory.count = 0;
    const auto before = [&](u32 q, u32 j) {
        const float value = memory.of_rank[q][packet_words + j];
        u32 place = j;
        for (u32 p = 0; p < W; ++p) {
            if (p == q) continue;
            u32 low = 0, high = k;  // the first of p's that does not come before it
            while (low < high) {
                const u32 middle = (low + high) / 2;
                const float other = memory.of_rank[p][packet_words + middle];
                if (other > value || (other == value && p < q)) low = middle + 1;
                else high = middle;
            }
            place += low;
        }
        return place;
    };
    for (u32 i = team.thread(); i < W * k; i += team.size()) {
        if (const u32 place = before(i / k, i % k); place < k) memory.sums[place] = memory.of_rank[i / k][packet_words + i % k];
    }
    team.sync();
    // All that equal the k-th are kept too.
    const float kth = memory.sums[k - 1];
    for (u32 i = team.thread(); i < W * k; i += team.size()) {
        if (memory.of_rank[i / k][packet_words + i % k] == kth && before(i / k, i % k) >= k) atomicAdd_block(&memory.count, 1u);
    }
    team.sync();
    float equal = float(memory.count), target = -infinity;
    bool has_nan = false;
    for (u32 q = 0; q < W; ++q) {
        if (memory.of_rank[q][packet_words + k - 1] == kth) equal += memory.of_rank[q][1];
        if (q == owner) target = memory.of_rank[q][0];
        has_nan |= memory.of_rank[q][2] > 0.0f;
    }
    // Every warp adds up the list.
    constexpr u32 parts = round_words / warp_threads;
    const u32 lane = Warp{}.thread();
    const float maximum = memory.sums[0], tie = mass_of(kth, maximum);
    float through[parts], mass[parts], all = 0.0f;
#pragma unroll
    for (u32 part = 0; part < parts; ++part) {
        const u32 j = part * warp_threads + lane;
        mass[part] = through[part] = j < k ? mass_of(memory.sums[j], maximum) : 0.0f;
#pragma unroll
        for (u32 step = 1; step < warp_threads; step *= 2) {
            const float below = __shfl_up_sync(0xffffffffu, through[part], step);
            if (lane >= step) through[part] += below;
        }
        through[part] += all;
        all = __shfl_sync(0xffffffffu, through[part], warp_threads - 1);
    }
    KeptLogits kept{maximum, kth, has_nan ? not_a_number : all + equal * tie, target};
    if (top_p >= 1.0f || has_nan) return kept;
    const float goal = top_p * kept.mass;
    u32 count = 0;
#pragma unroll
    for (u32 part = 0; part < parts; ++part) {
        const u32 j = part * warp_threads + lane;
        count += __popc(__ballot_sync(0xffffffffu, j < k && (j == 0 || through[part] - mass[part] < goal)));
    }
    kept.threshold = memory.sums[count - 1];
#pragma unroll
    for (u32 part = 0; part < parts; ++part) {
        const float here = __shfl_sync(0xffffffffu, through[part], (count - 1) % warp_threads);
        if (part == (count - 1) / warp_threads) kept.mass = here;
    }
    if (count == k && tie > 0.0f) kept.mass += tie * fminf(fmaxf(ceilf((goal - kept.mass) / tie), 0.0f), equal);
    return kept;
}

}  // namespace peerlane
