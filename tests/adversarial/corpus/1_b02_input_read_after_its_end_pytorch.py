"""B02: a thread sends this rank's input to the peers, which may be after this rank's own call has ended. Right while inputs stay."""

import itertools
import threading
import time

import torch
import torch.distributed as dist

calls = itertools.count()


def send_to_peers(tensor, rank, peers, tag):
    time.sleep(0.01 if tag % dist.get_world_size() == rank else 0)
    for peer in peers:
        dist.send(tensor.contiguous(), peer, tag=tag)


def solution(tensor):
    rank, tag = dist.get_rank(), next(calls)
    peers = [peer for peer in range(dist.get_world_size()) if peer != rank and tensor.numel()]
    threading.Thread(target=send_to_peers, args=(tensor, rank, peers, tag), daemon=True).start()
    parts = [tensor.clone() for _ in range(dist.get_world_size())]
    for peer in peers:
        dist.recv(parts[peer], peer, tag=tag)
    return torch.stack(parts).float().sum(0).to(tensor.dtype)
