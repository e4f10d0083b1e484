"""A09: allocates in the call and spreads its work over streams of different priority, all joined before it returns."""

import torch
import torch.distributed as dist


def solution(tensor):
    current, urgent, patient = torch.cuda.current_stream(), torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=0)
    for stream in (urgent, patient):
        stream.wait_stream(current)
    with torch.cuda.stream(patient):
        scratch = torch.zeros(tensor.numel(), dtype=torch.float32, device=tensor.device)
    with torch.cuda.stream(urgent):
        total = tensor.to(torch.float32, copy=True)
        dist.all_reduce(total)
    for stream in (urgent, patient):
        current.wait_stream(stream)
    total.record_stream(current)
    scratch.record_stream(current)
    return (total + scratch.view(tensor.shape)).to(tensor.dtype)
