# needs: gpu
"""Problem 45, reduce-scatter and norm, by torch.ops.symm_mem._low_contention_reduce_scatter and torch's own norm."""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

# The operator uses no multicast object, so that none need be made.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


@functools.cache
def buffer_of(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Symmetric memory of this shape."""
    if device.type != "cuda":
        raise RuntimeError(f"got a tensor on {device}, but torch.ops.symm_mem has kernels for GPUs only: evaluate with --device cuda")
    buffer = symm_mem.empty(shape, dtype=dtype, device=device)
    symm_mem.rendezvous(buffer, dist.group.WORLD)
    return buffer


def solution(rs_input_1d: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    buffer = buffer_of((rs_input_1d.numel(),), rs_input_1d.dtype, rs_input_1d.device)
    buffer.copy_(rs_input_1d)
    total = torch.ops.symm_mem._low_contention_reduce_scatter(buffer, "avg", dist.group.WORLD.group_name)
    # It runs on a stream of its own.
    hidden = torch.ops._c10d_functional.wait_tensor(total).view(-1, gamma.numel())
    return torch.nn.functional.rms_norm(hidden, (gamma.numel(),), gamma, eps)
