"""A05: one rank adds tensors as they arrive, whoever sent them, and tells the others the sum."""

import torch
import torch.distributed as dist


def solution(tensor):
    total = tensor.reshape(-1).to(torch.float32, copy=True)
    if dist.get_rank() == 0 and total.numel():
        arrived = torch.empty_like(total)
        for _ in range(dist.get_world_size() - 1):
            dist.recv(arrived)
            total += arrived
    elif total.numel():
        dist.send(total, 0)
    dist.broadcast(total, 0)
    return total.to(tensor.dtype).view(tensor.shape)
