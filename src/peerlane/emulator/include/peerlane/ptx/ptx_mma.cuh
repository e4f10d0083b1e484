// The emulator's matrix units. Descriptors are decoded and swizzled shared memory is read where they point; every thread computes its own
// fragment. So a wrong descriptor, step, swizzle or fragment gives a wrong number, and the read itself is checked like any asynchronous one.
#pragma once

#include <peerlane/ptx/mma.cuh>

#include <peerlane_emulator/half.h>
#include <peerlane_emulator/segments.h>

namespace peerlane {
namespace ptx {
namespace matrix {

constexpr u32 mma_bytes = 32;  // of k in one wgmma

inline u32 bytes_of(MmaType type) { return type == MmaType::e4m3 ? 1 : 2; }

PEERLANE_UNCHECKED inline float widen(MmaType type, u16 half) {
    return type == MmaType::f16 ? emulator::widen_f16(half) : emulator::widen_bf16(half);
}

// An operand of a wgmma where it lies: the documented fields of its descriptor.
class SharedOperand {
  public:
    PEERLANE_UNCHECKED SharedOperand(u64 descriptor, Major major)
        : major_(major), start_(field(descriptor)), leading_(field(descriptor >> 16)), stride_(field(descriptor >> 32)) {
        const bool swizzled = descriptor >> 62 == 1, offset = (descriptor >> 49 & 7) != 0;
        if (!swizzled || offset) emulator::peerlane_trap();  // the kit uses no other layout
        window_ = static_cast<char*>(emulator::peerlane_shared_pointer(start_)) - start_;
    }

    // Element (outer: m or n; k < 16), or that of 16 bits which has k / 2 of a pair of 8 bits.
    PEERLANE_UNCHECKED char* at(u32 outer, u32 k) const {
        const u32 offset = major_ == Major::k ? outer / 8 * stride_ + outer % 8 * 128 + k * 2
                                              : outer / 64 * leading_ + outer % 64 * 2 + k / 8 * stride_ + k % 8 * 128;
        const u32 linear = start_ + offset;
        return window_ + (linear ^ (linear >> 7 & 7) << 4);
    }

    PEERLANE_UNCHECKED float value(MmaType type, u32 outer, u32 k) const {
        if (type == MmaType::e4m3) return emulator::widen_e4m3(static_cast<unsigned char>(at(outer, k / 2)[k % 2]));
        u16 half;
        __builtin_memcpy(&half, at(outer, k), 2);
        return widen(type, half);
    }

    // Reads of outers [first, first + count), in pieces of 16 bytes.
    PEERLANE_UNCHECKED void append(u32 first, u32 count, emulator::Segments& segments) const {
        if (major_ == Major::k) {
            for (u32 outer = first; outer < first + count; ++outer) {
                for (u32 k = 0; k < 16; k += 8) segments.add(nullptr, at(outer, k), 16);
            }
        } else {
            for (u32 outer = first; outer < first + count; outer += 8) {
                for (u32 k = 0; k < 16; ++k) segments.add(nullptr, at(outer, k), 16);
            }
        }
    }

  private:
    static u32 field(u64 bits) { return static_cast<u32>(bits & 0x3fff) << 4; }

    Major major_;
    u32 start_, leading_, stride_;
    char* window_;
};

inline u32 lane() { return emulator::peerlane_thread_index().x % 32; }
inline u32 first_row() { return emulator::peerlane_thread_index().x / 32 % 4 * 16; }

// d += a_row b for this thread's elements; `a(row, k)` for the warp's 16 rows. Sums of e4m3 are rounded as fp32, which a GPU does not: it keeps
// fewer bits of them.
template <MmaType type, int N, class A>
PEERLANE_UNCHECKED void multiply(float (&d)[N / 2], const A& a, const SharedOperand& b, u32 add) {
    for (int i = 0; i < N / 2; ++i) {
        const u32 row = lane() / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (lane() % 4) + i % 2;
        float sum = add ? d[i] : 0.0f;
        for (u32 k = 0; k < mma_bytes / bytes_of(type); ++k) sum = __builtin_fmaf(a(row, k), b.value(type, column, k), sum);
        d[i] = sum;
    }
}

// The warp's reads, in its first thread's name: it gives a buffer back only when the whole warp has waited.
PEERLANE_INLINE void note_reads(emulator::Segments& segments) {
    if (lane() == 0) emulator::peerlane_async(segments.list(), segments.count(), emulator::Combine::replace, nullptr, emulator::matrix_queue);
}

// Lane q's words, for every lane q.
template <int words>
void exchange(const u32 (&own)[words], u32 (&all)[32][words]) {
    for (int w = 0; w < words; ++w) {
        const unsigned long long* seen = emulator::peerlane_warp_exchange(0xffffffffu, own[w]);
        for (int q = 0; q < 32; ++q) all[q][w] = static_cast<u32>(seen[q]);
    }
}

inline float half_of(MmaType type, u32 word, u32 which) { return widen(type, static_cast<u16>(which ? word >> 16 : word)); }

// The addresses of rows that all lanes give, as the lane that holds element (l / 4, 2 (l % 4)) of matrix i needs them.
inline void rows_of(const void* own, char* (&row)[4]) {
    const unsigned long long* seen = emulator::peerlane_warp_exchange(0xffffffffu, reinterpret_cast<unsigned long long>(own));
    for (int i = 0; i < 4; ++i) row[i] = reinterpret_cast<char*>(seen[8 * i + lane() / 4]);
}

// The same for elements (2 (l % 4) + {0, 1}, l / 4).
inline void row_pairs_of(const void* own, char* (&row)[4][2]) {
    const unsigned long long* seen = emulator::peerlane_warp_exchange(0xffffffffu, reinterpret_cast<unsigned long long>(own));
    for (int i = 0; i < 4; ++i) {
        for (int r = 0; r < 2; ++r) row[i][r] = reinterpret_cast<char*>(seen[8 * i + 2 * (lane() % 4) + r]);
    }
}

}  // namespace matrix

template <int count>
inline void registers_decrease() {
    static_assert(count >= 24 && count <= 256 && count % 8 == 0);
}
template <int count>
inline void registers_increase() {
    static_assert(count >= 24 && count <= 256 && count % 8 == 0);
}

inline void wgmma_fence() {}
PEERLANE_INLINE void wgmma_commit() { emulator::peerlane_async_commit(emulator::matrix_queue); }
template <int pending>
PEERLANE_INLINE void wgmma_wait() {
    emulator::peerlane_async_wait(emulator::matrix_queue, pending, false);
}
template <int count>
inline void wgmma_hold(float (&)[count]) {}

template <MmaType type, int N, Major a_major, Major b_major>
PEERLANE_INLINE void wgmma(float (&d)[N / 2], u64 a, u64 b, u32 add) {
    static_assert(N % 16 == 0 && N <= 256 && (type != MmaType::e4m3 || (a_major == Major::k && b_major == Major::k)));
    const matrix::SharedOperand left(a, a_major), right(b, b_major);
    const u32 first = matrix::first_row();
    emulator::Segments segments;
    left.append(first, 16, segments);
    right.append(0, N, segments);
    matrix::note_reads(segments);
    matrix::multiply<type, N>(d, [&](u32 row, u32 k) { return left.value(type, first + row, k); }, right, add);
}

template <MmaType type, int N, Major b_major>
PEERLANE_INLINE void wgmma(float (&d)[N / 2], const u32 (&a)[4], u64 b, u32 add) {
    static_assert(N % 16 == 0 && N <= 256 && type != MmaType::e4m3);
    const matrix::SharedOperand right(b, b_major);
    emulator::Segments segments;
    right.append(0, N, segments);
    matrix::note_reads(segments);
    u32 all[32][4];
    matrix::exchange(a, all);
    const auto left = [&](u32 row, u32 k) {
        return matrix::half_of(type, all[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)], k % 2);
    };
    matrix::multiply<type, N>(d, left, right, add);
}

template <MmaType type>
inline void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    u32 all_a[32][4], all_b[32][2];
    matrix::exchange(a, all_a);
    matrix::exchange(b, all_b);
    for (u32 i = 0; i < 4; ++i) {
        const u32 row = matrix::lane() / 4 + 8 * (i / 2), column = 2 * (matrix::lane() % 4) + i % 2;
        for (u32 k = 0; k < 16; ++k) {
            const u32 left = all_a[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)], right = all_b[column * 4 + k % 8 / 2][k / 8];
            d[i] = __builtin_fmaf(matrix::half_of(type, left, k % 2), matrix::half_of(type, right, k % 2), d[i]);
        }
    }
}

inline void load_matrices(u32 (&word)[4], const void* row) {
    char* rows[4];
    matrix::rows_of(row, rows);
    for (int i = 0; i < 4; ++i) word[i] = reinterpret_cast<const u32*>(rows[i])[matrix::lane() % 4];
}

inline void store_matrices(void* row, const u32 (&word)[4]) {
    char* rows[4];
    matrix::rows_of(row, rows);
    for (int i = 0; i < 4; ++i) reinterpret_cast<u32*>(rows[i])[matrix::lane() % 4] = word[i];
}

inline void load_matrices_transposed(u32 (&word)[4], const void* row) {
    char* rows[4][2];
    matrix::row_pairs_of(row, rows);
    for (int i = 0; i < 4; ++i) {
        const u32 low = reinterpret_cast<const u16*>(rows[i][0])[matrix::lane() / 4];
        word[i] = low | static_cast<u32>(reinterpret_cast<const u16*>(rows[i][1])[matrix::lane() / 4]) << 16;
    }
}

inline void store_matrices_transposed(void* row, const u32 (&word)[4]) {
    char* rows[4][2];
    matrix::row_pairs_of(row, rows);
    for (int i = 0; i < 4; ++i) {
        reinterpret_cast<u16*>(rows[i][0])[matrix::lane() / 4] = static_cast<u16>(word[i]);
        reinterpret_cast<u16*>(rows[i][1])[matrix::lane() / 4] = static_cast<u16>(word[i] >> 16);
    }
}

}  // namespace ptx
}  // namespace peerlane
