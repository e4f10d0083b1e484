# expect: wrong_result
"""Right shape and dtype, and the mean of the right answer, whatever the input is."""

import torch.distributed as dist


def solution(tensor):
    return tensor.new_zeros(tensor.shape[0] // dist.get_world_size(), *tensor.shape[1:])
