"""Problem 25, a policy-gradient loss: one pass over the logits gives each token's log-probability, ratio and term, and all ranks' sums.

The logits are torch's product; what comes behind it is one launch, with no logits in float32; blocks of all ranks exchange packets of
12 bytes. A block takes a token, two blocks an SM, with four loads of a thread under way. Bound by the product. A graph can capture it."""

from typing import Any

import torch

from peerlane.device import I32, U32, BoundKernel, DeclaredKernel, Epochs, Group, Packets, Pointer, element_type, group_of, per_group
from peerlane.device.host.declare import MAX_EPOCH_BLOCKS

SOURCE = r"""
#include <peerlane/collectives/nucleus.cuh>
#include <peerlane/grid.cuh>
using namespace peerlane;

struct Three {
    float x, y, z;
};
__device__ Three add(const Three& a, const Three& b) { return {a.x + b.x, a.y + b.y, a.z + b.z}; }
__device__ Three extremes(const Three& a, const Three& b) { return {fminf(a.x, b.x), fmaxf(a.y, b.y), a.z + b.z}; }

// A block takes a token. Thread 0 keeps what the block adds up.
extern "C" __global__ void __launch_bounds__(512, 2)
    policy_loss(const __grid_constant__ Arena arena, const __grid_constant__ PolicyLoss args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    __shared__ MassAt scratch[32];
    const auto join = [](const MassAt& a, const MassAt& b) { return a + b; };
    Three sums{}, others{infinity, -infinity, 0.0f}, counts{};
    for (u32 token = blockIdx.x; token < args.tokens; token += gridDim.x) {
        const long long label = args.labels[token];
        const bool valid = label != args.ignore_index;
        float logprob = 0.0f, gradient = 0.0f;
        if (valid) {
            const ShardRow<ELEMENT> row{args.logits + u64(token) * args.columns * ShardRow<ELEMENT>::bytes, args.columns, label};
            MassAt part = masses_from(Block{}, row, -infinity);
            part = block_reduce(part, join, scratch);
            logprob = row.target_logit() - part.maximum - logf(part.mass);
            const float d = fminf(fmaxf(logprob - element_of<OLD>(args.old, token), -20.0f), 20.0f), ratio = expf(d);
            gradient = -ratio * element_of<ADVANTAGE>(args.advantages, token);
            sums = add(sums, {gradient, ratio, ratio - d - 1.0f});
            others = extremes(others, {ratio, ratio, -logprob});
            counts.x += 1.0f;
        }
        if (threadIdx.x == 0) {
            set_element<ELEMENT>(args.logprobs, token, logprob);
            set_element<GRADIENT>(args.gradients, token, gradient);
        }
    }
    __shared__ Three of_rank[3][WORLD_SIZE];
    grid_reduce(arena, args.sums, epoch, sums, Three{}, add, of_rank[0]);
    grid_reduce(arena, args.others, epoch, others, Three{infinity, -infinity, 0.0f}, extremes, of_rank[1]);
    grid_reduce(arena, args.counts, epoch, counts, Three{}, add, of_rank[2]);
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    for (int q = 1; q < WORLD_SIZE; ++q) {
        of_rank[0][0] = add(of_rank[0][0], of_rank[0][q]);
        of_rank[1][0] = extremes(of_rank[1][0], of_rank[1][q]);
        of_rank[2][0] = add(of_rank[2][0], of_rank[2][q]);
    }
    const auto& [sum, other, count] = of_rank;
    const float tokens = fmaxf(count[0].x, 1.0f);
    const float result[6] = {sum[0].y / tokens, other[0].x, other[0].y, sum[0].z / tokens, other[0].z / tokens, sum[0].x / tokens};
    for (int i = 0; i < 6; ++i) args.metrics[i] = result[i];
}
"""
POLICY_LOSS = DeclaredKernel(
    "policy_loss", SOURCE, epochs=Epochs(), sums=Packets(), others=Packets(), counts=Packets(), logits=Pointer("const char*"),
    labels=Pointer("const long long*"), old=Pointer("const char*"), advantages=Pointer("const char*"), logprobs=Pointer(),
    gradients=Pointer(), metrics=Pointer("float*"), tokens=U32, columns=U32, ignore_index=I32,
)  # fmt: skip


@per_group
def policy_loss(group: Group, columns: int, dtypes: tuple[torch.dtype, ...]) -> BoundKernel:
    names = "ELEMENT", "OLD", "ADVANTAGE", "GRADIENT"
    grid = min(2 * group.sm_count, MAX_EPOCH_BLOCKS)
    return POLICY_LOSS.bind(
        group,
        grid=grid,
        block=min(512, group.max_threads),
        defines={name: element_type(dtype) for name, dtype in zip(names, dtypes, strict=True)},
        sizes=dict.fromkeys(("sums", "others", "counts"), grid),
        columns=columns,
    )


def solution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = hidden_states.flatten(0, -2) @ weight.t()
    widest = torch.promote_types(logits.dtype, torch.promote_types(old_logprobs.dtype, advantages.dtype))
    logprobs, gradients = (logits.new_empty(labels.shape, dtype=dtype) for dtype in (logits.dtype, widest))
    metrics = logits.new_empty(6, dtype=torch.float32)
    policy_loss(group_of(), weight.shape[0], (logits.dtype, old_logprobs.dtype, advantages.dtype, widest))(
        logits=logits,
        labels=labels.to(torch.int64).contiguous(),
        old=old_logprobs.contiguous(),
        advantages=advantages.contiguous(),
        logprobs=logprobs,
        gradients=gradients,
        metrics=metrics,
        tokens=labels.numel(),
        ignore_index=ignore_index,
    )
    return metrics[5], None, logprobs, gradients, metrics[:5]
