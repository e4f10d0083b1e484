"""The carriers of an operator's data: the kit, torch.distributed, or for a single rank nothing at all."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.device import Communicator, communicator
from peerlane.device.collectives.alone import Alone
from peerlane.device.collectives.reductions import SUM, Reduction, refusal
from peerlane.device.host.group import current_group
from peerlane.device.host.tally import count
from peerlane.errors import UsageError
from peerlane.ops.check import no_kernel
from peerlane.ops.groups import kit_group, process_group, world_size
from peerlane.ops.shapes import rows

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""dtypes that torch.distributed does not know"""


def transport(x: torch.Tensor, group: str, reduction: Reduction | None = None) -> "Communicator | Alone | Library":
    """Returns what carries ``x`` between the ranks of ``group``. ``reduction``: of a collective that reduces.

    Reductions that the kit lacks go to torch.distributed, which is logged once and counted in the backend's ``report()``."""
    kit = kit_group(x, group)
    adds = reduction is not None and reduction.name not in ("max", "min") and x.is_floating_point() and world_size(group) > 1
    if reduction is not None and adds and (kit is None or refusal(reduction.name, x.dtype)):
        no_kernel(f"a reduction with {reduction.name}", group, x)
    if kit is None:
        return Alone() if world_size(group) == 1 else Library(group)
    if reduction is None or not (reason := refusal(reduction.name, x.dtype)):
        return communicator(kit)
    if current_group() is not None:
        raise UsageError(f"{reason}; emulated ranks have no torch.distributed to fall back to")
    count(f"ops, {reduction.name}", x.device.type, str(dist.get_backend(process_group(group))), reason)
    return Library(group)


def summed(x: torch.Tensor, group: str, reduction: Reduction = SUM) -> torch.Tensor:
    """Returns the sum of all ranks' x, or another reduction."""
    x = x.contiguous()
    total = torch.empty_like(x)
    transport(x, group, reduction).all_reduce(x, total, reduction)
    return total


def gathered(x: torch.Tensor, group: str) -> torch.Tensor:
    """Returns all ranks' rows."""
    sent = x.contiguous().view(torch.uint8) if x.dtype in _FP8 else x.contiguous()
    whole = sent.new_empty((world_size(group) * sent.shape[0], *sent.shape[1:]))
    transport(sent, group).all_gather_into_tensor(whole, sent)
    return whole if whole.dtype == x.dtype else whole.view(x.dtype)


def scattered(x: torch.Tensor, group: str, reduction: Reduction = SUM, name: str = "gemm_reduce_scatter") -> torch.Tensor:
    """Returns this rank's rows of the sum of all ranks' x, or of another reduction. ``name``: the operator's, for errors."""
    x = x.contiguous()
    part = x.new_empty((rows(x, world_size(group), name), *x.shape[1:]))
    transport(x, group, reduction).reduce_scatter_tensor(part, x, reduction)
    return part


class Library:
    """torch.distributed in the place of the kit; ``Communicator`` says what each method does. Tensors are contiguous."""

    def __init__(self, group: str) -> None:
        self._group, self._ranks = process_group(group), world_size(group)

    def all_reduce(self, tensor: torch.Tensor, output: torch.Tensor, reduction: Reduction = SUM) -> None:
        if output.data_ptr() != tensor.data_ptr():
            output.copy_(tensor)
        dist.all_reduce(output, _operation(reduction), group=self._group)
        self._finish(output, reduction)

    def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor, reduction: Reduction = SUM) -> None:
        dist.reduce_scatter_tensor(output, input, _operation(reduction), group=self._group)
        self._finish(output, reduction)

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        dist.all_gather_into_tensor(output, input, group=self._group)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
    ) -> None:
        received, sent = (None if sizes is None else list(sizes) for sizes in (output_split_sizes, input_split_sizes))
        dist.all_to_all_single(output, input, received, sent, group=self._group)

    def all_gather_parts(self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int]) -> None:
        self.all_to_all_single(output, input.repeat(self._ranks, *[1] * (input.dim() - 1)), sizes, [len(input)] * self._ranks)

    def reduce_scatter_parts(self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int], reduction: Reduction = SUM) -> None:
        terms = output.new_empty((self._ranks, *output.shape))
        self.all_to_all_single(terms.flatten(0, 1), input, [len(output)] * self._ranks, sizes)
        if reduction.name in ("max", "min"):
            output.copy_(terms.amax(0) if reduction.name == "max" else terms.amin(0))
            return
        total = terms.sum(0, dtype=torch.promote_types(terms.dtype, torch.float32) if terms.is_floating_point() else terms.dtype)
        self._finish(total, reduction)
        output.copy_(total)

    def _finish(self, output: torch.Tensor, reduction: Reduction) -> None:
        if reduction.name == "avg":
            output.div_(self._ranks)
        elif reduction.name == "premul_sum":
            output.mul_(reduction.factor)


def _operation(reduction: Reduction) -> Any:
    """Returns the operation of torch.distributed; means and scaled sums are made of sums, which every backend has."""
    return {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(reduction.name, dist.ReduceOp.SUM)
