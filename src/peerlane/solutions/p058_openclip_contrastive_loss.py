"""Problem 58, a sigmoid contrastive loss against all ranks' texts: an all-gather, cuBLAS's product, and one kernel from logits to the loss.

The loss kernel reads the logits once, four loads of a lane at a time. The reference widens them to float32 and passes over them five times.
Bound by the product at large sizes, by three launches at small ones. Terms are summed in the same order in every run."""

import torch
import torch.distributed as dist

from peerlane.device import F32, U32, BoundKernel, Buffer, DeclaredKernel, Group, Pointer, communicator, element_type, group_of, per_group

SOURCE = r"""
#include <peerlane/grid.cuh>
using namespace peerlane;

// log(1 + e^z): log(1 + t) by the first terms of its series where t is small, as it is for nearly all pairs.
__device__ inline float softplus(float z) {
    const float t = ptx::exp2(-1.44269504f * fabsf(z)), series = t - t * t * (1.0f / 2 - t * (1.0f / 3 - t * (1.0f / 4 - t * (1.0f / 5))));
    return fmaxf(z, 0.0f) + (t < 1.0f / 16 ? series : 0.69314718f * ptx::log2(1.0f + t));
}

extern "C" __global__ void __launch_bounds__(512, 2)
    contrastive_loss(const __grid_constant__ Arena arena, const __grid_constant__ ContrastiveLoss args) {
    __shared__ float scratch[32];
    constexpr int at_once = 2 * ELEMENT::lanes;
    constexpr u32 strip = warp_threads * row_lanes;
    const auto add = [](float a, float b) { return a + b; };
    float sum = 0.0f;
    each_row(args.rows, [&](u32 row) {
        for (u32 first = Warp{}.thread() * row_lanes; first < args.columns; first += at_once * strip) {
            u32 words[at_once][row_lanes / ELEMENT::lanes];
            const auto place = [&](int i, u32& at, u32& column) { at = row, column = first + i * strip; };
            load_words_together<ELEMENT>(args.logits, args.columns, place, words);
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const u32 column = first + i * strip;
                if (column >= args.columns) break;
                float z[row_lanes];
                widen_words<ELEMENT>(words[i], z);
                for (float& one : z) one = one * args.scale + args.bias;
                if (args.first + row - column < row_lanes || args.columns - column < row_lanes) {  // the own pair is here, or the row's end
                    for (u32 e = 0; e < row_lanes; ++e) {
                        z[e] = column + e >= args.columns ? -infinity : column + e == args.first + row ? -z[e] : z[e];
                    }
                }
                for (float one : z) sum += softplus(one);
            }
        }
    });
    sum = block_reduce(sum, add, scratch);
    float* of_block = reinterpret_cast<float*>(arena.local(args.sums));
    if (threadIdx.x == 0) of_block[blockIdx.x] = sum;
    if (!last_block(reinterpret_cast<u32*>(arena.local(args.counter)), gridDim.x)) return;
    float total = 0.0f;
    for (u32 block = threadIdx.x; block < gridDim.x; block += blockDim.x) total += of_block[block];
    total = block_reduce(total, add, scratch);
    if (threadIdx.x == 0) set_element<ELEMENT>(args.loss, 0, total / args.rows);
}
"""
CONTRASTIVE_LOSS = DeclaredKernel(
    "contrastive_loss", SOURCE, sums=Buffer(), counter=Buffer(), logits=Pointer("const char*"), loss=Pointer(), rows=U32, columns=U32,
    first=U32, scale=F32, bias=F32,
)  # fmt: skip


@per_group
def contrastive_loss(group: Group, rows: int, dtype: torch.dtype) -> BoundKernel:
    """Computes the loss of one rank from its logits (rows, W rows)."""
    grid = min(2 * group.sm_count, rows)
    return CONTRASTIVE_LOSS.bind(
        group,
        grid=grid,
        block=min(512, group.max_threads),
        defines={"ELEMENT": element_type(dtype)},
        sizes={"sums": 4 * grid, "counter": 4},
        rows=rows,
        columns=rows * group.world_size,
        first=rows * group.rank,
    )


def solution(
    image_features: torch.Tensor,
    text_features: torch.Tensor,
    logit_scale: float,
    logit_bias: float = 0.0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    ranks, texts = group_of(group), communicator(group).all_gather(text_features).flatten(0, 1)
    logits, loss = image_features @ texts.t(), image_features.new_empty(())
    contrastive_loss(ranks, len(text_features), logits.dtype)(logits=logits, loss=loss, scale=logit_scale, bias=logit_bias)
    return loss
