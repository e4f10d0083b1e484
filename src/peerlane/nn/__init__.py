"""Linear layers whose weights are sharded over ranks, on the kit's fused kernels.

    up = ColumnParallelLinear(hidden, 4 * hidden, sequence_parallel=True)      (s/W, b, hidden) gives (s, b, 4 hidden / W)
    down = RowParallelLinear(4 * hidden, hidden, sequence_parallel=True)       and back to (s/W, b, hidden)

They are the layers of ``peerlane.ops.parallel`` by constructors: weights are DTensors of the whole layer, drawn as ``torch.nn.Linear``
draws it and parted, so one seed gives the weights of one rank, and optimizers, clipping and checkpoints treat shards as shards. Call
``replicate_others(model)`` once for the parameters of its other modules.

With ``sequence_parallel`` tokens between layers are sharded along axis 0, in rank order: gathering them is part of the first product,
adding and scattering them part of the second, forward and backward. Every rank's loss is that of its tokens, and gradients are those of the
sum of these losses. Without it tokens are the same on all ranks, and so is the loss: gradients are those of this one loss. Nothing is left
to reduce within the group."""

from typing import Any

from torch.distributed.tensor import Replicate, Shard

from peerlane.device.products.gemm import Activation
from peerlane.ops.groups import GroupLike, group_name
from peerlane.ops.parallel import ColwiseLinear, ColwiseParallel, RowwiseLinear, RowwiseParallel, mesh_of, replicate_others

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "replicate_others"]


class ColumnParallelLinear(ColwiseLinear):
    """A linear layer whose output features are sharded: ``activation(x @ weight.T + bias)``, weight (out_features, in_features) by rows.

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
        super().__init__(in_features, out_features, bias, **made)
        self.activation, self.keeps_rows = activation, keeps_rows
        style = ColwiseParallel(input_layouts=Shard(0) if sequence_parallel else Replicate())
        style.part(self, mesh_of(group, self.weight.device), group_name(group))


class RowParallelLinear(RowwiseLinear):
    """A linear layer whose input features are sharded: the sum over ranks of ``x @ weight.T``, plus bias and residual, weight
    (out_features, in_features) by columns.

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
        super().__init__(in_features, out_features, bias, **made)
        style = RowwiseParallel(output_layouts=Shard(0) if sequence_parallel else Replicate())
        style.part(self, mesh_of(group, self.weight.device), group_name(group))
