// Products of groups of rows with a matrix each: rows [ends[g - 1], ends[g]) of C = the same rows of A times B[g]. The device alone knows the ends.
//
// B[g] lies as layers have their weights, (n x k). A tile belongs to one group. Its last rows may be those of the next group: they are multiplied too,
// and not stored.
#pragma once

#include <peerlane/products/gemm.cuh>
#include <peerlane/peers/team.cuh>

namespace peerlane {

// A tile of a group, in tiles from the group's first row on.
struct GroupTile {
    u32 group;
    int row, column;
};

// Tile `index` in the order of groups; tiles[g]: rows of tiles of all groups before g, one more than there are groups.
__device__ inline GroupTile group_tile(const u32* tiles, u32 columns, u32 index) {
    u32 group = 0;
    while (index >= tiles[group + 1] * columns) ++group;
    const u32 rows = tiles[group + 1] - tiles[group];
    const auto place = GroupedTiles{rows, columns, rows < 8 ? rows : 8}.at(index - tiles[group] * columns);
    return {group, place.row, place.column};
}

constexpr u32 most_products = 511;

// Parameters have
//   TensorMap a, b, c   (k, rows, 1); (k, n, groups); (n, rows, 1) with boxes of 64 x 64
//   const int* ends     groups
//   char* out           what `c` describes, its rows `row_bytes` apart
//   u32 groups, n, k, row_bytes
//   OperandScales a_scales, b_scales
template <class Shape, class Parameters>
struct GroupedGemmRoles : Shape {
    using Tile = GroupTile;
    const Parameters& parameters;
    u32 (&tiles)[most_products + 1];

    // By all threads; `shared` is shared memory.
    __device__ GroupedGemmRoles(const Parameters& p, u32 (&shared)[most_products + 1]) : parameters(p), tiles(shared) {
        for (u32 g = threadIdx.x; g <= parameters.groups; g += blockDim.x) {
            u32 sum = 0;
            for (u32 before = 0; before < g; ++before) sum += (end(before) - begin(before) + Shape::rows - 1) / Shape::rows;
            tiles[g] = sum;
        }
        __syncthreads();
    }

    __device__ u32 tile_count() const { return tiles[parameters.groups] * columns(); }
    __device__ Tile tile(u32 index) const { return group_tile(tiles, columns(), index); }

    __device__ void load(const Tile& tile, InputProducer<Shape>& in) const {
        const int row = begin(tile.group) + tile.row * Shape::rows + Shape::first_row();
        for (u32 k = 0; k < parameters.k; k += Shape::depth) {
            load_step<Shape>(in, {&parameters.a, row, static_cast<int>(k), 0},
                             {&parameters.b, tile.column * Shape::columns, static_cast<int>(k), static_cast<int>(tile.group)});
        }
    }

    __device__ void compute(const Tile& tile, u32 group, InputConsumer<Shape>& in, OutputProducer<Shape>& out) const {
        const int row = begin(tile.group) + tile.row * Shape::rows + Shape::first_row(group), column = tile.column * Shape::columns;
        typename Shape::Sum sum;
        multiply_steps<Shape>(sum, group, Shape::steps(parameters.k), in,
                              {parameters.a_scales, parameters.b_scales.matrix(tile.group), row, column});
        emit<Shape>(sum, out);
    }

    __device__ void store(const Tile& tile, u32 group, OutputConsumer<Shape>& out) const {
        const int row = begin(tile.group) + tile.row * Shape::rows + Shape::first_row(group), rows = end(tile.group) - row;
        if (rows >= 64) {
            store_sum<Shape>(out, &parameters.c, {tile.column * Shape::columns, row, 0});
            return;
        }
        // What the group has of 64 rows, by ordinary stores.
        for (int first = 0; first < Shape::columns; first += panel_columns) {
            const auto& chunk = out.wait();
            const u32 column = tile.column * Shape::columns + first;
            for (int i = Warp{}.thread(); i < rows * 8; i += warp_threads) {
                if (column + i % 8 * 8 >= parameters.n) continue;  // rows are as long as a multiple of 8 elements
                char* to = parameters.out + u64(row + i / 8) * parameters.row_bytes + (column + i % 8 * 8) * element_bytes;
                *reinterpret_cast<Vec16*>(to) = *reinterpret_cast<const Vec16*>(chunk.data + chunk.offset(i / 8, i % 8 * 8));
            }
            out.release();
        }
    }

  private:
    __device__ int begin(u32 group) const { return group == 0 ? 0 : parameters.ends[group - 1]; }
    __device__ int end(u32 group) const { return parameters.ends[group]; }
    __device__ u32 columns() const { return (parameters.n + Shape::columns - 1) / Shape::columns; }
};

}  // namespace peerlane
