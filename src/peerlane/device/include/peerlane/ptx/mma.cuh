// How the matrix units see their operands: types, fragments in registers, descriptors of shared memory.
//
// Fragments, for lane l of a warp: a word holds two 16-bit elements, the one of the lower column (or k) in the low half.
//   accumulator (fp32), rows x 8 j.. columns: elements 4 j + {0, 1} are row l / 4, columns 8 j + 2 (l % 4) + {0, 1}; elements 4 j + {2, 3}
//     are eight rows further down
//   A, 16 x 16: word 0 is row l / 4, k 2 (l % 4) + {0, 1}; word 1 eight rows down; words 2 and 3 the same, eight k further
//   B, 16 x 8 (mma.sync): word 0 is k 2 (l % 4) + {0, 1}, column l / 4; word 1 eight k further
// In a warpgroup, warp w has the rows 16 w to 16 w + 15.
#pragma once

#include <peerlane/ptx/ptx_async.cuh>

namespace peerlane {

enum class MmaType { bf16, f16, e4m3 };  // of A and B; sums are fp32

// Which dimension of an operand is contiguous in shared memory: k, or the other one (m of A, n of B).
enum class Major { k, mn };

// The shared-memory operand of a wgmma, in the 128-byte swizzle: rows of 128 bytes, eight of them make a 1024-byte aligned atom.
// Major::k: a row is 64 k of one m, or 128 of e4m3; `stride_bytes` from eight m to the next eight; `leading_bytes` is not used.
// Major::mn: a row is 64 m of one k; `stride_bytes` from eight k to the next eight, `leading_bytes` from 64 m to the next 64.
// The start may lie inside an atom, 16-byte aligned, to step along k.
__device__ inline u64 mma_descriptor(const void* start, u32 leading_bytes, u32 stride_bytes) {
    constexpr u64 swizzle_128_bytes = 1;
    const auto field = [](u32 bytes) { return static_cast<u64>((bytes & 0x3ffff) >> 4); };
    return field(ptx::shared_address(start)) | field(leading_bytes) << 16 | field(stride_bytes) << 32 | swizzle_128_bytes << 62;
}

}  // namespace peerlane
