// Tensor cores and matrices in shared memory, for C++ that was translated from PTX: mma.sync, wmma, ldmatrix, stmatrix, wgmma. Descriptors are
// decoded and swizzled memory is read where they point; every thread computes its own fragment. Products are summed in fp32, in order of k.
#pragma once

#include "ptx_code.h"
#include "segments.h"

namespace peerlane::emulator::ptx_code {

enum class Element { f16, bf16, tf32, e4m3, e5m2 };
constexpr u32 bytes_of(Element element) { return element == Element::tf32 ? 4 : element == Element::f16 || element == Element::bf16 ? 2 : 1; }

// Element number `index` of a word.
template <Element element>
PEERLANE_UNCHECKED inline float element_of(u32 word, u32 index) {
    if constexpr (element == Element::tf32) return __builtin_bit_cast(float, word & 0xffffe000u);
    else if constexpr (element == Element::f16) return widen_f16(static_cast<u16>(word >> 16 * index));
    else if constexpr (element == Element::bf16) return widen_bf16(static_cast<u16>(word >> 16 * index));
    else if constexpr (element == Element::e4m3) return widen_e4m3(word >> 8 * index & 255);
    else return widen_f16(static_cast<u16>((word >> 8 * index & 255) << 8));
}

// Every lane's words, two at a time.
template <int words>
PEERLANE_INLINE void exchange(const u32 (&own)[words], u32 (&all)[32][words]) {
    for (int w = 0; w < words; w += 2) {
        const u32 second = w + 1 < words ? own[w + 1 < words ? w + 1 : w] : 0;
        const unsigned long long* seen = peerlane_warp_exchange(whole_warp, u64(second) << 32 | own[w]);
        for (int q = 0; q < 32; ++q) {
            all[q][w] = static_cast<u32>(seen[q]);
            if (w + 1 < words) all[q][w + 1 < words ? w + 1 : w] = static_cast<u32>(seen[q] >> 32);
        }
    }
}

// The word of a fragment of A that holds (row, byte of k), and that of B for a column.
template <int words>
PEERLANE_UNCHECKED inline u32 word_of_a(const u32 (&all)[32][words], u32 row, u32 k_byte) {
    return all[row % 8 * 4 + k_byte % 16 / 4][row / 8 + 2 * (k_byte / 16)];
}

// d += a b, 16 x 8, where a row of A has 4 bytes of k for each of its 4 or 8 words in 4 lanes.
template <Element element, int words_a, int words_b>
PEERLANE_UNCHECKED inline void multiplied(float (&d)[4], const u32 (&a)[32][words_a], const u32 (&b)[32][words_b], u32 own) {
    constexpr u32 size = bytes_of(element);
    for (u32 i = 0; i < 4; ++i) {
        const u32 row = own / 4 + 8 * (i / 2), column = 2 * (own % 4) + i % 2;
        for (u32 k = 0; k < 16 * words_b; k += 4) {
            const u32 left = word_of_a(a, row, k), right = b[column * 4 + k % 16 / 4][k / 16];
            for (u32 e = 0; e < 4 / size; ++e) d[i] = __builtin_fmaf(element_of<element>(left, e), element_of<element>(right, e), d[i]);
        }
    }
}
template <Element element, int words_a, int words_b>
PEERLANE_INLINE void mma(float (&d)[4], const u32 (&a)[words_a], const u32 (&b)[words_b]) {
    u32 all_a[32][words_a], all_b[32][words_b];
    exchange(a, all_a);
    exchange(b, all_b);
    multiplied<element>(d, all_a, all_b, lane());
}

// ---- wmma: matrices of 8 x 8 elements, or 8 x 4 of 32 bits, down the columns of A and the sums, and along the rows of B

// The line (row of A or the sums, column of B) and the place in it of element `index`, which lane `own` holds.
struct Place {
    u32 line, place;
};
PEERLANE_UNCHECKED inline Place place_of(u32 own, u32 index, u32 lines, u32 in_word) {
    const u32 block = index / in_word;
    return {own / 4 + 8 * (block % (lines / 8)), own % 4 * in_word + index % in_word + 4 * in_word * (block / (lines / 8))};
}
// Loads a lane's elements of A or B, or of the sums, whose lines are `stride` elements apart if they are contiguous, or else its places.
template <class T, u32 lines, u32 in_word, int count>
PEERLANE_INLINE void load_fragment(T (&own)[count], const char* from, u64 stride, bool contiguous) {
    for (int i = 0; i < count; ++i) {
        const Place at = place_of(lane(), i, lines, in_word);
        own[i] = reinterpret_cast<const T*>(from)[contiguous ? at.line * stride + at.place : at.place * stride + at.line];
    }
}
template <class T, u32 lines, int count>
PEERLANE_INLINE void store_fragment(const T (&own)[count], char* to, u64 stride, bool contiguous) {
    for (int i = 0; i < count; ++i) {
        const Place at = place_of(lane(), i, lines, 2);
        reinterpret_cast<T*>(to)[contiguous ? at.line * stride + at.place : at.place * stride + at.line] = own[i];
    }
}
template <Element element, u32 rows, u32 columns, int words_a, int words_b>
PEERLANE_INLINE void multiply_fragments(float (&d)[8], const u32 (&a)[words_a], const u32 (&b)[words_b]) {
    constexpr u32 in_word = 4 / bytes_of(element), depth = 8 * in_word;
    u32 all_a[32][words_a], all_b[32][words_b];
    exchange(a, all_a);
    exchange(b, all_b);
    for (u32 i = 0; i < 8; ++i) {
        const Place at = place_of(lane(), i, rows, 2);
        for (u32 k = 0; k < depth; ++k) {
            const u32 holds = k % (4 * in_word) / in_word, block = k / (4 * in_word);
            const u32 left = all_a[at.line % 8 * 4 + holds][at.line / 8 + rows / 8 * block];
            const u32 right = all_b[at.place % 8 * 4 + holds][at.place / 8 + columns / 8 * block];
            d[i] = __builtin_fmaf(element_of<element>(left, k % in_word), element_of<element>(right, k % in_word), d[i]);
        }
    }
}

// ---- matrices of 8 x 8 elements of 16 bits, one row of which each lane names

template <int count>
PEERLANE_INLINE void rows_of(u32 own, u32 (&rows)[32]) {
    const unsigned long long* seen = peerlane_warp_exchange(whole_warp, own);
    for (int q = 0; q < 8 * count; ++q) rows[q] = static_cast<u32>(seen[q]);
}
template <int count, bool transposed>
PEERLANE_INLINE void load_matrices(u32 (&words)[count], u32 own) {
    u32 rows[32];
    rows_of<count>(own, rows);
    const u32 first = lane() / 4, second = 2 * (lane() % 4);
    for (int i = 0; i < count; ++i) {
        if constexpr (transposed) {
            const u32 low = *reinterpret_cast<const u16*>(shared(rows[8 * i + second]) + 2 * first);
            words[i] = low | u32(*reinterpret_cast<const u16*>(shared(rows[8 * i + second + 1]) + 2 * first)) << 16;
        } else {
            words[i] = *reinterpret_cast<const u32*>(shared(rows[8 * i + first]) + 2 * second);
        }
    }
}
template <int count, bool transposed>
PEERLANE_INLINE void store_matrices(u32 own, const u32 (&words)[count]) {
    u32 rows[32];
    rows_of<count>(own, rows);
    const u32 first = lane() / 4, second = 2 * (lane() % 4);
    for (int i = 0; i < count; ++i) {
        if constexpr (transposed) {
            *reinterpret_cast<u16*>(shared(rows[8 * i + second]) + 2 * first) = static_cast<u16>(words[i]);
            *reinterpret_cast<u16*>(shared(rows[8 * i + second + 1]) + 2 * first) = static_cast<u16>(words[i] >> 16);
        } else {
            *reinterpret_cast<u32*>(shared(rows[8 * i + first]) + 2 * second) = words[i];
        }
    }
}

// ---- wgmma

// An operand in shared memory, as its descriptor says: start, leading and stride bytes, and how wide rows are swizzled.
template <bool k_major>
class Operand {
  public:
    PEERLANE_UNCHECKED explicit Operand(u64 descriptor)
        : start_(field(descriptor)), leading_(field(descriptor >> 16)), stride_(field(descriptor >> 32)) {
        const u32 mode = descriptor >> 62;
        width_ = mode == 0 ? 16 : 256 >> mode;  // 1: 128 bytes, 2: 64, 3: 32
        if (descriptor >> 49 & 7) peerlane_trap();  // a base that is not aligned to the pattern
    }
    // The place of (outer: m or n; byte of k), or where k is not contiguous, of element k.
    PEERLANE_UNCHECKED char* at(u32 outer, u32 k) const {
        u32 offset;
        if constexpr (k_major) {
            offset = outer / 8 * stride_ + outer % 8 * width_ + (width_ == 16 ? k / 16 * leading_ + k % 16 : k);
        } else {
            const u32 wide = width_ / 2, to_outer = width_ == 16 ? stride_ : leading_, to_k = width_ == 16 ? leading_ : stride_;
            offset = outer / wide * to_outer + outer % wide * 2 + k / 8 * to_k + k % 8 * width_;
        }
        const u32 linear = start_ + offset, mask = width_ / 16 - 1;
        return static_cast<char*>(peerlane_shared_pointer(linear ^ (linear >> 7 & mask) << 4));
    }
    template <Element element>
    PEERLANE_UNCHECKED float value(u32 outer, u32 k) const {
        constexpr u32 size = bytes_of(element);
        u32 word = 0;
        __builtin_memcpy(&word, at(outer, k_major ? k * size : k), size);
        return element_of<element>(word, 0);
    }
    PEERLANE_UNCHECKED void append(u32 first, u32 count, Segments& segments) const {
        if constexpr (k_major) {
            for (u32 outer = first; outer < first + count; ++outer) {
                for (u32 k = 0; k < 32; k += 16) segments.add(nullptr, at(outer, k), 16);
            }
        } else {
            for (u32 outer = first; outer < first + count; outer += 8) {
                for (u32 k = 0; k < 16; ++k) segments.add(nullptr, at(outer, k), 16);
            }
        }
    }

  private:
    static u32 field(u64 bits) { return static_cast<u32>(bits & 0x3fff) << 4; }
    u32 start_, leading_, stride_, width_;
};

template <Element element, int elements, class A, class B>
PEERLANE_UNCHECKED void accumulate(float (&d)[elements], const A& a, const B& b, bool add, bool minus) {
    constexpr u32 depth = 32 / bytes_of(element);
    const u32 own = lane();
    for (u32 i = 0; i < elements; ++i) {
        const u32 row = own / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (own % 4) + i % 2;
        float sum = add ? d[i] : 0.0f;
        for (u32 k = 0; k < depth; ++k) {
            const float left = a(row, k);
            sum = __builtin_fmaf(minus ? -left : left, b.template value<element>(column, k), sum);
        }
        d[i] = sum;
    }
}
// The warp's reads, in its first thread's name: it gives a buffer back only when the whole warp has waited.
PEERLANE_INLINE void note_reads(Segments& segments) {
    if (lane() == 0) peerlane_async(segments.list(), segments.count(), Combine::replace, nullptr, matrix_queue);
}
template <Element element, bool a_k_major, bool b_k_major, int elements>
PEERLANE_INLINE void wgmma(float (&d)[elements], u64 a, u64 b, bool add, bool minus) {
    const Operand<a_k_major> left(a);
    const Operand<b_k_major> right(b);
    const u32 first = first_lane() / 32 % 4 * 16;
    Segments segments;
    left.append(first, 16, segments);
    right.append(0, 2 * elements, segments);
    note_reads(segments);
    accumulate<element>(d, [&](u32 row, u32 k) { return left.template value<element>(first + row, k); }, right, add, minus);
}
template <Element element, bool b_k_major, int elements>
PEERLANE_INLINE void wgmma_of_registers(float (&d)[elements], const u32 (&a)[4], u64 b, bool add, bool minus) {
    const Operand<b_k_major> right(b);
    Segments segments;
    right.append(0, 2 * elements, segments);
    note_reads(segments);
    u32 all[32][4];
    exchange(a, all);
    constexpr u32 size = bytes_of(element);
    const auto left = [&](u32 row, u32 k) { return element_of<element>(word_of_a(all, row, k * size), k * size % 4 / size); };
    accumulate<element>(d, left, right, add, minus);
}

}  // namespace peerlane::emulator::ptx_code
