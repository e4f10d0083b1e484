"""The tensors that collectives of the kit take. Each function raises UsageError for others."""

from collections.abc import Sequence

import torch

from peerlane.errors import UsageError


def require_fit(output: torch.Tensor, input: torch.Tensor, outputs: int = 1, inputs: int = 1) -> None:
    """``outputs`` times the elements of ``output`` are ``inputs`` times those of ``input``, in one dtype on one device."""
    if output.dtype != input.dtype or output.numel() * outputs != input.numel() * inputs or output.device != input.device:
        raise UsageError(
            f"output {tuple(output.shape)} {output.dtype} on {output.device} does not fit input {tuple(input.shape)} {input.dtype} on "
            f"{input.device}: expected {input.numel() * inputs // outputs} elements of {input.dtype}"
        )


def require_contiguous(*tensors: torch.Tensor | None) -> None:
    """All of them that are not None are contiguous."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise UsageError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous; pass .contiguous()")


def require_root(root: int, world_size: int) -> None:
    """``root`` is a rank of the group."""
    if not 0 <= root < world_size:
        raise UsageError(f"rank {root} is not in a group of {world_size}; expected a number within the group")


def require_parts(tensor: torch.Tensor | None, verb: str, rank: int, world_size: int) -> torch.Tensor:
    """The root, which gathers or scatters as ``verb`` says, has a tensor of all parts; returns it."""
    if tensor is None:
        raise UsageError(f"rank {rank} {verb} and got no tensor; pass one of {world_size} equal parts")
    return tensor


def require_part(part: torch.Tensor, whole: torch.Tensor, rows: int) -> None:
    """``part`` is so many rows of ``whole``: this rank's."""
    wanted = (rows, *whole.shape[1:])
    if tuple(part.shape) != wanted or part.dtype != whole.dtype or part.device != whole.device:
        raise UsageError(
            f"this rank's part is {tuple(part.shape)} {part.dtype} on {part.device}; expected {wanted} {whole.dtype} on {whole.device}, "
            "as the sizes say"
        )


def part_bytes(tensor: torch.Tensor, rows: Sequence[int] | None, world_size: int) -> list[int]:
    """Returns the bytes of each rank's part of ``tensor``: so many rows of axis 0 each, or equal ones."""
    length = tensor.shape[0] if tensor.dim() else 0
    rows = [length // world_size] * world_size if rows is None else rows
    if len(rows) != world_size or sum(rows) != length or min(rows) < 0:
        raise UsageError(f"splits {list(rows)} do not cut {length} rows into {world_size} parts; they must sum to the length of axis 0")
    row_bytes = tensor.nbytes // length if length else 0
    return [count * row_bytes for count in rows]
