// Rows of any element type by warps, reductions of warps and blocks, and small values from everybody to everybody.
#pragma once

#include <peerlane/comm.cuh>
#include <peerlane/peers/numeric.cuh>

namespace peerlane {

// ---- reductions: every thread of the warp or block gets the result, the same bits in each --------------------------------------------------

// Another lane's value, of any type of whole words.
template <class T>
__device__ inline T shuffle_xor(const T& value, int bits) {
    static_assert(sizeof(T) % 4 == 0);
    struct Words {
        u32 word[sizeof(T) / 4];
    };
    Words words = __builtin_bit_cast(Words, value);
#pragma unroll
    for (u32& word : words.word) word = __shfl_xor_sync(0xffffffffu, word, bits);
    return __builtin_bit_cast(T, words);
}

// Among lanes that agree in all bits of their number but the lowest; `lanes` is a power of two. Of a pair both lanes join the lower one's term
// with the higher one's: a * b + c * d may be rounded otherwise than c * d + a * b, where the compiler fuses operations.
template <int lanes = 32, class T, class Join>
__device__ inline T warp_reduce(T value, const Join& join) {
#pragma unroll
    for (int bits = lanes / 2; bits > 0; bits /= 2) {
        const T other = shuffle_xor(value, bits);
        const bool second = threadIdx.x & bits;
        value = join(second ? other : value, second ? value : other);
    }
    return value;
}
template <int lanes = 32, class T>
__device__ inline T warp_sum(T value) {  // a + b has the same bits in either order
#pragma unroll
    for (int bits = lanes / 2; bits > 0; bits /= 2) value = value + shuffle_xor(value, bits);
    return value;
}
template <class T>
__device__ inline T warp_max(T value) {
    return warp_reduce(value, [](T a, T b) { return a > b ? a : b; });
}

// `join` is associative; terms are joined in the order of the warps. Whole warps, at most 32. `scratch` is shared memory, free again behind
// the call: a barrier stands at its begin and behind its writes.
template <class T, class Join>
__device__ inline T block_reduce(T value, const Join& join, T (&scratch)[32]) {
    value = warp_reduce(value, join);
    __syncthreads();
    if (Warp{}.thread() == 0) scratch[threadIdx.x / warp_threads] = value;
    __syncthreads();
    T total = scratch[0];
    for (u32 warp = 1; warp < blockDim.x / warp_threads; ++warp) total = join(total, scratch[warp]);
    return total;
}

// ---- rows: a warp takes a row, a lane eight elements at a time ------------------------------------------------------------------------------

constexpr int row_lanes = 8;

// use(row) for every row of the caller's warp. Rows go round the blocks first, so that few rows are on many SMs; the same row is on the same
// warp number in every launch of one shape.
template <class Use>
__device__ inline void each_row(u32 rows, const Use& use) {
    const u32 warps = blockDim.x / warp_threads;
    for (u32 row = threadIdx.x / warp_threads * gridDim.x + blockIdx.x; row < rows; row += gridDim.x * warps) use(row);
}

// Rows of `bytes` from `from(i)` to `to(i)`, for i < count. By a block. `vectors`: all addresses and `bytes` are multiples of 16, so that
// short rows are moved by single vectors, several of a thread at a time; others by warps.
template <class From, class To>
__device__ inline void copy_rows(u32 count, u32 bytes, bool vectors, const From& from, const To& to) {
    if (!vectors || bytes >= warp_threads * sizeof(Vec16)) {
        for (u32 i = threadIdx.x / warp_threads; i < count; i += blockDim.x / warp_threads) copy_bytes(Warp{}, to(i), from(i), bytes);
        return;
    }
    constexpr u32 at_once = 8;
    const u32 each = bytes / sizeof(Vec16), vectors_in_all = count * each;
    for (u32 first = threadIdx.x; first < vectors_in_all; first += at_once * blockDim.x) {
        Vec16 value[at_once];
#pragma unroll
        for (u32 k = 0; k < at_once; ++k) {
            const u32 at = first + k * blockDim.x;
            if (at < vectors_in_all) value[k] = reinterpret_cast<const Vec16*>(from(at / each))[at % each];
        }
#pragma unroll
        for (u32 k = 0; k < at_once; ++k) {
            const u32 at = first + k * blockDim.x;
            if (at < vectors_in_all) reinterpret_cast<Vec16*>(to(at / each))[at % each] = value[k];
        }
    }
}

// use(column) for the first of every eight columns of the caller's lane.
template <class Use>
__device__ inline void each_column(u32 columns, const Use& use) {
    for (u32 column = Warp{}.thread() * row_lanes; column < columns; column += row_lanes * warp_threads) use(column);
}

// One row of a matrix of element type E, contiguous, at any address that is a multiple of the element's size.
template <class E>
class RowOf {
  public:
    __device__ RowOf(const char* matrix, u64 row, u32 columns) : data_(const_cast<char*>(matrix) + row * columns * bytes), size_(u64(columns) * bytes) {}

    // Eight elements from `column` on; zero behind the end.
    __device__ void load(u32 column, typename E::Sum (&value)[row_lanes]) const {
        u32 words[row_lanes / E::lanes];
        load_words(data_, u64(column) * bytes, size_, words);
#pragma unroll
        for (int w = 0; w < row_lanes / E::lanes; ++w) E::widen(words[w], value + w * E::lanes);
    }
    // Rounds to nearest even; nothing is written behind the end.
    __device__ void store(u32 column, const typename E::Sum (&value)[row_lanes]) const {
        u32 words[row_lanes / E::lanes];
#pragma unroll
        for (int w = 0; w < row_lanes / E::lanes; ++w) words[w] = E::narrow(value + w * E::lanes);
        store_words(data_, u64(column) * bytes, size_, words);
    }

  private:
    static constexpr int bytes = 4 / E::lanes;
    char* data_;
    u64 size_;
};

// Eight elements at each of `count` places of a matrix; place(i, row, column) says where. All loads are under way before the first value is
// used, if rows begin at multiples of 16 bytes. Zero behind the end of a row.
template <class E, int count, class Place>
__device__ inline void load_together(const char* matrix, u32 columns, const Place& place, typename E::Sum (&value)[count][row_lanes]) {
    constexpr int words = row_lanes / E::lanes;
    constexpr u32 bytes = 4 / E::lanes;
    u32 word[count][words] = {}, row, column;
    if (aligned_for<Vec16>(matrix) && columns % row_lanes == 0 && words % 4 == 0) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            place(i, row, column);
            if (column >= columns) continue;
#pragma unroll
            for (int v = 0; v < words / 4; ++v) {
                const Vec16 whole = reinterpret_cast<const Vec16*>(matrix + (u64(row) * columns + column) * bytes)[v];
#pragma unroll
                for (int w = 0; w < 4; ++w) word[i][4 * v + w] = whole.word[w];
            }
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            place(i, row, column);
            u32 one[words];
            load_words(matrix + u64(row) * columns * bytes, u64(column) * bytes, u64(columns) * bytes, one);
#pragma unroll
            for (int j = 0; j < count; ++j) {
#pragma unroll
                for (int w = 0; w < words; ++w) word[j][w] = j == i ? one[w] : word[j][w];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
#pragma unroll
        for (int w = 0; w < words; ++w) E::widen(word[i][w], value[i] + w * E::lanes);
    }
}

// Single elements of an array of E.
template <int lanes>
struct ElementBits { using type = u32; };
template <>
struct ElementBits<2> { using type = u16; };
template <>
struct ElementBits<4> { using type = u8; };
template <class E>
__device__ inline typename E::Sum element_of(const char* array, u64 i) {
    typename E::Sum value[E::lanes];
    E::widen(reinterpret_cast<const typename ElementBits<E::lanes>::type*>(array)[i], value);
    return value[0];
}
template <class E>
__device__ inline void set_element(char* array, u64 i, typename E::Sum number) {
    const typename E::Sum value[E::lanes] = {number};
    using Bits = typename ElementBits<E::lanes>::type;
    reinterpret_cast<Bits*>(array)[i] = static_cast<Bits>(E::narrow(value));
}

// What is left of the values where they are stored as E and loaded again.
template <class E>
__device__ inline void round_as(float (&value)[row_lanes]) {
#pragma unroll
    for (int e = 0; e < row_lanes; e += E::lanes) E::widen(E::narrow(value + e), value + e);
}

// The sum of the values of all lanes up to the caller's.
__device__ inline u32 warp_prefix(u32 value) {
#pragma unroll
    for (u32 bits = 1; bits < warp_threads; bits *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, value, bits);
        if (Warp{}.thread() >= bits) value += other;
    }
    return value;
}

// ---- small values from every rank to every rank ----------------------------------------------------------------------------------------------

// `count` packets of every rank, in two alternating buffers. Mirrors `peerlane.device.host.declare.PacketSpace`.
struct PacketSpace {
    u64 at;
    u32 count, unused;
};

// A value of at most 12 bytes for every index, from every rank to every other: value and flag in one store, no fence and no barrier.
//
// In every launch each rank pushes every index below `space.count` once, and behind that pulls every one, in all launches in one order of a
// stream. A rank that has pulled all of an epoch knows that every other rank has begun it, hence has finished the one before: a place may be
// written again in the epoch after next. Left out pushes hang, left out pulls let a rank run ahead and overwrite what another has not read.
template <int W, class T>
class SmallExchange {
    static_assert(sizeof(T) <= packet_data_bytes && sizeof(T) % 4 == 0);
    struct Words {
        u32 word[sizeof(T) / 4];
    };

  public:
    __device__ SmallExchange(const Arena& arena, const PacketSpace& space, u32 epoch)
        : arena_(arena), stride_(u64(space.count) * sizeof(Vec16)), buffer_(space.at + (epoch & 1) * W * stride_), epoch_(epoch) {}

    // The caller sends `value` to every other rank.
    __device__ void send(u32 i, const T& value) const {
        u32 data[packet_words];
        pack(value, data);
        push_packet_to_all<W>(arena_, place(arena_.rank, i), data, epoch_);
    }
    // All ranks' values of index i, folded in rank order, the own one included, for the caller alone.
    template <class Fold>
    __device__ T receive(u32 i, const T& own, const Fold& fold) const {
        u32 data[W][packet_words];
        pull_packets<W>(arena_, arena_.local(place(0, i)), stride_, i, epoch_, data);
        T total{};
#pragma unroll
        for (int q = 0; q < W; ++q) {
            const T term = q == arena_.rank ? own : unpack(data[q]);
            total = q == 0 ? term : fold(total, term);
        }
        return total;
    }

    // The same by a warp: its lane 0 sends, and every lane gets the result.
    __device__ void push(u32 i, const T& value) const {
        if (Warp{}.thread() == 0) send(i, value);
    }
    template <class Fold>
    __device__ T pull(u32 i, const T& own, const Fold& fold) const {
        T total = own;
        if (Warp{}.thread() == 0) total = receive(i, own, fold);
        Words words = __builtin_bit_cast(Words, total);
#pragma unroll
        for (u32& word : words.word) word = __shfl_sync(0xffffffffu, word, 0);
        return __builtin_bit_cast(T, words);
    }

    // The same where a warp that pulls no longer knows its own value: that goes through the own arena. use(rank, value) for every rank in order,
    // in every lane.
    __device__ void push_everywhere(u32 i, const T& value) const {
        if (Warp{}.thread() >= W) return;
        u32 data[packet_words];
        pack(value, data);
        push_packet(arena_.peer(rank_after<W>(arena_.rank, Warp{}.thread()), place(arena_.rank, i)), data, epoch_);
    }
    template <class Use>
    __device__ void pull_everything(u32 i, const Use& use) const {
        u32 data[packet_words] = {};
        const u32 source = Warp{}.thread();
        if (source < W) pull_packet(arena_, source, arena_.local(place(source, i)), i, epoch_, data);
        __syncwarp();
#pragma unroll
        for (int q = 0; q < W; ++q) {
            u32 of_rank[packet_words];
#pragma unroll
            for (int w = 0; w < packet_words; ++w) of_rank[w] = __shfl_sync(0xffffffffu, data[w], q);
            use(q, unpack(of_rank));
        }
    }

    // The same by single threads.
    __device__ void send_everywhere(u32 i, const T& value) const {
        u32 data[packet_words];
        pack(value, data);
#pragma unroll
        for (int k = 0; k < W; ++k) push_packet(arena_.peer(rank_after<W>(arena_.rank, k), place(arena_.rank, i)), data, epoch_);
    }
    __device__ T receive_from(u32 source, u32 i) const {
        u32 data[packet_words];
        pull_packet(arena_, source, arena_.local(place(source, i)), i, epoch_, data);
        return unpack(data);
    }

    __device__ static void pack(const T& value, u32 (&data)[packet_words]) {
        const Words words = __builtin_bit_cast(Words, value);
#pragma unroll
        for (int w = 0; w < packet_words; ++w) data[w] = w < int(sizeof(T) / 4) ? words.word[w < int(sizeof(T) / 4) ? w : 0] : 0;
    }
    __device__ static T unpack(const u32 (&data)[packet_words]) {
        Words words;
#pragma unroll
        for (int w = 0; w < int(sizeof(T) / 4); ++w) words.word[w] = data[w];
        return __builtin_bit_cast(T, words);
    }
    // Where in every arena rank `source`'s packet lies.
    __device__ u64 place(u32 source, u32 i) const { return buffer_ + source * stride_ + i * sizeof(Vec16); }

  private:
    const Arena& arena_;
    u64 stride_, buffer_;
    u32 epoch_;
};

// By one thread: the host, which waits for the stamp, sees what the thread has written behind the first of these words of its memory.
__device__ inline void tell_host(u64* words, u32 stamp) {
    ptx::fence_system();
    ptx::store_relaxed_system(reinterpret_cast<u32*>(words), stamp);
}

}  // namespace peerlane
