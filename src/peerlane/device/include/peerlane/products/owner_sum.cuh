// Sums over ranks of products, tile by tile at the tile's owner: what GEMM + reduce-scatter and GEMM + all-reduce share.
//
// A finished tile goes from shared memory straight to its owner's slot for this rank, and a flag behind it. The owner computes its own tile
// of the same number about a wave later, and adds the others' to it in fp32, from the next rank before it backwards (a fixed order), before it
// rounds once. So each rank's port is used evenly while it computes, nothing is zeroed, and own tiles never see memory before they are final.
// A batch-invariant sum goes in rank order, and the own tile is rounded first, as the others' are: the bits do not depend on the owner.
//
// With two buffers slots take turns by the launch's epoch. A rank that finishes launch e has had tiles of launch e from every other rank, which had
// therefore finished launch e - 1: the slots of launch e - 1 may be written again in launch e + 1. One buffer will do if no rank finishes a launch
// before every owner has read its slots. Launches of other sizes may come between these (`products/capacity.py`).
//
// Blocks that are resident together can not lock each other. All ranks go through the same sequence of places: place s of every rank is a tile of
// the same number and the same distance to its owner. Only own tiles wait, for tiles of their number, whose places come before theirs. A block
// takes places in ascending order. Now consider, of all tiles on any rank that wait for ever, one of the first place. What it waits for has an
// earlier place on its rank; the block there has nothing that waits for ever before it, so it computes and sends it: the storer that watches
// for a place has stored all that came before.
#pragma once

#include <peerlane/comm.cuh>
#include <peerlane/products/gemm.cuh>

namespace peerlane {

// Parameters have
//   TensorMap a, b              as GemmRoles has them
//   TensorMap partials          own slots, third index the source (of the odd launches' buffer W + source), boxes of a block's rows of a tile
//   TensorMap slots[max_ranks]  the same of every other rank, boxes of 64 rows
//   u32 k, lag                  k of this rank; how many numbers own tiles come behind the others', the same on all ranks
//   OperandScales a_scales, b_scales
//   u64 flags, epochs           in the arena: Peers::flag_bytes of a flag for each number and 64 rows of a tile; u32[max_epoch_blocks]
// and what the epilogue has.
template <class Shape, int W, class Parameters, int buffers>
struct OwnerSum : Shape {
    const Parameters& parameters;
    const Arena& arena;
    const u32 epoch;

    struct Tile {
        u32 number;                  // among the owner's
        int owner;                   // -1: no such tile
        int row, column;             // of the product
        int result_row;              // of what the owner has as result
        int slot_row, slot_column;   // of the owner's slots
    };

    // By all threads: advances the epoch.
    __device__ OwnerSum(const Parameters& p, const Arena& a)
        : parameters(p), arena(a), epoch(next_epoch(reinterpret_cast<u32*>(a.local(p.epochs)))) {}

    // Whose tile comes at a place of the sequence, where each rank owns `count`. Round n is the other ranks' tiles number n, next rank first, and the
    // own one number n - lag. The first `lag` rounds have no own tile, the last ones nothing else.
    struct Turn {
        u32 number;
        int owner;
    };
    __device__ Turn turn(u32 index, u32 count) const {
        const u32 lag = parameters.lag < count ? parameters.lag : count;
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
        return {number, rank_after<W>(arena.rank, distance)};
    }

    __device__ void load(const Tile& tile, InputProducer<Shape>& in, ReadyConsumer& ready) const {
        if (tile.owner < 0) return;
        const int row = tile.row + Shape::first_row();
        load_steps<Shape>(parameters, row, tile.column, in);
        if (tile.owner != arena.rank) return;
        for (int before = 1; before < W; ++before) {
            ready.wait();
            ready.release();
            const int source = source_of(before);
            load_partial<Shape>(in, &parameters.partials, {tile.slot_column, tile.slot_row + Shape::first_row(), slot_of(source)});
        }
        load_epilogue<Shape>(parameters, {tile.column, tile.result_row + Shape::first_row(), 0}, in);
    }

    // For each other rank's tile of an own one's number.
    __device__ void watch(const Tile& tile, ReadyProducer& ready) const {
        for (int before = 1; before < W && tile.owner == arena.rank; ++before) {
            const int source = source_of(before);
            peers(storer).wait_slots(source, flag_of(tile, 0), Shape::roles.consumer_groups, epoch);
            ready.acquire();
            ready.commit();
        }
    }

    __device__ void compute(const Tile& tile, u32 group, InputConsumer<Shape>& in, OutputProducer<Shape>& out) const {
        if (tile.owner < 0) return;
        typename Shape::Sum sum;
        add_up(sum, tile, group, in);
        emit<Shape>(sum, out);
    }

    // This rank's part of a tile; of an own tile, all ranks' sum and its epilogue.
    __device__ void add_up(typename Shape::Sum& sum, const Tile& tile, u32 group, InputConsumer<Shape>& in) const {
        const int row = tile.row + Shape::first_row(group);
        multiply_steps<Shape>(sum, group, Shape::steps(parameters.k), in, {parameters.a_scales, parameters.b_scales, row, tile.column});
        if (tile.owner == arena.rank) {
            if constexpr (Shape::Epilogue::batch_invariant) {
                add_in_rank_order(sum, group, in);
            } else {
                for (int before = 1; before < W; ++before) add_partial<Shape>(sum, group, in);
            }
            apply_epilogue<Shape>(sum, parameters, group, tile.column, in);
        }
    }

    // All ranks' parts, the own one rounded as the others were: the same bits on any owner.
    __device__ void add_in_rank_order(typename Shape::Sum& sum, u32 group, InputConsumer<Shape>& in) const {
        constexpr int pairs = Shape::columns / 4;
        u32 own[pairs];
#pragma unroll
        for (int i = 0; i < pairs; ++i) {
            own[i] = Shape::E::narrow(sum.value + 2 * i);
            sum.value[2 * i] = sum.value[2 * i + 1] = 0;
        }
#pragma unroll 1
        for (u32 q = 0; q < W; ++q) {
            if (q != arena.rank) {
                add_partial<Shape>(sum, group, in);
                continue;
            }
#pragma unroll
            for (int i = 0; i < pairs; ++i) {
                float part[2];
                Shape::E::widen(own[i], part);
                sum.value[2 * i] += part[0], sum.value[2 * i + 1] += part[1];
            }
        }
    }

    // Another rank's tile, to its owner.
    __device__ void store_partial(const Tile& tile, u32 group, OutputConsumer<Shape>& out) const {
        store_sum<Shape>(out, &parameters.slots[tile.owner], {tile.slot_column, tile.slot_row + Shape::first_row(group), slot_of(arena.rank)});
        peers(storer).signal(tile.owner, flag_of(tile, group), epoch);
    }

    // Whose part comes next, of the others: from the next rank before this one backwards, or in rank order.
    __device__ int source_of(int before) const {
        if constexpr (Shape::Epilogue::batch_invariant) return before - (before > static_cast<int>(arena.rank) ? 0 : 1);
        return rank_after<W>(arena.rank, W - before);
    }
    static constexpr u32 tile_flags = Shape::rows / 64;
    __device__ static u32 flag_of(const Tile& tile, u32 group) { return tile.number * tile_flags + Shape::group_of_tile(group); }
    __device__ Peers<W, Warp> peers(Role role) const { return {arena, parameters.flags, {}, role}; }
    __device__ int slot_of(u32 source) const { return static_cast<int>(epoch % buffers * W + source); }
};

}  // namespace peerlane
