"""Problem 81, masks of all ranks gathered and suppressed by overlap: one kernel sends masks as they are and as bits, and widens what comes.

Ranks send the narrow type and one bit a pixel. Behind a barrier every block finds out from bits whether its object loses, and writes
the object's float32 mask, or the blank, once. Bound by the links, (W - 1) / W of the masks in their own type, and by HBM, which writes
the masks in float32. Masks lie in one of two buffers by the launch's parity. docs/kernels.md has the account."""

import torch
import torch.distributed as dist

from peerlane.device import (
    F32,
    U32,
    U64,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Flags,
    Group,
    Pointer,
    array,
    element_type,
    group_of,
    per_group,
)
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr u32 vector_pixels = row_lanes * warp_threads, segment_pixels = 8 * vector_pixels;
constexpr int mask_bytes = 4 / MASK::lanes, score_bytes = 4 / SCORE::lanes;

// A warp takes segments of its rank's masks: the pixels to the other ranks, their bits and the number of those set to all.
__device__ void send_masks(const Arena& arena, const MaskSuppression& args, u32 epoch, u32 first, u32 count) {
    const u64 half = (epoch & 1) * args.objects, masks = args.masks + half * args.mask_stride, bits = args.bits + half * args.bit_stride;
    each_row(count * args.segments, [&](u32 item) {
        const u32 object = item / args.segments, segment = item % args.segments;
        const RowOf<MASK> row(args.local_masks, object, args.pixels);
        u32 area = 0;
        for (u32 k = 0; k < segment_pixels / vector_pixels; ++k) {
            const u32 pixel = segment * segment_pixels + k * vector_pixels + Warp{}.thread() * row_lanes;
            float value[row_lanes];
            row.load(pixel, value);
            u32 set = 0;
            for (int e = 0; e < row_lanes; ++e) set |= u32(value[e] > 0.0f) << e;
            area += __popc(set);
            const u32 word = warp_reduce<4>(set << threadIdx.x % 4 * 8, [](u32 a, u32 b) { return a | b; });
            for (int q = 0; q < WORLD_SIZE; ++q) {
                const int to = rank_after<WORLD_SIZE>(arena.rank, q);
                char* mask = arena.peer(to, masks + (first + object) * args.mask_stride);
                u32* bit_words = reinterpret_cast<u32*>(arena.peer(to, bits + (first + object) * args.bit_stride));
                if (q > 0 && pixel < args.pixels) RowOf<MASK>(mask, 0, args.pixels).store(pixel, value);
                if (threadIdx.x % 4 == 0) bit_words[pixel / 32] = word;
            }
        }
        area = warp_sum(area);
        for (u32 q = Warp{}.thread(); q < WORLD_SIZE; q += warp_threads) {
            const u64 place = args.areas + ((half + first + object) * args.segments + segment) * 4;
            *reinterpret_cast<u32*>(arena.peer(q, place)) = area;
        }
    });
}

// Whether object i overlaps one that it loses to, in every thread of the block: a warp takes every so manieth other object.
__device__ bool loses(const Arena& arena, const MaskSuppression& args, u32 epoch, u32 i, u32& found) {
    const u32 half = (epoch & 1) * args.objects, warps = blockDim.x / warp_threads;
    const auto area_of = [&](u32 object) {
        u32 sum = 0;
        const u32* areas = reinterpret_cast<const u32*>(arena.local(args.areas)) + (half + object) * args.segments;
        for (u32 segment = Warp{}.thread(); segment < args.segments; segment += warp_threads) sum += areas[segment];
        return warp_sum(sum);
    };
    const auto bits_of = [&](u32 object) {
        return reinterpret_cast<const u32*>(arena.local(args.bits + u64(half + object) * args.bit_stride));
    };
    __syncthreads();
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    const u32 own = area_of(i);
    for (u32 j = threadIdx.x / warp_threads; j < args.objects; j += warps) {
        const auto mine = args.times[i], other = args.times[j];
        if (!(args.reverse ? mine < other : mine > other) || !(other > -1)) continue;
        const u32 *ours = bits_of(i), *theirs = bits_of(j), words = args.segments * (segment_pixels / 32);
        u32 common = 0;
        for (u32 word = Warp{}.thread(); word < words; word += warp_threads) common += __popc(ours[word] & theirs[word]);
        common = warp_sum(common);
        const float all = float(own + area_of(j) - common);
        if (float(common) / fmaxf(all, 1.0f) >= args.threshold && Warp{}.thread() == 0) atomicOr_block(&found, 1u);
    }
    __syncthreads();
    return found != 0;
}

extern "C" __global__ void __launch_bounds__(512)
    mask_suppression(const __grid_constant__ Arena arena, const __grid_constant__ MaskSuppression args) {
    __shared__ u32 found;
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs))), first = args.first[arena.rank];
    const u32 count = args.first[arena.rank + 1] - first, half = (epoch & 1) * args.objects;
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    send_masks(arena, args, epoch, first, count);
    const u64 scores = args.scores + half * args.score_stride;
    for (int k = 1; k < WORLD_SIZE && blockIdx.x == 0; ++k) {
        char* to = arena.peer(rank_after<WORLD_SIZE>(arena.rank, k), scores + first * args.score_stride);
        copy_bytes(Block{}, to, args.local_scores, u64(count) * args.score_stride);
    }
    peers.signal_all(blockIdx.x, epoch);
    peers.signal(arena.rank, blockIdx.x, epoch);
    for (int q = 0; q < WORLD_SIZE; ++q) peers.wait_slots(q, 0, gridDim.x, epoch);

    // Some blocks share an object's pixels; each of them finds out for itself.
    for (u32 item = blockIdx.x; item < args.objects * args.shares; item += gridDim.x) {
        const u32 i = item / args.shares, share = item % args.shares;
        const bool suppressed = loses(arena, args, epoch, i, found), own = i - first < count;
        const char* mask = own ? args.local_masks + u64(i - first) * args.pixels * mask_bytes
                               : arena.local(args.masks + (half + i) * args.mask_stride);
        const u32 step = blockDim.x * row_lanes;
        for (u32 pixel = share * step + threadIdx.x * row_lanes; pixel < args.pixels; pixel += args.shares * step) {
            float value[row_lanes];
            RowOf<MASK>(mask, 0, args.pixels).load(pixel, value);
            for (float& v : value) v = suppressed ? -10.0f : v;
            RowOf<Float32>(reinterpret_cast<char*>(args.out_masks), i, args.pixels).store(pixel, value);
        }
        if (share > 0) continue;
        const char* score = own ? args.local_scores + u64(i - first) * args.score_stride : arena.local(scores + i * args.score_stride);
        const u32 elements = args.score_stride / score_bytes;
        for (u32 e = threadIdx.x; e < elements; e += blockDim.x) args.out_scores[u64(i) * elements + e] = element_of<SCORE>(score, e);
        if (threadIdx.x == 0) args.suppress[i] = suppressed;
    }
}
"""
MASK_SUPPRESSION = DeclaredKernel(
    "mask_suppression", SOURCE, epochs=Epochs(), flags=Flags(), masks=Buffer(), bits=Buffer(), areas=Buffer(), scores=Buffer(),
    local_masks=Pointer("const char*"), local_scores=Pointer("const char*"), times=Pointer("const TIME*"), out_masks=Pointer("float*"),
    out_scores=Pointer("float*"), suppress=Pointer("bool*"), mask_stride=U64, bit_stride=U32, score_stride=U32, first=array(U32, 9),
    objects=U32, pixels=U32, segments=U32, shares=U32, reverse=U32, threshold=F32,
)  # fmt: skip
SEGMENT = 2048


@per_group
def mask_suppression(
    group: Group, counts: tuple[int, ...], pixels: int, score: int, dtypes: tuple[torch.dtype, torch.dtype], times: str
) -> BoundKernel:
    objects, segments = sum(counts), -(-pixels // SEGMENT)
    stride, bits, scores = -(-pixels * dtypes[0].itemsize // 16) * 16, segments * SEGMENT // 8, score * dtypes[1].itemsize
    bound = MASK_SUPPRESSION.bind(
        group,
        grid=group.sm_count,
        block=min(512, group.max_threads),
        defines={"MASK": element_type(dtypes[0]), "SCORE": element_type(dtypes[1]), "TIME": times},
        sizes={
            "flags": group.sm_count,
            "masks": 2 * objects * stride,
            "bits": 2 * objects * bits,
            "areas": 8 * objects * segments,
            "scores": 2 * objects * scores,
        },
    )
    shares = max(1, min(segments, group.sm_count // objects))
    first = [sum(counts[:rank]) for rank in range(group.world_size + 1)]
    bound.set(first=first, objects=objects, pixels=pixels, segments=segments, shares=shares)
    bound.set(mask_stride=stride, bit_stride=bits, score_stride=scores)
    return bound


def solution(
    low_res_masks_local: torch.Tensor,
    obj_scores_local: torch.Tensor,
    num_obj_per_gpu: list[int],
    last_occluded: torch.Tensor,
    iou_threshold: float = 0.7,
    reverse: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ranks, masks, scores = group_of(group), low_res_masks_local.contiguous(), obj_scores_local.contiguous()
    if masks.shape[0] != num_obj_per_gpu[ranks.rank] or scores.shape[0] != num_obj_per_gpu[ranks.rank]:
        raise UsageError(f"{masks.shape[0]} masks and {scores.shape[0]} scores; expected {num_obj_per_gpu[ranks.rank]} of each")
    times = last_occluded.contiguous() if last_occluded.dtype == torch.float32 else last_occluded.to(torch.int64).contiguous()
    objects = sum(num_obj_per_gpu)
    out_masks = masks.new_empty((objects, *masks.shape[1:]), dtype=torch.float32)
    out_scores = scores.new_empty((objects, *scores.shape[1:]), dtype=torch.float32)
    suppress = torch.empty(objects, dtype=torch.bool, device=masks.device)
    if objects:
        sizes = torch.Size(masks.shape[1:]).numel(), torch.Size(scores.shape[1:]).numel()
        kind = "float" if times.dtype == torch.float32 else "long long"
        launch = mask_suppression(ranks, tuple(num_obj_per_gpu), *sizes, (masks.dtype, scores.dtype), kind)
        launch(
            local_masks=masks, local_scores=scores, times=times, out_masks=out_masks, out_scores=out_scores, suppress=suppress,
            reverse=int(reverse), threshold=iou_threshold,
        )  # fmt: skip
    return out_masks, out_scores, suppress
