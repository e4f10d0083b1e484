"""C06: sends fp8 where bf16 was given."""

import torch
import torch.distributed as dist


def solution(tensor):
    total = tensor.to(torch.float8_e4m3fn).to(torch.float32)
    dist.all_reduce(total)
    return total.to(tensor.dtype)
