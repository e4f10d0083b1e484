"""Problem 26, split sizes and counts of a dispatch: one sum, one exchange of packets that writes to the host's memory, and one wait."""

import torch
import torch.distributed as dist

from peerlane.device import U32, BoundKernel, DeclaredKernel, Epochs, Group, Packets, Pointer, group_of, per_group

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(512) moe_counts(const __grid_constant__ Arena arena, const __grid_constant__ MoeCounts args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const SmallExchange<WORLD_SIZE, u32> counts(arena, args.packets, epoch);
    const u32 own = args.experts / WORLD_SIZE;
    each_row(args.experts, [&](u32 expert) {
        if (Warp{}.thread() == 0) args.host[expert] = args.counts[expert];
        counts.push(expert, static_cast<u32>(args.counts[expert]));
    });
    each_row(args.experts, [&](u32 expert) {
        const u32 q = Warp{}.thread();
        if (q >= WORLD_SIZE) return;
        u32 count = static_cast<u32>(args.counts[expert]), data[packet_words];
        if (q != arena.rank) {
            pull_packet(arena, q, arena.local(counts.place(q, expert)), expert, epoch, data);
            count = counts.unpack(data);
        }
        if (expert / own == arena.rank) args.host[args.experts + q * own + expert % own] = count;
    });
}
"""
MOE_COUNTS = DeclaredKernel(
    "moe_counts", SOURCE, epochs=Epochs(), packets=Packets(), counts=Pointer("const long long*"), host=Pointer("long long*"), experts=U32
)


@per_group
def moe_counts(group: Group, experts: int) -> tuple[BoundKernel, torch.Tensor]:
    """Returns the launch, and the host memory that it writes: of every expert what is sent, then what each rank sends of own ones."""
    grid, on_gpu = min(group.sm_count, -(-experts // 4)), group.device.type == "cuda"
    launch = MOE_COUNTS.bind(group, grid=grid, block=128, resident=True, sizes={"packets": experts}, experts=experts)
    return launch, torch.zeros(2 * experts, dtype=torch.int64, device="cpu", pin_memory=on_gpu)


def solution(
    expert_mask: torch.Tensor, num_experts: int, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ranks, counts = group_of(group), expert_mask.sum(dim=(1, 2))
    if ranks.world_size == 1:
        both = counts.long().repeat(2).cpu()
    else:
        launch, both = moe_counts(ranks, num_experts)
        launch(counts=counts.long(), host=both)
        if ranks.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
            ranks.waits.check()  # nobody takes a count from what has not come
    sent, received = both.view(2, ranks.world_size, -1)
    of_experts = received.to(counts.dtype, copy=True)  # the next call overwrites what the kernel wrote
    return sent.sum(1), received.sum(1), of_experts, of_experts.sum(0)
