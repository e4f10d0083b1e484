"""Process groups as operators know them, by name, and the kit's groups of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from peerlane.device import Group, group_of
from peerlane.device.host.group import current_group


def group_name(group: dist.ProcessGroup | None) -> str:
    return "" if group is None else group.group_name


def process_group(name: str) -> dist.ProcessGroup | None:
    resolve: Any = dist.distributed_c10d.__dict__["_resolve_process_group"]
    resolved: dist.ProcessGroup | None = resolve(name) if name else None
    return resolved


def kit_group(x: torch.Tensor, name: str) -> Group | None:
    """Returns the kit's group; None on CPU ranks, which have none."""
    return group_of(process_group(name)) if x.is_cuda or current_group() is not None else None


@torch.compiler.assume_constant_result
def world_size(name: str) -> int:
    emulated = current_group()
    return emulated.world_size if emulated is not None else dist.get_world_size(process_group(name))


@torch.compiler.assume_constant_result
def rank(name: str) -> int:
    emulated = current_group()
    return emulated.rank if emulated is not None else dist.get_rank(process_group(name))
