// Softmax attention on Hopper's tensor cores: the tile loop that fused kernels share, and the plain kernel.
//
// out (queries x depth) = softmax(scale q k^T) v for every head of every batch entry, 16-bit floats in and out, scores, weights' sums and results in
// fp32, of any lengths and of depths up to the shape's; what lies outside a tensor counts as zero. Several query heads may share a key head.
// Weights are rounded to the element type for their product with the values.
//
// A tile is some consecutive queries of one head. It meets blocks of keys and values, one a step, and keeps for each query the largest score so
// far, the sum of weights relative to that, and the weighted sum of values (online softmax). While a step's weights are made, the tensor
// cores add up the values of the step before.
#pragma once

#include <peerlane/tiles/roles.cuh>
#include <peerlane/peers/team.cuh>
#include <peerlane/tiles/tile.cuh>

namespace peerlane {

// Tiles of 64 Groups queries against blocks of `Keys` keys, `Slots` blocks of keys or values in flight, and `OutputSlots` pieces of 64 x 64 of each
// group's results on their way out. `Turns`: the groups start their products in
// turns, so that one makes weights while the other's products run.
template <class Element, int Groups, int Keys, int Depth, int Slots, int OutputSlots, bool Turns>
struct AttentionShape {
    using E = Element;
    static constexpr RoleTable roles = Groups == 3 ? RoleTable{3, 32, 160} : RoleTable{Groups, 40, 232};
    static constexpr int queries = 64 * Groups;
    static constexpr int keys = Keys;
    static constexpr int depth = Depth;
    static constexpr bool turns = Turns && Groups == 2;

    using Kept = SharedTile<E, queries, Depth>;
    static constexpr int kept_slots = 1;
    using Input = SharedTile<E, Keys, Depth>;
    static constexpr int input_slots = Slots;
    using Output = SharedTile<E, 64, panel_columns>;
    static constexpr int output_slots = OutputSlots;
    static_assert(Slots >= 2 && Keys % mma_depth == 0 && Depth % panel_columns == 0);
};

// One step of a tile: key c of the block counts for query i of the tile if c < end and c <= i + diagonal. `source` and `key`, the block's first,
// say where it lies.
struct AttentionStep {
    int source, key, end, diagonal;

    // Whether a block of `keys` keys has some that do not count, for queries from `query` of the tile on.
    __device__ bool masked(int keys, int query) const { return end < keys || query + diagonal < keys - 1; }
};
constexpr int no_diagonal = 1 << 30;

// Groups that start their products in turns: between `begin` and `end` each takes its turn and passes it on, all equally often.
template <bool on>
class ProductTurns {
  public:
    __device__ explicit ProductTurns(u32 group) : group_(group) {}
    __device__ void begin() const {
        if constexpr (on) {
            if (group_ == 1) pass();
        }
    }
    __device__ void take() const {
        if constexpr (on) ptx::barrier_sync(first_barrier + group_, 2 * group_threads);
    }
    __device__ void pass() const {
        if constexpr (on) ptx::barrier_arrive(first_barrier + 1 - group_, 2 * group_threads);
    }
    // In place of the last `pass`.
    __device__ void end() const {
        if constexpr (on) {
            if (group_ == 0) pass();
        }
    }

  private:
    static constexpr u32 first_barrier = 2;
    const u32 group_;
};

// What a consumer group knows of its 64 queries.
template <class Shape>
struct OnlineSoftmax : SumPlaces {
    using E = typename Shape::E;
    static constexpr int keys = Shape::keys;

    SumTile<keys> scores;         // of this step's keys; then their weights, relative to `top`
    u32 weights[keys / 16][4];    // rounded, as the left operand of a product
    SumTile<Shape::depth> sum;    // of values
    float top[2];                 // the largest score so far
    float total[2];               // of weights, this thread's share
    float factor[2];              // what `sum` is multiplied with since `top` has changed

    __device__ void clear() {
#pragma unroll
        for (float& value : sum.value) value = 0.0f;
        top[0] = top[1] = -infinity();
        total[0] = total[1] = 0.0f;
    }

    // Scores to weights. `scale`: of scores as powers of two; `query`: the group's first in the tile.
    template <bool masked>
    __device__ void weigh(const AttentionStep& step, int query, float scale) {
        float (&value)[keys / 2] = scores.value;
        if constexpr (masked) {
            int end[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) end[r] = min(step.end, query + row(r) + step.diagonal + 1) - 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
            for (int i = 0; i < keys / 2; ++i) {
                if (8 * (i / 4) + i % 2 >= end[row_of(i)]) value[i] = -infinity();
            }
        }
        // Two chains of each kind for a row, so that they are half as long.
        float largest[2] = {top[0], top[1]}, other[2] = {value[1], value[3]}, shift[2], added[2][2] = {};
#pragma unroll
        for (int i = 0; i < keys / 2; ++i) {
            float& chain = i % 2 ? other[row_of(i)] : largest[row_of(i)];
            chain = fmaxf(chain, value[i]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = fmaxf(largest[r], other[r]);
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 1));
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 2));
            shift[r] = largest[r] == -infinity() ? 0.0f : largest[r] * scale;  // no key so far: weights of 0
            factor[r] = ptx::exp2(top[r] * scale - shift[r]);
            top[r] = largest[r];
        }
#pragma unroll
        for (int i = 0; i < keys / 2; ++i) {
            value[i] = ptx::exp2(value[i] * scale - shift[row_of(i)]);
            added[row_of(i)][i % 2] += value[i];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) total[r] = total[r] * factor[r] + (added[r][0] + added[r][1]);
    }

    __device__ void rescale() {
#pragma unroll
        for (int i = 0; i < Shape::depth / 2; ++i) sum.value[i] *= factor[row_of(i)];
    }

    // The weighted mean, in `sum`, and, of scaled scores, the logarithm of the sum of exponentials, in `top`: zero and -infinity where no key counts.
    __device__ void finish(float scale) {
        constexpr float ln2 = 0.6931471805599453f;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            total[r] += __shfl_xor_sync(0xffffffffu, total[r], 1);
            total[r] += __shfl_xor_sync(0xffffffffu, total[r], 2);
            factor[r] = total[r] == 0.0f ? 0.0f : 1.0f / total[r];
            top[r] = total[r] == 0.0f ? -infinity() : (top[r] * scale + ptx::log2(total[r])) * ln2;
        }
        rescale();
    }

    __device__ static float infinity() { return __uint_as_float(0x7f800000u); }
};

template <bool known>
struct Known {
    static constexpr bool value = known;
};

// What a consumer group does with a tile: `kernel.step(tile, number)` for numbers below `tile.steps` are its steps, in the order in which `load_blocks`
// copies them. `state` holds the results, finished.
template <class Shape, class Kernel, class Tile, class Input, class Kept>
__device__ inline void attend(OnlineSoftmax<Shape>& state, const Kernel& kernel, const Tile& tile, u32 group, float scale, Input& in, Kept& kept) {
    using E = typename Shape::E;
    const int query = 64 * static_cast<int>(group);
    const ProductTurns<Shape::turns> turns(group);
    const auto& queries = kept.wait();
    state.clear();
    if (tile.steps > 0) {
        turns.begin();
        const auto first = [&](auto masked) {
            const auto& keys = in.wait();
            turns.take();
            state.scores.start_product(queries, 64 * group, keys);
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(state.scores.value);
            in.release();
            if (tile.steps > 1) {
                turns.pass();
            } else {
                turns.end();
            }
            state.template weigh<masked.value>(kernel.step(tile, 0), query, scale);
            state.scores.template round<E>(state.weights);
        };
        const auto next = [&](u32 number, const AttentionStep& step, auto masked) {
            const auto& keys = in.wait();
            turns.take();
            state.scores.start_product(queries, 64 * group, keys);
            const auto& values = in.wait();
            state.sum.start_adding(state.weights, values, number == 1);
            if (number + 1 < tile.steps) {
                turns.pass();
            } else {
                turns.end();
            }
            ptx::wgmma_wait<1>();
            ptx::wgmma_hold(state.scores.value);
            in.release();
            state.template weigh<masked.value>(step, query, scale);
            // Never so: a question about all weights, so that the compiler makes them while the products run, not behind the wait.
            if (state.total[0] + state.total[1] < 0.0f) ptx::trap();
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(state.sum.value);
            in.release();
            state.rescale();
            state.scores.template round<E>(state.weights);
        };
        if (kernel.step(tile, 0).masked(Shape::keys, query)) {
            first(Known<true>{});
        } else {
            first(Known<false>{});
        }
        for (u32 number = 1; number < tile.steps; ++number) {
            const AttentionStep step = kernel.step(tile, number);
            if (step.masked(Shape::keys, query)) {
                next(number, step, Known<true>{});
            } else {
                next(number, step, Known<false>{});
            }
        }
        const auto& values = in.wait();
        state.sum.start_adding(state.weights, values, tile.steps == 1);
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(state.sum.value);
        in.release();
    }
    kept.release();
    state.finish(scale);
}

// The copies that `attend` uses: load_keys(buffer, full, step) and load_values, each of one block, for every step of the tile. A step's values come
// behind the next one's keys. The whole warp calls prepare(step) before a step's copies.
template <class Shape, class Kernel, class Tile, class Input, class Prepare, class LoadKeys, class LoadValues>
__device__ inline void load_blocks(const Kernel& kernel, const Tile& tile, Input& in, const Prepare& prepare, const LoadKeys& load_keys,
                                   const LoadValues& load_values) {
    AttentionStep before{};
    for (u32 number = 0; number <= tile.steps; ++number) {
        const AttentionStep step = number < tile.steps ? kernel.step(tile, number) : before;
        if (number < tile.steps) prepare(step);
        if (number < tile.steps) in.fill(Shape::Input::bytes, [&](auto& buffer, u64* full) { load_keys(buffer, full, step); });
        if (number > 0) in.fill(Shape::Input::bytes, [&](auto& buffer, u64* full) { load_values(buffer, full, before); });
        before = step;
    }
}

// A token for every step of the tile that waits for a piece, in the order of the steps: pieces(step) tells its flag, or no_flag. Lanes look at the flags of
// 32 steps at a time, most of which have come long ago.
constexpr u32 no_flag = ~0u;
template <class Kernel, class Tile, class Peers, class Pieces, class Give>
__device__ inline void watch_blocks(const Kernel& kernel, const Tile& tile, const Peers& peers, u32 epoch, const Pieces& pieces, const Give& give_token) {
    for (u32 number = 0; number < tile.steps;) {
        const u32 own = number + Warp{}.thread();
        const AttentionStep step = kernel.step(tile, min(own, tile.steps - 1));
        const u32 flag = own < tile.steps ? pieces(step) : no_flag;
        const u32 come = peers.wait_leading(flag != no_flag, step.source, flag, epoch);
        const u32 these = __ballot_sync(full_warp, flag != no_flag && Warp{}.thread() < come);
        for (u32 tokens = __popc(these); tokens > 0; --tokens) give_token();
        number += come;
    }
}

// By the group, to line[query ...], as far as there are queries.
template <class Shape>
__device__ inline void write_logarithms(const OnlineSoftmax<Shape>& state, float* line, u32 query, u32 queries) {
    if (threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 at = query + state.row(r);
        if (at < queries) line[at] = state.top[r];
    }
}

// Rounds results and hands them to the group's storer, 64 columns at a time, which copies them to `at` of the tensor.
template <class Shape, class Producer>
__device__ inline void emit_attention(const OnlineSoftmax<Shape>& state, Producer& out) {
#pragma unroll
    for (int column = 0; column < Shape::depth; column += panel_columns) {
        state.sum.store(out.acquire(), column);
        out.commit();
    }
}

template <class Shape, class Consumer>
__device__ inline void store_attention(Consumer& out, const TensorMap* map, Place4 at) {
#pragma unroll 1
    for (int column = 0; column < Shape::depth; column += panel_columns) {
        const auto& chunk = out.wait();
        if (ptx::elect_one()) {
            chunk.store(map, {at.x + column, at.y, at.z, at.w});
            ptx::bulk_commit();
            ptx::bulk_wait_read<0>();
        }
        out.release();
    }
}

// The next of `tiles` tiles. `claims`: a counter that is zero before the launch, and again behind it, for the last claim takes all back. By one thread.
__device__ inline u32 claim_tile(u32* claims, u32 tiles) {
    const u32 index = ptx::add_relaxed_gpu(claims, 1), all = tiles + gridDim.x;
    if (index + 1 == all) ptx::add_relaxed_gpu(claims, 0u - all);
    return index;
}

// Tiles of heads in groups of `at_once`, whose keys stay in L2: in a group all heads' first tiles, then all second ones, and so on.
struct LineTile {
    u32 group, line, place;

    __device__ static LineTile at(u32 index, u32 lines, u32 tiles, u32 at_once) {
        const u32 group = index / (at_once * tiles), first = group * at_once;
        const u32 height = min(at_once, lines - first), within = index - first * tiles;
        return {group, first + within % height, within / height};
    }
};

// Which queries of which head a tile has, and the number of its steps.
struct AttentionTile {
    int query, head, batch;
    u32 steps;
};

// Attention by itself. `Claimed`: blocks take the next tile when they are ready, for under a causal mask tiles differ. Parameters have
//   TensorMap q, k, v, out  of (depth, heads, tokens, batch), innermost first, with boxes of a panel of a tile
//   float* logarithms       (batch, heads, queries), of sums of exponentials; or null
//   u32* claims             of tiles, if causal; zero before and after a launch
//   float scale             of scores, as powers of two
//   u32 batch, heads, key_heads, queries, keys
//   u32 causal; int offset  key j counts for query i if j <= i + offset
//   u32 lines_at_once       heads whose tiles come side by side
template <class Shape, bool Claimed, class Parameters>
struct AttentionRoles : Shape {
    using Tile = AttentionTile;
    const Parameters& parameters;

    __device__ explicit AttentionRoles(const Parameters& p) : parameters(p) {}
    __device__ u32 blocks() const { return (parameters.queries + Shape::queries - 1) / Shape::queries; }
    __device__ u32 tile_count() const { return blocks() * parameters.heads * parameters.batch; }

    __device__ u32 claim() const
        requires(Claimed)
    {
        return claim_tile(parameters.claims, tile_count());
    }

    // Those with most keys first.
    __device__ Tile tile(u32 index) const {
        const LineTile at = LineTile::at(index, parameters.heads * parameters.batch, blocks(), parameters.lines_at_once);
        const int query = static_cast<int>((blocks() - 1 - at.place) * Shape::queries);
        return {query, static_cast<int>(at.line % parameters.heads), static_cast<int>(at.line / parameters.heads), steps(query)};
    }

    // From the last block that the tile's queries see to the first.
    __device__ AttentionStep step(const Tile& tile, u32 number) const {
        const int key = static_cast<int>(tile.steps - 1 - number) * Shape::keys;
        return {0, key, static_cast<int>(parameters.keys) - key, parameters.causal ? tile.query + parameters.offset - key : no_diagonal};
    }

    __device__ void load(const Tile& tile, InputProducer<AttentionRoles>& in, KeptProducer<AttentionRoles>& kept) const {
        kept.fill(Shape::Kept::bytes,
                  [&](auto& queries, u64* full) { queries.load(&parameters.q, full, Place4{0, tile.head, tile.query, tile.batch}); });
        const int head = tile.head / static_cast<int>(parameters.heads / parameters.key_heads);
        const auto copy = [&](const TensorMap* map) {
            return [=](auto& block, u64* full, const AttentionStep& step) { block.load(map, full, Place4{0, head, step.key, tile.batch}); };
        };
        load_blocks<Shape>(*this, tile, in, [](const AttentionStep&) {}, copy(&parameters.k), copy(&parameters.v));
    }

    __device__ void compute(const Tile& tile, u32 group, InputConsumer<AttentionRoles>& in, KeptConsumer<AttentionRoles>& kept,
                            OutputProducer<AttentionRoles>& out) const {
        OnlineSoftmax<Shape> state;
        attend(state, *this, tile, group, parameters.scale, in, kept);
        if (parameters.logarithms) {
            float* line = parameters.logarithms + (u64(tile.batch) * parameters.heads + tile.head) * parameters.queries;
            write_logarithms(state, line, tile.query + 64 * group, parameters.queries);
        }
        emit_attention(state, out);
    }

    __device__ void store(const Tile& tile, u32 group, OutputConsumer<AttentionRoles>& out) const {
        store_attention<Shape>(out, &parameters.out, {0, tile.head, tile.query + 64 * static_cast<int>(group), tile.batch});
    }

  private:
    __device__ u32 steps(int query) const {
        int keys = static_cast<int>(parameters.keys);
        if (parameters.causal) {
            const int last = min(query + Shape::queries, static_cast<int>(parameters.queries));
            keys = max(0, min(keys, last + parameters.offset));
        }
        return static_cast<u32>((keys + Shape::keys - 1) / Shape::keys);
    }
};

}  // namespace peerlane
