// Matrix products on tensor cores: the parts that fused kernels share, and the plain product.
//
// C (m x n) = A (m x k) B (k x n), 16-bit floats in and out, sums in fp32, of any size; rows in memory begin at multiples of 16 bytes.
// Operands come by TMA, which fills up ragged tiles with zeros and leaves out what lies outside of C.
//
// Operands may hold e4m3 (scales.cuh): both lie along k, and two of their numbers pass for an element of 16 bits. So k and steps count pairs, a step
// of 64 has 128 numbers, and only the matrix instruction and the scales are not those of 16 bits.
#pragma once

#include <peerlane/tiles/roles.cuh>
#include <peerlane/products/scales.cuh>
#include <peerlane/tiles/tile.cuh>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#include <peerlane/products/gemm_tensor_memory.cuh>
#endif

namespace peerlane {

// What a sum becomes before it is rounded: activation(scale sum + bias) + residual; with relu_gradient, whose residual is what relu gave, zero where
// that is not positive, and nothing added; with difference the residual is subtracted. Each part is there if the type says so; the kernel's parameters
// then have a member for it:
//   float scale
//   const char* bias      `n` elements, one for each column of the result
//   TensorMap residual    as large as the result, boxes of a block's rows of a tile
//   float* sums, u32 m    [m / 16, rounded up][n], of each column of 16 rows of the m rows of the result, before it is rounded; of the plain product
enum class Activation { none, relu, silu, gelu, gelu_tanh, relu_gradient, difference };

// `BatchInvariant`: sums over ranks do not depend on who owns a tile (owner_sum.cuh).
template <Activation Function = Activation::none, bool Bias = false, bool Residual = false, bool Scale = false, Scaling Scales = Scaling::none,
          bool BatchInvariant = false, bool ColumnSums = false>
struct Epilogue {
    static constexpr Activation activation = Function;
    static constexpr bool bias = Bias, residual = Residual, scale = Scale, batch_invariant = BatchInvariant, column_sums = ColumnSums;
    static constexpr Scaling scaling = Scales;
};

template <Activation activation>
__device__ inline float activate(float x) {
    if constexpr (activation == Activation::relu) return x < 0 ? 0 : x;  // NaN stays NaN
    if constexpr (activation == Activation::silu) return x / (1 + expf(-x));
    if constexpr (activation == Activation::gelu) return 0.5f * x * (1 + erff(x * 0.70710678f));
    if constexpr (activation == Activation::gelu_tanh) return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    return x;
}

// Tiles of 64 Groups Blocks x N by a cluster of that many blocks: each has 64 Groups rows, and loads its part of B's tile for all of them, so that
// B is read from L2 once for the cluster. `Slots` steps of 64 k in flight. A_major and B_major: how the operands lie in memory (tile.cuh).
template <class Element, int Groups, int N, int Slots, Major A_major, Major B_major, int Blocks = 1, class Last = Epilogue<>>
struct GemmShape {
    using E = Element;
    using Epilogue = Last;
    static constexpr int cluster_blocks = Blocks;
    static constexpr RoleTable roles{.consumer_groups = Groups, .service_registers = 56, .consumer_registers = 224};
    static constexpr int block_rows = 64 * Groups;
    static constexpr int rows = block_rows * Blocks;
    static constexpr int columns = N;
    static constexpr int depth = panel_columns;
    static constexpr Major a_major = A_major, b_major = B_major;
    static constexpr Scaling scaling = Last::scaling;
    static constexpr MmaType type = scaling == Scaling::none ? mma_type<E> : MmaType::e4m3;

    using A = Operand<E, block_rows, A_major>;
    using B = Operand<E, N, B_major>;
    // A piece of another product that is to be added, in place of operands.
    using Partial = SharedTile<E, block_rows, (N < 128 ? N : 128)>;
    struct Operands {
        A a;
        B b;
    };
    union Input {
        Operands operands;
        Partial partial;
    };
    static_assert(sizeof(Partial) <= sizeof(Operands));
    static constexpr int input_slots = Slots;
    using Output = SharedTile<E, 64, panel_columns>;
    static constexpr int output_slots = 2;
    using Sum = SumTile<N>;

    __device__ static u32 steps(u32 k) { return (k + depth - 1) / depth; }
    // Of this block's consumer groups, the number among the cluster's: it has the tile's rows from 64 times that on.
    __device__ static u32 group_of_tile(u32 group) { return Blocks == 1 ? group : ptx::cluster_rank() * Groups + group; }
    __device__ static int first_row(u32 group = 0) { return 64 * static_cast<int>(group_of_tile(group)); }
};

// What one fill of the input ring copies: `a` and `b` are maps of three dimensions, the places in them are of the block's first row (the tile's first
// column) and the step's first k; z is whatever the caller's maps have as third dimension.
struct OperandPlace {
    const TensorMap* map;
    int outer, inner, z;
};

template <class Shape, class Producer>
__device__ inline void load_step(Producer& in, const OperandPlace& a, const OperandPlace& b) {
    in.fill(sizeof(typename Shape::Operands), [&](auto& slot, u64* full) {
        slot.operands.a.load(a.map, full, Shape::A::place(a.outer, a.inner, a.z));
        slot.operands.b.template load_part<Shape::cluster_blocks>(b.map, full, b.outer, b.inner, b.z);
    });
}

// A convolution as a product: row p of A has the `channels` (a multiple of 64) of an image's point p, and k goes through the channels of
// point p + x + y line + z plane, for x first and z last. Parameters of a convolution have these as `windows`.
struct Windows {
    u32 channels, width, height, line, plane;
};

// All steps of a tile, from this row and column on.
template <class Shape, class Parameters, class Producer>
__device__ inline void load_steps(const Parameters& parameters, int row, int column, Producer& in) {
    const auto load = [&](int a_row, u32 a_k, u32 k) {
        load_step<Shape>(in, {&parameters.a, a_row, static_cast<int>(a_k), 0}, {&parameters.b, column, static_cast<int>(k), 0});
    };
    if constexpr (requires { parameters.windows; }) {
        const Windows& windows = parameters.windows;
        const u32 taps = parameters.k / windows.channels;
        for (u32 tap = 0; tap < taps; ++tap) {
            const u32 x = tap % windows.width, y = tap / windows.width % windows.height, z = tap / windows.width / windows.height;
            const int at = row + static_cast<int>(x + y * windows.line + z * windows.plane);
            for (u32 k = 0; k < windows.channels; k += Shape::depth) load(at, k, tap * windows.channels + k);
        }
    } else {
        for (u32 k = 0; k < parameters.k; k += Shape::depth) load(row, k, k);
    }
}

// sum = the product of the next `steps` (at least 1) fills of the input ring; one step is computed while the one before is given back.
template <class Shape, class Consumer>
__device__ inline void multiply_steps(typename Shape::Sum& sum, u32 group, u32 steps, Consumer& in) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    static_assert(Shape::type != MmaType::e4m3, "products of e4m3 run on Hopper alone");
    multiply_in_tensor_memory<Shape>(sum, group, steps, in);
#else
    for (u32 step = 0; step < steps; ++step) {
        const auto& operands = in.wait().operands;
        ptx::wgmma_hold(sum.value);
        ptx::wgmma_fence();
        sum.template multiply<Shape::type>(operands.a, 64 * group, operands.b, 0, step == 0);
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        if (step > 0) in.release();
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(sum.value);
    in.release();
#endif
}

// The same with each step's product added to the sum by the threads: a sum of 128 columns of 128 k, which the matrix units keep fewer bits of than of
// fp32, and then the next. While one group adds, the other one multiplies.
template <class Shape, class Consumer>
__device__ inline void multiply_promoted(typename Shape::Sum& sum, u32 group, u32 steps, Consumer& in, const TileScales& scales) {
    constexpr int columns = Shape::columns < scale_block ? Shape::columns : scale_block, parts = Shape::columns / columns;
    SumTile<columns> part;
#pragma unroll
    for (float& value : sum.value) value = 0;
    StepScales<Shape::scaling, parts> step_scales;
    for (u32 step = 0; step < steps; ++step) {
        const auto& operands = in.wait().operands;
#pragma unroll
        for (int p = 0; p < parts; ++p) {
            ptx::wgmma_hold(part.value);
            ptx::wgmma_fence();
            part.template multiply<Shape::type>(operands.a, 64 * group, operands.b, p * columns, true);
            ptx::wgmma_commit();
            if (p == 0) step_scales.load(scales, step);  // not before: they may come with the operands; the matrix units work meanwhile
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(part.value);
            if (p + 1 == parts) in.release();
            step_scales.add(part.value, sum.value + p * columns / 2, p);
        }
    }
}

// The product of e4m3 with its scales: those of rows and columns once, behind the last step.
template <class Shape, class Consumer>
__device__ inline void multiply_steps(typename Shape::Sum& sum, u32 group, u32 steps, Consumer& in, const TileScales& scales) {
    if constexpr (Shape::scaling == Scaling::none || Shape::scaling == Scaling::fp8) {
        multiply_steps<Shape>(sum, group, steps, in);
    } else {
        multiply_promoted<Shape>(sum, group, steps, in, scales);
    }
    if constexpr (Shape::scaling == Scaling::fp8 || Shape::scaling == Scaling::fp8_promoted) apply_scales<Shape::columns>(sum.value, scales);
}

// A tile of another sum that is to be added, from `at` in the map on, in place of operands; `join_partial` is the consumers' side.
template <class Shape, class Producer>
__device__ inline void load_partial(Producer& in, const TensorMap* map, Place3 at) {
    for (int column = 0; column < Shape::columns; column += Shape::Partial::columns) {
        in.fill(Shape::Partial::bytes, [&](auto& slot, u64* full) { slot.partial.load(map, full, {at.x + column, at.y, at.z}); });
    }
}

template <class Shape, class Consumer, class Join>
__device__ inline void join_partial(typename Shape::Sum& sum, u32 group, Consumer& in, const Join& join) {
#pragma unroll
    for (int column = 0; column < Shape::columns; column += Shape::Partial::columns) {
        sum.join(in.wait().partial, 64 * group, column, join);
        in.release();
    }
}
template <class Shape, class Consumer>
__device__ inline void add_partial(typename Shape::Sum& sum, u32 group, Consumer& in, float factor = 1) {
    join_partial<Shape>(sum, group, in, [factor](float value, float term) { return value + factor * term; });
}

// The epilogue: the loader's part, behind all else of a tile whose first row and column of the result these are, and the consumers'.
template <class Shape, class Parameters, class Producer>
__device__ inline void load_epilogue(const Parameters& parameters, Place3 at, Producer& in) {
    if constexpr (Shape::Epilogue::residual) load_partial<Shape>(in, &parameters.residual, at);
}

template <class Shape, class Parameters, class Consumer>
__device__ inline void apply_epilogue(typename Shape::Sum& sum, const Parameters& parameters, u32 group, int first_column, Consumer& in) {
    using Last = typename Shape::Epilogue;
    constexpr bool changes = Last::scale || Last::bias || Last::activation != Activation::none;
    if constexpr (changes || Last::residual) {
        if (first_column >= static_cast<int>(parameters.n)) return;  // never: but without a branch here the compiler spills half of the sum
        if constexpr (changes) {
#pragma unroll
            for (int i = 0; i < Shape::columns / 2; ++i) {
                float& value = sum.value[i];
                if constexpr (Last::scale) value *= parameters.scale;
                if constexpr (Last::bias) {
                    const u32 column = first_column + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;  // mma.cuh says where elements lie
                    float bias[2] = {};
                    if (column < parameters.n) Shape::E::widen(reinterpret_cast<const u16*>(parameters.bias)[column], bias);
                    value += bias[0];
                }
                value = activate<Last::activation>(value);
            }
        }
        if constexpr (Last::activation == Activation::relu_gradient) {
            join_partial<Shape>(sum, group, in, [](float value, float of_relu) { return of_relu <= 0 ? 0 : value; });
        } else if constexpr (Last::residual) {
            add_partial<Shape>(sum, group, in, Last::activation == Activation::difference ? -1.0f : 1.0f);
        }
    }
}

// Sums of each column of a warp's 16 rows of a tile. Lanes that have the same columns halve what is theirs until each has an eighth of it.
template <class Shape, class Parameters>
__device__ inline void store_column_sums(const typename Shape::Sum& sum, const Parameters& parameters, int first_row, int first_column) {
    constexpr int pairs = Shape::columns / 4;
    const u32 lane = threadIdx.x % 32, warp_row = first_row + threadIdx.x / 32 % 4 * 16, row = warp_row + lane / 4;
    const bool upper_inside = row < parameters.m, lower_inside = row + 8 < parameters.m;  // mma.cuh says where elements lie
    float total[pairs];
#pragma unroll
    for (int i = 0; i < pairs; ++i) {
        const float* at = sum.value + i / 2 * 4 + i % 2;
        total[i] = (upper_inside ? at[0] : 0.0f) + (lower_inside ? at[2] : 0.0f);
    }
    u32 own = 0;
#pragma unroll
    for (int bits = 16, left = pairs / 2; bits >= 4; bits /= 2, left /= 2) {
        const bool second = lane & bits;
        own += second ? left : 0;
#pragma unroll
        for (int i = 0; i < left; ++i) {
            const float other = __shfl_xor_sync(0xffffffffu, second ? total[i] : total[i + left], bits);
            total[i] = (second ? total[i + left] : total[i]) + other;
        }
    }
    if (warp_row >= parameters.m) return;
#pragma unroll
    for (int i = 0; i < pairs / 8; ++i) {
        const u32 column = first_column + (own + i) / 2 * 8 + lane % 4 * 2 + i % 2;
        if (column < parameters.n) parameters.sums[u64(warp_row / 16) * parameters.n + column] = total[i];
    }
}

// Rounds the sum and hands it to the group's storer, 64 columns at a time.
template <class Shape, class Producer>
__device__ inline void emit(const typename Shape::Sum& sum, Producer& out) {
#pragma unroll
    for (int column = 0; column < Shape::columns; column += panel_columns) {
        sum.store(out.acquire(), column);
        out.commit();
    }
}

// Copies what `emit` has handed over to `at` in some tensors, which may be peers': `each` calls what it gets with every one's map. When it returns the
// ring's slots have been read; that the peers have it all, a signal says (it waits for that).
template <class Shape, class Consumer, class Each>
__device__ inline void store_sum(Consumer& out, Place3 at, const Each& each) {
#pragma unroll 1
    for (int column = 0; column < Shape::columns; column += panel_columns) {
        const auto& chunk = out.wait();
        if (ptx::elect_one()) {
            each([&](const TensorMap* map) { chunk.store(map, {at.x + column, at.y, at.z}); });
            ptx::bulk_commit();
            ptx::bulk_wait_read<1>();
        }
        if (column > 0) out.release();
    }
    if (ptx::elect_one()) ptx::bulk_wait_read<0>();
    out.release();
}

// The same to one tensor.
template <class Shape, class Consumer>
__device__ inline void store_sum(Consumer& out, const TensorMap* map, Place3 at) {
    store_sum<Shape>(out, at, [&](const auto& store) { store(map); });
}

// The product by itself. Parameters have
//   TensorMap a, b, c   (k, m, 1) or (m, k, 1); (n, k, 1) or (k, n, 1); (n, m, 1): innermost dimension first, with boxes of one panel or part
//   GroupedTiles tiles
//   u32 k
//   OperandScales a_scales, b_scales   of operands that have scales
// and what the epilogue has.
template <class Shape, class Parameters>
struct GemmRoles : Shape {
    const Parameters& parameters;

    __device__ explicit GemmRoles(const Parameters& p) : parameters(p) {}
    __device__ u32 tile_count() const { return parameters.tiles.count(); }
    __device__ GroupedTiles::Tile tile(u32 index) const { return parameters.tiles.at(index); }

    __device__ void load(const GroupedTiles::Tile& tile, InputProducer<GemmRoles>& in) const {
        const int row = tile.row * Shape::rows + Shape::first_row();
        load_steps<Shape>(parameters, row, tile.column * Shape::columns, in);
        load_epilogue<Shape>(parameters, {tile.column * Shape::columns, row, 0}, in);
    }
    __device__ void compute(const GroupedTiles::Tile& tile, u32 group, InputConsumer<GemmRoles>& in, OutputProducer<GemmRoles>& out) const {
        typename Shape::Sum sum;
        const int row = tile.row * Shape::rows + Shape::first_row(group), column = tile.column * Shape::columns;
        if constexpr (Shape::scaling == Scaling::none) multiply_steps<Shape>(sum, group, Shape::steps(parameters.k), in);
        else multiply_steps<Shape>(sum, group, Shape::steps(parameters.k), in, {parameters.a_scales, parameters.b_scales, row, column});
        apply_epilogue<Shape>(sum, parameters, group, column, in);
        emit<Shape>(sum, out);
        if constexpr (Shape::Epilogue::column_sums) store_column_sums<Shape>(sum, parameters, row, column);
    }
    __device__ void store(const GroupedTiles::Tile& tile, u32 group, OutputConsumer<GemmRoles>& out) const {
        store_sum<Shape>(out, &parameters.c, {tile.column * Shape::columns, tile.row * Shape::rows + Shape::first_row(group), 0});
    }
};

}  // namespace peerlane
