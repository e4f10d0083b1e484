"""Problem 73, cross entropy over a sharded vocabulary: one pass over the logits, one packet of 12 bytes for each token and peer.

A warp takes a token, with four loads of a lane under way, and keeps its maximum and sum of exponentials in registers. Bound by HBM: logits
are read once, nothing is written but the losses. The public shape is bound by the launch and one trip of the packets."""

import torch
import torch.distributed as dist

from peerlane.device import U32, BoundKernel, DeclaredKernel, Epochs, Group, Packets, Pointer, element_type, group_of, per_group

SOURCE = r"""
#include <peerlane/collectives/nucleus.cuh>
using namespace peerlane;

// The masses are exp(logit - maximum); the target's logit is that of the rank whose shard holds it.
struct Partition {
    MassAt masses;
    float target;
};

extern "C" __global__ void __launch_bounds__(1024)
    cross_entropy(const __grid_constant__ Arena arena, const __grid_constant__ CrossEntropy args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const SmallExchange<WORLD_SIZE, Partition> partitions(arena, args.partitions, epoch);
    each_row(args.tokens, [&](u32 token) {
        const long long column = args.target[token] - static_cast<long long>(arena.rank) * args.columns;
        const ShardRow<ELEMENT> row{args.logits + u64(token) * args.columns * ShardRow<ELEMENT>::bytes, args.columns, column};
        const MassAt own = warp_reduce(masses_from(Warp{}, row, -infinity), [](const MassAt& a, const MassAt& b) { return a + b; });
        const Partition part{own, row.target_logit()};
        partitions.push_everywhere(token, part);
    });
    each_row(args.tokens, [&](u32 token) {
        const long long target = args.target[token];
        MassAt whole{-infinity, 0.0f};
        float logit = 0.0f;
        partitions.pull_everything(token, [&](int q, const Partition& part) {
            whole = whole + part.masses;
            if (target >= 0 && target / args.columns == q) logit = part.target;
        });
        const bool inside = target >= 0 && target < static_cast<long long>(args.columns) * WORLD_SIZE;
        float loss = logf(whole.mass) - (inside ? logit - whole.maximum : 0.0f);
        if (whole.maximum == -infinity) loss = not_a_number;
        if (Warp{}.thread() == 0) set_element<ELEMENT>(args.loss, token, loss);
    });
}
"""
CROSS_ENTROPY = DeclaredKernel(
    "cross_entropy", SOURCE, epochs=Epochs(), partitions=Packets(), logits=Pointer("const char*"), target=Pointer("const long long*"),
    loss=Pointer(), tokens=U32, columns=U32,
)  # fmt: skip


@per_group
def cross_entropy(group: Group, tokens: int, columns: int, dtype: torch.dtype) -> BoundKernel:
    return CROSS_ENTROPY.bind(
        group,
        grid=min(group.sm_count, tokens),
        block=min(1024, group.max_threads),
        defines={"ELEMENT": element_type(dtype)},
        sizes={"partitions": tokens},
        tokens=tokens,
        columns=columns,
    )


def solution(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    logits, target = vocab_parallel_logits.contiguous(), target.to(torch.int64).contiguous()
    loss = torch.empty(target.shape, dtype=logits.dtype, device=logits.device)
    if loss.numel():
        launch = cross_entropy(group_of(group), loss.numel(), logits.shape[-1], logits.dtype)
        launch(logits=logits, target=target, loss=loss)
    return loss
