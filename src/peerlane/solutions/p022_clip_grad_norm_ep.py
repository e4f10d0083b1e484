"""Problem 22, clipping by one norm over different groups: one kernel and one exchange for both sums, however many groups there are.

A rank's experts' powers count once for every rank of ep_group whose ep_fsdp_group holds it; these counts are found once for each set
of groups. Bound by HBM as problem 21: ``families/clipping.py``."""

import torch
import torch.distributed as dist

from peerlane.device import Group, group_of, per_group
from peerlane.solutions.families.clipping import Clipping, clip_gradients


@per_group
def _members(world: Group, group: dist.ProcessGroup | None) -> list[int]:
    """Returns the group's ranks; without one, the rank alone."""
    return [world.rank] if group is None else group_of(group).exchange(world.rank)


@per_group
def _counts(world: Group, ep_fsdp_group: dist.ProcessGroup | None, ep_group: dist.ProcessGroup | None) -> tuple[float, ...]:
    """Returns how often each rank's experts count here: by the sum over the first group, then over the second."""
    of_rank = world.exchange(_members(world, ep_fsdp_group))
    return tuple(float(sum(rank in of_rank[q] for q in _members(world, ep_group))) for rank in range(world.world_size))


def solution(
    non_ep_grad_tensors: list[torch.Tensor],
    ep_grad_tensors: list[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    ep_size: int = 1,
    fsdp_group: dist.ProcessGroup | None = None,
    ep_fsdp_group: dist.ProcessGroup | None = None,
    ep_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    world = group_of()
    members = _members(world, fsdp_group)
    others = tuple(float(rank in members) for rank in range(world.world_size))
    clipping = Clipping(others, _counts(world, ep_fsdp_group, ep_group), max_norm, norm_type, max(1, ep_size))
    return clip_gradients(world, non_ep_grad_tensors, ep_grad_tensors, clipping)
