"""What groups on CUDA devices have in common: kernels, addresses and tensor maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from peerlane import settings
from peerlane.device.host import cuda_bindings
from peerlane.device.host.group import FAULT_WORDS, Group
from peerlane.device.host.jit import Cubin, compile_cubin
from peerlane.device.host.launch import Kernel
from peerlane.device.host.tensor_map import TensorMap, TensorMapSpec
from peerlane.errors import DeviceError

GRANULARITY_BYTES = 2 << 20


class CudaGroup(Group):
    """Ranks on CUDA devices."""

    def kernel(
        self, source: str | Path, name: str, *, defines: Mapping[str, str | int], on_failure: Callable[[], None] | None = None
    ) -> Kernel:
        return Kernel(_compiled(source, defines), name, on_failure)

    def compile_ahead(self, kernels: Sequence[tuple[str | Path, Mapping[str, str | int]]]) -> None:
        for number in range(len(kernels)):
            _compiled(*kernels[(self.rank + number) % len(kernels)])

    def address(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def encode(self, spec: TensorMapSpec) -> TensorMap:
        return spec.encode()


def _compiled(source: str | Path, defines: Mapping[str, str | int]) -> Cubin:
    observed = {"PEERLANE_TIMELINE": 1} if settings.records_roles() else {}
    return compile_cubin(source, defines={**defines, **observed})


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
        raise DeviceError(f"{what} failed: {cuda_bindings.describe(status)}")
    return values[0] if values else None


def enable_peer_access(count: int) -> None:
    """Let every GPU address every other one's memory. torch's own copies do so too, and do not mind that it is done already."""
    driver = cuda_bindings.driver()
    contexts = []
    for gpu in range(count):
        torch.zeros(1, device=f"cuda:{gpu}")
        status, context = driver.cuDevicePrimaryCtxRetain(gpu)
        if status:
            raise DeviceError(f"GPU {gpu} has no context: {cuda_bindings.describe(status)}")
        contexts.append(context)
    already: Any = driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
    for gpu in range(count):
        with torch.cuda.device(gpu):
            for other in range(count):
                if other == gpu:
                    continue
                (status,) = driver.cuCtxEnablePeerAccess(contexts[other], 0)
                if status and status != already:
                    raise DeviceError(
                        f"GPU {gpu} can not address GPU {other}: {cuda_bindings.describe(status)}; see what `nvidia-smi topo -p2p rw` says"
                    )
