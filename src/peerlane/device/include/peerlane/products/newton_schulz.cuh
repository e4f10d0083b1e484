// The products of a Newton-Schulz iteration X <- a X + (b G + c G^2) X, with G = sum over ranks of X_q X_q^T.
//
// G and its polynomial are symmetric: of their tiles, those with something on or above the diagonal are computed. A tile's pieces of 64 x 64 above
// the diagonal are stored twice, as they are and transposed, pieces on it once, and pieces below it not at all. So each element has one writer.
//
// X is kept in two parts, its rounded value and what rounding has left. Products read the first part; a X needs both, for an iteration amplifies
// what it loses in the directions of small singular values.
#pragma once

#include <peerlane/products/gemm_all_reduce.cuh>

namespace peerlane {

// The tiles of a square result that have something on or above the diagonal, row by row. Mirrors `peerlane.device.products.newton_schulz.TriangleTiles`.
struct TriangleTiles {
    u32 columns, total;             // tiles in a row of the square; tiles in all
    u32 tile_rows, tile_columns;    // size of a tile

    __device__ u32 count() const { return total; }
    __device__ GroupedTiles::Tile at(u32 index) const {
        u32 row = 0, first = 0;
        while (index >= columns - first) index -= columns - first, first = ++row * tile_rows / tile_columns;
        return {static_cast<int>(row), static_cast<int>(first + index)};
    }
};

// Hands a group's rows of a symmetric sum to its storer; `row` and `column` are of the result.
template <class Shape, class Producer>
__device__ inline void emit_mirrored(const typename Shape::Sum& sum, int row, int column, Producer& out) {
#pragma unroll
    for (int j = 0; j < Shape::columns; j += panel_columns) {
        if (column + j < row) continue;
        sum.store(out.acquire(), j);
        out.commit();
        if (column + j == row) continue;
        sum.store_transposed(out.acquire(), j);
        out.commit();
    }
}

// The storer's end of a group's pieces: one is being read while the next is waited for.
template <class Consumer>
class PieceStorer {
  public:
    __device__ explicit PieceStorer(Consumer& out) : out_(out) {}

    // Starts the copies of the next piece; `copies` begins them, for one thread.
    template <class Copies>
    __device__ void next(const Copies& copies) {
        const auto& piece = out_.wait();
        if (ptx::elect_one()) {
            copies(piece);
            ptx::bulk_commit();
            ptx::bulk_wait_read<1>();
        }
        if (held_) out_.release();
        held_ = true;
    }

    // Behind the last piece, if there was any.
    __device__ void finish() {
        if (!held_) return;
        if (ptx::elect_one()) ptx::bulk_wait_read<0>();
        out_.release();
    }

  private:
    Consumer& out_;
    bool held_ = false;  // the slot before is being read
};

// Copies what `emit_mirrored` has handed over; `each` as in `store_sum`.
template <class Shape, class Consumer, class Each>
__device__ inline void store_mirrored(Consumer& out, int row, int column, const Each& each) {
    PieceStorer pieces(out);
    const auto copy = [&](int x, int y) {
        pieces.next([&](const auto& piece) { each([&](const TensorMap* map) { piece.store(map, {x, y, 0}); }); });
    };
#pragma unroll 1
    for (int j = 0; j < Shape::columns; j += panel_columns) {
        if (column + j >= row) copy(column + j, row);
        if (column + j > row) copy(row, column + j);
    }
    pieces.finish();
}

// sum = scale sum + share (the tile of the residual, which comes in `parts` parts)
template <class Shape, int parts, class Parameters, class Consumer>
__device__ inline void add_share(typename Shape::Sum& sum, const Parameters& parameters, u32 group, int column, Consumer& in) {
    if (column >= static_cast<int>(parameters.n)) return;  // never: as in `apply_epilogue`
#pragma unroll
    for (float& value : sum.value) value *= parameters.scale;
#pragma unroll
    for (int part = 0; part < parts; ++part) add_partial<Shape>(sum, group, in, parameters.share);
}

// C = scale A B + share R, of symmetric matrices whose product is symmetric. Parameters have, besides what GemmRoles has,
//   TriangleTiles tiles
//   TensorMap residual   as large as the result, boxes of a block's rows of a tile
//   u32 n                columns of the result
//   float scale, share
template <class Shape, class Parameters>
struct SymmetricProductRoles : GemmRoles<Shape, Parameters> {
    using Base = GemmRoles<Shape, Parameters>;
    using Base::Base;
    using Tile = GroupedTiles::Tile;

    __device__ void load(const Tile& tile, InputProducer<Shape>& in) const {
        Base::load(tile, in);
        load_partial<Shape>(in, &this->parameters.residual, {tile.column * Shape::columns, tile.row * Shape::rows + Shape::first_row(), 0});
    }
    __device__ void compute(const Tile& tile, u32 group, InputConsumer<Shape>& in, OutputProducer<Shape>& out) const {
        typename Shape::Sum sum;
        const int column = tile.column * Shape::columns;
        multiply_steps<Shape>(sum, group, Shape::steps(this->parameters.k), in);
        add_share<Shape, 1>(sum, this->parameters, group, column, in);
        emit_mirrored<Shape>(sum, tile.row * Shape::rows + Shape::first_row(group), column, out);
    }
    __device__ void store(const Tile& tile, u32 group, OutputConsumer<Shape>& out) const {
        const int row = tile.row * Shape::rows + Shape::first_row(group);
        store_mirrored<Shape>(out, row, tile.column * Shape::columns, [&](const auto& store) { store(&this->parameters.c); });
    }
};

// C = scale A B + share (R + R_low), in two parts, or rounded to `Result`, which may be another type of 16 bits than the operands'. Parameters have,
// besides what GemmRoles has,
//   TensorMap residual, residual_low, c_low
//   u32 n
//   float scale, share
template <class Shape, bool in_parts, class Result, class Parameters>
struct PartsProductRoles : GemmRoles<Shape, Parameters> {
    using Base = GemmRoles<Shape, Parameters>;
    using Base::Base;
    using Tile = GroupedTiles::Tile;
    using Output = SharedTile<Result, 64, panel_columns>;

    __device__ void load(const Tile& tile, InputProducer<Shape>& in) const {
        Base::load(tile, in);
        const Place3 at = {tile.column * Shape::columns, tile.row * Shape::rows + Shape::first_row(), 0};
        load_partial<Shape>(in, &this->parameters.residual, at);
        load_partial<Shape>(in, &this->parameters.residual_low, at);
    }
    __device__ void compute(const Tile& tile, u32 group, InputConsumer<Shape>& in, OutputProducer<PartsProductRoles>& out) const {
        typename Shape::Sum sum;
        multiply_steps<Shape>(sum, group, Shape::steps(this->parameters.k), in);
        add_share<Shape, 2>(sum, this->parameters, group, tile.column * Shape::columns, in);
        if constexpr (!in_parts) return emit<Shape>(sum, out);
#pragma unroll
        for (int j = 0; j < Shape::columns; j += panel_columns) {
            sum.store(out.acquire(), j);
            out.commit();
            sum.store_remainder(out.acquire(), j);
            out.commit();
        }
    }
    __device__ void store(const Tile& tile, u32 group, OutputConsumer<PartsProductRoles>& out) const {
        const Place3 at = {tile.column * Shape::columns, tile.row * Shape::rows + Shape::first_row(group), 0};
        if constexpr (!in_parts) return store_sum<Shape>(out, &this->parameters.c, at);
        PieceStorer pieces(out);
#pragma unroll 1
        for (int j = 0; j < Shape::columns; j += panel_columns) {
            pieces.next([&](const auto& piece) { piece.store(&this->parameters.c, {at.x + j, at.y, 0}); });
            pieces.next([&](const auto& piece) { piece.store(&this->parameters.c_low, {at.x + j, at.y, 0}); });
        }
        pieces.finish();
    }
};

// out = sum over q of A_q A_q^T on every rank: GemmAllReduceRoles, whose owners store their tiles mirrored. Parameters have TriangleTiles tiles.
template <class Shape, int W, class Parameters>
struct GramAllReduceRoles : GemmAllReduceRoles<Shape, W, Parameters> {
    using Base = GemmAllReduceRoles<Shape, W, Parameters>;
    using typename Base::Tile;
    using Base::Base;

    __device__ void compute(const Tile& tile, u32 group, InputConsumer<Shape>& in, OutputProducer<Shape>& out) const {
        if (tile.owner < 0) return;
        typename Shape::Sum sum;
        this->add_up(sum, tile, group, in);
        if (tile.owner != this->arena.rank) return emit<Shape>(sum, out);
        emit_mirrored<Shape>(sum, tile.row + Shape::first_row(group), tile.column, out);
    }
    __device__ void store(const Tile& tile, u32 group, OutputConsumer<Shape>& out) const {
        if (tile.owner < 0) return;
        if (tile.owner != this->arena.rank) return this->store_partial(tile, group, out);
        store_mirrored<Shape>(out, tile.row + Shape::first_row(group), tile.column, this->everywhere());
        this->tell(tile, group);
    }
};

}  // namespace peerlane
