"""Train a GPT in tensor parallel under torch.compile(fullgraph=True): with peerlane's styles, then with torch's on NCCL.

torchrun --nproc-per-node 2 examples/training/tensor_parallel.py                          on two GPUs, one that they share, or the CPU
torchrun --nproc-per-node 2 examples/training/tensor_parallel.py --model 1.4b --steps 20  at a real size, on two GPUs

On GPUs the layers run in bfloat16 by autocast, so each product and its exchange are one kernel. All blocks share one compilation.
"""

import argparse

import gpt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import parallel
from torch.distributed.tensor.parallel import parallelize_module

from peerlane.ops.parallel import ColwiseParallel, RowwiseParallel

STYLES = {"peerlane": (ColwiseParallel, RowwiseParallel), "torch": (parallel.ColwiseParallel, parallel.RowwiseParallel)}


def split(model: gpt.GPT, mesh: DeviceMesh, styles: str) -> gpt.GPT:
    """Splits every block's heads and hidden units over the ranks. Embeddings, norms and head are the same on all."""
    columns, rows = STYLES[styles]
    plan = {"attention.qkv": columns(), "attention.out": rows(), "up": columns(), "down": rows()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def trained(styles: str, device: torch.device, options: argparse.Namespace) -> tuple[gpt.GPT, gpt.Training]:
    """A GPT after ``options.steps`` steps, and what they took."""
    size = gpt.SIZES[options.model]
    data = gpt.batches(size, options.steps, 0, device)  # all ranks have the same data
    torch.compiler.reset()
    model = split(gpt.build(size, device), init_device_mesh(device.type, (dist.get_world_size(),)), styles)
    for block in model.blocks:
        block.compile(fullgraph=True, backend=options.compiler)
    return model, gpt.train(model, size, data, precision(device, size))


def precision(device: torch.device, size: gpt.Size) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else size.dtype


if __name__ == "__main__":
    options, device = gpt.arguments(), gpt.start()
    ours, theirs = (trained(styles, device, options)[1] for styles in STYLES)
    exact = precision(device, gpt.SIZES[options.model]) == torch.float32
    gpt.compare(ours, theirs, options, limit=1e-3 if exact else 2e-2)
    dist.destroy_process_group()
