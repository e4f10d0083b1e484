"""Problem 26, split sizes and counts of a dispatch: one kernel counts the mask, and writes all results to the host's memory.

Blocks take the experts, or pieces of them, and send what they have counted to the experts' owners, as packets. One block gathers them.
Bound by the host's wait, and at large sizes by HBM, which reads the mask once."""

import torch
import torch.distributed as dist

from peerlane.device import U32, U64, BoundKernel, DeclaredKernel, Epochs, Group, Packets, Pointer, group_of, per_group
from peerlane.device.collectives.counts import HostWords

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr u32 lanes = sizeof(Vec16) / sizeof(MASK);
struct Values { MASK of[lanes]; };

// By a block; every thread gets its share.
__device__ inline u32 sum_of(const MASK* values, u64 count) {
    const u64 before = min(count, u64(-reinterpret_cast<u64>(values) % sizeof(Vec16) / sizeof(MASK))), vectors = (count - before) / lanes;
    u32 sum = 0;
    for (u64 i = threadIdx.x; i < count - vectors * lanes; i += blockDim.x) sum += u32(values[i < before ? i : i + vectors * lanes]);
    const Vec16* whole = reinterpret_cast<const Vec16*>(values + before);
    constexpr u32 at_once = 8;  // loads of a thread that are under way together
    for (u64 first = threadIdx.x; first < vectors; first += at_once * blockDim.x) {
        Vec16 some[at_once] = {};
#pragma unroll
        for (u32 k = 0; k < at_once; ++k) {
            if (first + k * blockDim.x < vectors) some[k] = whole[first + k * blockDim.x];
        }
#pragma unroll
        for (u32 k = 0; k < at_once; ++k) {
            const Values of_vector = __builtin_bit_cast(Values, some[k]);
#pragma unroll
            for (u32 i = 0; i < lanes; ++i) sum += u32(of_vector.of[i]);
        }
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(512) moe_counts(const __grid_constant__ Arena arena, const __grid_constant__ MoeCounts args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const SmallExchange<WORLD_SIZE, u32> counts(arena, args.packets, epoch);
    const u32 experts = args.experts, own = experts / WORLD_SIZE;
    __shared__ u32 scratch[32];
    for (u32 item = blockIdx.x; item < experts * args.pieces; item += gridDim.x) {
        const u32 expert = item / args.pieces;
        const Part part = part_of(args.slots, item % args.pieces, args.pieces);
        const u32 sum = sum_of(args.mask + expert * args.slots + part.first, part.end - part.first);
        const u32 all = block_reduce(sum, [](u32 a, u32 b) { return a + b; }, scratch);
        u32 data[packet_words];
        counts.pack(all, data);
        // To the expert's rank, which hears of its experts from every rank, and to this one.
        if (threadIdx.x == 0) push_packet(arena.peer(expert / own, counts.place(arena.rank, item)), data, epoch);
        if (threadIdx.x == 0 && expert / own != arena.rank) push_packet(arena.local(counts.place(arena.rank, item)), data, epoch);
    }
    if (blockIdx.x != 0) return;
    u32 *sent = reinterpret_cast<u32*>(ptx::dynamic_shared()), *received = sent + experts;  // by expert; by source and own expert
    for (u32 i = threadIdx.x; i < 2 * experts; i += blockDim.x) {
        const u32 source = i < experts ? arena.rank : (i - experts) / own, expert = i < experts ? i : arena.rank * own + i % own;
        u32 sum = 0;
        for (u32 piece = 0; piece < args.pieces; ++piece) sum += counts.receive_from(source, expert * args.pieces + piece);
        sent[i] = sum;
    }
    if (!block_arrived(arena)) return;
    u64* out = args.host + 1;
    for (u32 i = threadIdx.x; i < 2 * WORLD_SIZE; i += blockDim.x) {
        u64 sum = 0;
        for (u32 e = 0; e < own; ++e) sum += sent[i * own + e];
        out[i] = sum;
    }
    out += 2 * WORLD_SIZE;
    for (u32 i = threadIdx.x; i < experts + own; i += blockDim.x) {
        u64 sum = i < experts ? received[i] : 0;
        for (u32 q = 0; i >= experts && q < WORLD_SIZE; ++q) sum += received[q * own + i - experts];
        out[i] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) tell_host(args.host, args.stamp);
}
"""
MOE_COUNTS = DeclaredKernel(
    "moe_counts", SOURCE, epochs=Epochs(), packets=Packets(), mask=Pointer("const MASK*"), host=Pointer("u64*"), slots=U64, experts=U32,
    pieces=U32, stamp=U32,
)  # fmt: skip
MASK_TYPES = {torch.bool: "u8", torch.uint8: "u8", torch.int32: "int", torch.int64: "long long", torch.float32: "float"}


@per_group
def moe_counts(group: Group, experts: int, mask: torch.dtype) -> tuple[BoundKernel, HostWords]:
    """Returns the launch, and what it tells the host: split sizes, counts by source and own expert, and their sums."""
    told, pieces = HostWords(group, 2 * group.world_size + experts + experts // group.world_size), max(1, group.sm_count // experts)
    launch = MOE_COUNTS.bind(
        group, grid=min(group.sm_count, experts * pieces), block=min(512, group.max_threads), resident=True,
        defines={"MASK": MASK_TYPES[mask]}, sizes={"packets": experts * pieces}, shared_bytes=8 * experts, experts=experts, pieces=pieces,
        host=told.words,
    )  # fmt: skip
    return launch, told


def solution(
    expert_mask: torch.Tensor, num_experts: int, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ranks, mask = group_of(group), expert_mask.contiguous()
    launch, told = moe_counts(ranks, num_experts, mask.dtype)
    launch(mask=mask, slots=mask.numel() // num_experts, stamp=told.stamp())
    told.wait()
    found = told.words[1:].clone()  # the next call overwrites what the kernel wrote
    splits, counts = found[: 2 * ranks.world_size], found[2 * ranks.world_size :]
    if expert_mask.dtype.is_floating_point:
        counts = counts.to(torch.float32)
    return splits[: ranks.world_size], splits[ranks.world_size :], counts[:num_experts].view(ranks.world_size, -1), counts[num_experts:]
