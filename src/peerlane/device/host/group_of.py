"""Finds the group that a caller means."""

import torch.distributed as dist

from peerlane.device.host.group import Group, current_group
from peerlane.device.host.ipc import process_group


def group_of(group: Group | dist.ProcessGroup | None = None) -> Group:
    """The group of a process group's ranks, on the current CUDA device. The first call for one is collective."""
    if isinstance(group, Group):
        return group
    entered_group = current_group()
    return entered_group if group is None and entered_group is not None else process_group(group)
