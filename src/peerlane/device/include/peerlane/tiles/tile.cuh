// Tiles: pieces of matrices in shared memory, in the layout that TMA and wgmma share, and sums of them in registers.
//
// E is an element type of 16 bits (numeric.cuh).
#pragma once

#include <peerlane/peers/numeric.cuh>
#include <peerlane/ptx/ptx_mma.cuh>
#include <peerlane/ptx/ptx_tensor.cuh>

namespace peerlane {

template <class E>
constexpr MmaType mma_type = MmaType::bf16;
template <>
constexpr MmaType mma_type<Float16> = MmaType::f16;

constexpr int element_bytes = 2;
constexpr int panel_columns = 64;   // elements in the 128 bytes of a swizzled row
constexpr int swizzle_atom = 1024;  // bytes after which the swizzle repeats: what a tile in shared memory is aligned to
constexpr int mma_depth = 16;       // k of one wgmma

// Where a box lies in its tensor, innermost dimension first. Tensors of two dimensions have a third of extent 1.
struct Place3 {
    int x, y, z;
};

struct Place4 {
    int x, y, z, w;
    __device__ Place4(int x_, int y_, int z_, int w_) : x(x_), y(y_), z(z_), w(w_) {}  // so that three numbers in braces are no Place4
};

// Descriptors of what wgmmas along k read, number `step` from `offset(step)` bytes on. They differ in the low word, by a constant, and are known to be
// the same in all lanes: so they take no instructions of every lane.
template <class Offset>
class OperandSteps {
  public:
    __device__ OperandSteps(u64 first, const Offset& offset)
        : low_(ptx::uniform(static_cast<u32>(first))), high_(first & 0xffffffff00000000u), offset_(offset) {}
    __device__ u64 operator[](int step) const { return high_ | static_cast<u32>(low_ + (offset_(step) >> 4)); }

  private:
    u32 low_;
    u64 high_;
    Offset offset_;
};

// A tile of `Rows` x `Columns` elements as it lies in shared memory, in the 128-byte swizzle: panels of 64 columns, one after the other, each
// of `Rows` rows of 128 bytes; the 16-byte pieces of row r change places by r % 8. One panel is the box of a tensor map.
template <class Element, int Rows, int Columns>
struct alignas(swizzle_atom) SharedTile {
    using E = Element;
    static constexpr int rows = Rows;
    static constexpr int columns = Columns;
    static constexpr int panels = Columns / panel_columns;
    static constexpr u32 panel_bytes = Rows * panel_columns * element_bytes;
    static constexpr u32 bytes = panels * panel_bytes;
    static_assert(Rows % 8 == 0 && Rows <= 256 && Columns % panel_columns == 0);

    char data[bytes];

    __device__ char* panel(int p) { return data + p * panel_bytes; }
    __device__ const char* panel(int p) const { return data + p * panel_bytes; }

    // Bytes from the tile's start to an element. Columns from a multiple of 8 to the next lie together.
    __device__ static constexpr u32 offset(int row, int column) {
        const u32 piece = (column / 8) % 8, within = column % 8;
        return column / panel_columns * panel_bytes + row * 128 + ((piece ^ (row % 8)) * 8 + within) * element_bytes;
    }

    // The whole tile from `at` on; `bytes` count towards the barrier's phase. For one thread. Panels go along x.
    __device__ void load(const TensorMap* map, u64* barrier, Place3 at) {
#pragma unroll
        for (int p = 0; p < panels; ++p) ptx::tensor_load(panel(p), map, barrier, at.x + p * panel_columns, at.y, at.z);
    }

    __device__ void load(const TensorMap* map, u64* barrier, Place4 at) {
#pragma unroll
        for (int p = 0; p < panels; ++p) ptx::tensor_load(panel(p), map, barrier, at.x + p * panel_columns, at.y, at.z, at.w);
    }

    // The whole tile to `at`; the caller commits and waits (`ptx::bulk_commit`, `ptx::bulk_wait`). For one thread.
    __device__ void store(const TensorMap* map, Place3 at) const {
#pragma unroll
        for (int p = 0; p < panels; ++p) ptx::tensor_store(map, panel(p), at.x + p * panel_columns, at.y, at.z);
    }
    __device__ void store(const TensorMap* map, Place4 at) const {
#pragma unroll
        for (int p = 0; p < panels; ++p) ptx::tensor_store(map, panel(p), at.x + p * panel_columns, at.y, at.z, at.w);
    }

    // The tile as an operand: along the columns, from row `first` on (rows are m or n, columns k) ...
    __device__ auto along_columns(int first) const {
        const auto offset = [](int step) { return step / 4 * panel_bytes + step % 4 * (mma_depth * element_bytes); };
        return OperandSteps(mma_descriptor(data + first * 128, 16, swizzle_atom), offset);
    }
    // ... or along the rows, from a panel on (rows are k, columns n).
    __device__ auto along_rows(int first = 0) const {
        return OperandSteps(mma_descriptor(panel(first), panel_bytes, swizzle_atom), [](int step) { return 128 * mma_depth * step; });
    }
};

// One operand of a product in shared memory: `Span` rows of A (or columns of B) by 64 k.
//   Major::k   rows of the tile are the operand's m (or n), columns are k: A row-major, B as (n, k)
//   Major::mn  rows of the tile are k, columns the operand's m (or n): A as (k, m), B row-major as (k, n)
template <class E, int Span, Major major>
struct Operand : SharedTile<E, major == Major::k ? Span : panel_columns, major == Major::k ? panel_columns : Span> {
    static constexpr int span = Span;
    static constexpr int depth = panel_columns;

    // What wgmma number `step` along k reads, from m (or n) = `first` on, a multiple of 64.
    __device__ u64 descriptor(int first, int step) const {
        if constexpr (major == Major::k) {
            return mma_descriptor(this->data + first * 128 + step * (mma_depth * element_bytes), 16, swizzle_atom);
        } else {
            return mma_descriptor(this->panel(first / panel_columns) + step * (mma_depth * 128), this->panel_bytes, swizzle_atom);
        }
    }

    // This block's part of a tile that all `blocks` of the cluster use: they load a part each, into all of them. Boxes of the map are a panel, or
    // a part's rows. For one thread of each block; all of the tile's `bytes` count towards every block's barrier.
    template <int blocks>
    __device__ void load_part(const TensorMap* map, u64* barrier, int outer, int inner, int z) {
        if constexpr (blocks == 1) {
            this->load(map, barrier, place(outer, inner, z));
        } else {
            constexpr int part = Span / blocks;
            static_assert(Span % (blocks * panel_columns) == 0);
            const int first = static_cast<int>(ptx::cluster_rank()) * part;
            constexpr int step = major == Major::k ? part : panel_columns;
#pragma unroll
            for (int at = 0; at < part; at += step) {
                char* target = major == Major::k ? this->data + (first + at) * 128 : this->panel((first + at) / panel_columns);
                const Place3 from = place(outer + first + at, inner, z);
                ptx::tensor_load_to((1 << blocks) - 1, target, map, barrier, from.x, from.y, from.z);
            }
        }
    }

    // From m (or n) = `outer`, k = `inner` on.
    __device__ static Place3 place(int outer, int inner, int z) { return major == Major::k ? Place3{inner, outer, z} : Place3{outer, inner, z}; }
};

// Where a thread of a warpgroup has the elements of a sum: in two rows, eight apart, of which number r is row `row(r)`.
struct SumPlaces {
    __device__ static int row(int r) { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * r; }
    __device__ static constexpr int row_of(int element) { return element / 2 % 2; }
    __device__ static int column_of(int element) { return 8 * (element / 4) + element % 2 + 2 * static_cast<int>(threadIdx.x % 4); }
};

// A sum of 64 x N products over a warpgroup, in the fragment layout of ptx_mma.cuh.
template <int N>
struct SumTile {
    static constexpr int columns = N;
    float value[N / 2];

    // Starts adding A B: 64 rows of A from `row` on, and N columns of B from `column` on. `first`: to nothing. Between ptx::wgmma_fence and
    // ptx::wgmma_commit. `Type` of what the operands hold: with e4m3 each of their elements is two.
    template <MmaType Type, class E, int ASpan, int BSpan, Major a_major, Major b_major>
    __device__ void multiply(const Operand<E, ASpan, a_major>& a, int row, const Operand<E, BSpan, b_major>& b, int column, bool first) {
#pragma unroll
        for (int step = 0; step < panel_columns / mma_depth; ++step) {
            ptx::wgmma<Type, N, a_major, b_major>(value, a.descriptor(row, step), b.descriptor(column, step), !first || step > 0);
        }
    }

    // Starts A B^T: rows of A from `row` on, and k along the columns of both.
    template <class E, int Rows, int Depth>
    __device__ void start_product(const SharedTile<E, Rows, Depth>& a, int row, const SharedTile<E, N, Depth>& b) {
        const auto left = a.along_columns(row);
        const auto right = b.along_columns(0);
        ptx::wgmma_hold(value);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < Depth / mma_depth; ++step) {
            ptx::wgmma<mma_type<E>, N, Major::k, Major::k>(value, left[step], right[step], step > 0);
        }
        ptx::wgmma_commit();
    }

    // Starts adding A B, to nothing if `first`. A is `rounded`, in registers.
    template <class E, int K>
    __device__ void start_adding(const u32 (&a)[K / mma_depth][4], const SharedTile<E, K, N>& b, bool first = false) {
        const auto right = b.along_rows();
        ptx::wgmma_hold(value);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < K / mma_depth; ++step) ptx::wgmma<mma_type<E>, N, Major::mn>(value, a[step], right[step], !first || step > 0);
        ptx::wgmma_commit();
    }

    // Rounds columns [first, first + 16), as stmatrix takes them, and as a left operand has them.
    template <class E>
    __device__ void round(u32 (&word)[4], int first) const {
#pragma unroll
        for (int w = 0; w < 4; ++w) word[w] = E::narrow(value + first / 2 + 2 * w);
    }

    // Rounds all of it to the left operand of a product.
    template <class E>
    __device__ void round(u32 (&rounded)[N / mma_depth][4]) const {
#pragma unroll
        for (int step = 0; step < N / mma_depth; ++step) round<E>(rounded[step], mma_depth * step);
    }

    // Rounds columns [first, first + 64) into the tile, by stmatrix: 16 columns at a time, four 8 x 8 matrices.
    template <class E>
    __device__ void store(SharedTile<E, 64, panel_columns>& tile, int first) const {
        const int lane = threadIdx.x % 32;
        const int row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
        for (int j = 0; j < panel_columns; j += 16) {
            u32 word[4];
            round<E>(word, first + j);
            ptx::store_matrices(tile.data + tile.offset(row, j + lane / 16 * 8), word);
        }
    }

    // The same, transposed: row r of the tile gets column first + r.
    template <class E>
    __device__ void store_transposed(SharedTile<E, 64, panel_columns>& tile, int first) const {
        const int lane = threadIdx.x % 32;
        const int column = threadIdx.x / 32 % 4 * 16 + lane / 8 % 2 * 8;
#pragma unroll
        for (int j = 0; j < panel_columns; j += 16) {
            u32 word[4];
            round<E>(word, first + j);
            ptx::store_matrices_transposed(tile.data + tile.offset(j + lane / 16 * 8 + lane % 8, column), word);
        }
    }

    // As `store`, of what rounding to E leaves of the sum.
    template <class E>
    __device__ void store_remainder(SharedTile<E, 64, panel_columns>& tile, int first) const {
        const int lane = threadIdx.x % 32;
        const int row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
        for (int j = 0; j < panel_columns; j += 16) {
            u32 word[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const float* own = value + (first + j) / 2 + 2 * w;
                float left[2];
                E::widen(E::narrow(own), left);
                left[0] = own[0] - left[0], left[1] = own[1] - left[1];
                word[w] = E::narrow(left);
            }
            ptx::store_matrices(tile.data + tile.offset(row, j + lane / 16 * 8), word);
        }
    }

    // Columns [first, first + tile's columns) become join(value, term), with rows [row, row + 64) and all rows' columns of the tile.
    template <class E, int Rows, int Columns, class Join>
    __device__ void join(const SharedTile<E, Rows, Columns>& tile, int row, int first, const Join& join) {
        const int lane = threadIdx.x % 32;
        const int own_row = row + threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
        for (int j = 0; j < Columns; j += 16) {
            u32 word[4];
            ptx::load_matrices(word, tile.data + tile.offset(own_row, j + lane / 16 * 8));
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                float term[2];
                E::widen(word[w], term);
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    float& own = value[(first + j) / 2 + 2 * w + t];
                    own = join(own, term[t]);
                }
            }
        }
    }
};

}  // namespace peerlane
