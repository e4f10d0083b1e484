"""Functions of torch.distributed for emulated ranks: numbers of ranks, collectives of CPU tensors, and symmetric memory.

Host code that calls them runs as written. A collective here is the host's: all ranks meet, and it is over. One in which every rank needs
something of every other orders kernels as a barrier on the stream does; a broadcast orders its root's before those of the others. What it
writes is the host's.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from peerlane.device.host.group import current_group
from peerlane.emulator.cuda_graphs import recorded
from peerlane.emulator.emulated_rank import EmulatedRank
from peerlane.emulator.group_order import order_ranks
from peerlane.emulator.symmetric_memory import SIGNAL_PAD_BYTES, SymmetricMemory, empty, write_value32
from peerlane.emulator.torch_accesses import note_read, unnoted
from peerlane.errors import UsageError
from peerlane.settings import multicast_allowed

_BACKEND = "nccl"


class ProcessGroup:
    """Stands for torch's process group; ``members``: their numbers among all ranks, None for all."""

    def __init__(self, members: tuple[int, ...] | None = None, name: str = "0") -> None:
        self.members, self.group_name = members, name

    def rank(self) -> int:
        return _rank(self)

    def size(self) -> int:
        return _size(self)

    def name(self) -> str:
        return _BACKEND


class _Groups:
    WORLD = ProcessGroup()


class _GroupMember(_Groups):
    NON_GROUP_MEMBER = object()


def _group(group: Any = None) -> EmulatedRank:
    found = current_group() if group is None or isinstance(group, ProcessGroup | str) else group
    if not isinstance(found, EmulatedRank):
        raise UsageError(f"got {type(found).__name__} for a process group; expected None, dist.group.WORLD or a group that is an argument")
    group = _resolved(group) if isinstance(group, str) else group
    if isinstance(group, ProcessGroup) and group.members is not None:
        if found.member not in group.members:
            raise UsageError(f"rank {found.member} is not in the process group of ranks {list(group.members)}; only its members may use it")
        return cast(EmulatedRank, found.team.world.team(group.members).group(found.member))
    return found


def _resolved(name: str) -> ProcessGroup:
    groups = _group().team.world.process_groups
    if name.startswith("ranks "):  # of a group that is an argument
        return ProcessGroup(tuple(map(int, name.split()[1:])), name)
    if name not in groups:
        raise UsageError(f"no process group has the name {name!r}; expected one of {', '.join(groups)}")
    return cast(ProcessGroup, groups[name])


def _new_group(ranks: Sequence[int] | None = None, *_: Any, **__: Any) -> Any:
    """Returns a group of some ranks; a call of all ranks, as in torch."""
    own = _group()
    members = tuple(sorted(range(own.world_size) if ranks is None else ranks))

    def act(asked: list[tuple[int, ...]]) -> ProcessGroup:
        groups = own.team.world.process_groups
        groups[str(len(groups))] = ProcessGroup(members, str(len(groups)))
        return cast(ProcessGroup, groups[str(len(groups) - 1)])

    made = own.team.meeting.meet(own.member, f"dist.new_group of ranks {list(members)}", members, act)
    return made if own.member in members else _GroupMember.NON_GROUP_MEMBER


def _rank(group: Any = None) -> int:
    return _group(group).rank


def _size(group: Any = None) -> int:
    return _group(group).world_size


def _meet(
    group: Any,
    what: str,
    value: Any,
    act: Callable[[list[Any]], Any] = lambda values: None,
    reads: Sequence[torch.Tensor] = (),
    pairs: Callable[[list[Any]], list[tuple[int, int]]] | None = None,
) -> Any:
    """Returns ``act`` of all ranks' values, behind what the rank ``reads`` of its tensors. No rank's kernels go on before all other ranks
    have come, or those that ``pairs`` names as its senders: pairs of a sender and a receiver."""
    own = _group(group)
    if recorded(functools.partial(_meet, group, what, value, act, reads, pairs)):
        return None
    own.team.world.collectives[what.partition(" ")[0]] += 1
    for tensor in reads:
        note_read(tensor, what.partition(" ")[0])

    def ordered(values: list[Any]) -> Any:
        ordering = None if pairs is None else [(sender, receiver) for sender, receiver in pairs(values) if sender != receiver]
        order_ranks(own.team, None if ordering is not None and len(ordering) == len(values) * (len(values) - 1) else ordering)
        with unnoted():
            return act(values)

    return own.team.meeting.meet(own.member, what, value, ordered)


def _from_root(root: int, values: list[Any]) -> list[tuple[int, int]]:
    return [(root, rank) for rank in range(len(values))]


def _by_sizes(sizes: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Returns the pairs of a sender and a receiver between which something is sent."""
    return [(sender, receiver) for sender, sent in enumerate(sizes) for receiver, size in enumerate(sent) if size]


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

    _meet(group, f"dist.all_reduce of {tuple(tensor.shape)}", tensor, act, [tensor])
    return _work(async_op)


def _broadcast(
    tensor: torch.Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None
) -> _Done | None:
    root = (group_src if src is None else _group(group).team.members.index(src)) or 0

    def act(tensors: list[torch.Tensor]) -> None:
        for each in tensors:
            each.copy_(tensors[root].clone())

    reads = [tensor] if _rank(group) == root else []
    _meet(group, f"dist.broadcast of {tuple(tensor.shape)}", tensor, act, reads, functools.partial(_from_root, root))
    return _work(async_op)


def _all_gather_into_tensor(output: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> _Done | None:
    def act(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        whole = torch.cat([given.flatten() for _, given in pairs])
        for to, _ in pairs:
            to.copy_(whole.view(to.shape))

    _meet(group, f"dist.all_gather_into_tensor of {tuple(tensor.shape)}", (output, tensor), act, [tensor])
    return _work(async_op)


def _all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> _Done | None:
    def act(pairs: list[tuple[list[torch.Tensor], torch.Tensor]]) -> None:
        given = [tensor.clone() for _, tensor in pairs]
        for to, _ in pairs:
            for each, value in zip(to, given, strict=True):
                each.copy_(value)

    _meet(group, f"dist.all_gather of {tuple(tensor.shape)}", (outputs, tensor), act, [tensor])
    return _work(async_op)


def _reduce_scatter_tensor(
    output: torch.Tensor, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> _Done | None:
    def act(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        total = _reduced([given for _, given in pairs], op).flatten().chunk(len(pairs))
        for (to, _), share in zip(pairs, total, strict=True):
            to.copy_(share.view(to.shape))

    _meet(group, f"dist.reduce_scatter_tensor of {tuple(tensor.shape)}", (output, tensor), act, [tensor])
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

    given = (output, tensor, input_split_sizes)

    def pairs(given: list[tuple[torch.Tensor, torch.Tensor, list[int] | None]]) -> list[tuple[int, int]]:
        return _by_sizes([sizes or [each.numel()] * len(given) for _, each, sizes in given])

    _meet(group, "dist.all_to_all_single", given, act, [tensor], pairs)
    return _work(async_op)


def _all_to_all(outputs: list[torch.Tensor], tensors: list[torch.Tensor], group: Any = None, async_op: bool = False) -> _Done | None:
    def act(pairs: list[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
        given = [[tensor.clone() for tensor in sent] for _, sent in pairs]
        for rank, (to, _) in enumerate(pairs):
            for each, sent in zip(to, given, strict=True):
                each.copy_(sent[rank])

    def pairs(given: list[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> list[tuple[int, int]]:
        return _by_sizes([[part.numel() for part in parts] for _, parts in given])

    _meet(group, "dist.all_to_all", (outputs, tensors), act, tensors, pairs)
    return _work(async_op)


def _reduce_scatter(
    output: torch.Tensor, tensors: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> _Done | None:
    def act(pairs: list[tuple[torch.Tensor, list[torch.Tensor]]]) -> None:
        total = _reduced([torch.stack(given) for _, given in pairs], op)
        for (to, _), share in zip(pairs, total, strict=True):
            to.copy_(share)

    _meet(group, "dist.reduce_scatter", (output, tensors), act, tensors)
    return _work(async_op)


def _all_gather_object(objects: list[Any], given: Any, group: Any = None) -> None:
    objects[:] = copy.deepcopy(_meet(group, "dist.all_gather_object", given, lambda values: values))


def _broadcast_object_list(
    objects: list[Any], src: int | None = None, group: Any = None, device: Any = None, group_src: int | None = None
) -> None:
    root = (group_src if src is None else _group(group).team.members.index(src)) or 0
    sent = _meet(group, "dist.broadcast_object_list", objects, lambda values: list(values[root]), (), functools.partial(_from_root, root))
    objects[:] = copy.deepcopy(sent)


def _members(group: Any = None) -> list[int]:
    return list(_group(group).team.members)


def _empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    return empty(_group(), *size, dtype=dtype)


def _rendezvous(tensor: torch.Tensor, group: Any = None) -> SymmetricMemory:
    """Returns the handle of a tensor: the same one for the same tensor, as in torch."""
    own = _group(group)
    key = (own.member, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.dtype)
    known = own.team.handles.get(key)
    if known is None:
        known = own.team.handles[key] = SymmetricMemory(own, tensor)
    return cast(SymmetricMemory, known)


def _workspace(group_name: str, min_size: int) -> SymmetricMemory:
    """Returns the group's workspace; larger than the one before, if that is too small."""
    group = _group(group_name)
    known = group.team.workspaces.get(group.member)
    if known is None or known.buffer_size < min_size:
        known = group.team.workspaces[group.member] = _rendezvous(empty(group, min_size, dtype=torch.uint8), group_name)
    return cast(SymmetricMemory, known)


class _SymmetricMemory:
    """Stands for the functions of torch's class of this name."""

    signal_pad_size = SIGNAL_PAD_BYTES

    @staticmethod
    def rendezvous(tensor: torch.Tensor, group_name: Any = None) -> SymmetricMemory:
        return _rendezvous(tensor, group_name)

    @staticmethod
    def empty_strided_p2p(
        size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: Any = None, group_name: Any = None, alloc_id: Any = None
    ) -> torch.Tensor:
        made = empty(_group(), tuple(size), dtype=dtype)
        if tuple(stride) != made.stride():
            raise UsageError(f"empty_strided_p2p got strides {tuple(stride)}; emulated ranks have contiguous ones, {made.stride()}")
        return made

    @staticmethod
    def stream_write_value32(tensor: torch.Tensor, offset: int, val: int) -> torch.Tensor:
        return write_value32(_group(), tensor, offset, val)

    @staticmethod
    def memset32(tensor: torch.Tensor, offset: int, val: int, count: int = 1) -> torch.Tensor:
        return write_value32(_group(), tensor, offset, val, count)

    @staticmethod
    def has_multicast_support(device_type: Any = None, index: int = 0) -> bool:
        return multicast_allowed()


def _reducing(in_place: bool) -> Callable[..., torch.Tensor]:
    """Returns an operator of ``torch.ops.symm_mem`` that reduces: its barriers are kernels, as torch's, and the sum is the host's."""

    def reduce(tensor: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        if reduce_op not in ("sum", "avg"):
            raise UsageError(f"emulated ranks reduce symmetric memory by 'sum' and 'avg', got {reduce_op!r}")
        op = dist.ReduceOp.SUM if reduce_op == "sum" else dist.ReduceOp.AVG
        out = tensor if in_place else torch.empty_like(tensor) if out is None else out
        return _between_barriers(tensor, out, group_name, lambda tensors, rank: _reduced(tensors, op))

    return reduce


def _all_gather_out(tensor: torch.Tensor, group_name: str, out: torch.Tensor) -> torch.Tensor:
    return _between_barriers(tensor, out, group_name, lambda tensors, rank: torch.cat([each.flatten() for each in tensors]))


def _between_barriers(
    tensor: torch.Tensor, out: torch.Tensor, group_name: str, result: Callable[[list[torch.Tensor], int], torch.Tensor]
) -> torch.Tensor:
    handle = _rendezvous(tensor, group_name)

    def act(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        made = [result([given for given, _ in pairs], rank) for rank in range(len(pairs))]
        for (_, to), value in zip(pairs, made, strict=True):
            to.copy_(value.view(to.shape))

    handle.barrier()
    _meet(group_name, "torch.ops.symm_mem", (tensor, out), act, [], lambda values: [])
    handle.barrier()
    return out


_FUNCTIONS: dict[str, Any] = {
    "group": _Groups,
    "GroupMember": _GroupMember,
    "get_rank": _rank,
    "get_world_size": _size,
    "is_initialized": lambda: True,
    "init_process_group": lambda *_, **__: None,
    "destroy_process_group": lambda group=None: None,
    "new_group": _new_group,
    "get_process_group_ranks": _members,
    "get_global_rank": lambda group, group_rank: _members(group)[group_rank],
    "get_group_rank": lambda group, global_rank: _members(group).index(global_rank),
    "get_backend": lambda group=None: _BACKEND,
    "barrier": _barrier,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather": _all_gather,
    "all_gather_object": _all_gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
}
_SYMMETRIC: dict[str, Any] = {
    "empty": _empty,
    "rendezvous": _rendezvous,
    "enable_symm_mem_for_group": lambda name: None,
    "is_symm_mem_enabled_for_group": lambda name: True,
    "is_nvshmem_available": lambda: False,
    "get_backend": lambda device=None: "CUDA",
    "get_signal_pad_size": lambda: SIGNAL_PAD_BYTES,
    "get_symm_mem_workspace": _workspace,
    "_SymmetricMemory": _SymmetricMemory,
}
_OPERATORS: dict[str, Any] = {
    **dict.fromkeys(("one_shot_all_reduce", "one_shot_all_reduce_out", "two_shot_all_reduce_out"), _reducing(in_place=False)),
    **dict.fromkeys(("multimem_one_shot_all_reduce", "multimem_one_shot_all_reduce_out"), _reducing(in_place=False)),
    **dict.fromkeys(("two_shot_all_reduce_", "multimem_all_reduce_"), _reducing(in_place=True)),
    "multimem_all_gather_out": _all_gather_out,
    "stream_write_value32_": _SymmetricMemory.stream_write_value32,
    "memset32_": _SymmetricMemory.memset32,
}


def distributed_stand_ins() -> list[tuple[Any, dict[str, Any]]]:
    """Returns modules of torch.distributed with what stands for their members on emulated ranks."""
    from torch._C import _distributed_c10d
    from torch.distributed import _symmetric_memory, distributed_c10d

    inner = {"_get_default_group": lambda: _Groups.WORLD, "_resolve_process_group": _resolved}
    return [
        (dist, _FUNCTIONS),
        (distributed_c10d, inner),
        (_symmetric_memory, _SYMMETRIC),
        (_distributed_c10d, {"_SymmetricMemory": _SymmetricMemory}),
        (torch.ops.symm_mem, _OPERATORS),
    ]
