// The filter of a token's logits, of which every rank holds a shard: top-k keeps those no smaller than the k-th largest, and top-p of these the
// fewest whose probabilities, from the largest down, reach p. A warp does a token; no logit crosses a link.
#pragma once

#include <peerlane/rows.cuh>

namespace peerlane {

// What is kept: logits of at least `threshold`, as probabilities exp(logit - maximum) / mass. The same bits on all ranks. If a logit of the
// token is NaN, the mass is NaN.
struct KeptLogits {
    float maximum, threshold, mass;
    float target;  // the target's logit
};

// One row of a shard, and the token's target if it is here: a column, or anything else.
template <class E>
struct ShardRow {
    RowOf<E> row;
    u32 columns;
    long long target;

    // use(column, value) for the entries of the caller's lane.
    template <class Use>
    __device__ void each(const Use& use) const {
        each_column(columns, [&](u32 column) {
            float value[row_lanes];
            row.load(column, value);
#pragma unroll
            for (u32 e = 0; e < row_lanes; ++e) {
                if (column + e < columns) use(column + e, value[e]);
            }
        });
    }
};

__device__ inline float mass_of(float logit, float maximum) { return logit == -infinity ? 0.0f : expf(logit - maximum); }

// ---- up to 32 largest: one packet for each of a rank's k largest logits says all ----------------------------------------------------------

struct Candidate {
    float logit;
    u32 column;
};
__device__ inline bool before(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.column < b.column); }

// Lane j gets the row's j-th largest logit, -inf behind the row's end; `ties` entries that equal the k-th are not among the k. `ties` is NaN if a
// logit is.
template <class E>
__device__ inline float largest_of(const ShardRow<E>& shard, u32 k, float& ties) {
    const Candidate none{-infinity, ~0u};
    Candidate last{infinity, 0}, first, second;
    bool has_nan = false;
    const auto scan = [&] {  // the next two of the lane's own entries behind those that were taken
        first = second = none;
        shard.each([&](u32 column, float value) {
            const Candidate entry{value, column};
            has_nan |= value != value;
            if (!before(last, entry) || !before(entry, second)) return;
            if (before(entry, first)) second = first, first = entry;
            else second = entry;
        });
    };
    scan();
    const auto join = [](const Candidate& a, const Candidate& b) { return before(b, a) ? b : a; };
    float mine = -infinity, kth = -infinity;
    for (u32 j = 0; j < k; ++j) {
        const Candidate best = warp_reduce(first, join);
        kth = best.logit;
        if (Warp{}.thread() == j) mine = kth;
        if (best.column != ~0u && best.column == first.column) {
            last = first;
            first = second, second = none;
            if (first.column == ~0u) scan();
        }
        __syncwarp();
    }
    ties = 0.0f;
    if (warp_reduce(first, join).logit == kth && kth > -infinity) {
        shard.each([&](u32, float value) { ties += value == kth ? 1.0f : 0.0f; });
        ties = warp_sum(ties) - __popc(__ballot_sync(0xffffffffu, mine == kth && Warp{}.thread() < k));
    }
    if (__any_sync(0xffffffffu, has_nan)) ties = not_a_number;
    return mine;
}

struct SentCandidate {
    float logit, ties, target;
};

// Of k <= 32, the same on all ranks. Push, and behind it pull.
template <class E, int W>
__device__ inline void push_candidates(const SmallExchange<W, SentCandidate>& exchange, u32 token, const ShardRow<E>& shard, float target, u32 k) {
    float ties;
    const float mine = largest_of(shard, k, ties);
    if (Warp{}.thread() < k) exchange.send_everywhere(token * k + Warp{}.thread(), {mine, ties, target});
}
template <int W>
__device__ inline KeptLogits pull_candidates(const SmallExchange<W, SentCandidate>& exchange, u32 token, u32 owner, u32 k, bool nucleus, float top_p) {
    const u32 lane = Warp{}.thread();
    float logit[W], ties[W], target = 0.0f;
    u32 next[W];
#pragma unroll
    for (int q = 0; q < W; ++q) {
        SentCandidate sent{-infinity, 0.0f, 0.0f};
        if (lane < k) sent = exchange.receive_from(q, token * k + lane);
        __syncwarp();
        logit[q] = sent.logit, ties[q] = __shfl_sync(0xffffffffu, sent.ties, 0), next[q] = 0;
        if (q == owner) target = __shfl_sync(0xffffffffu, sent.target, 0);
    }
    // Lane j gets the j-th largest of all.
    float merged = -infinity, kth = -infinity;
    for (u32 j = 0; j < k; ++j) {
        int best = 0;
        kth = -infinity;
#pragma unroll
        for (int q = 0; q < W; ++q) {
            const float head = __shfl_sync(0xffffffffu, logit[q], next[q] & 31);
            if (next[q] < k && head > kth) kth = head, best = q;
        }
#pragma unroll
        for (int q = 0; q < W; ++q) next[q] += q == best;
        if (lane == j) merged = kth;
    }
    // All that equal the k-th are kept too.
    float equal = 0.0f;
#pragma unroll
    for (int q = 0; q < W; ++q) {
        const float last = __shfl_sync(0xffffffffu, logit[q], k - 1);
        equal += __popc(__ballot_sync(0xffffffffu, lane < k && logit[q] == kth)) + (last == kth ? ties[q] : 0.0f);
    }
    equal -= __popc(__ballot_sync(0xffffffffu, lane < k && merged == kth));
    const float maximum = __shfl_sync(0xffffffffu, merged, 0), mass = lane < k ? mass_of(merged, maximum) : 0.0f, tie = mass_of(kth, maximum);
    bool has_nan = false;
#pragma unroll
    for (int q = 0; q < W; ++q) has_nan |= ties[q] != ties[q];
    KeptLogits kept{maximum, kth, has_nan ? not_a_number : warp_sum(mass) + equal * tie, target};
    if (!nucleus || has_nan) return kept;
    const float goal = top_p * kept.mass;
    float through = mass;  // of this entry and those before it
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float below = __shfl_up_sync(0xffffffffu, through, step);
        if (lane >= step) through += below;
    }
    const bool is_kept = lane < k && (lane == 0 || through - mass < goal);
    const u32 count = __popc(__ballot_sync(0xffffffffu, is_kept));
    kept.threshold = __shfl_sync(0xffffffffu, merged, count - 1);
    kept.mass = __shfl_sync(0xffffffffu, through, count - 1);
    if (count == k && tie > 0.0f) kept.mass += tie * fminf(fmaxf(ceilf((goal - kept.mass) / tie), 0.0f), equal);
    return kept;
}

// ---- any filter: a search for the thresholds, in which ranks exchange sums over their shards --------------------------------------------------

// Numbers in the order of floats. The lower bits of all bfloat16 of one sign are the same.
template <class E>
constexpr int unused_bits = 0;
template <>
constexpr int unused_bits<BFloat16> = 16;
__device__ inline u32 ordered(float value) {
    const u32 bits = __float_as_uint(value + 0.0f);  // there is one zero
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ inline float from_ordered(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

struct ThreeSums {
    float first, second, third;
};
__device__ inline ThreeSums operator+(const ThreeSums& a, const ThreeSums& b) { return {a.first + b.first, a.second + b.second, a.third + b.third}; }

// Sums over the whole vocabulary, a round for each; all lanes of all ranks get the same bits. A place is written again two rounds later: a warp
// has then had a packet of the round between from every other rank's warp of the token, which had read this one. `epoch` is the launch's first.
template <class E, int W>
class VocabularySums {
  public:
    __device__ VocabularySums(const Arena& arena, const PacketSpace& space, u32 epoch, u32 token, const ShardRow<E>& shard)
        : arena_(arena), space_(space), epoch_(epoch), token_(token), shard_(shard) {}

    // Of a value of each lane.
    template <class Join>
    __device__ ThreeSums join(const ThreeSums& own, const Join& join) {
        const ThreeSums of_shard = warp_reduce(own, join);
        const SmallExchange<W, ThreeSums> round(arena_, space_, epoch_++);
        round.push(token_, of_shard);
        return round.pull(token_, of_shard, join);
    }
    // Of term(value) of every logit.
    template <class Term>
    __device__ ThreeSums sum(const Term& term) {
        ThreeSums own{};
        shard_.each([&](u32, float value) { own = own + term(value); });
        return join(own, [](const ThreeSums& a, const ThreeSums& b) { return a + b; });
    }
    // The largest logit for which at least `goal` of weight(logit) lies at it or above.
    template <class Weight>
    __device__ float search(float goal, const Weight& weight) {
        u32 low = 0;
        for (int bit = 30; bit >= unused_bits<E>; bit -= 2) {
            const u32 step = 1u << bit;
            const ThreeSums above = sum([&](float value) {
                const u32 key = ordered(value);
                if (key < low + step) return ThreeSums{};
                const float own = weight(value);
                return ThreeSums{own, key >= low + 2 * step ? own : 0.0f, key >= low + 3 * step ? own : 0.0f};
            });
            low += step * (above.third >= goal ? 3 : above.second >= goal ? 2 : above.first >= goal ? 1 : 0);
        }
        return from_ordered(low >> 31 ? low : low | ((1u << unused_bits<E>) - 1));
    }

  private:
    const Arena& arena_;
    const PacketSpace& space_;
    u32 epoch_, token_;
    const ShardRow<E>& shard_;
};

// Rounds: search_rounds(...) of peerlane.solutions.families.nucleus. `top_k` 0 and `top_p` 1 filter nothing.
template <class E, int W>
__device__ inline KeptLogits search_kept(VocabularySums<E, W> sums, const ShardRow<E>& shard, float target, u32 top_k, float top_p) {
    ThreeSums own{-infinity, target, 0.0f};
    shard.each([&](u32, float value) {
        own.first = fmaxf(own.first, value);
        if (value != value) own.third = 1.0f;
    });
    const ThreeSums largest = sums.join(own, [](const ThreeSums& a, const ThreeSums& b) {
        return ThreeSums{fmaxf(a.first, b.first), fmaxf(a.second, b.second), fmaxf(a.third, b.third)};
    });
    KeptLogits kept{largest.first, -infinity, 0.0f, largest.second};
    if (top_k > 0) kept.threshold = sums.search(float(top_k), [](float) { return 1.0f; });
    const auto mass = [&](float value) { return value >= kept.threshold ? mass_of(value, kept.maximum) : 0.0f; };
    const bool has_nan = largest.third > 0.0f;
    kept.mass = sums.sum([&](float value) { return ThreeSums{mass(value), 0.0f, 0.0f}; }).first;
    if (has_nan) kept.mass = not_a_number;
    if (top_p >= 1.0f) return kept;
    const float goal = fmaxf(top_p * kept.mass, 1e-30f), cut = sums.search(goal, mass), tie = mass_of(cut, kept.maximum);
    const ThreeSums at_cut = sums.sum([&](float value) { return ThreeSums{value > cut ? mass(value) : 0.0f, value == cut ? 1.0f : 0.0f, 0.0f}; });
    // Of the logits that equal the cut, as many as it takes.
    kept.threshold = cut;
    if (!has_nan) kept.mass = at_cut.first + tie * fminf(fmaxf(ceilf((goal - at_cut.first) / tie), 1.0f), at_cut.second);
    return kept;
}

}  // namespace peerlane
