// A product whose left operand lies in pieces on all ranks, split along k: out = sum over q of A_q B[q], A_q (m x local_k) on rank q, and
// B[q] the q-th local_k rows of this rank's own B.
//
// What travels are images: 128 rows x 64 k of A as they lie in shared memory for the matrix units, swizzled. A communicator brings an image
// of this rank's A into shared memory by a tensor copy, and sends it to every other rank by bulk copies, with a flag behind it; there it
// lies in one piece, which a loader copies straight into its ring. Who communicates, the launch says: a warp of every block, or blocks that do
// nothing else.
//
// Images are sent in the order in which tiles use them: rows in groups, as many as all blocks work on at a time, and within a group its first
// columns first. Each tile starts with this rank's own A, and goes on with the first columns of every other rank's, then the next ones, waiting
// for what it needs: so all tiles of a group advance as the images come, from all ranks alike.
//
// What is gathered is double-buffered by the launch's epoch. A rank that finishes launch e has had all images of launch e from every other rank,
// which had therefore finished launch e - 1: what launch e - 1 gathered may be written over in launch e + 1.
//
// Communicators wait for nobody, and if they have blocks of their own these are the first ones, so tiles always get what they wait for.
#pragma once

#include <peerlane/comm.cuh>
#include <peerlane/gemm.cuh>

namespace peerlane {

// Mirrors `peerlane.device.all_gather_gemm.Parameters`.
struct AllGatherGemmParameters {
    TensorMap a;         // this rank's: (local_k, m, 1), boxes of a block's rows
    TensorMap images;    // the same, boxes of an image
    TensorMap b;         // (n, local_k, W), or (local_k, n, W)
    TensorMap out;       // (n, m, 1)
    GroupedTiles tiles;
    GroupedTiles sent;   // images, in the order in which they are sent
    u32 m, local_k;
    u32 waited_panels;   // images of a row that a tile waits for at a time
    u32 communicator_blocks;
    u64 gathered;        // in the arena: 2 W times all images of a rank
    u64 flags;           // in the arena: Peers::flag_bytes(sent.count())
    u64 epochs;          // in the arena: u32[max_epoch_blocks]
};

template <class Shape, int W>
struct AllGatherGemm : Shape {
    using Parameters = AllGatherGemmParameters;
    using Tile = GroupedTiles::Tile;
    static constexpr int image_rows = 128;
    using Carried = SharedTile<typename Shape::E, image_rows, panel_columns>;
    static constexpr int carry_slots = 2;
    static_assert(image_rows % Shape::block_rows == 0 && Shape::depth == panel_columns);

    const Parameters& parameters;
    const Arena& arena;
    const u32 epoch;

    // By all threads: advances the epoch.
    __device__ AllGatherGemm(const Parameters& p, const Arena& a)
        : parameters(p), arena(a), epoch(next_epoch(reinterpret_cast<u32*>(a.local(p.epochs)))) {}

    __device__ u32 tile_count() const { return parameters.tiles.count(); }
    __device__ Tile tile(u32 index) const { return parameters.tiles.at(index); }

    __device__ void load(const Tile& tile, InputProducer<AllGatherGemm>& in) const {
        const int row = tile.row * Shape::rows + Shape::first_row(), column = tile.column * Shape::columns;
        for (u32 k = 0; k < parameters.local_k; k += Shape::depth) {
            const int depth = static_cast<int>(k);
            load_step<Shape>(in, {&parameters.a, row, depth, 0}, {&parameters.b, column, depth, arena.rank});
        }
        const u32 panels = parameters.sent.columns;
        for (u32 first = 0; first < panels; first += parameters.waited_panels) {
            const u32 end = min(first + parameters.waited_panels, panels);
            for (int before = 1; before < W; ++before) {
                const int source = rank_after<W>(arena.rank, W - before);
                if (rows_from(row) > 0) peers().wait_slots(source, image_of(row, first), end - first, epoch);
                for (u32 panel = first; panel < end; ++panel) load_gathered(in, source, row, column, panel);
            }
        }
    }

    __device__ void compute(const Tile&, u32 group, InputConsumer<AllGatherGemm>& in, OutputProducer<AllGatherGemm>& out) const {
        typename Shape::Sum sum;
        multiply_steps<Shape>(sum, group, W * parameters.sent.columns, in);
        emit<Shape>(sum, out);
    }

    __device__ void store(const Tile& tile, u32 group, OutputConsumer<AllGatherGemm>& out) const {
        store_sum<Shape>(out, &parameters.out, {tile.column * Shape::columns, tile.row * Shape::rows + Shape::first_row(group), 0});
    }

    // One image is on its way out while the next one comes in.
    __device__ void communicate(u32 part, u32 parts, CarryProducer<AllGatherGemm>& in, CarryConsumer<AllGatherGemm>& out) const {
        const u32 count = parameters.sent.count();
        const auto fetch = [&](u32 index) {
            if (index >= count) return;
            const auto [row, panel] = parameters.sent.at(index);
            in.fill(Carried::bytes, [&](auto& image, u64* full) {
                image.load(&parameters.images, full, {panel * panel_columns, row * image_rows, 0});
            });
        };
        StoreQueue<W, 1> queue(arena, parameters.flags, Warp{}, communicator);
        for (u32 slot = 0; slot < carry_slots; ++slot) fetch(part + slot * parts);
        for (u32 index = part; index < count; index += parts) {
            const auto [row, panel] = parameters.sent.at(index);
            const u32 image = image_of(row * image_rows, panel);
            queue.store_all(place_of(arena.rank, image), &out.wait(), min(rows_from(row * image_rows), image_rows) * row_bytes);
            queue.end_step(Signal{every_rank, image, epoch});
            if (index == part) continue;
            out.release();  // the image before this one has been written
            fetch(index + (carry_slots - 1) * parts);
        }
        queue.flush();
    }

  private:
    static constexpr u32 row_bytes = panel_columns * element_bytes;

    __device__ u32 rows_from(u32 row) const { return row < parameters.m ? parameters.m - row : 0; }
    __device__ u32 image_of(u32 row, u32 panel) const { return row / image_rows * parameters.sent.columns + panel; }
    __device__ u64 place_of(u32 source, u32 image) const {
        return parameters.gathered + (u64((epoch & 1) * W + source) * parameters.sent.count() + image) * Carried::bytes;
    }
    __device__ Peers<W, Warp> peers() const { return {arena, parameters.flags, {}, loader}; }

    // Rows that there are not stay as they were in the slot; nobody sees what becomes of them.
    __device__ void load_gathered(InputProducer<AllGatherGemm>& in, int source, u32 row, int column, u32 panel) const {
        const u32 bytes = min(rows_from(row), Shape::block_rows) * row_bytes;
        const char* image = arena.local(place_of(source, image_of(row, panel)) + row % image_rows * row_bytes);
        in.fill(bytes + Shape::B::bytes, [&](auto& slot, u64* full) {
            if (bytes > 0) ptx::bulk_load(&slot.operands.a, image, bytes, full);
            slot.operands.b.template load_part<Shape::cluster_blocks>(&parameters.b, full, column, panel * panel_columns, source);
        });
    }
};

}  // namespace peerlane
