"""A17: a ring by hand: W - 1 steps that add a piece and pass it on, then W - 1 steps that hand the sums around."""

import torch
import torch.distributed as dist


def pass_on(sent, received):
    rank, world = dist.get_rank(), dist.get_world_size()
    messages = [dist.P2POp(dist.isend, sent, (rank + 1) % world), dist.P2POp(dist.irecv, received, (rank - 1) % world)]
    for message in dist.batch_isend_irecv(messages):
        message.wait()


def solution(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    piece = -(-tensor.numel() // world)
    if piece == 0:
        return tensor.clone()
    padded = torch.zeros(world, piece, dtype=torch.float32, device=tensor.device)
    padded.view(-1)[: tensor.numel()] = tensor.reshape(-1)
    received = torch.empty_like(padded[0])
    for step in range(world - 1):
        pass_on(padded[(rank - step) % world], received)
        padded[(rank - step - 1) % world] += received
    for step in range(world - 1):
        pass_on(padded[(rank + 1 - step) % world], received)
        padded[(rank - step) % world] = received
    return padded.view(-1)[: tensor.numel()].to(tensor.dtype).view(tensor.shape)
