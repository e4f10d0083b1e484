// Rows in e4m3 with scales, made where rows are made: the operands of scales.cuh. A scale makes the largest number of its part 448.
//
// With `gated` a row of 2 n numbers gives n: silu of its first half times its second one, which is what lies between two products of a layer.
#pragma once

#include <peerlane/rows.cuh>
#include <peerlane/products/scales.cuh>

namespace peerlane {

constexpr float largest_code = 448, smallest_scale_of_codes = 1e-12f;

__device__ inline float scale_of(float most) { return fmaxf(most / largest_code, smallest_scale_of_codes); }

__device__ inline float largest_of(const float (&value)[row_lanes]) {
    float most = 0;
#pragma unroll
    for (float v : value) most = fmaxf(most, fabsf(v));
    return most;
}

// The numbers over their scale, from `column` on of a row of codes.
__device__ inline void store_codes(char* codes, u32 column, u32 columns, float (&value)[row_lanes], float scale) {
#pragma unroll
    for (float& v : value) v /= scale;
    RowOf<Float8E4M3>(codes, 0, columns).store(column, value);
}

// Rows by warps; a scale for each, or with `blocks` for each 128 of its numbers. Parameters have
//   const char* x                           (rows, columns), of E; with `gated` (rows, 2 columns)
//   char* codes, float* scales              rows of them, code_stride bytes and scale_stride floats apart
//   u32 rows, columns, code_stride, scale_stride
template <class E, bool gated, bool blocks, class Parameters>
__device__ inline void quantise_rows(const Parameters& args) {
    each_row(args.rows, [&](u32 row) {
        const RowOf<E> from(args.x, row, args.columns * (gated ? 2 : 1));
        char* codes = args.codes + u64(row) * args.code_stride;
        float* scales = args.scales + u64(row) * args.scale_stride;
        // What a lane has from `column` on: nothing behind the end.
        const auto load = [&](u32 column, float (&value)[row_lanes]) {
#pragma unroll
            for (float& v : value) v = 0;
            if (column >= args.columns) return;
            from.load(column, value);
            if constexpr (gated) {
                float up[row_lanes];
                from.load(args.columns + column, up);
#pragma unroll
                for (int i = 0; i < row_lanes; ++i) value[i] = value[i] / (1 + expf(-value[i])) * up[i];
            }
        };
        constexpr u32 step = row_lanes * warp_threads;
        float value[row_lanes], scale = 0;
        if constexpr (!blocks) {
            float most = 0;
            for (u32 first = 0; first < args.columns; first += step) {
                load(first + Warp{}.thread() * row_lanes, value);
                most = fmaxf(most, largest_of(value));
            }
            scale = scale_of(warp_max(most));
            if (Warp{}.thread() == 0) scales[0] = scale;
        }
        for (u32 first = 0; first < args.columns; first += step) {
            const u32 column = first + Warp{}.thread() * row_lanes;
            load(column, value);
            if constexpr (blocks) {
                scale = scale_of(warp_reduce<scale_block / row_lanes>(largest_of(value), [](float a, float b) { return fmaxf(a, b); }));
                if (column < args.columns && column % scale_block == 0) scales[column / scale_block] = scale;
            }
            if (column < args.columns) store_codes(codes, column, args.columns, value, scale);
        }
    });
}

constexpr u32 square_threads = 256;

// Squares of 128 x 128 of some matrices, a block each, and with `transposed` the same codes once more with rows for columns: a square's scale is that
// of its transpose. Parameters have
//   const char* x                           (matrices, rows, columns), of E
//   char *codes, *transposed                (matrices, rows, columns); (matrices, columns, rows), rows a multiple of 16
//   float* scales                           (matrices, rows / 128, columns / 128)
//   u32 matrices, rows, columns
template <class E, bool transposes, class Parameters>
__device__ inline void quantise_squares(const Parameters& args) {
    constexpr u32 row_threads = scale_block / row_lanes, passes = scale_block * row_threads / square_threads, rows_of_pass = square_threads / row_threads;
    constexpr u32 padded = scale_block + sizeof(Vec16);  // bytes of a row of the transpose, so that its columns lie in several banks
    __shared__ float scratch[32];
    __shared__ alignas(16) unsigned char turned[transposes ? scale_block * padded : 1];
    const u32 across = (args.columns + scale_block - 1) / scale_block, down = (args.rows + scale_block - 1) / scale_block;
    for (u32 square = blockIdx.x; square < args.matrices * down * across; square += gridDim.x) {
        const u32 matrix = square / (down * across), first_row = square / across % down * scale_block, first_column = square % across * scale_block;
        const u32 lane_row = threadIdx.x / row_threads, lane_column = threadIdx.x % row_threads * row_lanes, column = first_column + lane_column;
        float value[passes][row_lanes] = {}, most = 0;
#pragma unroll
        for (u32 pass = 0; pass < passes; ++pass) {
            const u32 row = first_row + pass * rows_of_pass + lane_row;
            if (row < args.rows && column < args.columns) RowOf<E>(args.x, u64(matrix) * args.rows + row, args.columns).load(column, value[pass]);
            most = fmaxf(most, largest_of(value[pass]));
        }
        const float scale = scale_of(block_reduce(most, [](float a, float b) { return fmaxf(a, b); }, scratch));
        if (threadIdx.x == 0) args.scales[square] = scale;
#pragma unroll
        for (u32 pass = 0; pass < passes; ++pass) {
            const u32 in_square = pass * rows_of_pass + lane_row, row = first_row + in_square;
            alignas(8) char codes[row_lanes];
            store_codes(codes, 0, row_lanes, value[pass], scale);
            if constexpr (transposes) {
#pragma unroll
                for (int i = 0; i < row_lanes; ++i) turned[(lane_column + i) * padded + in_square] = static_cast<unsigned char>(codes[i]);
            }
            if (row >= args.rows || column >= args.columns) continue;
            char* to = args.codes + (u64(matrix) * args.rows + row) * args.columns + column;
            *reinterpret_cast<u64*>(to) = *reinterpret_cast<const u64*>(codes);
        }
        if constexpr (transposes) {
            __syncthreads();
            constexpr u32 vectors = scale_block / sizeof(Vec16);
            for (u32 i = threadIdx.x; i < scale_block * vectors; i += square_threads) {
                const u32 of_column = i / vectors, at = i % vectors * sizeof(Vec16);
                if (first_column + of_column >= args.columns || first_row + at >= args.rows) continue;
                char* to = args.transposed + (u64(matrix) * args.columns + first_column + of_column) * args.rows + first_row + at;
                *reinterpret_cast<Vec16*>(to) = *reinterpret_cast<const Vec16*>(turned + of_column * padded + at);
            }
            __syncthreads();  // before the next square's codes
        }
    }
}

}  // namespace peerlane
