# expect: cuda_error on gpu, not_run on cpu
# needs: nvrtc
"""A kernel writes to an address that is not mapped."""

import torch

from peerlane.device import Kernel, compile_cubin

cubin = compile_cubin('extern "C" __global__ void stray() { *reinterpret_cast<volatile int*>(0x10) = 1; }')


def solution(tensor):
    Kernel(cubin, "stray").launch(1, 1, [])
    torch.cuda.synchronize()
    return tensor.clone()
