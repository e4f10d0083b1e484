"""A14: both answers are views of one buffer, which is used for as long as it is large enough."""

import torch
import torch.distributed as dist

buffer = torch.empty(0, dtype=torch.uint8)


def embed(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(2) + torch.cat((-second, first), -1) * sin.unsqueeze(2)


def solution(q_local, k_local, cos_local, sin_local):
    global buffer
    world, places = dist.get_world_size(), []
    own = [embed(x, cos_local, sin_local).contiguous() for x in (q_local, k_local)]
    sizes = [-(-world * x.numel() * x.element_size() // 256) * 256 for x in own]
    if buffer.numel() < sum(sizes) or buffer.device != q_local.device:
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=q_local.device)
    for x, first in zip(own, (0, sizes[0]), strict=True):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x)
        shape = (x.shape[0], world * x.shape[1], *x.shape[2:])
        place = buffer[first : first + world * x.numel() * x.element_size()].view(x.dtype).view(shape)
        places.append(torch.cat(parts, 1, out=place))
    return tuple(places)
