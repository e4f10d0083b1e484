"""Process groups as operators know them, by name, and the kit's groups of them."""

import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh

from peerlane import settings
from peerlane.device import Arena, Group, group_of, per_group
from peerlane.device.host.group import MAX_RANKS, current_group
from peerlane.device.host.ipc import StoreExchange, host_name
from peerlane.errors import PeerlaneError, UsageError

Constant = TypeVar("Constant", int, str)
GroupLike = dist.ProcessGroup | DeviceMesh | str | None
"""What ``group=`` takes: a process group, its name, a DeviceMesh of one dimension, or None for all ranks."""

_log = logging.getLogger("peerlane.ops")
_joined: WeakKeyDictionary[dist.ProcessGroup, tuple[Group | None, str]] = WeakKeyDictionary()
"""The kit's groups; None and the reason where operators run on torch.distributed."""
_SKIPPED = tuple(str(Path(module.__file__ or "").parent) for module in (settings, torch))
_groups_seen = 0
"""The number of process groups when a call without a group looked at them last; -1 when it has told."""


def group_name(group: GroupLike) -> str:
    """Returns the name of a group, empty for all ranks. Raises UsageError for what is no group, or none of this rank's."""
    if group is None:
        if not torch.compiler.is_compiling():
            _tell_of_smaller_groups()
        return ""
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    if isinstance(group, str):
        return _known_name(group)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(f"group= got a DeviceMesh of {group.ndim} dimensions: expected one; pass a slice such as mesh['tp']")
        if group.get_coordinate() is None:
            raise UsageError("group= got a DeviceMesh that this rank is not in: only its ranks may call")
        return group.get_group().group_name
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError("group= got a group that this rank is not in: only ranks that new_group listed may call")
    raise UsageError(f"group= got {type(group).__name__}: expected a process group, its name, a DeviceMesh of one dimension, or None")


def _tell_of_smaller_groups() -> None:
    """Logs once that a call without ``group=`` means all ranks, if this process is in smaller groups too."""
    global _groups_seen
    known = dist.distributed_c10d.__dict__["_world"].pg_map
    if len(known) == _groups_seen or _groups_seen < 0:
        return
    sizes, _groups_seen = sorted({group.size() for group in known} - {1}), len(known)
    if len(sizes) > 1:
        _groups_seen = -1
        _log.warning(
            "a call without group= at %s means all %d ranks; this process has groups of %s ranks too. Pass group=, or "
            "group=torch.distributed.group.WORLD for all ranks. This is told once.",
            caller_place(),
            sizes[-1],
            ", ".join(map(str, sizes[:-1])),
        )


def caller_place() -> str:
    """Returns the file and line of the innermost frame outside of peerlane and torch."""
    own = [frame for frame in traceback.extract_stack() if not frame.filename.startswith((*_SKIPPED, "<"))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "an unknown place"


def process_group(name: str) -> dist.ProcessGroup | None:
    """Returns the group of a name; None, which stands for all ranks, if that is empty. Raises UsageError if there is no such group."""
    try:
        resolved: dist.ProcessGroup | None = dist.distributed_c10d.__dict__["_resolve_process_group"](name) if name else None
    except RuntimeError as error:
        raise UsageError(f"group= got {name!r}: expected a group that is not destroyed, or its group_name") from error
    return resolved


def kit_group(x: torch.Tensor, name: str) -> Group | None:
    """Returns the kit's group for ``x``; None where operators run on torch.distributed: on CPU ranks, and in groups the kit can not join.

    The first call for a group is collective. A group of one rank needs neither."""
    emulated = current_group()
    if emulated is not None:
        return emulated if emulated.world_size > 1 else None
    if not x.is_cuda:
        return None
    return joined(existing(name))


def joined(group: dist.ProcessGroup) -> Group | None:
    """Returns the kit's group of a process group; None, on all its ranks, if the kit can not join it. The first call is collective."""
    return joined_or_reason(group)[0]


def joined_or_reason(group: dist.ProcessGroup) -> tuple[Group | None, str]:
    """Returns ``joined(group)``, and the reason where that is None and the group has several ranks. The first call is collective."""
    try:
        return _joined[group]
    except KeyError:
        pass
    _joined[group] = _join(group)
    if reason := _joined[group][1]:
        _log.warning("operators of group %s run on torch.distributed: %s", group.group_name, reason)
    return _joined[group]


def _assume_constant_result(function: Callable[[str], Constant]) -> Callable[[str], Constant]:
    """Does what :func:`torch.compiler.assume_constant_result` does, which imports the compiler: two seconds in every rank."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_assume_constant_result
def world_size(name: str) -> int:
    emulated = current_group()
    return emulated.world_size if emulated is not None else existing(name).size()  # torch's own function takes ten times as long


@_assume_constant_result
def rank(name: str) -> int:
    emulated = current_group()
    return emulated.rank if emulated is not None else dist.get_rank(process_group(name))


@_assume_constant_result
def _known_name(name: str) -> str:
    process_group(name)
    return name


def existing(name: str) -> dist.ProcessGroup:
    """Returns the group of a name, which is empty for all ranks. Raises UsageError if there is none."""
    group = process_group(name) or dist.group.WORLD
    if group is None:
        raise UsageError("there is no process group; call torch.distributed.init_process_group first")
    return group


@per_group
def _probe(group: Group) -> Arena:
    """Collective: a little memory, which shows that the ranks can address each other's."""
    return Arena(1, group, name="probe")


def _join(group: dist.ProcessGroup) -> tuple[Group | None, str]:
    """Collective: returns the kit's group, or None and the reason why not; alike on all ranks."""
    size = group.size()
    if size == 1:
        return None, ""
    if size > MAX_RANKS:
        return None, f"the group has {size} ranks; the kit serves up to {MAX_RANKS}"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UsageError("the group's first operator came while a graph was captured; call it once before, on every rank")
    exchange = StoreExchange(PrefixStore("peerlane.ops", group.get_group_store()), group.rank(), size)
    if len(hosts := set(exchange(host_name()))) > 1:
        return None, f"the group spans {len(hosts)} hosts; the kit serves groups of one host"
    opened, problem = None, ""
    try:
        opened = group_of(group)
        _probe(opened)
    except (PeerlaneError, ImportError, RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        problem = f"{type(error).__name__}: {error}"
    if failed := [f"rank {rank}: {answer}" for rank, answer in enumerate(exchange(problem)) if answer]:
        return None, f"the kit could not be opened on {'; '.join(failed)}"
    return opened, ""
