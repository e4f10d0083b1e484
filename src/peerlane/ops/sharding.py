"""Operators on DTensors: how each operator's inputs and result lie along the mesh dimension of its group.

An operator is called with DTensors as with tensors. Inputs that lie differently are redistributed first. Along other dimensions of the
mesh, such as data-parallel ones, rows may be sharded; everything else is replicated there.

``register_sharding`` of torch does not fit here. It computes a result's global shape by running the operator on global shapes, and
an operator that gathers or scatters would count the ranks twice. It does not know either which mesh dimension an operator exchanges over.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from peerlane.errors import UsageError
from peerlane.ops.groups import GroupLike, group_name

Arguments = ParamSpec("Arguments")
LAST = Shard(-1)
_OF_TENSORS: Mapping[str, Any] = {"reduce_op": "sum", "axis": 0, "out": None}
"""Options that DTensors do not take."""


@dataclass(frozen=True)
class Sharding:
    """The placements of an operator's tensors along the mesh dimension of its group."""

    inputs: tuple[Placement, ...]
    result: Placement
    row_inputs: int = 1
    """of the first so many inputs, and of the result, rows may be sharded along other mesh dimensions too"""
    row_axes: tuple[int, int | None] = (0, None)
    """the slice of axes that are rows"""


_OF_SEQUENCE = Sharding((Shard(1), Shard(1), Shard(1)), Shard(1), 3, (0, 1))
SHARDINGS: Mapping[str, Sharding] = {
    "all_reduce": Sharding((Partial(),), Replicate()),
    "all_gather": Sharding((Shard(0),), Replicate()),
    "reduce_scatter": Sharding((Partial(),), Shard(0)),
    "all_to_all": Sharding((Shard(0),), Shard(0)),
    "all_gather_gemm": Sharding((LAST, Shard(1)), LAST, row_axes=(0, -1)),
    "gemm_reduce_scatter": Sharding((LAST, Shard(0)), Shard(0), row_axes=(0, -1)),
    "gemm_all_reduce": Sharding((LAST, Shard(0)), Replicate(), row_axes=(0, -1)),
    "gemm_all_gather": Sharding((Replicate(), Shard(1)), Replicate(), row_axes=(0, -1)),
    "ring_attention": _OF_SEQUENCE,
    "ulysses_attention": _OF_SEQUENCE,
    "gated_experts": Sharding((Shard(0),) * 6, Shard(0), 3, (0, -1)),
}


def takes_dtensors(function: Callable[Arguments, torch.Tensor]) -> Callable[Arguments, torch.Tensor]:
    """Returns the operator for tensors and DTensors. It gives a DTensor if one of its tensors is one."""
    sharding, names = SHARDINGS[function.__name__], tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> torch.Tensor:
        if not any(isinstance(value, DTensor) for value in args):
            return function(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        return _on_shards(function, sharding, names, given)

    return called


def _on_shards(function: Callable[..., torch.Tensor], sharding: Sharding, names: tuple[str, ...], given: dict[str, Any]) -> torch.Tensor:
    tensors = [given[name] for name in names[: len(sharding.inputs)]]
    if not all(isinstance(value, DTensor) for value in tensors) or len({value.device_mesh for value in tensors}) > 1:
        raise UsageError(f"{function.__name__} got tensors and DTensors, or DTensors of several meshes: expected DTensors of one mesh")
    if changed := [name for name, usual in _OF_TENSORS.items() if given.get(name, usual) != usual]:
        raise UsageError(
            f"{function.__name__} got DTensors and {', '.join(f'{name}=' for name in changed)}: expected neither; use to_local()"
        )
    mesh: DeviceMesh = tensors[0].device_mesh
    dim, group = _dimension(mesh, given.get("group"), function.__name__)
    outer = [_kept(tensors[0], d, dim, sharding) for d in range(mesh.ndim)]
    local = {}
    for number, (name, value) in enumerate(zip(names, tensors, strict=False)):
        own = sharding.inputs[number]
        rows = outer if number < sharding.row_inputs else [Replicate()] * mesh.ndim
        placements = tuple(placed(own, value.ndim) if d == dim else rows[d] for d in range(mesh.ndim))
        # What all ranks have, and only some of their rows meet, has partial gradients.
        grads = tuple(_gradient(placement, d == dim or isinstance(outer[d], Shard)) for d, placement in enumerate(placements))
        local[name] = _redistributed(value, placements, function.__name__).to_local(grad_placements=grads)
    options = {**given, **local, "group": group}
    if "gradient" in names:
        options["gradient"] = "replicated" if isinstance(sharding.result, Replicate) else "summed"
    result = function(**options)
    lies = tuple(placed(sharding.result, result.ndim) if d == dim else outer[d] for d in range(mesh.ndim))
    return DTensor.from_local(result, mesh, lies, run_check=False)


def placed(placement: Placement, axes: int) -> Placement:
    """Returns the placement of a tensor of so many axes, counted from the first one."""
    return Shard(placement.dim % axes) if isinstance(placement, Shard) else placement


def _gradient(placement: Placement, differs: bool) -> Placement:
    """Returns how the gradient of a local tensor lies: ``differs`` along this dimension if ranks use the tensor for different things."""
    if isinstance(placement, Partial):
        return Replicate()
    return Partial() if isinstance(placement, Replicate) and differs else placement


def _kept(x: DTensor, d: int, dim: int, sharding: Sharding) -> Placement:
    """Returns how rows lie along mesh dimension ``d``: as they do, if the operator can leave it so."""
    placement = x.placements[d]
    axes = range(x.ndim)[slice(*sharding.row_axes)]
    if d == dim or not isinstance(placement, Shard) or placement.dim not in axes:
        return Replicate()
    exchanged = {placed(own, x.ndim) for own in (sharding.inputs[0], sharding.result)}
    # Of two dimensions that share an axis, the first one has the larger parts; an exchange may only cut or join the smaller ones.
    return Replicate() if d > dim and placement in exchanged else placement


def _redistributed(x: DTensor, placements: tuple[Placement, ...], name: str) -> DTensor:
    for d, placement in enumerate(placements):
        ranks = x.device_mesh.size(d)
        if isinstance(placement, Shard) and x.shape[placement.dim] % ranks:
            raise UsageError(f"{name} got a DTensor of {tuple(x.shape)}: expected {ranks} equal shards of axis {placement.dim}; pad it")
    return x if x.placements == placements else x.redistribute(placements=placements)


def _dimension(mesh: DeviceMesh, group: GroupLike, name: str) -> tuple[int, dist.ProcessGroup]:
    """Returns the mesh dimension that the operator exchanges over, and its group."""
    if group is None:
        if mesh.ndim > 1:
            raise UsageError(f"{name} got DTensors of a mesh of {mesh.ndim} dimensions and no group: pass the dimension's group")
        return 0, mesh.get_group(0)
    wanted = group_name(group)
    for dim in range(mesh.ndim):
        if mesh.get_group(dim).group_name == wanted:
            return dim, mesh.get_group(dim)
    raise UsageError(f"{name} got DTensors of the mesh {mesh} and another group: expected the group of one of its dimensions")
