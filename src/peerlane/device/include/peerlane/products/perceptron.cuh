// Two layers of a perceptron in one launch, for a left operand that lies in columns on all ranks: out = f([A_0 | A_1 | ...] B) C, where rank q has
// a part of A_q for every rank. For sizes whose first product is one wave of tiles.
//
// Tiles of the first product come first. Their blocks are all resident, and raise a flag of their own rank for every 64 rows of a tile that they
// have stored. Tiles of the second product wait for the flags of their rows. What is gathered is handled as in all_gather_gemm.cuh.
#pragma once

#include <peerlane/products/all_gather_gemm.cuh>

namespace peerlane {

// Parameters have those of AllGatherGemmRoles, of the first product, whose result (`out`, n columns) is the hidden rows; and
//   TensorMap hidden, second_b, second_out   of the second product
//   GroupedTiles second_tiles
//   u64 done                                 in the arena: Peers::flag_bytes of a flag for each 64 rows of the first product's tiles
template <class Shape, int W, class Parameters>
struct PerceptronRoles : AllGatherGemmRoles<Shape, W, true, Parameters> {
    using First = AllGatherGemmRoles<Shape, W, true, Parameters>;
    using First::parameters;
    struct Tile : GroupedTiles::Tile {
        bool second;
    };

    // By all threads: advances the epoch.
    __device__ PerceptronRoles(const Parameters& p, const Arena& a) : First(p, a) {}

    __device__ u32 tile_count() const { return First::tile_count() + parameters.second_tiles.count(); }
    __device__ Tile tile(u32 index) const {
        const u32 before = First::tile_count();
        if (index < before) return {First::tile(index), false};
        return {parameters.second_tiles.at(index - before), true};
    }

    __device__ void load(const Tile& tile, InputProducer<PerceptronRoles>& in, ReadyConsumer& ready) const {
        if (!tile.second) return First::load(tile, in, ready);
        ready.wait();
        ready.release();
        for (u32 k = 0; k < parameters.n; k += Shape::depth) {
            const int depth = static_cast<int>(k);
            load_step<Shape>(in, {&parameters.hidden, tile.row * Shape::rows, depth, 0},
                             {&parameters.second_b, tile.column * Shape::columns, depth, 0});
        }
    }

    __device__ void watch(const Tile& tile, ReadyProducer& ready) const {
        if (tile.second) {
            const u32 stored = Shape::roles.consumer_groups * parameters.tiles.columns;
            flags(parameters.done).wait_slots(this->arena.rank, done_flag(tile.row, 0, 0), stored, this->epoch);
            ready.acquire();
            ready.commit();
        } else if (parameters.pieces.columns > 1) {
            First::watch(tile, ready);
        } else {
            // All ranks' pieces of the rows at a time: a wait takes longer than what is computed between two of them.
            const u32 row = tile.row * Shape::rows, rows = min(parameters.m - row, u32(Shape::rows)), each = parameters.piece_rows;
            flags(parameters.flags).wait_all_slots(row / each, (rows + each - 1) / each, this->epoch);
            for (int before = 1; before < W; ++before) {
                ready.acquire();
                ready.commit();
            }
        }
    }

    __device__ void compute(const Tile& tile, u32 group, InputConsumer<PerceptronRoles>& in, OutputProducer<PerceptronRoles>& out) const {
        typename Shape::Sum sum;
        multiply_steps<Shape>(sum, group, tile.second ? Shape::steps(parameters.n) : W * Shape::steps(parameters.k), in);
        if (!tile.second) apply_epilogue<Shape>(sum, parameters, group, tile.column * Shape::columns, in);
        emit<Shape>(sum, out);
    }

    __device__ void store(const Tile& tile, u32 group, OutputConsumer<PerceptronRoles>& out) const {
        const TensorMap* map = tile.second ? &parameters.second_out : &parameters.out;
        store_sum<Shape>(out, map, {tile.column * Shape::columns, tile.row * Shape::rows + Shape::first_row(group), 0});
        if (!tile.second) flags(parameters.done).signal(this->arena.rank, done_flag(tile.row, group, tile.column), this->epoch);
    }

  private:
    static_assert(Shape::cluster_blocks == 1);
    __device__ Peers<W, Warp> flags(u64 at) const { return {this->arena, at, {}, storer}; }
    __device__ u32 done_flag(int row, u32 group, int column) const {
        return (row * Shape::roles.consumer_groups + group) * parameters.tiles.columns + column;
    }
};

}  // namespace peerlane
