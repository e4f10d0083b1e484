"""A01: fetches every peer's tensor by the copy engines on side streams, and joins them by events."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

ROOM = 1 << 20


class Workspace:
    def __init__(self, device):
        self.memory = symm_mem.empty(ROOM, dtype=torch.float32, device=device)
        self.handle = symm_mem.rendezvous(self.memory, dist.group.WORLD)
        self.streams = [torch.cuda.Stream() for _ in range(dist.get_world_size())]


workspace = None


def solution(tensor):
    global workspace
    workspace = workspace or Workspace(tensor.device)
    size, current = tensor.numel(), torch.cuda.current_stream()
    workspace.memory[:size].copy_(tensor.reshape(-1))
    workspace.handle.barrier(channel=0)
    terms = torch.empty(len(workspace.streams), size, device=tensor.device)
    for peer, stream in enumerate(workspace.streams):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            terms[peer].copy_(workspace.handle.get_buffer(peer, (size,), torch.float32))
    for stream in workspace.streams:
        current.wait_stream(stream)
    workspace.handle.barrier(channel=1)
    return terms.sum(0).view(tensor.shape).to(tensor.dtype)
