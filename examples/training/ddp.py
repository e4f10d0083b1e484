"""Train a small GPT with DistributedDataParallel on the backend "peerlane", and on NCCL. The losses must agree.

torchrun --nproc-per-node 2 examples/training/ddp.py         on two GPUs, on one that they share, or on the CPU
"""

import gpt
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from peerlane.device import backend

options, device = gpt.arguments(), gpt.start("peerlane")
losses = []
for group in (dist.group.WORLD, dist.new_group(backend=gpt.baseline(device))):
    model = DistributedDataParallel(gpt.build(device), process_group=group)
    losses.append(gpt.train(model, model.parameters(), dist.get_rank(), device, options.steps, torch.float32))
gpt.compare(*losses, limit=1e-3)
if dist.get_rank() == 0:
    print(backend.report())
dist.destroy_process_group()
