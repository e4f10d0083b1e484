"""Functions of torch.distributed for emulated ranks: numbers of ranks, collectives of CPU tensors, and symmetric memory.

Host code that calls them runs as written. A collective here is the host's: all ranks meet, and it is over. What kernels race about with it
is not seen; with ``handle.barrier()`` of symmetric memory, which is a kernel, it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.device.host.group import current_group
from peerlane.emulator.emulated_rank import EmulatedRank
from peerlane.emulator.symmetric_memory import SymmetricMemory, empty
from peerlane.errors import UsageError

_BACKEND = "nccl"


class _World:
    """Stands for all ranks where host code names ``dist.group.WORLD``."""

    group_name = "0"

    def rank(self) -> int:
        return _rank()

    def size(self) -> int:
        return _size()


class _Groups:
    WORLD = _World()


def _group(group: Any = None) -> EmulatedRank:
    found = current_group() if group is None or isinstance(group, _World | str) else group
    if not isinstance(found, EmulatedRank):
        raise UsageError(f"got {type(found).__name__} for a process group; expected None, dist.group.WORLD or a group that is an argument")
    return found


def _rank(group: Any = None) -> int:
    return _group(group).rank


def _size(group: Any = None) -> int:
    return _group(group).world_size


def _meet(group: Any, what: str, value: Any, act: Callable[[list[Any]], Any] = lambda values: None) -> Any:
    own = _group(group)
    own.team.world.collectives[what.partition(" ")[0]] += 1
    return own.team.meeting.meet(own.member, what, value, act)


def _reduced(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Returns the sum, largest or smallest of the ranks' tensors, rounded once."""
    wide = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else tensors[0].dtype
    stack = torch.stack([tensor.to(wide) for tensor in tensors])
    if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        total = stack.sum(0, dtype=wide)
        return (total / len(tensors) if op == dist.ReduceOp.AVG else total).to(tensors[0].dtype)
    if op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        return (stack.amax(0) if op == dist.ReduceOp.MAX else stack.amin(0)).to(tensors[0].dtype)
    raise UsageError(f"emulated ranks reduce by SUM, AVG, MAX and MIN, got {op}")


class _Done:
    """The handle of an asynchronous collective, which is over."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _work(async_op: bool) -> _Done | None:
    return _Done() if async_op else None


def _barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> _Done | None:
    _meet(group, "dist.barrier", None)
    return _work(async_op)


def _all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> _Done | None:
    def act(tensors: list[torch.Tensor]) -> None:
        total = _reduced(tensors, op)
        for each in tensors:
            each.copy_(total)

    _meet(group, f"dist.all_reduce of {tuple(tensor.shape)}", tensor, act)
    return _work(async_op)


def _broadcast(
    tensor: torch.Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None
) -> _Done | None:
    root = group_src if src is None else _group(group).team.members.index(src)

    def act(tensors: list[torch.Tensor]) -> None:
        for each in tensors:
            each.copy_(tensors[root or 0].clone())

    _meet(group, f"dist.broadcast of {tuple(tensor.shape)}", tensor, act)
    return _work(async_op)


def _all_gather_into_tensor(output: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> _Done | None:
    def act(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        whole = torch.cat([given.flatten() for _, given in pairs])
        for to, _ in pairs:
            to.copy_(whole.view(to.shape))

    _meet(group, f"dist.all_gather_into_tensor of {tuple(tensor.shape)}", (output, tensor), act)
    return _work(async_op)


def _all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> _Done | None:
    def act(pairs: list[tuple[list[torch.Tensor], torch.Tensor]]) -> None:
        given = [tensor.clone() for _, tensor in pairs]
        for to, _ in pairs:
            for each, value in zip(to, given, strict=True):
                each.copy_(value)

    _meet(group, f"dist.all_gather of {tuple(tensor.shape)}", (outputs, tensor), act)
    return _work(async_op)


def _reduce_scatter_tensor(
    output: torch.Tensor, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> _Done | None:
    def act(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        total = _reduced([given for _, given in pairs], op).flatten().chunk(len(pairs))
        for (to, _), share in zip(pairs, total, strict=True):
            to.copy_(share.view(to.shape))

    _meet(group, f"dist.reduce_scatter_tensor of {tuple(tensor.shape)}", (output, tensor), act)
    return _work(async_op)


def _all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> _Done | None:
    def act(given: list[tuple[torch.Tensor, torch.Tensor, list[int] | None]]) -> None:
        split = [torch.split(each, sizes or len(each) // len(given)) for _, each, sizes in given]
        for rank, (to, _, _) in enumerate(given):
            to.copy_(torch.cat([pieces[rank] for pieces in split]).view(to.shape))

    _meet(group, "dist.all_to_all_single", (output, tensor, input_split_sizes), act)
    return _work(async_op)


def _empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    return empty(_group(), *size, dtype=dtype)


def _rendezvous(tensor: torch.Tensor, group: Any = None) -> SymmetricMemory:
    return SymmetricMemory(_group(group), tensor)


_FUNCTIONS: dict[str, Any] = {
    "group": _Groups,
    "get_rank": _rank,
    "get_world_size": _size,
    "is_initialized": lambda: True,
    "get_backend": lambda group=None: _BACKEND,
    "barrier": _barrier,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all_single": _all_to_all_single,
}
_SYMMETRIC: dict[str, Any] = {"empty": _empty, "rendezvous": _rendezvous, "enable_symm_mem_for_group": lambda name: None}


@contextlib.contextmanager
def distributed_here() -> Iterator[None]:
    """While this lasts, threads of emulated ranks find these functions in torch.distributed."""
    import torch.distributed._symmetric_memory as symm_mem

    before: list[tuple[Any, str, Any]] = []
    try:
        for module, functions in ((dist, _FUNCTIONS), (symm_mem, _SYMMETRIC)):
            for name, function in functions.items():
                before.append((module, name, getattr(module, name)))
                setattr(module, name, function)
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
