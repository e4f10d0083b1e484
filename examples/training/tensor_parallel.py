"""Train a small GPT in tensor parallel under torch.compile(fullgraph=True): with peerlane's styles, and with torch's on NCCL.

torchrun --nproc-per-node 2 examples/training/tensor_parallel.py         on two GPUs, on one that they share, or on the CPU

On GPUs the layers run in bfloat16 by autocast, so each product and its exchange are one kernel.
"""

import gpt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import parallel
from torch.distributed.tensor.parallel import parallelize_module

from peerlane.ops.parallel import ColwiseParallel, RowwiseParallel

STYLES = {"peerlane": (ColwiseParallel, RowwiseParallel), "torch": (parallel.ColwiseParallel, parallel.RowwiseParallel)}


def split(model: gpt.GPT, mesh: DeviceMesh, styles: str) -> gpt.GPT:
    """Splits every block's heads and hidden units over the ranks."""
    columns, rows = STYLES[styles]
    plan = {f"attention.{name}": columns() for name in "qkv"} | {"attention.out": rows(), "up": columns(), "down": rows()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def trained(styles: str, device: torch.device, options: object) -> tuple[gpt.GPT, torch.Tensor]:
    """A GPT after ``options.steps`` steps, and their losses."""
    model = split(gpt.build(device), init_device_mesh(device.type, (dist.get_world_size(),)), styles)
    compiled = torch.compile(model, fullgraph=True, backend=options.compiler)
    return model, gpt.train(compiled, model.parameters(), 0, device, options.steps, precision(device))  # all ranks have the same data


def precision(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


if __name__ == "__main__":
    options, device = gpt.arguments(), gpt.start()
    _, ours = trained("peerlane", device, options)
    torch.compiler.reset()
    _, theirs = trained("torch", device, options)
    gpt.compare(ours, theirs, limit=1e-3 if device.type == "cpu" else 2e-2)
    dist.destroy_process_group()
