// Scales of operands in e4m3: where they lie, and how a tile of a product gets them.
//
// An operand has a scale for the whole of it, for each row (of B each column), or for blocks of 128 k: of A for each row, of B for 128 columns.
// Scales of blocks are part of the sum: each block's product is added to it, times the two scales, in fp32. Others are applied to the sum.
#pragma once

#include <peerlane/ptx/mma.cuh>
#include <peerlane/peers/words.cuh>

namespace peerlane {

// `none`: operands of 16 bits. `fp8`: sums grow in the matrix units, which keep about 14 bits. `fp8_promoted`: they grow in fp32 from one 128 k to the
// next. `fp8_blocks`: so do they, with scales of blocks.
enum class Scaling { none, fp8, fp8_promoted, fp8_blocks };

constexpr int scale_block = 128;

// That of row (or column, or 128 columns) `outer` and block `k` of the operand's matrix `g` is at[outer * outer_stride + k * block_stride +
// g * matrix_stride]. Behind the last row they are as that one's, so that ragged tiles read nothing else.
struct OperandScales {
    const float* at;
    u32 outer_stride, block_stride, matrix_stride, last;

    __device__ const float* of(u32 outer) const { return at + u64(outer < last ? outer : last) * outer_stride; }
    __device__ OperandScales matrix(u32 g) const { return {at + u64(g) * matrix_stride, outer_stride, block_stride, matrix_stride, last}; }
};

// Those of 64 rows of a tile, from `row` of A on, and of its columns from `column` of B on.
struct TileScales {
    OperandScales a, b;
    int row, column;

    // Of the calling thread's rows, `half` 0 or 1 (mma.cuh).
    __device__ const float* of_row(int half) const { return a.of(row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * half); }
};

// What a thread needs for the product of one block of k, with `parts` blocks of columns.
template <Scaling scaling, int parts>
struct StepScales {
    float factor[parts][2];

    __device__ void load(const TileScales& scales, u32 step) {
        if constexpr (scaling == Scaling::fp8_blocks) {
            const u32 at = step * scales.a.block_stride;
            const float upper = scales.of_row(0)[at], lower = scales.of_row(1)[at];
#pragma unroll
            for (int p = 0; p < parts; ++p) {
                const float of_columns = scales.b.of(scales.column / scale_block + p)[step * scales.b.block_stride];
                factor[p][0] = upper * of_columns, factor[p][1] = lower * of_columns;
            }
        }
    }

    // sum += the block's product.
    template <int count>
    __device__ void add(const float (&product)[count], float* sum, int part) const {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if constexpr (scaling == Scaling::fp8_blocks) {
                sum[i] += factor[part][i / 2 % 2] * product[i];
            } else {
                sum[i] += product[i];
            }
        }
    }
};

struct alignas(8) ScalePair {
    float left, right;
};

// A sum of 64 x `columns` times the scales of its rows and columns.
template <int columns>
__device__ inline void apply_scales(float (&sum)[columns / 2], const TileScales& scales) {
    if (scales.row < 0) return;  // never: but without a branch here the compiler spills half of the sum
    float of_row[2] = {*scales.of_row(0), *scales.of_row(1)};
    if (scales.b.outer_stride == 0) {
        const float one = *scales.b.at;
        of_row[0] *= one, of_row[1] *= one;
#pragma unroll
        for (int i = 0; i < columns / 2; ++i) sum[i] *= of_row[i / 2 % 2];
        return;
    }
    const auto apply = [&](const auto& pair_of) {
#pragma unroll
        for (int j = 0; j < columns / 8; ++j) {
            const ScalePair pair = pair_of(static_cast<u32>(scales.column + 8 * j + threadIdx.x % 4 * 2));
            sum[4 * j] *= of_row[0] * pair.left, sum[4 * j + 1] *= of_row[0] * pair.right;
            sum[4 * j + 2] *= of_row[1] * pair.left, sum[4 * j + 3] *= of_row[1] * pair.right;
        }
    };
    // Neighbours at once, where they lie so.
    if (scales.b.outer_stride == 1 && scales.b.last % 2 == 1 && aligned_for<ScalePair>(scales.b.at)) {
        apply([&](u32 column) { return *reinterpret_cast<const ScalePair*>(scales.b.at + (column < scales.b.last ? column : scales.b.last - 1)); });
    } else {
        apply([&](u32 column) { return ScalePair{*scales.b.of(column), *scales.b.of(column + 1)}; });
    }
}

}  // namespace peerlane
