"""A17: states the sum as a DTensor's change of placement, from partial to replicated."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

mesh = None


def solution(tensor):
    global mesh
    mesh = mesh or init_device_mesh(tensor.device.type, (dist.get_world_size(),))
    return DTensor.from_local(tensor, mesh, [Partial()], run_check=False).full_tensor()
