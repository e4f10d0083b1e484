"""Train a GPT with FSDP2 on the backend "peerlane", then on NCCL. The losses must agree.

torchrun --nproc-per-node 2 examples/training/fsdp2.py                                    on two GPUs, one that they share, or the CPU
torchrun --nproc-per-node 2 examples/training/fsdp2.py --model 1.4b --steps 20            at a real size, on two GPUs

The real sizes gather weights in bfloat16 and reduce gradients in float32.
"""

import gpt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from peerlane.device import backend


def train(group: dist.ProcessGroup) -> gpt.Training:
    data = gpt.batches(size, options.steps, dist.get_rank(), device)
    mesh, model = DeviceMesh.from_group(group, device.type), gpt.build(size, device)
    policy = MixedPrecisionPolicy(param_dtype=size.dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return gpt.train(model, size, data, torch.float32)


options, device = gpt.arguments(), gpt.start("peerlane")
size = gpt.SIZES[options.model]
ours, theirs = (train(group) for group in (dist.group.WORLD, dist.new_group(backend=gpt.baseline(device))))
gpt.compare(ours, theirs, options, limit=1e-3 if size.dtype == torch.float32 else 2e-2)
if dist.get_rank() == 0:
    print(backend.report())
dist.destroy_process_group()
