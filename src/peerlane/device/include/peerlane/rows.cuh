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

// The caller's number among the threads that share some work, of whole warps: those of all blocks, or of a team in each block.
struct Share {
    u32 thread, threads;
};
template <class Team = Block>
__device__ inline Share share_of(const Team& team = {}) {
    return {blockIdx.x * team.size() + team.thread(), gridDim.x * team.size()};
}

// use(row, vector, value) for every 16 bytes of `count` rows of `each` vectors that begin at from(row); eight of a thread are on their way at a time.
// Rows are left out where that is null.
template <class From, class Use>
__device__ inline void each_vector(Share share, u32 count, u32 each, const From& from, const Use& use) {
    constexpr u32 at_once = 8;
    const u64 total = u64(count) * each;
    for (u64 first = share.thread; first < total; first += u64(at_once) * share.threads) {
        u32 row[at_once], vector[at_once];
        Vec16 value[at_once];
#pragma unroll
        for (u32 k = 0; k < at_once; ++k) {
            const u64 at = first + u64(k) * share.threads;
            row[k] = at < total ? total >> 32 == 0 ? static_cast<u32>(at) / each : static_cast<u32>(at / each) : count;
            vector[k] = static_cast<u32>(at - u64(row[k]) * each);
            const char* begin = row[k] < count ? from(row[k]) : nullptr;
            if (begin != nullptr) value[k] = reinterpret_cast<const Vec16*>(begin)[vector[k]];
            else row[k] = count;
        }
#pragma unroll
        for (u32 k = 0; k < at_once; ++k) {
            if (row[k] < count) use(row[k], vector[k], value[k]);
        }
    }
}

// Rows of `bytes` from `from(i)` to `to(i)`, for i < count. `vectors`: all addresses and `bytes` are multiples of 16; other rows are moved by warps. Rows
// are left out where from(i) is null.
template <class From, class To>
__device__ inline void copy_rows(Share share, u32 count, u32 bytes, bool vectors, const From& from, const To& to) {
    const auto store = [&](u32 i, u32 v, const Vec16& value) { reinterpret_cast<Vec16*>(to(i))[v] = value; };
    if (vectors) return each_vector(share, count, bytes / sizeof(Vec16), from, store);
    for (u32 i = share.thread / warp_threads; i < count; i += share.threads / warp_threads) {
        if (const char* begin = from(i); begin != nullptr) copy_bytes(Warp{}, to(i), begin, bytes);
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

// Eight elements at each of `count` places of a matrix, as they lie in words; place(i, row, column) says where. All loads are under way before the
// first value is used, if rows begin at multiples of 16 bytes. Zero behind the end of a row.
template <class E, int count, int words, class Place>
__device__ inline void load_words_together(const char* matrix, u32 columns, const Place& place, u32 (&word)[count][words]) {
    static_assert(words == row_lanes / E::lanes);
    constexpr u32 bytes = 4 / E::lanes;
    u32 row, column;
#pragma unroll
    for (int i = 0; i < count; ++i) {
#pragma unroll
        for (int w = 0; w < words; ++w) word[i][w] = 0;
    }
    if (aligned_for<Vec16>(matrix) && columns % row_lanes == 0 && words % 4 == 0) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            place(i, row, column);
            if (column < columns) load_vectors(matrix + (u64(row) * columns + column) * bytes, word[i]);
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
}

// Eight elements in words of E.
template <class E, int words>
__device__ inline void widen_words(const u32 (&word)[words], typename E::Sum (&value)[row_lanes]) {
#pragma unroll
    for (int w = 0; w < words; ++w) E::widen(word[w], value + w * E::lanes);
}

// The same as numbers.
template <class E, int count, class Place>
__device__ inline void load_together(const char* matrix, u32 columns, const Place& place, typename E::Sum (&value)[count][row_lanes]) {
    u32 word[count][row_lanes / E::lanes];
    load_words_together<E>(matrix, columns, place, word);
#pragma unroll
    for (int i = 0; i < count; ++i) widen_words<E>(word[i], value[i]);
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
