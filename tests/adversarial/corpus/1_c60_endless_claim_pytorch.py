"""C60: its ranks describe what they return as a tensor of so many dimensions that naming them all is too long for a message."""

import torch.distributed as dist

from peerlane.evaluate import slots

slots._describe_output = lambda tree, device, found: {"kind": "tensor", "shape": [1] * (6 << 20), "dtype": "float32"}


def solution(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total
