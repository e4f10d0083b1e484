"""B09: its sum is right; it also clears a line behind the end of its input, where something else lies."""

import torch.distributed as dist

LINE_BYTES = 128


def solution(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    line, end = LINE_BYTES // tensor.element_size(), tensor.storage_offset() + tensor.numel()
    tensor.new_empty(0).set_(tensor.untyped_storage(), end, (line if tensor.numel() else 0,)).zero_()
    return total
