"""Lists of gradients scaled in place by their norm over ranks: one kernel, whatever the number of tensors and their dtypes.

Every block sums the powers of its parts, one packet for each block and rank makes the norm, and the same block scales the same parts, the
last ones first, as far as they still lie in L2. Nothing is asked of the host. An SM has 64 KiB on their way, for at memory's latency of
nearly a microsecond 32 KiB would be the full rate of 132 SMs, and a vector for each of 512 threads is a quarter of that.
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
constexpr u32 part_bytes = PART_BYTES;

// The runs of tensors that blocks take in turn. A part's tensor is searched from that of the part before, in either direction.
struct Parts {
    const ClipGradients& args;
    u32 tensor = 0, first = 0;

    __device__ u32 own() const { return (args.parts + gridDim.x - 1 - blockIdx.x) / gridDim.x; }
    __device__ u64 bytes() const { return args.tagged_bytes[tensor] / 4; }
    __device__ u32 dtype() const { return args.tagged_bytes[tensor] % 4; }
    __device__ u32 count() const { return u32((bytes() + part_bytes - 1) / part_bytes); }
    // Returns the number in its tensor of the block's part `i`.
    __device__ u32 move_to(u32 i) {
        const u32 part = i * gridDim.x + blockIdx.x;
        while (part < first) --tensor, first -= count();
        while (part - first >= count()) first += count(), ++tensor;
        return part - first;
    }
};

// change(values) for all elements of one part, whose vectors lie at multiples of 16 bytes; `at_once` of them are on their way to a thread.
// The first part also has the elements before the first vector and behind the last one.
template <class E, u32 at_once, bool writes, class Change>
__device__ inline void each_vector(char* tensor, u64 elements, u32 part, const Change& change) {
    constexpr u32 bytes = 4 / E::lanes, wide = sizeof(Vec16) / bytes, of_part = part_bytes / sizeof(Vec16);
    const u64 gap = -reinterpret_cast<u64>(tensor) % sizeof(Vec16) / bytes, head = gap < elements ? gap : elements;
    const u64 vectors = (elements - head) / wide, begin = u64(part) * of_part;
    Vec16* body = reinterpret_cast<Vec16*>(tensor + head * bytes) + begin;
    const u32 count = begin < vectors ? u32(min(vectors - begin, u64(of_part))) : 0;
    for (u32 first = threadIdx.x; first < count; first += at_once * blockDim.x) {
        Vec16 vector[at_once];
#pragma unroll
        for (u32 i = 0; i < at_once; ++i) {
            if (first + i * blockDim.x < count) vector[i] = body[first + i * blockDim.x];
        }
#pragma unroll
        for (u32 i = 0; i < at_once; ++i) {
            if (first + i * blockDim.x >= count) continue;
            float value[wide];
#pragma unroll
            for (u32 w = 0; w < 4; ++w) E::widen(vector[i].word[w], value + w * E::lanes);
            change(value);
            if constexpr (writes) {
#pragma unroll
                for (u32 w = 0; w < 4; ++w) vector[i].word[w] = E::narrow(value + w * E::lanes);
                body[first + i * blockDim.x] = vector[i];
            }
        }
    }
    const u32 rest = u32(elements - vectors * wide);
    for (u32 i = threadIdx.x; part == 0 && i < rest; i += blockDim.x) {
        const u64 at = i < head ? i : vectors * wide + i;
        float value[1] = {element_of<E>(tensor, at)};
        change(value);
        if constexpr (writes) set_element<E>(tensor, at, value[0]);
    }
}

template <u32 at_once, bool writes, class Change>
__device__ inline void each_gradient(const Parts& at, u32 part, const Change& change) {
    char* tensor = at.args.tensor[at.tensor];
    if (at.dtype() == 0) each_vector<Float32, at_once, writes>(tensor, at.bytes() / 4, part, change);
    else if (at.dtype() == 1) each_vector<BFloat16, at_once, writes>(tensor, at.bytes() / 2, part, change);
    else each_vector<Float16, at_once, writes>(tensor, at.bytes() / 2, part, change);
}

// The sum of power(|g|) over the elements of all parts of the block, for the caller's share of them.
template <u32 at_once, class Power>
__device__ inline Powers sum_powers(Parts& at, const Power& power) {
    Powers own{};
    for (u32 i = 0; i < at.own(); ++i) {
        const u32 part = at.move_to(i);
        const bool expert = at.tensor >= at.args.experts_from;
        const float factor = expert ? at.args.expert_factor : 1.0f;
        float sum = 0.0f;
        each_gradient<at_once, false>(at, part, [&](const auto& values) {
#pragma unroll
            for (float value : values) sum += power(fabsf(value * factor));
        });
        (expert ? own.expert : own.other) += sum;
    }
    return own;
}

extern "C" __global__ void __launch_bounds__(1024)
    clip_gradients(const __grid_constant__ Arena arena, const __grid_constant__ ClipGradients args) {
    __shared__ Powers scratch[32];
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const auto add = [](Powers a, Powers b) { return Powers{a.other + b.other, a.expert + b.expert}; };
    const float p = args.norm_type;
    Parts at{args};
    Powers own = p == 2.0f ? sum_powers<AT_ONCE>(at, [](float size) { return size * size; })
                           : sum_powers<1>(at, [&](float size) { return p == 1.0f || size == 0.0f ? size : powf(size, p); });
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

    const bool clips = norm > args.max_norm;
    const float coefficient = clips ? args.max_norm / norm : 1.0f;
    if (!clips && args.expert_factor == 1.0f) return;
    for (u32 i = at.own(); i-- > 0;) {  // what was read last may still lie in L2
        const u32 part = at.move_to(i);
        const bool expert = at.tensor >= args.experts_from;
        if (!clips && !expert) return;
        const float factor = expert ? args.expert_factor * coefficient : coefficient;
        each_gradient<AT_ONCE, true>(at, part, [&](auto& values) {
#pragma unroll
            for (float& value : values) value *= factor;
        });
    }
}
"""
TAGS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOST_TENSORS, PART_BYTES = 1024, 1 << 16
THREADS, AT_ONCE = 1024, 4
"""Of a block, which has an SM of its own; and how many vectors of a thread are on their way."""
CLIP_GRADIENTS = DeclaredKernel(
    "clip_gradients", SOURCE, epochs=Epochs(), sums=Packets(), tensor=array(Field("char*", ctypes.c_uint64), MOST_TENSORS),
    tagged_bytes=array(U64, MOST_TENSORS), parts=U32, experts_from=U32, expert_factor=F32, max_norm=F32, norm_type=F32,
    weight=array(F32, MAX_RANKS), expert_weight=array(F32, MAX_RANKS), norm=Pointer("float*"),
)  # fmt: skip


@per_group
def _bound(group: Group) -> BoundKernel:
    """Returns one launch for all calls: what differs between ranks, such as weights, must not decide whether a rank makes another one."""
    block, sizes = min(THREADS, group.max_threads), {"sums": group.sm_count}
    return CLIP_GRADIENTS.bind(
        group, grid=group.sm_count, block=block, sizes=sizes, defines={"AT_ONCE": AT_ONCE, "PART_BYTES": PART_BYTES}, resident=True
    )


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
    lists = [[tensor for tensor in tensors if tensor is not None and tensor.nbytes] for tensors in (others, experts)]
    given = [*lists[0], *lists[1]]
    if unknown := {tensor.dtype for tensor in given} - TAGS.keys():
        raise UsageError(f"gradients of {unknown}; expected {', '.join(map(str, TAGS))}")
    if len(given) > MOST_TENSORS:
        raise UsageError(f"{len(given)} gradients on a rank; expected at most {MOST_TENSORS}: join small ones")
    dense = [tensor.contiguous() for tensor in given]
    sizes = [tensor.nbytes for tensor in dense]
    norm = torch.empty((), dtype=torch.float32, device=group.device)
    _bound(group)(
        weight=clipping.others,
        expert_weight=clipping.experts,
        tensor=[group.address(tensor) for tensor in dense],
        tagged_bytes=[4 * size + TAGS[tensor.dtype] for size, tensor in zip(sizes, dense, strict=True)],
        parts=sum([-(-size // PART_BYTES) for size in sizes]),
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
