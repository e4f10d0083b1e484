"""The kit's collectives as torch.distributed's operations: what they serve, and lists of tensors as the single tensors that they take."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup

from peerlane.device.backend.neighbours import Seat, share_gpus
from peerlane.device.backend.ordering import CudaLane
from peerlane.device.collectives.alone import Alone
from peerlane.device.collectives.checks import require_contiguous
from peerlane.device.collectives.communicator import Communicator, communicator
from peerlane.device.collectives.point_to_point import PointToPoint, point_to_point
from peerlane.device.collectives.reductions import SUM, Reduction, reduction_of, refusal
from peerlane.device.host.group import MAX_RANKS
from peerlane.device.host.ipc import known_group
from peerlane.errors import UsageError

Collectives = Communicator | Alone
"""the calls of the backend"""


class KitProvider:
    """The source of a process's collectives and of their order: communicators on CUDA devices. Tests put one for the CPU in its place."""

    device_type = "cuda"
    """Tensors of this type of device are offered to the kit."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, CudaLane] = {}

    def open(self, group: ProcessGroup, device: torch.device) -> Collectives:
        """Opens the collectives of ``group``, for tensors on ``device``. All ranks of the group call it."""
        with torch.cuda.device(device):
            return Alone() if group.size() == 1 else communicator(group).serving_backend()

    def serves_messages(self, seats: Sequence[Seat]) -> bool:
        """Tells whether the kit serves messages between ranks on these seats; else NCCL or gloo does."""
        return share_gpus(seats)  # NCCL sends these through sockets, if at all

    def messages(self, group: ProcessGroup, device: torch.device) -> PointToPoint | None:
        """Opens the messages of ``group``, whose kit is open; None in a group of one rank. All ranks of the group call it."""
        if (ranks := known_group(group)) is None:
            return None
        with torch.cuda.device(device):
            return point_to_point(ranks)

    def close(self, group: ProcessGroup) -> None:
        """Collective: gives back all memory of the group's collectives and operators, which no rank uses any more."""
        if (ranks := known_group(group)) is None:
            return
        ranks.close()
        if not ranks.waits.stopped:  # else some rank may never come: the end of the process frees what peers had mapped
            ranks.free_closed()

    def device_of(self, group: ProcessGroup) -> torch.device | None:
        """Returns the device where the group has such memory; None if it has none."""
        ranks = known_group(group)
        return None if ranks is None else ranks.device

    def lane(self, device: torch.device) -> CudaLane:
        """Returns the one lane of ``device`` in this process."""
        if device not in self._lanes:
            self._lanes[device] = CudaLane(device)
        return self._lanes[device]


def refused_group(world_size: int, hosts: Collection[str]) -> str:
    """Returns the reason why the kit does not serve a group at all; empty if it does."""
    if world_size > MAX_RANKS:
        return f"the group has {world_size} ranks; the kit serves up to {MAX_RANKS}"
    if len(set(hosts)) > 1:
        return f"the group spans {len(set(hosts))} hosts; the kit serves groups of one host"
    return ""


def reduction(op: Any, dtype: torch.dtype) -> tuple[Reduction, str]:
    """Returns the reduction of a ``ReduceOp``, and the reason why the kit does not reduce so in ``dtype``; that is empty if it does."""
    try:
        found = reduction_of(op)
        return found, refusal(found.name, dtype)
    except UsageError as error:
        return SUM, str(error)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` as contiguous memory, for operations that treat all elements alike. Raises UsageError if it has gaps."""
    if not tensor.is_contiguous() and any(
        tensor.dim() == dims and tensor.is_contiguous(memory_format=layout)
        for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d))
    ):
        return tensor.as_strided((tensor.numel(),), (1,))
    require_contiguous(tensor)
    return tensor


def same_sizes(tensors: Sequence[torch.Tensor]) -> bool:
    """Tells whether all have the same number of elements."""
    return len({tensor.numel() for tensor in tensors}) == 1


def all_gather(served: Collectives, parts: Sequence[torch.Tensor], input: torch.Tensor) -> None:
    """Gathers every rank's ``input`` to its part, be they equal or not."""
    if same_sizes(parts):
        fill_parts(parts, lambda whole: served.all_gather_into_tensor(whole, input.contiguous()))
    else:
        sizes = [part.numel() for part in parts]
        fill_parts(parts, lambda whole: served.all_gather_parts(whole, input.reshape(-1), sizes))


def reduce_scatter(served: Collectives, output: torch.Tensor, parts: Sequence[torch.Tensor], reduction: Reduction) -> None:
    """Reduces every rank's own part of all ranks' ``parts`` to ``output``, be they equal or not."""
    if same_sizes([*parts, output]):
        served.reduce_scatter_tensor(output, joined(parts), reduction=reduction)
    else:
        sizes = [part.numel() for part in parts]
        served.reduce_scatter_parts(flat(output).view(-1), joined(parts), sizes, reduction=reduction)


def adjoining(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns one flat tensor over memory that ``tensors`` fill back to back, in order; None if they do not."""
    first = tensors[0]
    storage, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != storage or tensor.storage_offset() != place:
            return None
        place += tensor.numel()
    return first.as_strided((place - first.storage_offset(),), (1,))


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the elements of all tensors, one after the other: their own memory if they adjoin, else a copy."""
    own = adjoining(tensors)
    if own is not None:
        return own
    sizes = [tensor.numel() for tensor in tensors]
    whole = tensors[0].new_empty(sum(sizes))
    for tensor, part in zip(tensors, torch.split(whole, sizes), strict=True):
        part.copy_(tensor.reshape(-1))
    return whole


def fill_parts(outputs: Sequence[torch.Tensor], fill: Callable[[torch.Tensor], None]) -> None:
    """Lets ``fill`` write one flat tensor, of which every output gets its part."""
    own = adjoining(outputs)
    if own is not None:
        fill(own)
        return
    sizes = [output.numel() for output in outputs]
    whole = outputs[0].new_empty(sum(sizes))
    fill(whole)
    for output, part in zip(outputs, torch.split(whole, sizes), strict=True):
        output.copy_(part.view(output.shape))
