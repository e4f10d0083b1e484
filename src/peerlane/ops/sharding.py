"""Operators on DTensors: how each operator's inputs and result lie along the mesh dimension of its group.

An operator is called with DTensors as with tensors. Inputs that lie differently are redistributed first. Along other dimensions of the
mesh, such as data-parallel ones, rows may be sharded; everything else is replicated there.

``register_sharding`` of torch does not fit here. It computes a result's global shape by running the operator on global shapes, and
an operator that gathers or scatters would count the ranks twice. It does not know either which mesh dimension an operator exchanges over.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from peerlane.errors import UsageError
from peerlane.ops.groups import GroupLike, group_name

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
LAST = Shard(-1)
_OF_TENSORS: Mapping[str, Any] = {"reduce_op": "sum", "axis": 0, "out": None}
"""Options that DTensors do not take."""


@dataclass(frozen=True)
class Sharding:
    """The placements of an operator's tensors along the mesh dimension of its group."""

    inputs: tuple[Placement, ...]
    result: Placement
    row_inputs: int = 1
    """The rows of the first so many inputs, and of the result, may be sharded along other mesh dimensions too."""
    row_axes: tuple[int, int | None] = (0, None)
    """the slice of axes that are rows"""
    terms: Mapping[str, Placement] = field(default_factory=dict)
    """The placements of tensors that may be added to the result, by name."""


_ROWS: Mapping[str, Any] = {"row_axes": (0, -1)}
_OF_SEQUENCE = Sharding((Shard(1), Shard(1), Shard(1)), Shard(1), 3, (0, 1))
SHARDINGS: Mapping[str, Sharding] = {
    "all_reduce": Sharding((Partial(),), Replicate()),
    "all_gather": Sharding((Shard(0),), Replicate()),
    "reduce_scatter": Sharding((Partial(),), Shard(0)),
    "all_to_all": Sharding((Shard(0),), Shard(0)),
    "all_gather_gemm": Sharding((LAST, Shard(1)), LAST, **_ROWS),
    "row_gather_gemm": Sharding((Shard(0), Shard(1)), LAST, terms={"biases": Shard(0)}, **_ROWS),
    "gemm_reduce_scatter": Sharding((LAST, Shard(0)), Shard(0), terms={"bias": Replicate(), "residual": Shard(0)}, **_ROWS),
    "gemm_all_reduce": Sharding((LAST, Shard(0)), Replicate(), terms={"bias": Replicate(), "residual": Replicate()}, **_ROWS),
    "gemm_all_gather": Sharding((Replicate(), Shard(1)), Replicate(), **_ROWS),
    "ring_attention": _OF_SEQUENCE,
    "ulysses_attention": _OF_SEQUENCE,
    "gated_experts": Sharding((Shard(0),) * 6, Shard(0), 3, (0, -1)),
}


def takes_dtensors(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Returns the operator for tensors and DTensors. It gives a DTensor if its first tensor is one."""
    sharding, names = SHARDINGS[function.__name__], tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not any(isinstance(value, DTensor) for value in args):
            return function(*args, **kwargs)
        given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
        result: Result = _Call(function, sharding, names, given).run()
        return result

    return called


class _Call:
    """One call of an operator with DTensors."""

    def __init__(self, function: Callable[..., Any], sharding: Sharding, names: tuple[str, ...], given: dict[str, Any]) -> None:
        self.function, self.sharding, self.names, self.given = function, sharding, names, given
        terms = [name for name in sharding.terms if given.get(name) is not None]
        self.tensors = [*names[: len(sharding.inputs)], *terms]
        flat = [value for name in self.tensors for value in _listed(given[name])]
        if not all(isinstance(value, DTensor) for value in flat) or len({value.device_mesh for value in flat}) > 1:
            raise UsageError(f"{function.__name__} got tensors and DTensors, or DTensors of several meshes: expected DTensors of one mesh")
        if changed := [name for name, usual in _OF_TENSORS.items() if given.get(name, usual) != usual]:
            raise UsageError(
                f"{function.__name__} got DTensors and {', '.join(f'{name}=' for name in changed)}: expected neither; use to_local()"
            )
        self.mesh: DeviceMesh = flat[0].device_mesh
        self.dim, self.group = _dimension(self.mesh, given.get("group"), function.__name__)
        self.outer = [_kept(flat[0], d, self.dim, sharding) for d in range(self.mesh.ndim)]

    def run(self) -> Any:
        """Returns the result of the operator on this rank's parts, as DTensors."""
        local = {name: self._local(number, name) for number, name in enumerate(self.tensors)}
        options = {**self.given, **local, "group": self.group}
        if "gradient" in self.names:
            options["gradient"] = "replicated" if isinstance(self.sharding.result, Replicate) else "summed"
        result = self.function(**options)
        return [self._whole(part) for part in result] if isinstance(result, list) else self._whole(result)

    def _local(self, number: int, name: str) -> Any:
        value, count = self.given[name], len(self.sharding.inputs)
        own = self.sharding.inputs[number] if number < count else self.sharding.terms[name]
        # What all ranks have, and each uses for something else, has partial gradients. A term of what all ranks have is used alike.
        differs = number < count or isinstance(self.sharding.result, Shard)
        follows_rows = number < self.sharding.row_inputs or name == "residual"
        parts = [self._part(part, own, differs, follows_rows) for part in _listed(value)]
        return parts if isinstance(value, list | tuple) else parts[0]

    def _part(self, value: DTensor, own: Placement, differs: bool, follows_rows: bool) -> torch.Tensor:
        rows = self.outer if follows_rows else [Replicate()] * self.mesh.ndim
        placements = tuple(placed(own, value.ndim) if d == self.dim else rows[d] for d in range(self.mesh.ndim))
        used = [differs if d == self.dim else isinstance(self.outer[d], Shard) for d in range(self.mesh.ndim)]
        grads = tuple(_gradient(placement, apart) for placement, apart in zip(placements, used, strict=True))
        return _redistributed(value, placements, self.function.__name__).to_local(grad_placements=grads)

    def _whole(self, part: torch.Tensor) -> DTensor:
        result = placed(self.sharding.result, part.ndim)
        lies = tuple(result if d == self.dim else self.outer[d] for d in range(self.mesh.ndim))
        return DTensor.from_local(part, self.mesh, lies, run_check=False)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


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
