"""Problem 13, row-parallel matrix product and all-reduce, in CUDA C++: for small products one launch does it all.

A block computes one tile of the partial product, sends three quarters of it (of four ranks) to the ranks that sum them, straight from
shared memory, sums its own quarter and sends the sum to everybody. Products of more tiles than SMs are left to cuBLAS and summed in place
by a second launch. The partial products are rounded to the input's dtype, as in the reference, and added in fp32 in rank order.

Which exchange is used depends on the shape of the result only, so ranks agree on it. How a rank gets its partial product is its own affair:
a rank with a long or odd inner dimension asks cuBLAS for it and hands it to the same kernel.
"""

from __future__ import annotations

import ctypes

import torch
import torch.distributed as dist

from peerlane.device import Arena, Kernel, Launch, compile_cubin
from peerlane.device.all_reduce import ELEMENT_TYPES, Workspace, plan, workspace_bytes

SOURCE = r"""
#include <peerlane/all_reduce.cuh>

#define KERNEL extern "C" __global__ void __launch_bounds__(512)
#define PARAMETERS \
    const __grid_constant__ peerlane::Arena arena, const __grid_constant__ peerlane::AllReduceWorkspace space, \
    char* data, unsigned long long bytes, unsigned int tile

KERNEL one_shot(PARAMETERS) { peerlane::one_shot<ELEMENT, WORLD_SIZE>(arena, space, data, data, bytes); }
KERNEL two_shot(PARAMETERS) { peerlane::two_shot<ELEMENT, WORLD_SIZE>(arena, space, data, data, bytes); }
KERNEL two_shot_ring(PARAMETERS) { peerlane::two_shot_ring<ELEMENT, WORLD_SIZE>(arena, space, data, data, bytes, tile); }
"""
DATA = 2  # place of the argument of SOURCE's kernels that changes from call to call

TILED_SOURCE = r"""
#include <peerlane/all_reduce.cuh>
#include <peerlane/mma.cuh>

using namespace peerlane;

// Elements are 16 bits wide. Eight warps, four along m and two along n, each with a 32 x 32 part of the tile.
constexpr u32 tile_m = 128, tile_n = 64, tile_k = 64, stages = 4, threads = 256;
constexpr u32 row_bytes = 128, chunk = 8;  // a row of 64 elements in shared memory is 8 chunks of 8 elements
constexpr u32 a_bytes = tile_m * row_bytes, stage_bytes = a_bytes + tile_k * row_bytes;
constexpr u32 row_words = tile_n / 2, tile_packets = (tile_m * row_words + packet_words - 1) / packet_words;
static_assert(stages * stage_bytes == SHARED_BYTES && tile_m == TILE_M && tile_n == TILE_N && threads == THREADS);

// Both orders keep what eight rows have in the same place on different banks.
__device__ inline u32 chunk_at(u32 row, u32 c) { return row * row_bytes + ((c ^ (row & 7)) << 4); }
__device__ inline u32 word_at(u32 row, u32 word) { return row * row_words + (word ^ ((row & 7) << 2)); }

struct Problem {
    const char *a, *b;  // (m, k) and (k, n), row-major, 16-byte aligned, n and k multiples of 8
    u32 m, n, k, first_row, first_column;
};

// The k-th slice of the operands, zeros behind their ends.
__device__ inline void fetch(const Problem& p, u32 step, u32 stage) {
    for (u32 i = threadIdx.x; i < tile_m * 8; i += threads) {
        const u32 row = i / 8, c = i % 8, at_k = step * tile_k + c * chunk;
        const bool valid = p.first_row + row < p.m && at_k < p.k;
        ptx::copy_async(stage + chunk_at(row, c), p.a + (u64(p.first_row + row) * p.k + at_k) * 2, valid);
    }
    for (u32 i = threadIdx.x; i < tile_k * 8; i += threads) {
        const u32 row = i / 8, c = i % 8, at_k = step * tile_k + row, column = p.first_column + c * chunk;
        ptx::copy_async(stage + a_bytes + chunk_at(row, c), p.b + (u64(at_k) * p.n + column) * 2, at_k < p.k && column < p.n);
    }
}

// The tile of the partial product, rounded, into the first 16 KiB of shared memory.
__device__ inline void multiply(const Problem& p, char* shared) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
    const u32 base = ptx::shared_address(shared);
    const u32 steps = (p.k + tile_k - 1) / tile_k;
    float sum[2][4][4] = {};

#pragma unroll
    for (u32 s = 0; s < stages - 1; ++s) {
        if (s < steps) fetch(p, s, base + s * stage_bytes);
        ptx::copy_async_commit();
    }
    for (u32 step = 0; step < steps; ++step) {
        ptx::copy_async_wait<stages - 2>();
        __syncthreads();
        const u32 ahead = step + stages - 1;
        if (ahead < steps) fetch(p, ahead, base + ahead % stages * stage_bytes);
        ptx::copy_async_commit();

        const u32 a = base + step % stages * stage_bytes, b = a + a_bytes;
#pragma unroll
        for (u32 inner = 0; inner < tile_k / 16; ++inner) {
            u32 left[2][4], right[2][4];
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                ptx::load_matrices(left[i], a + chunk_at(warp_row + i * 16 + lane % 16, inner * 2 + lane / 16));
                ptx::load_matrices_transposed(right[i], b + chunk_at(inner * 16 + lane % 16, warp_column / chunk + i * 2 + lane / 16));
            }
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    ptx::multiply_add(ELEMENT{}, sum[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    }
    ptx::copy_async_wait<0>();
    __syncthreads();
    u32* tile = reinterpret_cast<u32*>(shared);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32 row = warp_row + i * 16 + lane / 4, word = warp_column / 2 + j * 4 + lane % 4;
            tile[word_at(row, word)] = ELEMENT::narrow(sum[i][j]);
            tile[word_at(row + 8, word)] = ELEMENT::narrow(sum[i][j] + 2);
        }
    }
}

// One block per tile, all resident. `product` is the partial product if the rank has it already, else null.
extern "C" __global__ void __launch_bounds__(threads) product_all_reduce(
    const __grid_constant__ Arena arena, const __grid_constant__ AllReduceWorkspace space,
    const char* a, const char* b, const char* product, char* out, u32 m, u32 n, u32 k) {
    extern __shared__ __align__(128) char shared[];
    u32* tile = reinterpret_cast<u32*>(shared);
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(space.epochs)));
    const u32 tiles_n = (n + tile_n - 1) / tile_n;
    const Problem p{a, b, m, n, k, blockIdx.x / tiles_n * tile_m, blockIdx.x % tiles_n * tile_n};
    const u32 words = min(tile_m, m - p.first_row) * row_words;
    const auto offset = [&](u32 row, u32 word) { return (u64(p.first_row + row) * n + p.first_column + word * 2) * 2; };
    const auto inside = [&](u32 word) { return p.first_column + word * 2 < n; };

    if (product == nullptr) {
        multiply(p, shared);
    } else {
        for (u32 i = threadIdx.x; i < words; i += threads) {
            const u32 row = i / row_words, word = i % row_words;
            tile[word_at(row, word)] = inside(word) ? *reinterpret_cast<const u32*>(product + offset(row, word)) : 0;
        }
    }
    __syncthreads();

    const auto load = [&](u32 packet, u32(&data)[packet_words]) {
#pragma unroll
        for (u32 w = 0; w < packet_words; ++w) {
            const u32 i = packet * packet_words + w;
            data[w] = i < words ? tile[word_at(i / row_words, i % row_words)] : 0;
        }
    };
    const auto store = [&](u32 packet, const u32(&data)[packet_words]) {
#pragma unroll
        for (u32 w = 0; w < packet_words; ++w) {
            const u32 i = packet * packet_words + w, row = i / row_words, word = i % row_words;
            if (i < words && inside(word)) *reinterpret_cast<u32*>(out + offset(row, word)) = data[w];
        }
    };
    const u64 place = space.packets + (epoch & 1) * space.packet_buffer_bytes + blockIdx.x * two_shot_bytes(WORLD_SIZE, tile_packets);
    const u32 count = (words + packet_words - 1) / packet_words;
    two_shot_packets<ELEMENT, WORLD_SIZE>(arena, epoch, place, count, threadIdx.x, threads, load, store);
}
"""
TILED_DEFINES = {"TILE_M": 128, "TILE_N": 64, "THREADS": 256, "SHARED_BYTES": 4 * (128 + 64) * 128}
A, B, PRODUCT, OUT, K = 2, 3, 4, 5, 8  # places of the arguments of TILED_SOURCE's kernel that change from call to call
# Below this size the exchange is better done in one shot.
TILED_MIN_BYTES = 256 << 10
# Beyond this inner dimension cuBLAS, with the instructions made for large products, is ahead by more than a launch costs.
OWN_PRODUCT_MAX_K = 1024


class ProductAllReduce:
    """The arena, and one bound launch per shape and dtype of the result. Created by the first call, which is collective."""

    def __init__(self) -> None:
        self.arena = Arena(workspace_bytes(dist.get_world_size()), timeout_s=10.0)
        self.workspace = Workspace.take(self.arena)
        self.launches: dict[tuple[int, int, torch.dtype], tuple[bool, Launch]] = {}

    def bind(self, m: int, n: int, dtype: torch.dtype) -> tuple[bool, Launch]:
        """Whether one launch does it all, and the launch."""
        if dtype not in ELEMENT_TYPES:
            raise TypeError(f"all-reduce of {dtype}: expected one of {', '.join(map(str, ELEMENT_TYPES))}; convert the operands")
        nbytes = m * n * dtype.itemsize
        chosen = plan(nbytes, self.arena.world_size, self.arena.sm_count)
        defines = {"ELEMENT": ELEMENT_TYPES[dtype], "WORLD_SIZE": self.arena.world_size}
        tiles = -(-m // TILED_DEFINES["TILE_M"]) * -(-n // TILED_DEFINES["TILE_N"])
        space = (self.arena.view, self.workspace)
        packets_suit = nbytes >= TILED_MIN_BYTES and chosen.kernel != "two_shot_ring"
        if packets_suit and dtype.itemsize == 2 and n % 8 == 0 and tiles <= self.arena.sm_count:
            cubin = compile_cubin(TILED_SOURCE, defines=defines | TILED_DEFINES)
            kernel = Kernel(cubin, "product_all_reduce", on_failure=self.arena.raise_fault)
            pointers = tuple(ctypes.c_void_p() for _ in range(4))
            args = (*space, *pointers, ctypes.c_uint32(m), ctypes.c_uint32(n), ctypes.c_uint32())
            return True, kernel.bind(tiles, TILED_DEFINES["THREADS"], args, shared_bytes=TILED_DEFINES["SHARED_BYTES"])
        kernel = Kernel(compile_cubin(SOURCE, defines=defines), chosen.kernel, on_failure=self.arena.raise_fault)
        args = (*space, ctypes.c_void_p(), ctypes.c_uint64(nbytes), ctypes.c_uint32(chosen.tile))
        return False, kernel.bind(chosen.grid, chosen.block, args)

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        m, k = a.shape
        n = b.shape[1]
        key = (m, n, a.dtype)
        if key not in self.launches:
            self.launches[key] = self.bind(*key)
        one_launch, launch = self.launches[key]
        args = launch.args
        if not one_launch:
            product = matrix_product(a, b)
            args[DATA].value = product.data_ptr()
            launch()
            return product
        if k <= OWN_PRODUCT_MAX_K and k % 8 == 0 and b.shape[0] == k and b.dtype == a.dtype and is_plain(a) and is_plain(b):
            out = a.new_empty((m, n))
            args[A].value, args[B].value, args[K].value, args[PRODUCT].value = a.data_ptr(), b.data_ptr(), k, None
        else:
            out = matrix_product(a, b)
            args[PRODUCT].value = out.data_ptr()
        args[OUT].value = out.data_ptr()
        launch()
        return out


def is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


@torch.no_grad()
def matrix_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)


product_all_reduce: ProductAllReduce | None = None


def solution(A_local: torch.Tensor, B_local: torch.Tensor) -> torch.Tensor:
    global product_all_reduce
    if A_local.shape[0] * B_local.shape[1] == 0 or dist.get_world_size() == 1:
        return matrix_product(A_local, B_local)
    if product_all_reduce is None:
        product_all_reduce = ProductAllReduce()
    return product_all_reduce(A_local, B_local)
