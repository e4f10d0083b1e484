"""Linear layers whose weights are sharded over ranks, on the kit's fused kernels.

    up = ColumnParallelLinear(hidden, 4 * hidden, sequence_parallel=True)      (s/W, b, hidden) gives (s, b, 4 hidden / W)
    down = RowParallelLinear(4 * hidden, hidden, sequence_parallel=True)       and back to (s/W, b, hidden)

With ``sequence_parallel`` tokens between layers are sharded along axis 0, in rank order: gathering them is part of the first product,
adding and scattering them part of the second, forward and backward. Every rank's loss is that of its tokens, and gradients are those of the
sum of these losses. Without it tokens are the same on all ranks, and so is the loss: gradients are those of this one loss. Gradients of
weights are always this rank's own, those of shared biases are summed over ranks; nothing is left to reduce within the group."""

from __future__ import annotations

import math
from typing import Any

import torch

from peerlane import ops
from peerlane.device.products.gemm import Activation
from peerlane.errors import UsageError
from peerlane.ops.groups import GroupLike, group_name, rank, world_size
from peerlane.ops.products import activate
from peerlane.ops.shapes import cast

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class _Sharded(torch.nn.Module):
    """A layer of which this rank has some rows or columns of the weight; they lie as in ``torch.nn.Linear``."""

    def __init__(self, shape: tuple[int, int], whole: tuple[int, int], axis: int, bias: int, group: GroupLike, **made: Any) -> None:
        super().__init__()
        self.group, self.ranks, self._whole, self._axis = group, world_size(group_name(group)), whole, axis
        if whole[axis] % self.ranks:
            name = ("out_features", "in_features")[axis]
            raise UsageError(f"a layer of {name}={whole[axis]} on {self.ranks} ranks: expected a multiple; pad the layer")
        self.weight = torch.nn.Parameter(torch.empty(shape, **made))
        self.bias = torch.nn.Parameter(torch.empty(bias, **made)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws this rank's part as ``torch.nn.Linear`` draws the whole. Seed ranks differently, or load parts of one layer
        (``load_whole``)."""
        bound = 1 / math.sqrt(self._whole[1])
        for value in self.parameters():
            torch.nn.init.uniform_(value, -bound, bound)
        if self.bias is not None and self._axis == 1:  # shared: the same on all ranks
            torch.nn.init.zeros_(self.bias)

    @torch.no_grad()
    def load_whole(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Copies this rank's part of the weight (out_features, in_features) and bias (out_features) of a whole layer."""
        if tuple(weight.shape) != self._whole or (bias is None) != (self.bias is None):
            raise UsageError(
                f"a weight of {tuple(weight.shape)} {'without' if bias is None else 'with'} a bias for a layer of {self._whole} "
                f"{'without' if self.bias is None else 'with'} one: expected a layer of the same shape"
            )
        own = rank(group_name(self.group))
        self.weight.copy_(weight.chunk(self.ranks, self._axis)[own])
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias.chunk(self.ranks)[own] if self._axis == 0 else bias)

    def extra_repr(self) -> str:
        """Returns the sizes of the whole layer and the number of ranks."""
        return f"in_features={self._whole[1]}, out_features={self._whole[0]}, ranks={self.ranks}"


class ColumnParallelLinear(_Sharded):
    """A linear layer whose output features are sharded: ``activation(x @ weight.T + bias)``, weight (out_features / W, in_features).

    With ``sequence_parallel`` x (s/W, ..., in_features) gives (s, ..., out_features / W), and all ranks' rows of x are gathered again for
    the weight's gradient, or kept from the forward pass with ``keeps_rows``. Without it x (..., in_features) is the same on all ranks, and
    its gradient is summed over them. Raises UsageError if out_features is not a multiple of the number of ranks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        activation: Activation = "none",
        keeps_rows: bool = False,
        group: GroupLike = None,
        **made: Any,
    ) -> None:
        own = out_features // world_size(group_name(group))
        super().__init__((own, in_features), (out_features, in_features), 0, own if bias else 0, group, **made)
        self.sequence_parallel, self.activation, self.keeps_rows = sequence_parallel, activation, keeps_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's output features of all tokens."""
        if self.sequence_parallel:
            biases = [] if self.bias is None else [self.bias]
            (y,) = ops.row_gather_gemm(
                x, [self.weight.t()], biases, activation=self.activation, keeps_rows=self.keeps_rows, group=self.group
            )
            return y
        rows, weight, bias = cast(x.flatten(0, -2), self.weight, self.bias)
        z: torch.Tensor = _Replicated.apply(rows, weight, bias, self.group)  # type: ignore[no-untyped-call]
        return activate(z, self.activation).view(*x.shape[:-1], -1)


class RowParallelLinear(_Sharded):
    """A linear layer whose input features are sharded: the sum over ranks of ``x @ weight.T``, plus bias and residual, weight
    (out_features, in_features / W).

    x (s, ..., in_features / W) gives (s/W, ..., out_features) with ``sequence_parallel``, and without it (s, ..., out_features), the same
    on all ranks. The bias (out_features) is the same on all ranks, and its gradient is that of all tokens. Raises UsageError if in_features
    is not a multiple of the number of ranks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        group: GroupLike = None,
        **made: Any,
    ) -> None:
        own = in_features // world_size(group_name(group))
        super().__init__((out_features, own), (out_features, in_features), 1, out_features if bias else 0, group, **made)
        self.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the sum, with ``residual``, of the result's shape, added before it is rounded."""
        if not self.sequence_parallel:
            return ops.gemm_all_reduce(x, self.weight.t(), self.group, bias=self.bias, residual=residual, gradient="replicated")
        bias = None if self.bias is None else ops.replicate(self.bias, self.group)
        return ops.gemm_reduce_scatter(x, self.weight.t(), self.group, bias=bias, residual=residual)


class _Replicated(torch.autograd.Function):
    """``x @ weight.T + bias`` of an x that all ranks share: its gradient is the sum of what the ranks' parts of the layer give, in one
    kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: GroupLike) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.has_bias = group, bias is not None
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dx = ops.gemm_all_reduce(grad, weight, ctx.group) if ctx.needs_input_grad[0] else None
        return dx, grad.T @ x, grad.sum(0) if ctx.has_bias else None, None
