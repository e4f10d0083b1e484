"""B11: a kernel on rank 2 writes to an address that is not mapped."""

import torch
import torch.distributed as dist

from peerlane.device import Kernel, compile_cubin

CUBIN = compile_cubin('extern "C" __global__ void stray() { *reinterpret_cast<volatile int*>(0x10) = 1; }')


def solution(tensor):
    if dist.get_rank() == 2:
        Kernel(CUBIN, "stray").launch(1, 1, [])
        torch.cuda.synchronize()
    total = tensor.clone()
    dist.all_reduce(total)
    return total
