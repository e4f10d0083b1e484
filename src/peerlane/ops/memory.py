"""The memory that a group's operators take on GPUs: told, and given back."""

import torch

from peerlane.device import Group
from peerlane.device.host.memory_report import MemoryReport
from peerlane.ops.groups import GroupLike, group_name, kit_group


def memory_report(group: GroupLike = None) -> MemoryReport:
    """Returns the bytes that the group's kernels take on this rank, by kernel; print it for a table. All zero where the kit serves no
    operator. The first call for a group is collective."""
    kit = kit_of(group)
    return MemoryReport.of("torch.distributed", [], 0, 0) if kit is None else kit.memory_report()


def close(group: GroupLike = None) -> None:
    """Collective: gives all memory of the group's operators back, once their kernels have ended. Graphs that hold them are not to be
    replayed. Later calls take memory anew. A group of the backend ``peerlane`` does the same when it is destroyed."""
    kit = kit_of(group)
    if kit is None:
        return
    if kit.device.type == "cuda":
        torch.cuda.synchronize(kit.device)
    kit.exchange(None)
    kit.close()
    kit.free_closed()


def kit_of(group: GroupLike) -> Group | None:
    """Returns the kit's group for tensors of this process's kind of device; None where operators run without the kit."""
    on_device = torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu")
    return kit_group(on_device, group_name(group))
