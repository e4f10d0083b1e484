"""Tensor-parallel layers whose weights are DTensors, and the styles that make them, for ``torch.distributed.tensor.parallel``.

    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

They split ``nn.Linear`` as torch's styles of the same names do, so checkpoints fit both. A column-parallel layer's backward pass and a
row-parallel layer's forward pass are one fused operator each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from peerlane import ops
from peerlane.device.host.group import current_group
from peerlane.device.products.gemm import Activation
from peerlane.errors import UsageError
from peerlane.ops.groups import GroupLike, existing, group_name
from peerlane.ops.products import activate
from peerlane.ops.replicated import ColumnProduct
from peerlane.ops.shapes import product
from peerlane.ops.sharding import placed


def mesh_of(group: GroupLike, device: torch.device) -> DeviceMesh:
    """Returns the mesh of a group's ranks for layers on ``device``. Emulated ranks get one that only parts tensors."""
    name = group_name(group)
    if isinstance(group, DeviceMesh):
        return group
    if (emulated := current_group()) is not None:
        return DeviceMesh(device.type, torch.arange(emulated.world_size), _init_backend=False, _rank=emulated.rank)
    found = existing(name)
    served = [kind.type for kind in found._device_types]
    usual = "cuda" if torch.cuda.is_available() and "cuda" in served else "cpu"  # of layers on meta, and of NCCL's on the CPU
    return DeviceMesh.from_group(found, device.type if device.type in served else usual)


@dataclass(frozen=True)
class _Layout:
    """The placements of a layer's input and output on the ranks of a mesh."""

    mesh: DeviceMesh
    group: str
    inputs: Placement
    outputs: Placement
    local_output: bool

    def taken(self, x: torch.Tensor, placement: Placement) -> torch.Tensor:
        """Returns this rank's part of a layer's input or residual."""
        if not isinstance(x, DTensor):
            return x
        return x.redistribute(placements=[placed(placement, x.ndim)]).to_local()

    def given(self, y: torch.Tensor) -> torch.Tensor:
        """Returns a layer's output as the caller wants it."""
        if self.local_output:
            return y
        return DTensor.from_local(y, self.mesh, [placed(self.outputs, y.ndim)], run_check=False)


def _local(parameter: torch.Tensor, gradient: Placement) -> torch.Tensor:
    return parameter.to_local(grad_placements=[gradient]) if isinstance(parameter, DTensor) else parameter


class _ParallelLinear(nn.Linear):
    """A linear layer whose weight and bias are DTensors. ``parallelize_module`` makes it of an ``nn.Linear``."""

    layout: _Layout

    def reset_parameters(self) -> None:
        """Draws the whole layer as ``nn.Linear`` does, and parts that of the mesh's rank 0, whatever the seeds of the others."""
        if not isinstance(self.weight, DTensor):
            super().reset_parameters()
            return
        local = self.weight.to_local()
        drawn = nn.Linear(self.in_features, self.out_features, self.bias is not None, local.device, local.dtype).state_dict()
        self.load_state_dict({name: _parted(drawn[name], own, 0) for name, own in self.state_dict().items()})

    def load_whole(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Copies this rank's part of the weight (out_features, in_features) and bias (out_features) of a whole layer."""
        self.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Takes DTensors, and parts whole tensors. Raises UsageError for shards that are plain tensors."""
        for name, own in self.named_parameters(recurse=False):
            given = state_dict.get(key := prefix + name)
            if isinstance(own, DTensor) and isinstance(given, torch.Tensor) and not isinstance(given, DTensor):
                if given.shape != own.shape:
                    raise UsageError(
                        f"{key} is a plain tensor of {tuple(given.shape)}: expected a DTensor, or the whole one of {tuple(own.shape)}. Of "
                        "shards that each rank saved by torch.save, join all by torch.cat, and load the result"
                    )
                state_dict[key] = _parted(given, own, None)
        super()._load_from_state_dict(state_dict, prefix, *others)


def _parted(whole: torch.Tensor, like: DTensor, source: int | None) -> DTensor:
    """Returns this rank's part, as ``like`` lies, of a whole tensor: of its own one, or of that of rank ``source``."""
    return _distributed(whole, like.device_mesh, like.placements, source)


def _distributed(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], source: int | None) -> DTensor:
    return distribute_tensor(whole.detach(), mesh, placements, src_data_rank=source if current_group() is None else None)


class ColwiseLinear(_ParallelLinear):
    """A linear layer of which each rank computes some outputs, with an ``activation`` behind it."""

    activation: Activation = "none"
    keeps_rows = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's outputs of all rows of x, or all outputs if the layout says so."""
        layout, group = self.layout, self.layout.group
        weight, x = _local(self.weight, Shard(0)).t(), layout.taken(x, layout.inputs)
        bias = None if self.bias is None else _local(self.bias, Shard(0))
        if isinstance(layout.inputs, Shard):
            axis, biases = layout.inputs.dim, [] if bias is None else [bias]
            kind: Mapping[str, Any] = {"activation": self.activation, "keeps_rows": self.keeps_rows, "group": group}
            (y,) = ops.row_gather_gemm(x.movedim(axis, 0), [weight], biases, **kind)
            y = y.movedim(0, axis)
        else:
            call: Any = ColumnProduct.apply
            y = product(lambda a, b, bias, _: call(a, b, bias, group), "ColwiseParallel", (x, weight), (bias, None))
            y = activate(y, self.activation)
        if isinstance(layout.outputs, Replicate):
            y = ops.all_gather(y.movedim(-1, 0), group, gradient="replicated").movedim(0, -1)
        return layout.given(y)


class RowwiseLinear(_ParallelLinear):
    """A linear layer of which each rank multiplies some inputs; the sum gets the bias and a residual before it is rounded."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the sum over ranks, plus ``residual`` of its shape: all of it, or this rank's rows if the layout says so."""
        layout, group, outputs = self.layout, self.layout.group, self.layout.outputs
        weight, x = _local(self.weight, Shard(1)).t(), layout.taken(x, layout.inputs)
        bias = None if self.bias is None else _local(self.bias, Replicate())
        residual = None if residual is None else layout.taken(residual, outputs)
        if isinstance(outputs, Shard):
            axis, bias = outputs.dim, None if bias is None else ops.replicate(bias, group)
            residual = None if residual is None else residual.movedim(axis, 0)
            y = ops.gemm_reduce_scatter(x.movedim(axis, 0), weight, group, bias=bias, residual=residual).movedim(0, axis)
        else:
            y = ops.gemm_all_reduce(x, weight, group, bias=bias, residual=residual, gradient="replicated")
        return layout.given(y)


class _Style(ParallelStyle):
    """A style that turns an ``nn.Linear`` into ``layer``, with its weight and bias in shards."""

    def __init__(
        self, layer: type[_ParallelLinear], shards: dict[str, Placement], inputs: Placement, outputs: Placement, use_local_output: bool
    ) -> None:
        super().__init__()
        self._layer, self._shards = layer, shards
        self._inputs, self._outputs, self._local_output = inputs, outputs, use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = type(self).__name__
        if type(module) is not nn.Linear:
            raise UsageError(f"{name} got a {type(module).__name__}: expected nn.Linear; torch's style of this name takes embeddings")
        if device_mesh.ndim != 1:
            raise UsageError(f'{name} got a mesh of {device_mesh.ndim} dimensions: expected one of them, as mesh["tp"]')
        module.__class__ = self._layer
        self.part(module, device_mesh, device_mesh.get_group().group_name)  # type: ignore[arg-type]
        return module

    def part(self, layer: _ParallelLinear, mesh: DeviceMesh, group: str) -> None:
        """Makes DTensors of a whole layer's parameters: of those of the mesh's rank 0, whatever the others have."""
        name, ranks = type(self).__name__, mesh.size()
        for key, whole in list(layer.named_parameters()):
            placement = self._shards[key]
            if isinstance(placement, Shard) and whole.shape[placement.dim] % ranks:
                raise UsageError(
                    f"{name} got a {key} of {tuple(whole.shape)}: expected {ranks} equal shards of axis {placement.dim}; pad the layer"
                )
            shard = _distributed(whole, mesh, [placement], self.src_data_rank)
            layer.register_parameter(key, nn.Parameter(shard, requires_grad=whole.requires_grad))
        layer.layout = _Layout(mesh, group, self._inputs, self._outputs, self._local_output)


class ColwiseParallel(_Style):
    """The style of a layer whose outputs are split over the ranks, as torch's ``ColwiseParallel``.

    ``input_layouts``: ``Replicate()``, or ``Shard(axis)`` of a sequence that is gathered first. ``output_layouts``: ``Shard(-1)``, or
    ``Replicate()`` to gather the outputs. A tensor that is no DTensor is this rank's part. The ranks divide the layer's outputs."""

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None, use_local_output: bool = True
    ) -> None:
        inputs, outputs = input_layouts or Replicate(), output_layouts or Shard(-1)
        if isinstance(inputs, Partial) or outputs not in (Shard(-1), Replicate()):
            raise UsageError(f"ColwiseParallel from {inputs} to {outputs}: expected Replicate() or Shard(axis) to Shard(-1) or Replicate()")
        super().__init__(ColwiseLinear, {"weight": Shard(0), "bias": Shard(0)}, inputs, outputs, use_local_output)


class RowwiseParallel(_Style):
    """The style of a layer whose inputs are split over the ranks, as torch's ``RowwiseParallel``.

    ``input_layouts``: ``Shard(-1)``. ``output_layouts``: ``Replicate()``, or ``Shard(axis)`` of a sequence that is scattered. A tensor that
    is no DTensor is this rank's part. The ranks divide the layer's inputs, and the sequence."""

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None, use_local_output: bool = True
    ) -> None:
        inputs, outputs = input_layouts or Shard(-1), output_layouts or Replicate()
        if inputs != Shard(-1) or outputs == Shard(-1) or isinstance(outputs, Partial):
            raise UsageError(f"RowwiseParallel from {inputs} to {outputs}: expected Shard(-1) to Replicate() or Shard(axis)")
        super().__init__(RowwiseLinear, {"weight": Shard(1), "bias": Replicate()}, inputs, outputs, use_local_output)


def replicate_others(model: nn.Module, group: GroupLike = None, *, sequence_parallel: bool = False) -> None:
    """Makes replicated DTensors of the parameters that tensor-parallel layers leave plain: those of norms, embeddings and heads.

    All ranks get the numbers of the group's rank 0. Optimizers and ``clip_grad_norm_`` then take the whole model. Each of these modules
    still takes and gives plain tensors: the same on all ranks, or shards of axis 0 with ``sequence_parallel``, whose gradients are added
    over ranks."""
    tokens, made = Shard(0) if sequence_parallel else Replicate(), dict[nn.Parameter, nn.Parameter]()  # shared parameters stay shared
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if not own or any(isinstance(parameter, DTensor) for parameter in own.values()):
            continue
        mesh = mesh_of(group, next(iter(own.values())).device)
        for key, parameter in own.items():
            if parameter not in made:
                copies = _distributed(parameter, mesh, [Replicate()], 0)
                made[parameter] = nn.Parameter(copies, requires_grad=parameter.requires_grad)
            module.register_parameter(key, made[parameter])
        module.register_forward_pre_hook(partial(_dtensors_in, mesh, tokens))
        module.register_forward_hook(partial(_locals_out, tokens))


def _dtensors_in(mesh: DeviceMesh, tokens: Placement, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(DTensor.from_local(x, mesh, [tokens], run_check=False) if isinstance(x, torch.Tensor) else x for x in inputs)


def _locals_out(tokens: Placement, module: nn.Module, inputs: tuple[Any, ...], output: DTensor) -> torch.Tensor:
    local: torch.Tensor = _Local.apply(output.redistribute(placements=[tokens]))  # type: ignore[no-untyped-call]
    return local


class _Local(torch.autograd.Function):
    """This rank's part of a DTensor. Unlike that of ``to_local`` it is no view, so it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.lies = x.device_mesh, x.placements
        return x.to_local().detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:
        return DTensor.from_local(grad, *ctx.lies, run_check=False)
