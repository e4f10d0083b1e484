"""A01: a side stream that is late by a million cycles in every call, joined by an event."""

import torch
import torch.distributed as dist

side = None


def solution(tensor):
    global side
    side = side or torch.cuda.Stream()
    total = tensor.clone()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000)
        dist.all_reduce(total)
    total.record_stream(side)
    torch.cuda.current_stream().wait_event(side.record_event())
    return total
