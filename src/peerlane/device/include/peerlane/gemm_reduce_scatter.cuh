// Rows of a sum over ranks: out = rows [rank * local_rows, (rank + 1) * local_rows) of sum over q of A_q B_q.
//
// A finished tile goes from shared memory straight to its owner's slot for this rank, and a flag behind it. The owner computes its own tile
// of the same number about a wave later, and adds the others' to it in fp32, from the next rank before it backwards (a fixed order), before it
// rounds once. So each rank's port is used evenly while it computes, nothing is zeroed, and own tiles never see memory before they are final.
//
// Slots are double-buffered by the launch's epoch. A rank that finishes launch e has had tiles of launch e from every other rank, which had
// therefore finished launch e - 1: the slots of launch e - 1 may be written again in launch e + 1.
//
// Blocks that are resident together can not lock each other. All ranks go through the same sequence of places: place s of every rank is a tile of
// the same number and the same distance to its owner. Only own tiles wait, for tiles of their number, whose places come before theirs. A block
// takes places in ascending order. Now consider, of all tiles on any rank that wait for ever, one of the first place. What it waits for has an
// earlier place on its rank; the block there has nothing that waits for ever before it, so it computes and sends it: the storer that watches
// for a place has stored all that came before.
#pragma once

#include <peerlane/comm.cuh>
#include <peerlane/gemm.cuh>

namespace peerlane {

// Mirrors `peerlane.device.gemm_reduce_scatter.Parameters`.
struct GemmReduceScatterParameters {
    TensorMap a, b;              // as in GemmParameters, third dimension of extent 1
    TensorMap out;               // (n, local_rows, 1)
    TensorMap partials;          // own slots: (n, local_rows, 2 W), third index buffer * W + source, boxes of a block's rows of a tile
    TensorMap slots[max_ranks];  // the same of every other rank, boxes of 64 rows
    GroupedTiles tiles;          // of the rows of one rank
    u32 k, local_rows;
    u32 lag;                     // how many numbers own tiles come behind the others'; the same on all ranks
    u64 flags;                   // in the arena: Peers::flag_bytes(tiles.count() * consumer groups of a cluster)
    u64 epochs;                  // in the arena: u32[max_epoch_blocks]
};

template <class Shape, int W>
struct GemmReduceScatter : Shape {
    using Parameters = GemmReduceScatterParameters;
    const Parameters& parameters;
    const Arena& arena;
    const u32 epoch;

    struct Tile {
        u32 number;  // among the owner's
        int owner, row, column;  // the first row of the owner's rows, the first column
    };

    // By all threads: advances the epoch.
    __device__ GemmReduceScatter(const Parameters& p, const Arena& a)
        : parameters(p), arena(a), epoch(next_epoch(reinterpret_cast<u32*>(a.local(p.epochs)))) {}

    __device__ u32 tile_count() const { return W * parameters.tiles.count(); }
    // Round n is the other ranks' tiles number n, next rank first, and the own one number n - lag. The first `lag` rounds have no own tile, the
    // last ones nothing else.
    __device__ Tile tile(u32 index) const {
        const u32 count = parameters.tiles.count(), lag = parameters.lag < count ? parameters.lag : count;
        const u32 before = lag * (W - 1), behind = before + (count - lag) * W;
        u32 number, distance;
        if (index < before) {
            number = index / (W - 1), distance = 1 + index % (W - 1);
        } else if (index < behind) {
            number = (index - before) / W, distance = 1 + (index - before) % W;
            if (distance < W) number += lag;
        } else {
            number = count - lag + index - behind, distance = W;
        }
        const auto [row, column] = parameters.tiles.at(number);
        return {number, rank_after<W>(arena.rank, distance), row * Shape::rows, column * Shape::columns};
    }

    __device__ void load(const Tile& tile, InputProducer<GemmReduceScatter>& in, ReadyConsumer& ready) const {
        const int own_row = tile.row + Shape::first_row(), row = tile.owner * static_cast<int>(parameters.local_rows) + own_row;
        for (u32 k = 0; k < parameters.k; k += Shape::depth) {
            load_step<Shape>(in, {&parameters.a, row, static_cast<int>(k), 0}, {&parameters.b, tile.column, static_cast<int>(k), 0});
        }
        if (tile.owner != arena.rank) return;
        for (int before = 1; before < W; ++before) {
            const int source = rank_after<W>(arena.rank, W - before);
            ready.wait();
            ready.release();
            for (int column = 0; column < Shape::columns; column += Shape::Partial::columns) {
                in.fill(Shape::Partial::bytes, [&](auto& slot, u64* full) {
                    slot.partial.load(&parameters.partials, full, {tile.column + column, own_row, slot_of(source)});
                });
            }
        }
    }

    // For each other rank's tile of an own one's number.
    __device__ void watch(const Tile& tile, ReadyProducer& ready) const {
        for (int before = 1; before < W && tile.owner == arena.rank; ++before) {
            const int source = rank_after<W>(arena.rank, W - before);
            peers(storer).wait_slots(source, flag_of(tile, 0), Shape::roles.consumer_groups, epoch);
            ready.acquire();
            ready.commit();
        }
    }

    __device__ void compute(const Tile& tile, u32 group, InputConsumer<GemmReduceScatter>& in, OutputProducer<GemmReduceScatter>& out) const {
        typename Shape::Sum sum;
        multiply_steps<Shape>(sum, group, Shape::steps(parameters.k), in);
        for (int before = 1; before < W && tile.owner == arena.rank; ++before) {
#pragma unroll
            for (int column = 0; column < Shape::columns; column += Shape::Partial::columns) {
                sum.add(in.wait().partial, 64 * group, column);
                in.release();
            }
        }
        emit<Shape>(sum, out);
    }

    __device__ void store(const Tile& tile, u32 group, OutputConsumer<GemmReduceScatter>& out) const {
        const int row = tile.row + Shape::first_row(group);
        if (tile.owner == arena.rank) {
            store_sum<Shape>(out, &parameters.out, {tile.column, row, 0});
        } else {
            store_sum<Shape>(out, &parameters.slots[tile.owner], {tile.column, row, slot_of(arena.rank)});
            peers(storer).signal(tile.owner, flag_of(tile, group), epoch);
        }
    }

  private:
    __device__ int slot_of(u32 source) const { return static_cast<int>((epoch & 1) * W + source); }
    __device__ static u32 flag_of(const Tile& tile, u32 group) { return tile.number * (Shape::rows / 64) + Shape::group_of_tile(group); }
    __device__ Peers<W, Warp> peers(Role role) const { return {arena, parameters.flags, {}, role}; }
};

}  // namespace peerlane
