"""What groups on CUDA devices have in common: a pool of memory, kernels, addresses and tensor maps."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from peerlane import settings
from peerlane.device.host import cuda_bindings
from peerlane.device.host.device_memory import checked
from peerlane.device.host.group import Group
from peerlane.device.host.jit import Cubin, compile_cubin
from peerlane.device.host.launch import Kernel
from peerlane.device.host.memory_report import MemoryReport
from peerlane.device.host.pool import Lease, MemoryPool, Source
from peerlane.device.host.tensor_map import TensorMap, TensorMapSpec
from peerlane.errors import DeviceError, UsageError


class CudaGroup(Group):
    """Ranks on CUDA devices."""

    def __init__(self, rank: int, world_size: int, device: torch.device, source: Source) -> None:
        super().__init__(rank, world_size, device)
        self.pool = MemoryPool(source)
        self.cache.captures = torch._C._cuda_isCurrentStreamCapturing

    def allocate(self, nbytes: int, name: str = "") -> Lease:
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"{name or 'an arena'} asks for memory while a CUDA graph is captured; call it once with these sizes before the capture"
            )
        return self.pool.lease(nbytes, name)

    def memory_report(self) -> MemoryReport:
        return self.pool.report()

    def kernel(
        self, source: str | Path, name: str, *, defines: Mapping[str, str | int], on_failure: Callable[[], None] | None = None
    ) -> Kernel:
        return Kernel(_compiled(source, defines), name, on_failure)

    def compile_ahead(self, kernels: Sequence[tuple[str | Path, Mapping[str, str | int]]]) -> None:
        for number in range(len(kernels)):
            _compiled(*kernels[(self.rank + number) % len(kernels)])

    def address(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def copy(self, target: int, source: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        checked(cuda_bindings.driver().cuMemcpyDtoDAsync(target, source.data_ptr(), source.nbytes, stream), "a copy to another rank")

    def encode(self, spec: TensorMapSpec) -> TensorMap:
        return spec.encode()


def _compiled(source: str | Path, defines: Mapping[str, str | int]) -> Cubin:
    observed = {"PEERLANE_TIMELINE": 1} if settings.records_roles() else {}
    return compile_cubin(source, defines={**defines, **observed})


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
