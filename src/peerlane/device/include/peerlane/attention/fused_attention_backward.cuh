// All gradients of softmax attention by one kernel with five products a step, on Hopper's tensor cores.
//
// A tile is 128 keys of one key head, 64 for each of two groups. It meets blocks of queries of all heads that share the key head:
//   p = exp(scale k q^T - lse), ds = p (v dout^T - delta), dv += p dout, dk += ds q, and the block's dq += ds^T k
// dk and dv stay in registers. The block's part of dq leaves through shared memory, to be added to `sums` in device memory, in fp32. With `Ordered`
// tiles add to a block from the last one that sees it to the first, each when the one before has: then results do not differ from call to call. Tiles are
// claimed in this order, so that whoever is waited for is at work. Under a causal mask tiles meet their diagonal first: those that begin together never
// wait for the same block. `write_query_gradients` turns the sums into dq.
#pragma once

#include <peerlane/attention/attention_backward.cuh>

namespace peerlane {

constexpr int fused_groups = 2;

struct alignas(16) FourFloats {
    float value[4];
};

// The part of a block's dq that a group adds: of 128 queries 64, of 64 some columns. Four floats of each thread, the next four of each, and so on, as the
// accumulator has them.
template <int Queries, int Depth>
struct QueryPiece {
    static_assert(Queries == 64 || Queries == 64 * fused_groups);
    static constexpr int columns = Queries == 64 ? Depth / fused_groups : Depth;
    static constexpr u32 floats = 64 * columns;
    __device__ static constexpr int query(u32 group) { return Queries == 64 ? 0 : 64 * static_cast<int>(group); }
    __device__ static constexpr int column(u32 group) { return Queries == 64 ? columns * static_cast<int>(group) : 0; }
};

// Tiles of 128 keys against blocks of `Columns` queries, `Slots` blocks of q or dout in flight.
template <class Element, int Columns, int Depth, int Slots, bool Ordered>
struct FusedBackwardShape {
    using E = Element;
    static constexpr RoleTable roles = Depth > panel_columns ? RoleTable{fused_groups, 24, 240} : RoleTable{fused_groups, 40, 232};
    static constexpr int rows = 64 * fused_groups;
    static constexpr int columns = Columns;
    static constexpr int depth = Depth;
    static constexpr bool ordered = Ordered;
    using Piece = QueryPiece<Columns, Depth>;
    static constexpr int piece_columns = Piece::columns;

    // Keys and values, and ds of the newest two steps, for both groups.
    struct Kept {
        SharedTile<E, rows, Depth> k, v;
        SharedTile<E, rows, Columns> ds[2];
        static constexpr u32 bytes = decltype(k)::bytes + decltype(v)::bytes;
    };
    static constexpr int kept_slots = 1;
    struct Input {
        SharedTile<E, Columns, Depth> tile;
        alignas(swizzle_atom) float numbers[Columns];  // of q the logarithms, of dout delta
        static constexpr u32 bytes = decltype(tile)::bytes + Columns * 4;
    };
    static constexpr int input_slots = Slots;
    // A piece of dq, or the group's rows of dk or dv.
    struct alignas(swizzle_atom) Output {
        char data[Piece::floats * 4];
        using Panel = SharedTile<E, 64, panel_columns>;
        __device__ Panel& panel(int p) { return reinterpret_cast<Panel*>(data)[p]; }
        __device__ const Panel& panel(int p) const { return reinterpret_cast<const Panel*>(data)[p]; }
    };
    static constexpr int output_slots = 1;
    static_assert(Slots >= 5, "two of this step, two of the step before, and one that comes");
};

template <class Shape>
struct FusedBackwardSums : SumPlaces {
    using E = typename Shape::E;
    static constexpr int columns = Shape::columns, rows = Shape::rows, depth = Shape::depth;
    using Block = SharedTile<E, columns, depth>;

    SumTile<columns> p, ds;
    SumTile<Shape::piece_columns> dq;
    u32 rounded_p[columns / 16][4];
    SumTile<depth> dk, dv;

    __device__ void start_dk(const SharedTile<E, rows, columns>& weights, u32 group, const Block& q) {
        const auto left = weights.along_columns(64 * group);
        const auto right = q.along_rows();
        ptx::wgmma_hold(dk.value);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < columns / mma_depth; ++step) {
            ptx::wgmma<mma_type<E>, depth, Major::k, Major::mn>(dk.value, left[step], right[step], 1);
        }
        ptx::wgmma_commit();
    }

    __device__ void start_dq(const SharedTile<E, rows, columns>& weights, u32 group, const SharedTile<E, rows, depth>& k) {
        const auto offset = [](int step) { return 128 * mma_depth * step; };
        const char* left_at = weights.data + weights.offset(0, Shape::Piece::query(group));
        const char* right_at = k.data + k.offset(0, Shape::Piece::column(group));
        const OperandSteps left(mma_descriptor(left_at, weights.panel_bytes, swizzle_atom), offset);
        const OperandSteps right(mma_descriptor(right_at, k.panel_bytes, swizzle_atom), offset);
        ptx::wgmma_hold(dq.value);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < rows / mma_depth; ++step) {
            ptx::wgmma<mma_type<E>, Shape::piece_columns, Major::mn, Major::mn>(dq.value, left[step], right[step], step > 0);
        }
        ptx::wgmma_commit();
    }

    // Key r of the group counts for query c of the block if r < end and r <= c + diagonal.
    __device__ void mask(int diagonal, int end) {
#pragma unroll
        for (int i = 0; i < columns / 2; ++i) {
            const int key = row(row_of(i));
            if (!(key <= column_of(i) + diagonal && key < end)) p.value[i] = -infinity;
        }
    }

    __device__ void weigh(float scale, const float* logarithms) {
#pragma unroll
        for (int i = 0; i < columns / 2; ++i) p.value[i] = ptx::exp2(p.value[i] * scale - logarithms[column_of(i)]);
    }

    __device__ void differ(const float* deltas) {
#pragma unroll
        for (int i = 0; i < columns / 2; ++i) ds.value[i] = p.value[i] * (ds.value[i] - deltas[column_of(i)]);
    }

    // Rounds ds into the group's rows.
    __device__ void publish(SharedTile<E, rows, columns>& weights, u32 group) const {
        const int lane = threadIdx.x % 32;
        const int own_row = 64 * static_cast<int>(group) + threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
        for (int j = 0; j < columns; j += 16) {
            u32 word[4];
            ds.template round<E>(word, j);
            ptx::store_matrices(weights.data + weights.offset(own_row, j + lane / 16 * 8), word);
        }
    }
};

// Parameters have what AttentionBackwardRoles (of keys) have with q, k, v, dout in place of x, y, a, b, and
//   float* sums   of dq: [batch * heads][blocks of queries][groups][piece]; not Ordered: zero at first
//   u32* turns    [batch * heads][blocks of queries][groups], of tiles that add to a piece; zero before and after a launch
template <class Shape, class Parameters>
struct FusedBackwardRoles : Shape {
    using E = typename Shape::E;
    static constexpr int rows = Shape::rows, columns = Shape::columns;
    struct Tile {
        int first, head, batch;  // of the keys
        int place, begin;  // among the head's tiles; the first block of queries that sees one of them
    };
    const Parameters& parameters;

    __device__ explicit FusedBackwardRoles(const Parameters& p) : parameters(p) {}

    __device__ int share() const { return static_cast<int>(parameters.heads / parameters.key_heads); }
    __device__ u32 lines() const { return parameters.batch * parameters.key_heads; }
    __device__ int tiles() const { return static_cast<int>(parameters.keys + rows - 1) / rows; }
    __device__ int blocks() const { return static_cast<int>(parameters.queries + columns - 1) / columns; }
    __device__ u32 tile_count() const { return lines() * tiles(); }
    __device__ u32 claim() const { return claim_tile(parameters.claims, tile_count()); }

    __device__ Tile tile(u32 index) const {
        const LineTile at = LineTile::at(index, lines(), tiles(), parameters.lines_at_once);
        const int place = tiles() - 1 - static_cast<int>(at.place);
        return {place * rows, static_cast<int>(at.line % parameters.key_heads), static_cast<int>(at.line / parameters.key_heads), place, first_block(place)};
    }

    // step(head, block) for every block that sees the tile.
    template <class Step>
    __device__ void each_step(const Tile& tile, const Step& step) const {
        for (int head = tile.head * share(); head < (tile.head + 1) * share(); ++head) {
            for (int block = tile.begin; block < blocks(); ++block) step(head, block);
        }
    }

    __device__ void load(const Tile& tile, InputProducer<FusedBackwardRoles>& in, KeptProducer<FusedBackwardRoles>& kept) const {
        kept.fill(Shape::Kept::bytes, [&](auto& both, u64* full) {
            const Place4 at{0, tile.head, tile.first, tile.batch};
            both.k.load(&parameters.k, full, at);
            both.v.load(&parameters.v, full, at);
        });
        each_step(tile, [&](int head, int block) {
            const int token = block * columns;
            const auto copy = [&](const TensorMap* map, int kind) {
                in.fill(Shape::Input::bytes, [&](auto& buffer, u64* full) {
                    buffer.tile.load(map, full, Place4{0, head, token, tile.batch});
                    ptx::bulk_load(buffer.numbers, numbers(kind, head, tile.batch) + token, columns * 4, full);
                });
            };
            copy(&parameters.q, 0);
            copy(&parameters.dout, 1);
        });
    }

    __device__ void compute(const Tile& tile, u32 group, InputConsumer<FusedBackwardRoles>& in, KeptConsumer<FusedBackwardRoles>& kept,
                            OutputProducer<FusedBackwardRoles>& out) const {
        FusedBackwardSums<Shape> state;
        auto& both = kept.wait();
#pragma unroll
        for (float& value : state.dk.value) value = 0.0f;
#pragma unroll
        for (float& value : state.dv.value) value = 0.0f;
        // As each_step, but as one loop: with two the compiler would wait for every product.
        const int all = blocks();
        int left = max(0, all - tile.begin) * share(), block = tile.begin;
        const auto weigh = [&](const auto& q) {
            ptx::wgmma_hold(state.p.value);
            const int key = tile.first + 64 * static_cast<int>(group), token = block * columns;
            const int end = static_cast<int>(parameters.keys) - key, diagonal = parameters.causal ? token + parameters.offset - key : no_diagonal;
            if (end < 64 || diagonal < 63) state.mask(diagonal, end);
            state.weigh(parameters.scale, q.numbers);
        };
        const auto publish = [&] {
            state.publish(both.ds[left & 1], group);
            ptx::fence_proxy_async_shared();
            ptx::barrier_sync(published, fused_groups * group_threads);
        };
        const auto emit = [&] {
            ptx::wgmma_hold(state.dq.value);
            auto* piece = reinterpret_cast<FourFloats*>(out.acquire().data) + threadIdx.x % group_threads;
            const auto& dq = state.dq.value;
#pragma unroll
            for (int i = 0; i < Shape::piece_columns / 8; ++i) piece[i * group_threads] = {{dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]}};
            out.commit();
        };
        for (; left > 0; --left, block = block + 1 == all ? tile.begin : block + 1) {
            const auto& q = in.wait();
            state.p.start_product(both.k, 64 * group, q.tile);
            const auto& dout = in.wait();
            state.ds.start_product(both.v, 64 * group, dout.tile);
            ptx::wgmma_wait<1>();
            weigh(q);
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(state.ds.value);
            state.differ(dout.numbers);
            state.p.template round<E>(state.rounded_p);
            state.dv.start_adding(state.rounded_p, dout.tile);
            publish();
            state.start_dq(both.ds[left & 1], group, both.k);
            state.start_dk(both.ds[left & 1], group, q.tile);
            ptx::wgmma_wait<1>();
            emit();
            ptx::wgmma_wait<0>();
            in.release();
            in.release();
        }
        ptx::wgmma_hold(state.dk.value);
        ptx::wgmma_hold(state.dv.value);
        kept.release();
#pragma unroll
        for (float& value : state.dk.value) value *= parameters.gradient_scale;
        emit_rows(state.dk, out);
        emit_rows(state.dv, out);
    }

    __device__ void store(const Tile& tile, u32 group, OutputConsumer<FusedBackwardRoles>& out) const {
        each_step(tile, [&](int head, int block) {
            const u32 at = ((tile.batch * parameters.heads + head) * blocks() + block) * fused_groups + group;
            const u32 turn = last_tile(block) - tile.place;
            if constexpr (Shape::ordered) {
                if (ptx::elect_one()) wait_turn(parameters.turns + at, turn);
            }
            const auto& piece = out.wait();
            if (ptx::elect_one()) {
                float* sum = parameters.sums + u64(at) * Shape::Piece::floats;
                if (Shape::ordered && turn == 0) {
                    ptx::bulk_store(sum, piece.data, Shape::Piece::floats * 4);
                } else {
                    ptx::bulk_add<ptx::BulkAdd::f32>(sum, piece.data, Shape::Piece::floats * 4);
                }
                ptx::bulk_commit();
                ptx::bulk_wait_read<0>();
            }
            out.release();
            if constexpr (Shape::ordered) {
                if (ptx::elect_one()) pass_turn(parameters.turns + at, tile.place == 0 ? 0u - turn : 1);
            }
        });
        const Place4 at{0, tile.head, tile.first + 64 * static_cast<int>(group), tile.batch};
#pragma unroll 1
        for (int result = 0; result < 2; ++result) {
            const auto& rounded = out.wait();
            if (ptx::elect_one()) {
#pragma unroll
                for (int p = 0; p < Shape::depth / panel_columns; ++p) rounded.panel(p).store(parameters.out + result, {p * panel_columns, at.y, at.z, at.w});
                ptx::bulk_commit();
                ptx::bulk_wait_read<0>();
            }
            out.release();
        }
    }

  private:
    static constexpr u32 published = 2;  // barrier: both groups' ds of this step

    __device__ const float* numbers(int kind, int head, int batch) const {
        const u64 all = u64(parameters.batch) * parameters.heads;
        return parameters.numbers + (kind * all + u64(batch) * parameters.heads + head) * parameters.padded;
    }

    // The first block of queries that sees a key of the tile.
    __device__ int first_block(int place) const { return parameters.causal ? max(0, place * rows - parameters.offset) / columns : 0; }
    // The last tile that the block sees, if it sees one.
    __device__ int last_tile(int block) const {
        return parameters.causal ? min(tiles() - 1, ((block + 1) * columns + parameters.offset - 1) / rows) : tiles() - 1;
    }

    __device__ static void emit_rows(const SumTile<Shape::depth>& sum, OutputProducer<FusedBackwardRoles>& out) {
        auto& rounded = out.acquire();
#pragma unroll
        for (int p = 0; p < Shape::depth / panel_columns; ++p) sum.store(rounded.panel(p), p * panel_columns);
        out.commit();
    }

    // Until the tile before has added its part: it is at work, or it has been.
    __device__ static void wait_turn(const u32* turn, u32 number) {
        if (number == 0) return;
        LocalDeadline deadline;
        while (ptx::load_acquire_gpu(turn) != number) deadline.check();
        ptx::fence_proxy_async();
    }
    __device__ static void pass_turn(u32* turn, u32 more) {
        ptx::bulk_wait<0>();
        ptx::fence_proxy_async();
        ptx::fence_gpu();
        ptx::add_relaxed_gpu(turn, more);
    }
};

// Four lanes, each with four words: lane l gets word l of each, in the lanes' order.
__device__ inline void transpose_quad(u32 (&word)[4], u32 lane) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & step) continue;
            const u32 other = __shfl_xor_sync(0xffffffffu, upper ? word[i] : word[i + step], step);
            (upper ? word[i] : word[i + step]) = other;
        }
    }
}

// dq of sums, by groups of 128 threads: scaled and rounded, zero where no tile has added. Parameters have
//   const float* sums    as FusedBackwardRoles have them
//   char* dq             (batch, queries, heads, depth), rows aligned to 16 bytes; u64 dq_strides[3] of batch, queries and heads, in bytes
//   float gradient_scale
//   u32 batch, heads, queries, depth, causal; int offset
template <class E, int columns, int depth, class Parameters>
__device__ inline void write_query_gradients(const Parameters& parameters) {
    using Piece = QueryPiece<columns, depth>;
    constexpr int parts = Piece::columns / 8;
    const u32 blocks = (parameters.queries + columns - 1) / columns, thread = threadIdx.x % group_threads, lane = thread % 4;
    const u64 pieces = u64(parameters.batch) * parameters.heads * blocks * fused_groups, each = blockDim.x / group_threads;
    const u32 unseen = parameters.causal ? static_cast<u32>(max(0, -parameters.offset)) / columns : 0;  // blocks
    for (u64 at = u64(blockIdx.x) * each + threadIdx.x / group_threads; at < pieces; at += u64(gridDim.x) * each) {
        const u32 group = at % fused_groups, block = at / fused_groups % blocks;
        const u64 line = at / fused_groups / blocks;
        const auto* piece = reinterpret_cast<const FourFloats*>(parameters.sums + at * Piece::floats) + thread;
        const u32 row = block * columns + Piece::query(group) + thread / 32 * 16 + thread % 32 / 4;
        char* to = parameters.dq + line / parameters.heads * parameters.dq_strides[0] + line % parameters.heads * parameters.dq_strides[2];
        FourFloats sum[parts] = {};
#pragma unroll
        for (int i = 0; i < parts; ++i) {
            if (block >= unseen) sum[i] = piece[i * group_threads];
        }
#pragma unroll
        for (int quad = 0; quad < parts / 4; ++quad) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                u32 word[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* from = sum[4 * quad + i].value + 2 * r;
                    const float pair[2] = {from[0] * parameters.gradient_scale, from[1] * parameters.gradient_scale};
                    word[i] = E::narrow(pair);
                }
                transpose_quad(word, lane);
                const u32 column = Piece::column(group) + 32 * quad + 8 * lane;
                if (row + 8 * r < parameters.queries && column < parameters.depth) {
                    *reinterpret_cast<Vec16*>(to + (row + 8 * r) * parameters.dq_strides[1] + column * element_bytes) = {{word[0], word[1], word[2], word[3]}};
                }
            }
        }
    }
}

}  // namespace peerlane
