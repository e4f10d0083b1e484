"""The collectives of a group of one rank: copies, without kernels of the kit or memory in an arena."""

from collections.abc import Sequence

import torch

from peerlane.device.collectives.reductions import SUM, Reduction


class Alone:
    """The collectives of a group of one rank, with the methods of ``Communicator``, which says what each method does."""

    def all_reduce(self, tensor: torch.Tensor, output: torch.Tensor | None = None, reduction: Reduction = SUM) -> None:
        output = tensor if output is None else output
        _move(output, tensor)
        if reduction.name == "premul_sum":
            output.mul_(reduction.factor)

    def reduce(self, tensor: torch.Tensor, dst: int, output: torch.Tensor | None = None, reduction: Reduction = SUM) -> None:
        self.all_reduce(tensor, output, reduction)

    def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor, reduction: Reduction = SUM) -> None:
        self.all_reduce(input, output, reduction)

    def broadcast(self, tensor: torch.Tensor, src: int, output: torch.Tensor | None = None) -> None:
        _move(tensor if output is None else output, tensor)

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        _move(output, input)

    def gather(self, tensor: torch.Tensor, output: torch.Tensor | None, dst: int) -> None:
        if output is not None:
            _move(output, tensor)

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None, src: int) -> None:
        if input is not None:
            _move(output, input)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
    ) -> None:
        _move(output, input)

    def all_gather_parts(self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int]) -> None:
        _move(output, input)

    def reduce_scatter_parts(self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int], reduction: Reduction = SUM) -> None:
        self.all_reduce(input, output, reduction)

    closed = False

    def close(self) -> None:
        """Does nothing: there is no memory."""


def _move(output: torch.Tensor, input: torch.Tensor) -> None:
    if output.data_ptr() != input.data_ptr():
        output.view(-1).copy_(input.view(-1))
