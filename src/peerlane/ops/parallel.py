"""Tensor-parallel styles for ``torch.distributed.tensor.parallel.parallelize_module``, whose layers run on the kit.

    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

They split ``nn.Linear`` as torch's styles of the same names do, so checkpoints fit both. A column-parallel layer's backward pass and a
row-parallel layer's forward pass are one fused operator each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from peerlane import ops
from peerlane.errors import UsageError
from peerlane.ops.replicated import ColumnProduct
from peerlane.ops.shapes import product
from peerlane.ops.sharding import placed


@dataclass(frozen=True)
class _Layout:
    """The placements of a layer's input and output on the ranks of a mesh."""

    mesh: DeviceMesh
    group: str
    inputs: Placement
    outputs: Placement
    local_output: bool

    def taken(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a layer's input."""
        if not isinstance(x, DTensor):
            return x
        return x.redistribute(placements=[placed(self.inputs, x.ndim)]).to_local()

    def given(self, y: torch.Tensor) -> torch.Tensor:
        """Returns a layer's output as the caller wants it."""
        if self.local_output:
            return y
        return DTensor.from_local(y, self.mesh, [placed(self.outputs, y.ndim)], run_check=False)


def _local(parameter: torch.Tensor, gradient: Placement) -> torch.Tensor:
    return parameter.to_local(grad_placements=[gradient]) if isinstance(parameter, DTensor) else parameter


class _ColwiseLinear(nn.Linear):
    """A linear layer of which each rank computes some outputs. ``parallelize_module`` makes it of an ``nn.Linear``."""

    layout: _Layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layout, group = self.layout, self.layout.mesh.get_group()
        weight, x = _local(self.weight, Shard(0)).t(), layout.taken(x)
        bias = None if self.bias is None else _local(self.bias, Shard(0))
        if isinstance(layout.inputs, Shard):
            axis = layout.inputs.dim
            (y,) = ops.row_gather_gemm(x.movedim(axis, 0), [weight], [] if bias is None else [bias], group=group)
            y = y.movedim(0, axis)
        else:
            y = product(partial(_column_product, group=layout.group), "ColwiseParallel", (x, weight), (bias, None))
        if isinstance(layout.outputs, Replicate):
            y = ops.all_gather(y.movedim(-1, 0), group, gradient="replicated").movedim(0, -1)
        return layout.given(y)


def _column_product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, _: torch.Tensor | None, *, group: str) -> torch.Tensor:
    y: torch.Tensor = ColumnProduct.apply(a, b, group)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


class _RowwiseLinear(nn.Linear):
    """A linear layer of which each rank multiplies some inputs. ``parallelize_module`` makes it of an ``nn.Linear``."""

    layout: _Layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layout, group = self.layout, self.layout.mesh.get_group()
        weight, x, outputs = _local(self.weight, Shard(1)).t(), layout.taken(x), layout.outputs
        bias = None if self.bias is None else _local(self.bias, Partial() if isinstance(outputs, Shard) else Replicate())
        if isinstance(outputs, Shard):
            y = ops.gemm_reduce_scatter(x.movedim(outputs.dim, 0), weight, group, bias=bias).movedim(0, outputs.dim)
        else:
            y = ops.gemm_all_reduce(x, weight, group, bias=bias, gradient="replicated")
        return layout.given(y)


class _Style(ParallelStyle):
    """A style that turns an ``nn.Linear`` into ``layer``, with its weight and bias in shards."""

    def __init__(
        self, layer: type[nn.Linear], shards: dict[str, Placement], inputs: Placement, outputs: Placement, use_local_output: bool
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
        for key, parameter in list(module.named_parameters()):
            placement, ranks = self._shards[key], device_mesh.size()
            if isinstance(placement, Shard) and parameter.shape[placement.dim] % ranks:
                raise UsageError(f"{name} got a {key} of {tuple(parameter.shape)}: expected {ranks} equal shards of axis {placement.dim}")
            shard = distribute_tensor(parameter, device_mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(key, nn.Parameter(shard, requires_grad=parameter.requires_grad))
        module.__class__ = self._layer
        group = device_mesh.get_group().group_name
        module.layout = _Layout(device_mesh, group, self._inputs, self._outputs, self._local_output)  # type: ignore[assignment]
        return module


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
        super().__init__(_ColwiseLinear, {"weight": Shard(0), "bias": Shard(0)}, inputs, outputs, use_local_output)


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
        super().__init__(_RowwiseLinear, {"weight": Shard(1), "bias": Replicate()}, inputs, outputs, use_local_output)
