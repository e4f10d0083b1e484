// Products whose left operand lies in rows on all ranks: out_p = [A_0; A_1; ...] B_p, A_q (m x k) on rank q, for some matrices B_p of this rank,
// side by side in one launch: what queries, keys and values of a layer are, or gate and up.
//
// gathered_pieces.cuh says how A is pushed. Tiles of this rank's own rows come first, while other rows are on their way. Then come tiles of the
// others', row after row of tiles from each of them in turn, which is how they arrive. Such a tile waits for its rows' first columns, then for the
// next ones; the wait for a tile begins before the one in front of it is stored. A watching warp passes on a token for each column of pieces. There
// are at most `ready_slots` of these: so all tokens of a tile find room once those of the tile before are used, which no store holds up.
//
// Rows of e4m3 have their scales in front of them (scales.cuh), in a header that comes with the first columns: one scale, or one for each 128 k.
//
// With `keeps` all rows are copied to `whole` too, for a gradient: by the spare warp of every compute block, as they come.
#pragma once

#include <peerlane/products/gathered_pieces.cuh>

namespace peerlane {

constexpr int most_right_operands = 4;

// Parameters have, besides those of GatheredPieces,
//   TensorMap a          this rank's: (k, m, 1)
//   TensorMap gathered   what `gathered_memory` holds
//   TensorMap b[]        of each product: (n, k, 1), or (k, n, 1)
//   TensorMap out[]      of each: (n, m, W)
//   OperandScales b_scales[]
//   u32 n[]              columns of each
//   u32 first[]          the first column of tiles of each; of a product that there is not, as many as there are
//   GroupedTiles tiles   of one rank's rows, with the columns of all products
//   char* whole          (W m, k), in rows of row_bytes, where all of A is kept
// and what the epilogue has: `residual` is of the only product and (n, m, W), `bias[]` is of each.
template <class Shape, int W, bool keeps, class Parameters>
struct RowGatherGemmRoles : GatheredPieces<Shape, W, false, Parameters, 8> {
    using Base = GatheredPieces<Shape, W, false, Parameters, 8>;
    using Base::arena;
    using Base::Base;
    using Base::parameters;
    static constexpr bool watches_ahead = true;

    struct Tile {
        int source, row, column;  // of the source's rows, and of the product's columns
        u32 product;
    };

    __device__ u32 tile_count() const { return W * parameters.tiles.count(); }
    __device__ Tile tile(u32 index) const {
        const GroupedTiles own = parameters.tiles;
        const bool is_own = index < own.count();
        const GroupedTiles others{(W - 1) * own.rows, own.columns, own.group_rows};
        const auto [row, column] = is_own ? own.at(index) : others.at(index - own.count());
        u32 product = 0;
#pragma unroll
        for (int p = 1; p < most_right_operands; ++p) product += column >= static_cast<int>(parameters.first[p]);
        const int source = is_own ? static_cast<int>(arena.rank) : rank_after<W>(arena.rank, W - 1 - row % (W - 1));
        return {source, (is_own ? row : row / (W - 1)) * Shape::rows, (column - static_cast<int>(parameters.first[product])) * Shape::columns, product};
    }

    __device__ void load(const Tile& tile, InputProducer<Shape>& in, ReadyConsumer& ready) const {
        const bool own = tile.source == static_cast<int>(arena.rank);
        const TensorMap *a = own ? &parameters.a : &parameters.gathered, *b = &parameters.b[tile.product];
        const int row = tile.row + Shape::first_row(), slot = own ? 0 : this->slot_of(tile.source);
        for (u32 piece = 0; piece < parameters.pieces.columns; ++piece) {
            if (!own) {
                ready.wait();
                ready.release();
            }
            const u32 first = piece * parameters.piece_columns, end = min(first + parameters.piece_columns, parameters.k);
            for (u32 k = first; k < end; k += Shape::depth) {
                const int depth = static_cast<int>(k);
                load_step<Shape>(in, {a, row, depth, slot}, {b, tile.column, depth, 0});
            }
        }
        load_epilogue<Shape>(parameters, {tile.column, row, tile.source}, in);
    }

    __device__ void watch(const Tile& tile, ReadyProducer& ready) const {
        if (tile.source == static_cast<int>(arena.rank)) return;
        for (u32 piece = 0; piece < parameters.pieces.columns; ++piece) {
            this->wait_for_rows(tile.row + Shape::first_row(), piece, tile.source);
            ready.acquire();
            ready.commit();
        }
    }

    __device__ void compute(const Tile& tile, u32 group, InputConsumer<Shape>& in, OutputProducer<Shape>& out) const {
        const struct {
            float scale;
            const char* bias;
            u32 n;
        } terms{parameters.scale, parameters.bias[tile.product], parameters.n[tile.product]};
        // Own scales lie in front of own rows, the others' where these were gathered.
        const bool own = tile.source == static_cast<int>(arena.rank);
        const char* rows = own ? parameters.local : arena.local(this->gathered_memory_of(tile.source));
        const OperandScales a_scales{reinterpret_cast<const float*>(rows), parameters.row_bytes / 4, 1, 0, parameters.m - 1};
        typename Shape::Sum sum;
        multiply_steps<Shape>(sum, group, Shape::steps(parameters.k), in,
                              {a_scales, parameters.b_scales[tile.product], tile.row + Shape::first_row(group), tile.column});
        apply_epilogue<Shape>(sum, terms, group, tile.column, in);
        emit<Shape>(sum, out);
    }

    __device__ void store(const Tile& tile, u32 group, OutputConsumer<Shape>& out) const {
        store_sum<Shape>(out, &parameters.out[tile.product], {tile.column, tile.row + Shape::first_row(group), tile.source});
    }

    // The spare warp of a compute block: what the base says, and then every rank's pieces to `whole`.
    __device__ void communicate(u32 part, u32 parts) const {
        Base::communicate(part, parts);
        if constexpr (keeps) {
            const u64 rank_bytes = u64(parameters.m) * parameters.row_bytes;
            this->each_piece(part, parts, [&](u32 flag, u64 at, const Rows& rows) {
                for (int before = 0; before < W; ++before) {
                    const int source = rank_after<W>(arena.rank, (W - before) % W);
                    const char* from = parameters.local + at;
                    if (before > 0) {
                        this->peers(communicator).wait_slots(source, flag, 1, this->epoch);
                        from = arena.local(this->gathered_memory_of(source) + at);
                    }
                    char* to = parameters.whole + source * rank_bytes + at;
                    this->peers(communicator).store_rows(from, rows, [&](const auto& store) { store(to); });
                }
            });
        }
    }
};

}  // namespace peerlane
