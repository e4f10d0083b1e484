"""C13: works on a side stream that never joins. The call ends at once; what it returns is written 25 ms later."""

import torch
import torch.distributed as dist

CYCLES = 50_000_000


def solution(tensor):
    total = torch.empty_like(tensor)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        total.copy_(tensor)
        dist.all_reduce(total)
    return total
