"""Memory that a trusted rank and a candidate rank share: CUDA IPC on a GPU, a memory file on CPU.

The trusted side allocates, the candidate's side maps. GPU arenas are allocations of their own, never part of torch's caching
allocator: an IPC handle opens a whole allocation, and nothing but slots may lie in one.
"""

import ctypes
import mmap
from typing import Any

import torch

from peerlane.errors import HarnessError, MissingDependency
from peerlane.problems.contract.tree import dtype_of

ALIGNMENT_BYTES = 256
POISON = 0xFF  # every float format: NaN; integers: -1 or the largest value
GUARD_BYTES = 256  # at least so many lie before and behind every tensor
_HANDLE_BYTES = 64  # of cudaIpcMemHandle_t
_PAGE_BYTES = 2 << 20


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def runtime() -> Any:
    try:
        from cuda.bindings import runtime  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise MissingDependency("cuda.bindings is needed to share GPU memory between processes: pip install 'peerlane[cuda]'") from None
    return runtime


def _checked(result: tuple[Any, ...], what: str) -> Any:
    if int(result[0]) != 0:
        raise HarnessError(f"{what} failed: {result[0].name}")
    return result[1] if len(result) > 1 else None


class DeviceMemory:
    """Raw device memory with the array interface by which torch takes a view of it."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3, "strides": None}


class Arena:
    """A flat byte tensor, and the handle by which another process maps the same memory."""

    _file_end = 0

    def __init__(
        self, data: torch.Tensor, handle: dict[str, Any], *, pointer: int = 0, file: mmap.mmap | None = None, owned: bool = False
    ) -> None:
        self.data, self.handle = data, handle
        self._pointer, self._file, self._owned = pointer, file, owned

    @property
    def size(self) -> int:
        return self.data.numel()

    @classmethod
    def begin_at(cls, offset: int) -> None:
        """Arenas that this process creates on CPU lie behind ``offset`` of its memory file."""
        Arena._file_end = offset

    @classmethod
    def create(cls, size: int, device: torch.device, memory_fd: int) -> "Arena":
        """A new arena of at least ``size`` bytes; on CPU in ``memory_fd``, a memory file, behind all earlier ones."""
        size = -(-max(size, 1) // _PAGE_BYTES) * _PAGE_BYTES
        if device.type == "cpu":
            offset, Arena._file_end = Arena._file_end, Arena._file_end + size
            return cls._map(size, memory_fd, offset, owned=True)
        cudart = runtime()
        pointer = int(_checked(cudart.cudaMalloc(size), f"allocating an arena of {size} bytes"))
        ipc = _checked(cudart.cudaIpcGetMemHandle(pointer), "exporting the arena")
        handle = {"kind": "cuda", "size": size, "ipc": ctypes.string_at(int(ipc.getPtr()), _HANDLE_BYTES).hex()}
        return cls(torch.as_tensor(DeviceMemory(pointer, size), device=device), handle, pointer=pointer, owned=True)

    @classmethod
    def attach(cls, handle: dict[str, Any], device: torch.device, memory_fd: int) -> "Arena":
        """Maps an arena that another process created."""
        if handle["kind"] == "cpu":
            return cls._map(handle["size"], memory_fd, handle["offset"], owned=False)
        cudart = runtime()
        ipc = cudart.cudaIpcMemHandle_t()
        ctypes.memmove(int(ipc.getPtr()), bytes.fromhex(handle["ipc"]), _HANDLE_BYTES)
        flags = cudart.cudaIpcMemLazyEnablePeerAccess
        pointer = int(_checked(cudart.cudaIpcOpenMemHandle(ipc, flags), "mapping the arena"))
        return cls(torch.as_tensor(DeviceMemory(pointer, handle["size"]), device=device), handle, pointer=pointer)

    @classmethod
    def _map(cls, size: int, memory_fd: int, offset: int, *, owned: bool) -> "Arena":
        file = mmap.mmap(memory_fd, size, offset=offset)
        data = torch.frombuffer(file, dtype=torch.uint8)
        return cls(data, {"kind": "cpu", "size": size, "offset": offset}, file=file, owned=owned)

    def clear(self) -> None:
        """Zeros everywhere: whoever maps the memory next finds nothing of what was here."""
        if self._file is not None:
            self._file.madvise(mmap.MADV_REMOVE)
        else:
            self.data.zero_()
            torch.cuda.synchronize()

    def close(self) -> None:
        """Unmaps or frees the memory; no view of it may be used afterwards."""
        self.data = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            if self._owned:
                self._file.madvise(mmap.MADV_REMOVE)  # gives the pages back; the file keeps its length
                if self.handle["offset"] + self.handle["size"] == Arena._file_end:
                    Arena._file_end = self.handle["offset"]
            self._file = None
        if self._pointer:
            cudart = runtime()
            torch.cuda.synchronize()
            if self._owned:
                _checked(cudart.cudaFree(self._pointer), "freeing the arena")
            else:
                _checked(cudart.cudaIpcCloseMemHandle(self._pointer), "unmapping the arena")
            self._pointer = 0


def place(description: dict[str, Any], offset: int) -> tuple[dict[str, Any], int]:
    """A tensor's description with its byte offset in an arena, and the next tensor's. Strides are kept; overlaps are not."""
    placed = {**description, "offset": offset}
    return placed, aligned(extent(placed)[1] + GUARD_BYTES)


def extent(placed: dict[str, Any]) -> tuple[int, int]:
    """The first byte of a placed tensor, and the first behind it."""
    begin: int = placed["offset"]
    return begin, begin + _span(placed) * dtype_of(placed["dtype"]).itemsize


def _span(description: dict[str, Any]) -> int:
    """Elements from the first to the last that the strides reach."""
    shape, stride = description["shape"], description["stride"]
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def view(data: torch.Tensor, placed: dict[str, Any]) -> torch.Tensor:
    """The tensor of a placed description, as a view of an arena's bytes."""
    dtype = dtype_of(placed["dtype"])
    shape, stride = placed["shape"], placed["stride"]
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=data.device)
    begin, end = extent(placed)
    flat = data[begin:end].view(dtype)
    return flat.as_strided(shape, stride, flat.storage_offset())
