"""Lists of gradients scaled in place by their norm over ranks: one kernel, whatever the number of tensors and their dtypes.

Every block sums the powers of its parts, one packet for each block and rank makes the norm, and the same block scales the same parts, as
far as they still lie in L2. Nothing is asked of the host.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from peerlane.device import F32, U32, U64, BoundKernel, DeclaredKernel, Epochs, Field, Group, Packets, Pointer, array, per_group
from peerlane.device.host.group import MAX_RANKS
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/grid.cuh>
using namespace peerlane;

struct Powers {
    float other, expert;
};
constexpr u32 part_elements = 8192;

// Calls use(row, elements, whether an expert's) for every part of the block's; a part is a run of one tensor.
template <class Use>
__device__ inline void each_part(const ClipGradients& args, const Use& use) {
    u32 part = blockIdx.x, begin = 0;
    for (u32 t = 0; t < args.tensors; ++t) {
        const u64 elements = args.tagged_elements[t] / 4;
        const u32 dtype = args.tagged_elements[t] % 4, parts = u32((elements + part_elements - 1) / part_elements);
        for (; part < begin + parts; part += gridDim.x) {
            const u64 first = u64(part - begin) * part_elements, left = elements - first;
            const u32 count = left < part_elements ? u32(left) : part_elements;
            const char* at = args.tensor[t] + first * (dtype == 0 ? 4 : 2);
            const bool expert = t >= args.experts_from;
            if (dtype == 0) use(RowOf<Float32>(at, 0, count), count, expert);
            else if (dtype == 1) use(RowOf<BFloat16>(at, 0, count), count, expert);
            else use(RowOf<Float16>(at, 0, count), count, expert);
        }
        begin += parts;
    }
}

extern "C" __global__ void __launch_bounds__(512)
    clip_gradients(const __grid_constant__ Arena arena, const __grid_constant__ ClipGradients args) {
    __shared__ Powers scratch[32];
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const auto add = [](Powers a, Powers b) { return Powers{a.other + b.other, a.expert + b.expert}; };
    const float p = args.norm_type;

    Powers own{};
    each_part(args, [&](const auto& row, u32 count, bool expert) {
        const float factor = expert ? args.expert_factor : 1.0f;
        float sum = 0.0f, value[row_lanes];
        for (u32 column = threadIdx.x * row_lanes; column < count; column += row_lanes * blockDim.x) {
            row.load(column, value);
            for (float v : value) {
                const float size = fabsf(v * factor);
                sum += p == 2.0f ? size * size : p == 1.0f || size == 0.0f ? size : powf(size, p);
            }
        }
        (expert ? own.expert : own.other) += sum;
    });
    own = block_reduce(own, add, scratch);
    __shared__ Powers of_rank[WORLD_SIZE];
    grid_reduce(arena, args.sums, epoch, own, Powers{}, add, of_rank);
    float sum = 0.0f;
    for (int q = 0; q < WORLD_SIZE; ++q) {  // ranks that do not count are left out, not multiplied by zero: theirs may be infinite
        if (args.weight[q] != 0.0f) sum += args.weight[q] * of_rank[q].other;
        if (args.expert_weight[q] != 0.0f) sum += args.expert_weight[q] * of_rank[q].expert;
    }
    const float norm = p == 2.0f ? sqrtf(sum) : p == 1.0f ? sum : powf(sum, 1.0f / p);
    if (blockIdx.x == 0 && threadIdx.x == 0) *args.norm = norm;

    const float coefficient = norm > args.max_norm ? args.max_norm / norm : 1.0f;
    each_part(args, [&](const auto& row, u32 count, bool expert) {
        const float factor = expert ? args.expert_factor * coefficient : coefficient;
        if (!(norm > args.max_norm) && factor == 1.0f) return;
        for (u32 column = threadIdx.x * row_lanes; column < count; column += row_lanes * blockDim.x) {
            float value[row_lanes];
            row.load(column, value);
            for (float& v : value) v *= factor;
            row.store(column, value);
        }
    });
}
"""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
THREADS, MOST_TENSORS = 512, 1024
CLIP_GRADIENTS = DeclaredKernel(
    "clip_gradients", SOURCE, epochs=Epochs(), sums=Packets(), tensor=array(Field("const char*", ctypes.c_uint64), MOST_TENSORS),
    tagged_elements=array(U64, MOST_TENSORS), tensors=U32, experts_from=U32, expert_factor=F32, max_norm=F32, norm_type=F32,
    weight=array(F32, MAX_RANKS), expert_weight=array(F32, MAX_RANKS), norm=Pointer("float*"),
)  # fmt: skip


@per_group
def _bound(group: Group) -> BoundKernel:
    """Returns one launch for all calls: what differs between ranks, such as weights, must not decide whether a rank makes another one."""
    block = min(THREADS, group.max_threads)
    return CLIP_GRADIENTS.bind(group, grid=group.sm_count, block=block, sizes={"sums": group.sm_count})


@dataclass(frozen=True)
class Clipping:
    """The clipping of a group's gradients. ``others`` counts how often each rank's powers are part of this rank's norm, ``experts`` those
    of its experts' gradients."""

    others: tuple[float, ...]
    experts: tuple[float, ...]
    max_norm: float
    norm_type: float
    divisor: int = 1
    """The divisor of the experts' gradients, before everything else."""


def clip_gradients(
    group: Group, others: Sequence[torch.Tensor | None], experts: Sequence[torch.Tensor | None], clipping: Clipping
) -> torch.Tensor:
    """Collective: scales gradients in place by max_norm / norm if the norm is larger, and returns the norm, a float32 scalar.

    Ranks may have unlike lists. Float32, bfloat16 and float16, of any strides; UsageError for other dtypes or too many tensors."""
    lists = [[tensor for tensor in tensors if tensor is not None and tensor.numel()] for tensors in (others, experts)]
    given = [*lists[0], *lists[1]]
    if unknown := {tensor.dtype for tensor in given} - set(DTYPES):
        raise UsageError(f"gradients of {unknown}; expected {', '.join(map(str, DTYPES))}")
    if len(given) > MOST_TENSORS:
        raise UsageError(f"{len(given)} gradients on a rank; expected at most {MOST_TENSORS}: join small ones")
    dense = [tensor.contiguous() for tensor in given]
    norm = torch.empty((), dtype=torch.float32, device=group.device)
    _bound(group)(
        weight=clipping.others,
        expert_weight=clipping.experts,
        tensor=[group.address(tensor) for tensor in dense],
        tagged_elements=[4 * tensor.numel() + DTYPES.index(tensor.dtype) for tensor in dense],
        tensors=len(dense),
        experts_from=len(lists[0]),
        expert_factor=1.0 / clipping.divisor,
        max_norm=clipping.max_norm,
        norm_type=clipping.norm_type,
        norm=norm,
    )
    for tensor, copy in zip(given, dense, strict=True):
        if copy is not tensor and copy.data_ptr() != tensor.data_ptr():
            tensor.copy_(copy)
    return norm
