"""Train a GPT with FSDP2 on the backend "peerlane", then on NCCL. The losses must agree. Layers may be sharded over some of the ranks.

torchrun --nproc-per-node 2 examples/training/fsdp2.py                                    on two GPUs, one that they share, or the CPU
torchrun --nproc-per-node 2 examples/training/fsdp2.py --model 1.4b --steps 20            at a real size, on two GPUs
torchrun --nproc-per-node 4 examples/training/fsdp2.py --tensor-parallel 2 --checkpoint gpt
torchrun --nproc-per-node 2 examples/training/decode.py --checkpoint gpt                  serves it at two ranks

The real sizes gather weights in bfloat16 and reduce gradients in float32.
"""

import gpt
import tensor_parallel
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from peerlane.device import backend
from peerlane.nn import replicate_others


def train(styles: str, library: str) -> gpt.Training:
    ranks, names = options.tensor_parallel, ("data", "tensor")
    shape = (dist.get_world_size() // ranks, ranks)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names, backend_override=dict.fromkeys(names, library))
    data = gpt.batches(size, options.steps, mesh.get_local_rank("data"), device)
    model = gpt.build(size, device)
    if ranks > 1:
        replicate_others(tensor_parallel.split(model, mesh["tensor"], styles), mesh["tensor"])
    policy = MixedPrecisionPolicy(param_dtype=size.dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"], mp_policy=policy)
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    training = gpt.train(model, size, data, torch.float32)
    if options.checkpoint is not None and library == "peerlane":
        dcp.save({"model": model.state_dict()}, checkpoint_id=options.checkpoint)
    return training


options, device = gpt.arguments(), gpt.start("peerlane")
size = gpt.SIZES[options.model]
ours, theirs = train("peerlane", "peerlane"), train("torch", gpt.baseline(device))
gpt.compare(ours, theirs, options, limit=1e-3 if size.dtype == torch.float32 else 2e-2)
if dist.get_rank() == 0:
    print(backend.report())
dist.destroy_process_group()
