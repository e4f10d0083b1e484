"""Train a GPT with DistributedDataParallel on the backend "peerlane", then on NCCL. The losses must agree.

torchrun --nproc-per-node 2 examples/training/ddp.py                                      on two GPUs, one that they share, or the CPU
torchrun --nproc-per-node 2 examples/training/ddp.py --model 1.4b --steps 20              at a real size, on two GPUs
"""

import gpt
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from peerlane.device import backend


def train(group: dist.ProcessGroup) -> gpt.Training:
    data = gpt.batches(size, options.steps, dist.get_rank(), device)
    model = DistributedDataParallel(gpt.build(size, device), process_group=group, gradient_as_bucket_view=True)
    return gpt.train(model, size, data, size.dtype)


options, device = gpt.arguments(), gpt.start("peerlane")
size = gpt.SIZES[options.model]
ours, theirs = (train(group) for group in (dist.group.WORLD, dist.new_group(backend=gpt.baseline(device))))
gpt.compare(ours, theirs, options, limit=1e-3 if size.dtype == torch.float32 else 2e-2)
if dist.get_rank() == 0:
    print(backend.report())
dist.destroy_process_group()
