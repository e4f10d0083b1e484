// Any filter of nucleus.cuh, without a sort: ranks count their logits in bins, from the largest down, and tell each other sums over bins. The bin
// in which a sum reaches the goal is divided again, until it holds one number.
//
// The first bins are those of a window of bfloat16, a bin for each number. So a row of bfloat16 is read once; its probabilities are counts times
// exp(number). Rows of float32 are read once more for every further division, and bins hold masses in fixed point. Sums of integers do not
// depend on the order of atomics.
#pragma once

#include <peerlane/collectives/nucleus.cuh>

namespace peerlane {

// Numbers of a magnitude of 2^-17 and less share a bin; the window ends at 2^7. A window that is moved down or up begins with the largest logit:
// that far, 32 nats are never more than so many bins.
constexpr int smallest_magnitude = (127 - 17) << 7, window_top = ((127 + 7) << 7) - 1 - smallest_magnitude;
constexpr u32 histogram_bins = 2 * window_top + 2;
constexpr float window_depth = 32.0f;  // nats below the largest logit: what lies there has no weight
constexpr u32 bins_of_group = 68, bin_groups = (histogram_bins + bins_of_group - 1) / bins_of_group;
static_assert(packet_words + bin_groups <= round_words && bins_of_group <= round_words && bins_of_group % 4 == 0 && histogram_bins % 4 == 0);

// Keys [low, high], the numbers of `ordered`, from the largest down.
struct KeyRange {
    u32 low, high;
};

// Bin i of a window holds the numbers whose upper 16 bits are the i-th from `top` down, the last one all below; of a divided range, its i-th
// 2^shift keys.
struct Bins {
    bool window;
    int top, shift;
    KeyRange range;

    __device__ static int rank_of(float value) {
        const int magnitude = static_cast<int>(__float_as_uint(value) >> 16 & 0x7fff) - smallest_magnitude, above = magnitude > 0 ? magnitude : 0;
        return __float_as_uint(value) >> 31 ? -above : above;
    }
    __device__ static Bins window_from(int top) { return {true, top, 0, {0, ~0u}}; }
    __device__ static Bins divided(const KeyRange& range) {
        const u32 size = range.high - range.low;  // 4096 bins or fewer
        return {false, 0, size >> 20 ? 20 : size >> 12 ? 8 : 0, range};
    }

    // The window's bin of a number; 0 for those above it, which then will be moved.
    __device__ u32 in_window(float value) const {
        const int bin = top - rank_of(value), last = histogram_bins - 1;
        return bin < 0 ? 0 : bin > last ? last : bin;
    }
    // The range's, if the number is in it.
    __device__ bool in_range(float value, u32& bin) const {
        const u32 key = ordered(value);
        bin = (range.high - key) >> shift;
        return key >= range.low && key <= range.high;
    }
    __device__ KeyRange of_bin(u32 bin) const {
        if (!window) {
            const u32 high = range.high - (bin << shift), size = (1u << shift) - 1;
            return {high - range.low < size ? range.low : high - size, high};
        }
        const int rank = top - static_cast<int>(bin);
        const u32 magnitude = static_cast<u32>((rank < 0 ? -rank : rank) + smallest_magnitude) << 16, largest = magnitude | 0xffff;
        const KeyRange own = rank > 0 ? KeyRange{0x80000000u | magnitude, 0x80000000u | largest}
                             : rank < 0 ? KeyRange{0x7fffffffu - largest, 0x7fffffffu - magnitude}
                                        : KeyRange{0x7fffffffu - largest, 0x80000000u | largest};
        return {bin + 1 == histogram_bins ? 0 : own.low, own.high};
    }
    // What stands for the numbers of a bin: the number, or nearly zero.
    template <class E>
    __device__ float number_of(u32 bin) const {
        return window && top == static_cast<int>(bin) ? 0.0f : from_ordered<E>(of_bin(bin).high);
    }
};

// How much lies in each bin.
template <class E, bool masses>
class Histogram {
    static constexpr bool exact = !masses || unused_bits<E> == 16;  // a count says all
    static constexpr float unit = 1u << 28;
    static constexpr u32 low_bits = 14;

  public:
    static constexpr u32 words = (exact ? 1 : 2) * histogram_bins;
    __device__ Histogram(u32* memory, const Bins& bins, float limit) : memory_(memory), bins_(bins), limit_(limit) {}

    template <class Team>
    __device__ void clear(const Team& team) const {
        for (u32 i = 4 * team.thread(); i < words; i += 4 * team.size()) *reinterpret_cast<Vec16*>(memory_ + i) = Vec16{};
    }
    template <bool window, bool has_floor>
    __device__ void add(float value, float floor) const {
        u32 bin;
        if (has_floor && !(value >= floor)) return;
        if (window) bin = bins_.in_window(value);
        else if (!bins_.in_range(value, bin)) return;
        if (exact || (!window && bins_.shift == 0)) {
            atomicAdd_block(memory_ + bin, 1u);
        } else {
            const u32 mass = static_cast<u32>(mass_of(value, base_of(bin)) * unit);
            atomicAdd_block(memory_ + 2 * bin, mass & ((1u << low_bits) - 1));
            atomicAdd_block(memory_ + 2 * bin + 1, mass >> low_bits);
        }
    }
    // A row; `largest` and `has_nan` are of the caller's entries.
    template <bool window, bool has_floor, class Team>
    __device__ void add(const Team& team, const ShardRow<E>& shard, float floor, float& largest, bool& has_nan) const {
        shard.each(team, [&](u32, const float (&value)[ShardRow<E>::lanes]) {
#pragma unroll
            for (u32 e = 0; e < ShardRow<E>::lanes; ++e) {
                if (window) largest = fmaxf(largest, value[e]), has_nan |= value[e] != value[e];
                add<window, has_floor>(value[e], floor);
            }
        });
    }
    // A count, or a mass relative to exp(maximum).
    __device__ float weight(u32 bin, float maximum) const {
        return counts() ? weight_of(bin, memory_[bin], 0, maximum) : weight_of(bin, memory_[2 * bin], memory_[2 * bin + 1], maximum);
    }
    // Of four bins, the first of which is a multiple of four.
    __device__ float weight_of_four(u32 first, float maximum) const {
        const Vec16* const vectors = reinterpret_cast<const Vec16*>(memory_);
        const Vec16 lower = counts() ? vectors[first / 4] : vectors[first / 2], upper = counts() ? Vec16{} : vectors[first / 2 + 1];
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const Vec16& pair = i < 2 ? lower : upper;
            sum += counts() ? weight_of(first + i, lower.word[i], 0, maximum) : weight_of(first + i, pair.word[i % 2 * 2], pair.word[i % 2 * 2 + 1], maximum);
        }
        return sum;
    }

  private:
    __device__ bool counts() const { return exact || (!bins_.window && bins_.shift == 0); }
    __device__ float weight_of(u32 bin, u32 low, u32 high, float maximum) const {
        if ((low | high) == 0) return 0.0f;
        if (!masses) return float(low);
        if (counts()) return float(low) * mass_of(bins_.template number_of<E>(bin), maximum);
        return (float(low) + float(1u << low_bits) * float(high)) * (1.0f / unit) * mass_of(base_of(bin), maximum);
    }
    // No number of the bin is larger, and none of the row is larger than `limit`.
    __device__ float base_of(u32 bin) const { return fminf(from_ordered<Float32>(bins_.of_bin(bin).high), limit_); }

    u32* memory_;
    const Bins& bins_;
    float limit_;
};

// Where a sum over numbers, in their order, first reaches a goal; else the last one that is not zero, or any if all are.
struct Place {
    u32 index;
    float before, here;
};

// Of `round_words` numbers in shared memory, the same for every lane of a warp.
__device__ inline Place first_reaching(const float* numbers, float goal) {
    constexpr u32 own = round_words / warp_threads;
    const u32 lane = Warp{}.thread();
    float mine[own], before[own], sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < own; ++i) mine[i] = numbers[lane * own + i], sum += mine[i];
    float through = sum;
#pragma unroll
    for (u32 step = 1; step < warp_threads; step *= 2) {
        const float below = __shfl_up_sync(0xffffffffu, through, step);
        if (lane >= step) through += below;
    }
    const float lower = __shfl_up_sync(0xffffffffu, through, 1);
    u32 reaching = own, last = own;
#pragma unroll
    for (u32 i = 0; i < own; ++i) {
        before[i] = i > 0 ? before[i > 0 ? i - 1 : 0] + mine[i > 0 ? i - 1 : 0] : lane > 0 ? lower : 0.0f;
        if (mine[i] > 0.0f) last = i;
        if (reaching == own && mine[i] > 0.0f && before[i] + mine[i] >= goal) reaching = i;
    }
    const u32 reached = __reduce_min_sync(0xffffffffu, reaching < own ? lane : warp_threads);
    const u32 filled = __reduce_max_sync(0xffffffffu, last < own ? lane : 0);
    const bool reaches = reached < warp_threads;
    const u32 chosen = reaches ? reached : filled, slot = reaches ? reaching : last < own ? last : own - 1;
    Place place{lane * own + slot, 0.0f, 0.0f};
#pragma unroll
    for (u32 i = 0; i < own; ++i) {
        if (i == slot) place.before = before[i], place.here = mine[i];
    }
    return {__shfl_sync(0xffffffffu, place.index, chosen), __shfl_sync(0xffffffffu, place.before, chosen), __shfl_sync(0xffffffffu, place.here, chosen)};
}

// Whole warps.
__device__ constexpr u32 round_up(u32 threads) { return (threads + warp_threads - 1) / warp_threads * warp_threads; }

// Where the search ends: `before` lies above the numbers of `range`, which weigh `here`. Masses are relative to exp(maximum).
struct Cut {
    float maximum, target, total, before, here;
    KeyRange range;
    bool has_nan, whole;  // whole: everything is needed
};

// The largest logit for which at least a goal of counts or masses lies at it or above; `goal` is a count, or a part of all masses. With has_floor only
// logits of at least `floor` take part. Ends with has_nan alone if there is a NaN.
template <bool masses, bool has_floor, class E, int W>
__device__ inline Cut search(Rounds<W>& rounds, const ShardRow<E>& shard, float goal, float floor, u32* bins_memory) {
    const Warps& team = rounds.team();
    RoundMemory<W>& memory = rounds.memory();
    const u32 own = team.thread(), warp = own / warp_threads;
    Bins bins = Bins::window_from(window_top);
    Cut cut{infinity, -infinity, 0.0f, 0.0f, 0.0f, {0, ~0u}, false, false};
    // memory.sums gets the ranks' numbers from memory.of_rank's `at` on, zero behind `count`. Masses may be relative to each rank's own largest.
    const auto sum_ranks = [&](u32 count, u32 at, bool one_base) {
        for (u32 i = own; i < round_words; i += team.size()) {
            float sum = 0.0f;
            for (u32 q = 0; q < W && i < count; ++q) {
                sum += memory.of_rank[q][at + i] * (one_base || !masses ? 1.0f : mass_of(memory.of_rank[q][0], cut.maximum));
            }
            memory.sums[i] = sum;
        }
        team.sync();
    };
    for (bool first = true; true;) {
        const Histogram<E, masses> histogram(bins_memory, bins, cut.maximum);
        histogram.clear(team);
        team.sync();
        float largest = -infinity;
        bool has_nan = false;
        if (bins.window) histogram.template add<true, has_floor>(team, shard, floor, largest, has_nan);
        else histogram.template add<false, has_floor>(team, shard, floor, largest, has_nan);
        if (first) {
            largest = warp_max(largest);
            has_nan = __any_sync(0xffffffffu, has_nan);
            if (Warp{}.thread() == 0) memory.of_warp[warp][0] = largest, memory.of_warp[warp][1] = has_nan ? 1.0f : 0.0f;
        }
        team.sync();
        float base = cut.maximum;
        if (first) {
            float any = 0.0f;
            base = -infinity;
            for (u32 w = 0; w < team.count; ++w) base = fmaxf(base, memory.of_warp[w][0]), any = fmaxf(any, memory.of_warp[w][1]);
            if (own == 0) memory.said[0] = base, memory.said[1] = shard.target_logit(), memory.said[2] = any;
        }
        base = base > -infinity ? base : 0.0f;
        for (u32 i = own; i < round_up(4 * bin_groups); i += team.size()) {  // four lanes add up a group
            float sum = 0.0f;
            for (u32 four = i % 4; four < bins_of_group / 4; four += 4) {
                const u32 bin = i / 4 * bins_of_group + 4 * four;
                if (bin < histogram_bins) sum += histogram.weight_of_four(bin, base);
            }
            sum = warp_sum<4>(sum);
            if (i % 4 == 0 && i < 4 * bin_groups) memory.said[packet_words + i / 4] = sum;
        }
        for (u32 i = packet_words + bin_groups + own; i < round_words; i += team.size()) memory.said[i] = 0.0f;
        rounds.exchange(round_packets);
        if (first) {
            cut.maximum = -infinity;
            for (u32 q = 0; q < W; ++q) {
                cut.maximum = fmaxf(cut.maximum, memory.of_rank[q][0]), cut.target = fmaxf(cut.target, memory.of_rank[q][1]);
                cut.has_nan |= memory.of_rank[q][2] > 0.0f;
            }
            if (cut.has_nan) return cut;
        }
        if (first && cut.maximum > -infinity &&
            (Bins::rank_of(cut.maximum) > window_top || Bins::rank_of(cut.maximum - window_depth) < -window_top)) {
            bins = Bins::window_from(Bins::rank_of(cut.maximum));
            first = false;
            continue;
        }
        sum_ranks(bin_groups, packet_words, !first);
        if (bins.window) {
            for (u32 i = Warp{}.thread(); i < round_words; i += warp_threads) cut.total += memory.sums[i];
            cut.total = warp_sum(cut.total);
            if (masses) goal = fmaxf(goal * cut.total, 1e-30f);
        }
        const Place group = first_reaching(memory.sums, goal - cut.before);
        for (u32 i = own; i < packet_words * ((bins_of_group + packet_words - 1) / packet_words); i += team.size()) {
            const u32 bin = group.index * bins_of_group + i;
            memory.said[i] = i < bins_of_group && bin < histogram_bins ? histogram.weight(bin, cut.maximum > -infinity ? cut.maximum : 0.0f) : 0.0f;
        }
        rounds.exchange((bins_of_group + packet_words - 1) / packet_words);
        sum_ranks(bins_of_group, 0, true);
        const Place place = first_reaching(memory.sums, goal - cut.before - group.before);
        const u32 bin = group.index * bins_of_group + place.index;
        cut.before += group.before + place.before, cut.here = place.here, cut.range = bins.of_bin(bin);
        cut.whole = masses && bins.window && bin + 1 >= histogram_bins;
        if (cut.whole || cut.range.low >> unused_bits<E> == cut.range.high >> unused_bits<E>) return cut;
        bins = Bins::divided(cut.range);
        first = false;
    }
}

// Rounds: one, and up to nine for each filter.
template <bool has_top_k, bool has_top_p, class E, int W>
__device__ inline KeptLogits search_kept(Rounds<W>& rounds, const ShardRow<E>& shard, u32 top_k, float top_p, u32* bins_memory) {
    float floor = -infinity;
    if constexpr (has_top_k) {
        const Cut cut = search<false, false>(rounds, shard, float(top_k), floor, bins_memory);
        if (!cut.has_nan) floor = from_ordered<E>(cut.range.high);
    }
    if constexpr (has_top_p) {
        const Cut cut = search<true, has_top_k>(rounds, shard, top_p, floor, bins_memory);
        KeptLogits kept{cut.maximum, floor, cut.has_nan ? not_a_number : cut.total, cut.target};
        if (cut.has_nan || cut.whole) return kept;
        // Of the logits that equal the cut, as many as it takes.
        kept.threshold = from_ordered<E>(cut.range.high);
        const float tie = mass_of(kept.threshold, cut.maximum), goal = fmaxf(top_p * cut.total, 1e-30f);
        kept.mass = cut.before + (tie > 0.0f ? fminf(tie * fmaxf(ceilf((goal - cut.before) / tie), 1.0f), cut.here) : cut.here);
        return kept;
    } else {
        return sum_kept(rounds, shard, floor);
    }
}

}  // namespace peerlane
