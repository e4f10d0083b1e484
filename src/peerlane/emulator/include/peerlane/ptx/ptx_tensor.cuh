// The emulator's tensor copies: a box becomes segments of 16 bytes or less, swizzled as the copy unit does, zeros where the tensor ends.
#pragma once

#include <peerlane/ptx/ptx_async.cuh>

#include <peerlane_emulator/segments.h>

namespace peerlane {

// What `peerlane.device.host.tensor_map.TensorMapSpec.emulated` writes.
struct alignas(64) TensorMap {
    u64 address;
    u64 extent[5];   // in elements, innermost first; 1 beyond the rank
    u64 stride[4];   // in bytes, of dimensions 1 to 4
    u32 box[5];      // in elements; 1 beyond the rank
    u32 element_bytes;
    u32 rank;
    u32 swizzle_bytes;  // 0 (none) or 128
};
static_assert(sizeof(TensorMap) == 128);

namespace ptx {
namespace tensor {

struct Place {
    u32 rank;
    int at[5];
};

// Pieces of the box at `place`: use(address in global memory or null, address in shared memory, bytes), in steps of at most 16 bytes. All
// `place.rank` coordinates count, the others are zero.
template <class Use>
PEERLANE_UNCHECKED void each_piece(const TensorMap& map, const void* shared, const Place& place, const Use& use) {
    if (map.rank != place.rank) emulator::peerlane_trap();
    const u32 start = emulator::peerlane_shared_address(shared);
    const u32 row_bytes = map.box[0] * map.element_bytes;
    if (start % (map.swizzle_bytes ? 1024 : 128) != 0 || row_bytes % 16 != 0) emulator::peerlane_trap();
    if (map.swizzle_bytes && row_bytes > map.swizzle_bytes) emulator::peerlane_trap();
    char* const window = static_cast<char*>(emulator::peerlane_shared_pointer(start)) - start;
    u32 linear = start;
    const auto within = [&](long long at, int dimension) { return at >= 0 && at < static_cast<long long>(map.extent[dimension]); };
    for (u32 outer = 0; outer < map.box[4] * map.box[3] * map.box[2]; ++outer) {
        for (u32 y = 0; y < map.box[1]; ++y) {
            const u32 steps[] = {y, outer % map.box[2], outer / map.box[2] % map.box[3], outer / map.box[2] / map.box[3]};
            bool row_inside = true;
            long long row = 0;  // in bytes
            for (int i = 1; i < 5; ++i) {
                const long long at = place.at[i] + static_cast<long long>(steps[i - 1]);
                row_inside = row_inside && within(at, i);
                row += at * static_cast<long long>(map.stride[i - 1]);
            }
            for (u32 x = 0; x < row_bytes; x += 16, linear += 16) {
                char* const piece = window + (map.swizzle_bytes ? linear ^ (linear >> 7 & 7) << 4 : linear);
                const long long first = place.at[0] + static_cast<long long>(x / map.element_bytes);
                for (u32 done = 0; done < 16;) {
                    // A run of elements that are all inside or all outside.
                    const auto inside = [&](u32 byte) {
                        const long long column = first + byte / map.element_bytes;
                        return row_inside && column >= 0 && column < static_cast<long long>(map.extent[0]);
                    };
                    u32 end = done + map.element_bytes;
                    while (end < 16 && inside(end) == inside(done)) end += map.element_bytes;
                    const u64 offset = first * map.element_bytes + done + row;
                    use(inside(done) ? reinterpret_cast<char*>(map.address + offset) : nullptr, piece + done, end - done);
                    done = end;
                }
            }
        }
    }
}

PEERLANE_INLINE void load(void* shared, const TensorMap* map, u64* barrier, const Place& place) {
    emulator::peerlane_async_aligned(shared, 128);
    emulator::Segments segments;
    each_piece(*map, shared, place, [&](char* global, char* piece, u32 bytes) { segments.add(piece, global, bytes); });
    emulator::peerlane_async(segments.list(), segments.count(), emulator::Combine::replace, barrier, emulator::bulk_queue);
}

// One copy for each block, which are done at different times.
PEERLANE_INLINE void load_to(u16 blocks, void* shared, const TensorMap* map, u64* barrier, const Place& place) {
    emulator::peerlane_async_aligned(shared, 128);
    for (u32 block = 0; blocks >> block; ++block) {
        if (!(blocks >> block & 1)) continue;
        emulator::Segments segments;
        const long long away = static_cast<char*>(emulator::peerlane_cluster_pointer(shared, block)) - static_cast<char*>(shared);
        each_piece(*map, shared, place, [&](char* global, char* piece, u32 bytes) { segments.add(piece + away, global, bytes); });
        u64* const there = static_cast<u64*>(emulator::peerlane_cluster_pointer(barrier, block));
        emulator::peerlane_async(segments.list(), segments.count(), emulator::Combine::replace, there, emulator::bulk_queue);
    }
}

PEERLANE_INLINE void store(const TensorMap* map, const void* shared, const Place& place) {
    emulator::peerlane_async_aligned(shared, 128);
    emulator::Segments segments;
    each_piece(*map, shared, place, [&](char* global, char* piece, u32 bytes) {
        if (global) segments.add(global, piece, bytes);
    });
    emulator::peerlane_async(segments.list(), segments.count(), emulator::Combine::replace, nullptr, emulator::bulk_queue);
}

}  // namespace tensor

PEERLANE_INLINE void tensor_load(void* shared, const TensorMap* map, u64* barrier, int x, int y) {
    tensor::load(shared, map, barrier, {2, {x, y}});
}
PEERLANE_INLINE void tensor_load(void* shared, const TensorMap* map, u64* barrier, int x, int y, int z) {
    tensor::load(shared, map, barrier, {3, {x, y, z}});
}
PEERLANE_INLINE void tensor_load(void* shared, const TensorMap* map, u64* barrier, int x, int y, int z, int w) {
    tensor::load(shared, map, barrier, {4, {x, y, z, w}});
}
PEERLANE_INLINE void tensor_load_to(u16 blocks, void* shared, const TensorMap* map, u64* barrier, int x, int y, int z) {
    tensor::load_to(blocks, shared, map, barrier, {3, {x, y, z}});
}
PEERLANE_INLINE void tensor_store(const TensorMap* map, const void* shared, int x, int y) {
    tensor::store(map, shared, {2, {x, y}});
}
PEERLANE_INLINE void tensor_store(const TensorMap* map, const void* shared, int x, int y, int z) {
    tensor::store(map, shared, {3, {x, y, z}});
}
PEERLANE_INLINE void tensor_store(const TensorMap* map, const void* shared, int x, int y, int z, int w) {
    tensor::store(map, shared, {4, {x, y, z, w}});
}

}  // namespace ptx
}  // namespace peerlane
