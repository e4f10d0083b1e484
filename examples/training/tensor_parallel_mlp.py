"""Train a tensor-parallel MLP twice: with peerlane.ops and with torch.distributed. The losses must agree.

torchrun --nproc-per-node 2 examples/training/tensor_parallel_mlp.py         GPUs, or CPU ranks where there are none
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional

from peerlane import ops

ROWS, WIDTH, HIDDEN, STEPS, RATE = 128, 128, 256, 10, 0.02
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def torch_all_gather_gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat(functional.all_gather(a), dim=1) @ b


def torch_gemm_reduce_scatter(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product = a @ b
    rows = functional.all_reduce(product).chunk(dist.get_world_size())  # type: ignore[no-untyped-call]
    mine: torch.Tensor = rows[dist.get_rank()]
    return mine


def train(gather_product: Product, product_scatter: Product, device: torch.device, dtype: torch.dtype) -> list[float]:
    """The loss of every step. Each rank holds columns of x and w1, and rows of w2 and of the result."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)  # the same whole matrices on all ranks
    x, w1, w2, target = (
        torch.randn(shape, generator=generator) for shape in ((ROWS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH), (ROWS, WIDTH))
    )
    own = [x.chunk(world_size, 1)[rank], w1.chunk(world_size, 1)[rank] / WIDTH**0.5, w2.chunk(world_size)[rank] / HIDDEN**0.5]
    x, w1, w2 = (part.to(device, dtype).contiguous() for part in own)
    target = target.chunk(world_size)[rank].to(device)
    weights = [w1.requires_grad_(), w2.requires_grad_()]
    losses = []
    for _ in range(STEPS):
        y = product_scatter(gather_product(x, weights[0]).relu(), weights[1])
        loss = (y.float() - target).square().sum() / target.numel() / world_size
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for weight in weights:
                assert weight.grad is not None
                weight -= RATE * WIDTH * weight.grad
                weight.grad = None
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    ours = train(ops.all_gather_gemm, ops.gemm_reduce_scatter, device, dtype)
    theirs = train(torch_all_gather_gemm, torch_gemm_reduce_scatter, device, dtype)
    if dist.get_rank() == 0:
        print("peerlane.ops     ", " ".join(f"{loss:.5f}" for loss in ours))
        print("torch.distributed", " ".join(f"{loss:.5f}" for loss in theirs))
    assert ours[-1] < ours[0] and all(abs(a - b) < 0.02 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
