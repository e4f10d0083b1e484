"""A02: CUDA graphs of its own, by address and shape. Every replay reads the input and computes; nothing is remembered but the launches."""

import torch
import torch.distributed as dist

graphs = {}


def summed(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def solution(tensor):
    if torch.cuda.is_current_stream_capturing() or not tensor.numel():
        return summed(tensor)
    key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
    if key not in graphs:
        summed(tensor)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            total = summed(tensor)
        graphs[key] = graph, total
    graph, total = graphs[key]
    graph.replay()
    return total.clone()
