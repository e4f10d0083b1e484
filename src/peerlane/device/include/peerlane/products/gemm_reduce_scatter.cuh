// Rows of a sum over ranks: out = rows [rank * local_rows, (rank + 1) * local_rows) of sum over q of A_q B_q. owner_sum.cuh has the protocol: a rank
// owns the tiles of its rows.
#pragma once

#include <peerlane/products/owner_sum.cuh>

namespace peerlane {

// Parameters have, besides those of OwnerSum,
//   TensorMap out       (n, local_rows, 1)
//   GroupedTiles tiles  of the rows of one rank
//   u32 local_rows
// Slots are (n, local_rows, 2 W).
template <class Shape, int W, class Parameters>
struct GemmReduceScatterRoles : OwnerSum<Shape, W, Parameters, 2> {
    using Base = OwnerSum<Shape, W, Parameters, 2>;
    using typename Base::Tile;
    using Base::Base;

    __device__ u32 tile_count() const { return W * this->parameters.tiles.count(); }
    __device__ Tile tile(u32 index) const {
        const auto [number, owner] = this->turn(index, this->parameters.tiles.count());
        const auto place = this->parameters.tiles.at(number);
        const int row = place.row * Shape::rows, column = place.column * Shape::columns;
        return {number, owner, owner * static_cast<int>(this->parameters.local_rows) + row, column, row, row, column};
    }

    __device__ void store(const Tile& tile, u32 group, OutputConsumer<Shape>& out) const {
        if (tile.owner != this->arena.rank) return this->store_partial(tile, group, out);
        store_sum<Shape>(out, &this->parameters.out, {tile.column, tile.result_row + Shape::first_row(group), 0});
    }
};

}  // namespace peerlane
