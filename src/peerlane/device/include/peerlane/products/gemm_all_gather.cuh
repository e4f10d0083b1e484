// Columns of a product to all: out = [A_0 B_0 | A_1 B_1 | ...] on every rank. A finished tile goes from shared memory straight to every rank's
// result, and a flag behind it.
//
// Results lie in the arena, in one buffer. A rank stores at a peer when the peer has begun the same launch: its stream has then done what read the
// result of the launch before. The first block says so as it begins; storers hear of it before their first tile, while that is computed.
//
// Storers wait for nothing else before their last tile, so all tiles come; behind it each waits for its part of the others' tiles.
#pragma once

#include <peerlane/comm.cuh>
#include <peerlane/products/gemm.cuh>

namespace peerlane {

// Parameters have
//   TensorMap a, b            as GemmRoles has them
//   TensorMap out[max_ranks]  of every rank: (n, m, W), third index the source
//   GroupedTiles tiles        of this rank's product, the same on all
//   u32 k
//   u64 flags, epochs         in the arena: Peers::flag_bytes(1 + tiles.count() * 64 rows of a tile); u32[max_epoch_blocks]
// and what the epilogue has.
template <class Shape, int W, class Parameters>
struct GemmAllGatherRoles : Shape {
    const Parameters& parameters;
    const Arena& arena;
    const u32 epoch;

    struct Tile {
        u32 index;
        int row, column;
    };

    // By all threads: advances the epoch, and tells the others of it.
    __device__ GemmAllGatherRoles(const Parameters& p, const Arena& a)
        : parameters(p), arena(a), epoch(next_epoch(reinterpret_cast<u32*>(a.local(p.epochs)))) {
        if (blockIdx.x == 0) Peers<W>(arena, parameters.flags).acknowledge_all(0, epoch);
    }

    __device__ u32 tile_count() const { return parameters.tiles.count(); }
    __device__ Tile tile(u32 index) const {
        const auto [row, column] = parameters.tiles.at(index);
        return {index, row * Shape::rows, column * Shape::columns};
    }

    __device__ void load(const Tile& tile, InputProducer<Shape>& in) const {
        const int row = tile.row + Shape::first_row();
        for (u32 k = 0; k < parameters.k; k += Shape::depth) {
            load_step<Shape>(in, {&parameters.a, row, static_cast<int>(k), 0}, {&parameters.b, tile.column, static_cast<int>(k), 0});
        }
        load_epilogue<Shape>(parameters, {tile.column, row, 0}, in);
    }

    __device__ void compute(const Tile& tile, u32 group, InputConsumer<Shape>& in, OutputProducer<Shape>& out) const {
        typename Shape::Sum sum;
        multiply_steps<Shape>(sum, group, Shape::steps(parameters.k), in);
        apply_epilogue<Shape>(sum, parameters, group, tile.column, in);
        emit<Shape>(sum, out);
    }

    __device__ void store(const Tile& tile, u32 group, OutputConsumer<Shape>& out) const {
        const Peers<W, Warp> peers(arena, parameters.flags, {}, storer);
        if (tile.index < gridDim.x / Shape::cluster_blocks) peers.wait_all(0, epoch);
        const Place3 place{tile.column, tile.row + Shape::first_row(group), static_cast<int>(arena.rank)};
        store_sum<Shape>(out, place, [&](const auto& store) {
            for (int k = 0; k < W; ++k) store(&parameters.out[rank_after<W>(arena.rank, k)]);
        });
        peers.signal_all(1 + tile.index * tile_flags + Shape::group_of_tile(group), epoch);
    }

    // Until every other rank's tiles have come.
    __device__ void finish(u32 part, u32 parts) const {
        const auto [first, end] = part_of(parameters.tiles.count() * tile_flags, part, parts);
        for (int k = 1; k < W; ++k) {
            Peers<W, Warp>(arena, parameters.flags, {}, storer).wait_slots(rank_after<W>(arena.rank, k), 1 + first, end - first, epoch);
        }
    }

  private:
    static constexpr u32 tile_flags = Shape::rows / 64;
};

}  // namespace peerlane
