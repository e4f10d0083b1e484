"""Problem 21, clipping by the norm over shards: one kernel reads, sums, exchanges and scales, with no question to the host.

Bound by HBM: each gradient is read once for the norm; what changes is written, and read again as far as L2 no longer holds it. The links
carry a packet of each block. Small lists are bound by one launch and one trip of a packet. ``families/clipping.py``."""

import torch
import torch.distributed as dist

from peerlane.device import Group, group_of, per_group
from peerlane.solutions.families.clipping import Clipping, clip_gradients


@per_group
def _members(world: Group, group: dist.ProcessGroup | None) -> tuple[float, ...]:
    """Returns a factor for each rank: 1 for those of the group, else 0. Without a group, the rank is alone in it."""
    members = [world.rank] if group is None else group_of(group).exchange(world.rank)
    return tuple(float(rank in members) for rank in range(world.world_size))


def solution(
    grad_tensors: list[torch.Tensor], max_norm: float, norm_type: float = 2.0, fsdp_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    world = group_of()
    members = _members(world, fsdp_group)
    return clip_gradients(world, grad_tensors, [], Clipping(members, members, max_norm, norm_type))
