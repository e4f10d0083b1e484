// A sum over ranks, on every rank: out = sum over q of A_q B_q. owner_sum.cuh has the protocol of the sum: tiles are owned by turns. A finished
// tile goes from its owner to every rank's result, and a flag behind it.
//
// Results lie in the arena, in one buffer. An owner stores a tile at a rank from which it has had its part of the tile: that rank has begun this
// launch, so its stream has done what read the result of the launch before.
//
// Behind its last tile each storer waits for its part of all tiles. Owners wait for nothing but parts, which nobody holds back: so these waits end.
// Behind them every owner has read its slots, so one buffer of them will do.
#pragma once

#include <peerlane/products/owner_sum.cuh>

namespace peerlane {

// Parameters have, besides those of OwnerSum,
//   TensorMap out[max_ranks]  of every rank: (n, m, 1)
//   GroupedTiles tiles        of the product; tile t is number t / W of rank t % W
// Slots are (columns of a tile, numbers * rows of a tile, W). There is a second flag for each number and 64 rows, behind all first ones.
template <class Shape, int W, class Parameters>
struct GemmAllReduceRoles : OwnerSum<Shape, W, Parameters, 1> {
    using Base = OwnerSum<Shape, W, Parameters, 1>;
    using typename Base::Tile;
    using Base::Base;

    __device__ u32 numbers() const { return (this->parameters.tiles.count() + W - 1) / W; }
    __device__ u32 tile_count() const { return W * numbers(); }
    __device__ Tile tile(u32 index) const {
        const auto [number, owner] = this->turn(index, numbers());
        if (number * W + owner >= this->parameters.tiles.count()) return {number, -1};
        const auto place = this->parameters.tiles.at(number * W + owner);
        const int row = place.row * Shape::rows;
        return {number, owner, row, place.column * Shape::columns, row, static_cast<int>(number) * Shape::rows, 0};
    }

    __device__ void store(const Tile& tile, u32 group, OutputConsumer<Shape>& out) const {
        if (tile.owner < 0) return;
        if (tile.owner != this->arena.rank) return this->store_partial(tile, group, out);
        store_sum<Shape>(out, {tile.column, tile.row + Shape::first_row(group), 0}, everywhere());
        tell(tile, group);
    }
    // What copies a piece to all ranks' results, this one's first.
    __device__ auto everywhere() const {
        return [this](const auto& store) {
            for (int k = 0; k < W; ++k) store(&this->parameters.out[rank_after<W>(this->arena.rank, k)]);
        };
    }
    // All ranks that this group's rows of an own tile have come.
    __device__ void tell(const Tile& tile, u32 group) const {
        this->peers(storer).signal_all(finished() + Base::flag_of(tile, group), this->epoch);
    }

    // Until every other owner's tiles have come.
    __device__ void finish(u32 part, u32 parts) const {
        for (int k = 1; k < W; ++k) {
            const int owner = rank_after<W>(this->arena.rank, k);
            const u32 owned = (this->parameters.tiles.count() + W - 1 - owner) / W;
            const auto [first, end] = part_of(owned * Base::tile_flags, part, parts);
            this->peers(storer).wait_slots(owner, finished() + first, end - first, this->epoch);
        }
    }

  private:
    __device__ u32 finished() const { return numbers() * Base::tile_flags; }
};

}  // namespace peerlane
