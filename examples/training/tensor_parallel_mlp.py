"""Train a tensor-parallel MLP twice: with peerlane.ops and with torch.distributed. The losses must agree.

torchrun --nproc-per-node 2 examples/training/tensor_parallel_mlp.py         on two GPUs, on one that they share, or on the CPU
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.nn import functional

from peerlane import ops
from peerlane.hardware.virtual_node import share_gpus

ROWS, WIDTH, HIDDEN, STEPS, RATE = 128, 128, 256, 10, 2.5


def ours(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """``relu(x @ w1) @ w2``. Each rank holds columns of x and w1, and rows of w2 and of the result."""
    return ops.gemm_reduce_scatter(ops.all_gather_gemm(x, w1).relu(), w2)


def theirs(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    product = (torch.cat(functional.all_gather(x), dim=1) @ w1).relu() @ w2
    return functional.all_reduce(product).chunk(dist.get_world_size())[dist.get_rank()]


def train(mlp: Callable[..., torch.Tensor], device: torch.device, dtype: torch.dtype) -> list[float]:
    """The loss of every step, summed over the ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(0)  # the same whole matrices on all ranks
    whole = (torch.randn(shape, generator=random) for shape in ((ROWS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH), (ROWS, WIDTH)))
    x, w1, w2, target = (part.chunk(world_size, axis)[rank].to(device) for part, axis in zip(whole, (1, 1, 0, 0), strict=True))
    x, w1, w2 = (part.to(dtype).contiguous() for part in (x, w1 / WIDTH**0.5, w2 / HIDDEN**0.5))
    weights, losses = [torch.nn.Parameter(w1), torch.nn.Parameter(w2)], torch.zeros(STEPS, device=device)
    optimizer = torch.optim.SGD(weights, lr=RATE)
    for step in range(STEPS):
        loss = (mlp(x, *weights).float() - target).square().mean() / world_size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    dist.all_reduce(losses)
    return losses.tolist()


if __name__ == "__main__":
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    if (node := share_gpus(int(os.environ["WORLD_SIZE"]), torch.cuda.device_count())) is not None:
        os.environ |= node.rank_environment(rank)  # NCCL needs it where ranks share a GPU
        torch.cuda.set_device(device := torch.device("cuda", node.device_index(rank)))
    dist.init_process_group("gloo" if node is None else "nccl")
    results = [train(mlp, device, torch.float32 if node is None else torch.bfloat16) for mlp in (ours, theirs)]
    if rank == 0:
        for name, losses in zip(("peerlane.ops", "torch.distributed"), results, strict=True):
            print(f"{name:17}", *(f"{loss:.5f}" for loss in losses))
    torch.testing.assert_close(*results, rtol=0.01, atol=0.0)
    dist.destroy_process_group()
