// A product whose left operand lies in pieces on all ranks, split along k: out = sum over q of A_q B[q], A_q (m x k) on rank q, and
// B[q] the q-th k rows of this rank's own B. With `scatters` rank q has a part of A_q for every rank, W m rows: each gets its own m rows of all,
// an all-to-all in place of the all-gather.
//
// gathered_pieces.cuh says how A is pushed. Each tile starts with this rank's own A, and goes on with the first columns of every other
// rank's, then the next ones, waiting for what it needs: so all tiles of a group advance as the pieces come, from all ranks alike.
#pragma once

#include <peerlane/products/gathered_pieces.cuh>

namespace peerlane {

// Parameters have, besides those of GatheredPieces,
//   TensorMap a          this rank's: (k, m, 1), or (k, m, W)
//   TensorMap gathered   what `gathered_memory` holds
//   TensorMap b          (n, k, W), or (k, n, W)
//   TensorMap out        (n, m, 1)
//   GroupedTiles tiles
// and what the epilogue has.
template <class Shape, int W, bool scatters, class Parameters>
struct AllGatherGemmRoles : GatheredPieces<Shape, W, scatters, Parameters> {
    using Base = GatheredPieces<Shape, W, scatters, Parameters>;
    using Tile = GroupedTiles::Tile;
    using Base::arena;
    using Base::Base;
    using Base::parameters;

    __device__ u32 tile_count() const { return parameters.tiles.count(); }
    __device__ Tile tile(u32 index) const { return parameters.tiles.at(index); }

    __device__ void load(const Tile& tile, InputProducer<AllGatherGemmRoles>& in, ReadyConsumer& ready) const {
        const int row = tile.row * Shape::rows + Shape::first_row(), column = tile.column * Shape::columns;
        for (u32 k = 0; k < parameters.k; k += Shape::depth) {
            const int depth = static_cast<int>(k);
            load_step<Shape>(in, {&parameters.a, row, depth, scatters ? static_cast<int>(arena.rank) : 0}, {&parameters.b, column, depth, arena.rank});
        }
        for (u32 piece = 0; piece < parameters.pieces.columns; ++piece) {
            const u32 first = piece * parameters.piece_columns;
            const u32 end = min(first + parameters.piece_columns, parameters.k);
            for (int before = 1; before < W; ++before) {
                const int source = rank_after<W>(arena.rank, W - before);
                ready.wait();
                ready.release();
                for (u32 k = first; k < end; k += Shape::depth) {
                    const int depth = static_cast<int>(k);
                    load_step<Shape>(in, {&parameters.gathered, row, depth, this->slot_of(source)}, {&parameters.b, column, depth, source});
                }
            }
        }
        load_epilogue<Shape>(parameters, {column, row, 0}, in);
    }

    // For the pieces that `load` uses, in that order.
    __device__ void watch(const Tile& tile, ReadyProducer& ready) const {
        const int row = tile.row * Shape::rows + Shape::first_row();
        for (u32 piece = 0; piece < parameters.pieces.columns; ++piece) {
            for (int before = 1; before < W; ++before) {
                this->wait_for_rows(row, piece, rank_after<W>(arena.rank, W - before));
                ready.acquire();
                ready.commit();
            }
        }
    }

    __device__ void compute(const Tile& tile, u32 group, InputConsumer<AllGatherGemmRoles>& in, OutputProducer<AllGatherGemmRoles>& out) const {
        typename Shape::Sum sum;
        multiply_steps<Shape>(sum, group, W * Shape::steps(parameters.k), in);
        apply_epilogue<Shape>(sum, parameters, group, tile.column * Shape::columns, in);
        emit<Shape>(sum, out);
    }

    __device__ void store(const Tile& tile, u32 group, OutputConsumer<AllGatherGemmRoles>& out) const {
        store_sum<Shape>(out, &parameters.out, {tile.column * Shape::columns, tile.row * Shape::rows + Shape::first_row(group), 0});
    }
};

}  // namespace peerlane
