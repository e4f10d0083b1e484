"""Copies of what the calls of a timed block return, which cost the host little.

:meth:`OutputRegions.take` describes an output in full, which takes the host longer than many kernels take the device. Here the places,
sizes and types of all regions are looked up before the block. An output that is as expected is copied at once; any other goes the long way.
"""

from __future__ import annotations

from typing import Any

import torch

from peerlane.evaluate.memory.arena import runtime
from peerlane.evaluate.memory.slots import OutputRegions, unplaced
from peerlane.problems.contract.tree import Description, Tree, dtype_of, tensor_descriptions

_MOST_COPIES = 3
"""Of an output, launched one by one. More tensors are copied by fewer kernels."""

# Captured before any candidate code is loaded.
_Tensor = torch.Tensor
_shape, _dtype, _device = torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__  # type: ignore[attr-defined]
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_is_contiguous, _is_neg, _data_ptr = torch.Tensor.is_contiguous, torch.Tensor.is_neg, torch.Tensor.data_ptr
_copy = torch.Tensor.copy_
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a build without CUDA has no such function
_KINDS = {"tensor": torch.Tensor, "list": list, "tuple": tuple}


class OutputCopies:
    """The copies of one block's outputs into their regions, in stream order."""

    def __init__(self, outputs: OutputRegions, device: torch.device) -> None:
        self._outputs, self._device = outputs, device
        self._prepared = [self._prepare(slot) for slot in range(len(outputs.layout))]
        if device.type == "cuda":
            cudart = runtime()
            self._memcpy, self._way = cudart.cudaMemcpyAsync, cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice

    def _prepare(self, slot: int) -> tuple[type[Any], list[tuple[Any, ...]], Description] | None:
        """The type of the output, the shape, dtype, region, address and bytes of each tensor, and the description; None for others."""
        layout, regions = self._outputs.layout[slot], self._outputs.views[slot]
        kind = _KINDS.get(layout["kind"])
        flat = all(item["kind"] == "tensor" for item in layout.get("items", ()))
        if kind is None or not flat or self._outputs.updates or len(regions) > _MOST_COPIES:
            return None
        dtypes = [dtype_of(placed["dtype"]) for placed in tensor_descriptions(layout)]
        if any(dtype.is_complex for dtype in dtypes):  # which may be conjugate, in name alone
            return None
        tensors = [(region.shape, dtype, region, region.data_ptr(), region.nbytes) for region, dtype in zip(regions, dtypes, strict=True)]
        return kind, tensors, unplaced(layout)

    def take(self, slot: int, output: Tree, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """As :meth:`OutputRegions.take`, and does the same."""
        prepared = self._prepared[slot]
        if prepared is None or type(output) is not prepared[0]:
            return self._outputs.take(slot, output, args)
        kind, expected, description = prepared
        found: list[Any] = [output] if kind is _Tensor else [*output]
        if len(found) != len(expected):
            return self._outputs.take(slot, output, args)
        for tensor, (shape, dtype, *_) in zip(found, expected, strict=True):
            plain = type(tensor) is _Tensor and _dtype(tensor) is dtype and _shape(tensor) == shape and _device(tensor) == self._device
            if not plain or not _is_contiguous(tensor) or _requires_grad(tensor) or _is_neg(tensor):
                return self._outputs.take(slot, output, args)
        if self._device.type == "cuda":
            stream = _current_stream(self._device.index)  # type: ignore[misc]
            for tensor, (*_, address, nbytes) in zip(found, expected, strict=True):
                if nbytes and int(self._memcpy(address, _data_ptr(tensor), nbytes, self._way, stream)[0]):
                    return self._outputs.take(slot, output, args)  # which says what is wrong
        else:
            for tensor, (*_, region, _, _) in zip(found, expected, strict=True):
                _copy(region, tensor)
        self._outputs.descriptions[slot] = description
        return found
