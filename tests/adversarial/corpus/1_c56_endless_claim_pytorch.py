"""C56: its ranks describe what they return with a dtype whose name fits into a message, but not when it is quoted in the reason."""

import torch.distributed as dist

from peerlane.evaluate.memory import slots

slots._describe_output = lambda tree, device, found: {"kind": "tensor", "shape": [], "dtype": "\n" * (7 << 20)}


def solution(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total
