// Gradients of softmax attention on Hopper's tensor cores, by recomputation, in two kernels of one tile loop.
//
// p = exp(scale q k^T - lse), ds = p (dout v^T - delta) with delta = rowsum(dout out), and
//   of keys      dk = scale ds^T q, dv = p^T dout     a tile is some keys of one key head; it meets blocks of queries of all heads that share it
//   of queries   dq = scale ds k                      a tile is some queries of one head; it meets blocks of keys
// 16-bit floats in and out; scores, sums and results in fp32; p and ds are rounded to the element type for their products. Every sum has one
// owner and a fixed order, so results do not differ from call to call. What lies outside a tensor counts as zero.
//
// Both tiles have two kept operands, X and Y, and meet blocks of two streamed ones, A and B:
//   scores = X A^T, dp = Y B^T, sums[0] += ds A, and of keys sums[1] += p B
// with X, Y, A, B = k, v, q, dout of keys and q, dout, k, v of queries. p and ds are transposed of keys, and never leave the registers.
#pragma once

#include <peerlane/attention/attention.cuh>
#include <peerlane/rows.cuh>

namespace peerlane {

// What the two kernels know of each query: its logarithm and its delta. By all blocks; 16 lanes take four queries of a head at a time. Parameters have
//   const char *dout, *out                (batch, queries, heads, depth), rows aligned to 16 bytes
//   const float* logarithms               (batch, heads, queries), natural ones
//   float* numbers                        as AttentionBackwardRoles have them
//   u64 dout_strides[3], out_strides[3]   of batch, queries and heads, in bytes
//   u32 batch, heads, queries, depth, padded
template <class E, class Parameters>
__device__ inline void write_numbers(const Parameters& parameters) {
    constexpr float log2e = 1.4426950408889634f;
    constexpr u32 lanes = 16, at_once = 4;
    const u32 lane = threadIdx.x % lanes, each = blockDim.x / lanes, steps = parameters.padded / at_once;
    const u64 all = u64(parameters.batch) * parameters.heads;
    // `padded` is a multiple of 128, so both halves of a warp go round equally often.
    for (u64 unit = u64(blockIdx.x) * each + threadIdx.x / lanes; unit < all * steps; unit += u64(gridDim.x) * each) {
        const u32 head = unit % parameters.heads, first = unit / parameters.heads % steps * at_once, batch = unit / parameters.heads / steps;
        const char* dout = parameters.dout + batch * parameters.dout_strides[0] + head * parameters.dout_strides[2] + 16 * lane;
        const char* out = parameters.out + batch * parameters.out_strides[0] + head * parameters.out_strides[2] + 16 * lane;
        float mine = 0.0f;  // of the first lanes: the delta of a query each
#pragma unroll
        for (u32 r = 0; r < at_once; ++r) {
            float delta = 0.0f;
            if (first + r < parameters.queries && lane < parameters.depth / 8) {
                const Vec16 left = *reinterpret_cast<const Vec16*>(dout + (first + r) * parameters.dout_strides[1]);
                const Vec16 right = *reinterpret_cast<const Vec16*>(out + (first + r) * parameters.out_strides[1]);
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    float a[2], b[2];
                    E::widen(left.word[w], a);
                    E::widen(right.word[w], b);
                    delta += a[0] * b[0] + a[1] * b[1];
                }
            }
            delta = warp_sum<lanes>(delta);
            if (lane == r) mine = delta;
        }
        if (lane < at_once) {
            const u64 line = u64(batch) * parameters.heads + head;
            const u32 query = first + lane;
            const float known = query < parameters.queries ? parameters.logarithms[line * parameters.queries + query] * log2e : infinity;
            parameters.numbers[line * parameters.padded + query] = known == -infinity ? infinity : known;
            parameters.numbers[(all + line) * parameters.padded + query] = mine;
        }
    }
}

// Tiles of 64 Groups rows of X and Y against blocks of `Columns` rows of A and B, `Slots` blocks of A or B in flight, and `OutputSlots` pieces of 64 x 64 of
// each group's results on their way out. `OfKeys`: which of the two kernels.
template <class Element, int Groups, int Columns, int Depth, int Slots, int OutputSlots, bool OfKeys>
struct BackwardShape {
    using E = Element;
    static constexpr RoleTable roles{Groups, 40, 232};
    static constexpr int rows = 64 * Groups;
    static constexpr int columns = Columns;
    static constexpr int depth = Depth;
    static constexpr bool of_keys = OfKeys;

    struct Kept {
        SharedTile<E, rows, Depth> x, y;
        static constexpr u32 bytes = decltype(x)::bytes + decltype(y)::bytes;
    };
    static constexpr int kept_slots = 1;
    // A block of queries comes with a number for each: of q the logarithm of its sum, of dout its delta.
    struct Input {
        SharedTile<E, Columns, Depth> tile;
        alignas(swizzle_atom) float numbers[OfKeys ? Columns : 4];
        static constexpr u32 bytes = decltype(tile)::bytes + (OfKeys ? Columns * 4 : 0);
    };
    static constexpr int input_slots = Slots;
    using Output = SharedTile<E, 64, panel_columns>;
    static constexpr int output_slots = OutputSlots;
    static_assert(Slots >= 4 && Columns % mma_depth == 0 && Depth % panel_columns == 0);
};

// What a consumer group knows of its 64 rows.
template <class Shape>
struct BackwardSums : SumPlaces {
    using E = typename Shape::E;
    static constexpr int columns = Shape::columns;

    SumTile<columns> p, ds;
    u32 rounded_p[Shape::of_keys ? columns / 16 : 1][4], rounded_ds[columns / 16][4];
    SumTile<Shape::depth> sums[Shape::of_keys ? 2 : 1];
    float logarithm[2], delta[2];  // of queries: those of the two rows

    // Scores to weights. `first`: row of the group in the tile. A pair counts if row <= column + diagonal (of keys) or column <= row + diagonal and
    // column < end.
    template <bool masked>
    __device__ void weigh(float scale, const float* numbers, int first, int diagonal, int end) {
        if constexpr (masked) {
#pragma unroll
            for (int i = 0; i < columns / 2; ++i) {
                const int at = first + row(row_of(i)), column = column_of(i);
                const bool counts = Shape::of_keys ? at <= column + diagonal : column <= at + diagonal && column < end;
                if (!counts) p.value[i] = -infinity;
            }
        }
#pragma unroll
        for (int i = 0; i < columns / 2; ++i) p.value[i] = ptx::exp2(p.value[i] * scale - (Shape::of_keys ? numbers[column_of(i)] : logarithm[row_of(i)]));
    }

    // dp to ds.
    __device__ void differ(const float* numbers) {
#pragma unroll
        for (int i = 0; i < columns / 2; ++i) ds.value[i] = p.value[i] * (ds.value[i] - (Shape::of_keys ? numbers[column_of(i)] : delta[row_of(i)]));
    }
};

// Parameters have
//   TensorMap x, y, a, b, out[2]   of (depth, heads, tokens, batch), innermost first; out: dk and dv, or dq
//   const float* numbers           [2][batch * heads][padded queries]: logarithms as powers of two, infinite where no key counts; delta
//   u32* claims                    of tiles; zero before and after a launch
//   float scale, gradient_scale    of scores as powers of two, and of dk and dq
//   u32 batch, heads, key_heads, queries, keys, padded
//   u32 causal; int offset         key j counts for query i if j <= i + offset
//   u32 lines_at_once              heads whose tiles come side by side
template <class Shape, class Parameters>
struct AttentionBackwardRoles : Shape {
    using E = typename Shape::E;
    static constexpr bool of_keys = Shape::of_keys;
    static constexpr int rows = Shape::rows, columns = Shape::columns;
    struct Tile {
        int first, head, batch;  // of keys: of the key heads
        u32 steps;
    };
    // Block of the streamed tensors from token `token` on, of head `head`.
    struct Step {
        int token, head;
    };
    const Parameters& parameters;

    __device__ explicit AttentionBackwardRoles(const Parameters& p) : parameters(p) {}

    __device__ u32 share() const { return parameters.heads / parameters.key_heads; }
    __device__ u32 lines() const { return parameters.batch * (of_keys ? parameters.key_heads : parameters.heads); }
    __device__ u32 blocks() const { return ((of_keys ? parameters.keys : parameters.queries) + rows - 1) / rows; }
    __device__ u32 tile_count() const { return lines() * blocks(); }
    __device__ u32 claim() const { return claim_tile(parameters.claims, tile_count()); }

    __device__ Tile tile(u32 index) const {
        const LineTile at = LineTile::at(index, lines(), blocks(), parameters.lines_at_once);
        const u32 heads = of_keys ? parameters.key_heads : parameters.heads;
        const int first = static_cast<int>(of_keys ? at.place : blocks() - 1 - at.place) * rows;  // those with most to do first
        return {first, static_cast<int>(at.line % heads), static_cast<int>(at.line / heads), of_keys ? share() * query_blocks(first) : key_blocks(first)};
    }

    __device__ Step step(const Tile& tile, u32 number) const {
        if constexpr (of_keys) {
            const u32 each = query_blocks(tile.first);
            return {static_cast<int>(first_query_block(tile.first) + number % each) * columns, tile.head * static_cast<int>(share()) + static_cast<int>(number / each)};
        } else {
            return {static_cast<int>(number) * columns, tile.head / static_cast<int>(share())};
        }
    }

    __device__ void load(const Tile& tile, InputProducer<AttentionBackwardRoles>& in, KeptProducer<AttentionBackwardRoles>& kept) const {
        kept.fill(Shape::Kept::bytes, [&](auto& both, u64* full) {
            const Place4 at{0, tile.head, tile.first, tile.batch};
            both.x.load(&parameters.x, full, at);
            both.y.load(&parameters.y, full, at);
        });
        for (u32 number = 0; number < tile.steps; ++number) {
            const Step now = step(tile, number);
            const auto copy = [&](const TensorMap* map, int kind) {
                in.fill(Shape::Input::bytes, [&](auto& block, u64* full) {
                    block.tile.load(map, full, Place4{0, now.head, now.token, tile.batch});
                    if constexpr (of_keys) ptx::bulk_load(block.numbers, numbers(kind, now.head, tile.batch) + now.token, columns * 4, full);
                });
            };
            copy(&parameters.a, 0);
            copy(&parameters.b, 1);
        }
    }

    __device__ void compute(const Tile& tile, u32 group, InputConsumer<AttentionBackwardRoles>& in, KeptConsumer<AttentionBackwardRoles>& kept,
                            OutputProducer<AttentionBackwardRoles>& out) const {
        BackwardSums<Shape> state;
        const int first = 64 * static_cast<int>(group);
        if constexpr (!of_keys) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32 at = static_cast<u32>(tile.first + first + state.row(r));
                state.logarithm[r] = numbers(0, tile.head, tile.batch)[at];
                state.delta[r] = numbers(1, tile.head, tile.batch)[at];
            }
        }
        const auto& both = kept.wait();
#pragma unroll
        for (auto& sum : state.sums) {
#pragma unroll
            for (float& value : sum.value) value = 0.0f;
        }
        const auto next = [&](const Step& now, auto masked) {
            const auto& a = in.wait();
            state.p.start_product(both.x, first, a.tile);
            const auto& b = in.wait();
            state.ds.start_product(both.y, first, b.tile);
            ptx::wgmma_wait<1>();
            ptx::wgmma_hold(state.p.value);
            const int diagonal = !parameters.causal ? no_diagonal : of_keys ? now.token + parameters.offset - tile.first : tile.first + parameters.offset - now.token;
            state.template weigh<masked.value>(parameters.scale, a.numbers, first, diagonal, static_cast<int>(parameters.keys) - now.token);
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(state.ds.value);
            if constexpr (of_keys) state.p.template round<E>(state.rounded_p);
            state.differ(b.numbers);
            state.ds.template round<E>(state.rounded_ds);
            if constexpr (of_keys) state.sums[1].start_adding(state.rounded_p, b.tile);
            state.sums[0].start_adding(state.rounded_ds, a.tile);
            ptx::wgmma_wait<0>();  // products in flight across steps would need more registers than there are
#pragma unroll
            for (auto& sum : state.sums) ptx::wgmma_hold(sum.value);
            in.release();
            in.release();
        };
        for (u32 number = 0; number < tile.steps; ++number) {
            const Step now = step(tile, number);
            if (masked(tile, now, first)) {
                next(now, Known<true>{});
            } else {
                next(now, Known<false>{});
            }
        }
        kept.release();
#pragma unroll
        for (float& value : state.sums[0].value) value *= parameters.gradient_scale;
#pragma unroll
        for (const auto& sum : state.sums) {
#pragma unroll
            for (int column = 0; column < Shape::depth; column += panel_columns) {
                sum.store(out.acquire(), column);
                out.commit();
            }
        }
    }

    __device__ void store(const Tile& tile, u32 group, OutputConsumer<AttentionBackwardRoles>& out) const {
        const Place4 at{0, tile.head, tile.first + 64 * static_cast<int>(group), tile.batch};
        for (int result = 0; result < (of_keys ? 2 : 1); ++result) store_attention<Shape>(out, parameters.out + result, at);
    }

  private:
    __device__ const float* numbers(int kind, int head, int batch) const {
        const u64 all = u64(parameters.batch) * parameters.heads;
        return parameters.numbers + (kind * all + u64(batch) * parameters.heads + head) * parameters.padded;
    }

    // Of a tile of keys: the first block of queries that sees one of them, and how many there are from there on.
    __device__ u32 first_query_block(int key) const {
        return parameters.causal ? static_cast<u32>(max(0, key - parameters.offset)) / columns : 0;
    }
    __device__ u32 query_blocks(int key) const {
        const u32 all = (parameters.queries + columns - 1) / columns, first = first_query_block(key);
        return all > first ? all - first : 0;
    }
    // Of a tile of queries: how many blocks of keys they see.
    __device__ u32 key_blocks(int query) const {
        int keys = static_cast<int>(parameters.keys);
        if (parameters.causal) keys = max(0, min(keys, min(query + rows, static_cast<int>(parameters.queries)) + parameters.offset));
        return static_cast<u32>((keys + columns - 1) / columns);
    }

    // Whether a block has pairs that do not count, for the group's 64 rows.
    __device__ bool masked(const Tile& tile, const Step& now, int first) const {
        if constexpr (of_keys) {
            return parameters.causal && tile.first + first + 63 > now.token + parameters.offset;
        } else {
            return now.token + columns > static_cast<int>(parameters.keys) ||
                   (parameters.causal && now.token + columns - 1 > tile.first + first + parameters.offset);
        }
    }
};

}  // namespace peerlane
