"""What groups on CUDA devices have in common: kernels, addresses and tensor maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from peerlane.device import _cuda
from peerlane.device.group import Group
from peerlane.device.jit import compile_cubin
from peerlane.device.launch import Kernel
from peerlane.device.tensor_map import TensorMap, TensorMapSpec
from peerlane.errors import DeviceError

GRANULARITY_BYTES = 2 << 20
FAULT_WORDS = 8


class CudaGroup(Group):
    """Ranks on CUDA devices."""

    def kernel(
        self, source: str | Path, name: str, *, defines: Mapping[str, str | int], on_failure: Callable[[], None] | None = None
    ) -> Kernel:
        return Kernel(compile_cubin(source, defines=defines), name, on_failure)

    def address(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def encode(self, spec: TensorMapSpec) -> TensorMap:
        return spec.encode()


class DeviceMemory:
    """Raw device memory with the array interface by which torch takes a view of it."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3, "strides": None}


def pinned_fault() -> torch.Tensor:
    """A fault record that a kernel can write and the host can read after the device was lost."""
    return torch.zeros(FAULT_WORDS, dtype=torch.int32, pin_memory=True)


def checked(result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call; raises DeviceError that says what failed."""
    status, *values = result
    if status:
        raise DeviceError(f"{what} failed: {_cuda.describe(status)}")
    return values[0] if values else None
