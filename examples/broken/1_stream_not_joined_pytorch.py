# expect: wrong_result
# needs: gpu
"""Right, but too late: the work is on a side stream that nobody waits for."""

import torch
import torch.distributed as dist


def solution(tensor):
    total = torch.empty_like(tensor)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        total.copy_(tensor)
        dist.all_reduce(total)
    return total
