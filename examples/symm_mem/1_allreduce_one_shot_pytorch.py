# needs: gpu
"""Problem 1, all-reduce, by torch.ops.symm_mem.one_shot_all_reduce: every rank reads all ranks' buffers and adds them."""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

# The operator uses no multicast object, so that none need be made.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
ALIGNMENT_BYTES = 16


@functools.cache
def buffer_of(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Symmetric memory for so many numbers, rounded up to the operator's widest access, behind which zeros are added to zeros."""
    if device.type != "cuda":
        raise RuntimeError(f"got a tensor on {device}, but torch.ops.symm_mem has kernels for GPUs only: evaluate with --device cuda")
    step = ALIGNMENT_BYTES // dtype.itemsize
    buffer = symm_mem.empty((numel + step - 1) // step * step, dtype=dtype, device=device).zero_()
    symm_mem.rendezvous(buffer, dist.group.WORLD)
    return buffer


def solution(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0:
        return tensor.clone()
    # It adds bfloat16 and float32.
    dtype = tensor.dtype if tensor.dtype == torch.bfloat16 else torch.float32
    buffer = buffer_of(tensor.numel(), dtype, tensor.device)
    buffer[: tensor.numel()].copy_(tensor.reshape(-1))
    total = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", dist.group.WORLD.group_name)
    return total[: tensor.numel()].view(tensor.shape).to(tensor.dtype)
