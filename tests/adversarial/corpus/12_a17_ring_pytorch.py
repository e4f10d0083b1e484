"""A17: multiplies the shard that it holds while the next one comes around the ring, in two boxes by turns."""

import torch
import torch.distributed as dist


def solution(A_local, B):
    rank, world, width = dist.get_rank(), dist.get_world_size(), A_local.shape[1]
    held, total = A_local.contiguous(), torch.zeros(A_local.shape[0], B.shape[1], dtype=torch.float32, device=B.device)
    for step in range(world):
        owner, messages = (rank - step) % world, []
        following = torch.empty_like(held)
        if step + 1 < world and held.numel():
            messages = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, held, (rank + 1) % world), dist.P2POp(dist.irecv, following, (rank - 1) % world)]
            )
        total += held.float() @ B[owner * width : (owner + 1) * width].float()
        for message in messages:
            message.wait()
        held = following
    return total.to(A_local.dtype)
