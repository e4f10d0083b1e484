"""Copies of what the calls of a timed block return, which cost the host little.

:meth:`OutputRegions.take` describes an output in full, which takes the host longer than many kernels take the device. Here the places,
sizes and types of all regions are looked up before the block. An output that is as expected is copied at once; any other goes the long way.
"""

from typing import Any

import torch

from peerlane.evaluate.memory.slots import OutputRegions, unplaced
from peerlane.problems.contract.tree import Description, Tree, dtype_of, tensor_descriptions

_LARGE_BYTES = 64 << 20
"""Size of a tensor above which an output is copied the long way. Below it one kernel copies all tensors of the output."""

# Captured before any candidate code is loaded.
_Tensor = torch.Tensor
_shape, _dtype, _device = torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__  # type: ignore[attr-defined]
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_is_contiguous, _is_neg = torch.Tensor.is_contiguous, torch.Tensor.is_neg
_copy_many = torch._foreach_copy_
_KINDS = {"tensor": torch.Tensor, "list": list, "tuple": tuple}


class OutputCopies:
    """The copies of one block's outputs into their regions, in stream order."""

    def __init__(self, outputs: OutputRegions, device: torch.device) -> None:
        self._outputs, self._device = outputs, device
        self._prepared = [self._prepare(slot) for slot in range(len(outputs.layout))]

    def _prepare(self, slot: int) -> tuple[type[Any], list[tuple[torch.Size, torch.dtype]], list[torch.Tensor], Description] | None:
        """Returns the type of the output, the shape and dtype of each tensor, the regions, and the description; None for others."""
        layout, regions = self._outputs.layout[slot], self._outputs.views[slot]
        kind = _KINDS.get(layout["kind"])
        flat = all(item["kind"] == "tensor" for item in layout.get("items", ()))
        if kind is None or not flat or self._outputs.updates or any(not 0 < region.nbytes <= _LARGE_BYTES for region in regions):
            return None
        dtypes = [dtype_of(placed["dtype"]) for placed in tensor_descriptions(layout)]
        if len(set(dtypes)) > 1 or any(dtype.is_complex for dtype in dtypes):  # which may be conjugate, in name alone
            return None
        return kind, [(region.shape, dtype) for region, dtype in zip(regions, dtypes, strict=True)], regions, unplaced(layout)

    def take(self, slot: int, output: Tree, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """Does the same as :meth:`OutputRegions.take`."""
        prepared = self._prepared[slot]
        if prepared is None or type(output) is not prepared[0]:
            return self._outputs.take(slot, output, args)
        kind, expected, regions, description = prepared
        found: list[Any] = [output] if kind is _Tensor else [*output]
        if len(found) != len(expected):
            return self._outputs.take(slot, output, args)
        for tensor, (shape, dtype) in zip(found, expected, strict=True):
            plain = type(tensor) is _Tensor and _dtype(tensor) is dtype and _shape(tensor) == shape and _device(tensor) == self._device
            if not plain or not _is_contiguous(tensor) or _requires_grad(tensor) or _is_neg(tensor):
                return self._outputs.take(slot, output, args)
        _copy_many(regions, found)
        self._outputs.descriptions[slot] = description
        return found
