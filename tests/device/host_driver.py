"""The CUDA driver calls behind arenas, on memory files of this machine: processes share them as they share a GPU's memory."""

import contextlib
import ctypes
import importlib
import mmap
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from peerlane.device.host import cuda_bindings, device_memory, ipc_memory, process_memory, virtual_memory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NO_RESERVE = 1, 2, 0x10, 0x20, 0x4000
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


def _mapped(address: int | None, size: int, protection: int, flags: int, file: int = -1) -> int:
    found = _libc.mmap(address, size, protection, flags, file, 0)
    assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return int(found)


class HostDriver:
    """``fails`` names calls that fail, each with its status; ``limit`` is what the device holds."""

    def __init__(self, limit: int = 1 << 28) -> None:
        self.fails: dict[str, str] = {}
        self.limit, self.used = limit, 0
        self._own: dict[int, tuple[int, int]] = {}
        self._opened: dict[int, int] = {}
        self._real = importlib.import_module("cuda.bindings.driver")

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and (status := object.__getattribute__(self, "fails").get(name)):
            return lambda *args: (self._real.CUresult[status], None)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def cuGetErrorString(self, status: Any) -> tuple[int, bytes]:
        return 0, b"as the test wants it"

    def _file(self, size: int) -> int | None:
        if self.used + size > self.limit:
            return None
        self.used += size
        file = os.memfd_create("arena", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        return file

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[int]:
        return (0,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        return 0, address

    # ---- legacy IPC ------------------------------------------------------------------------------------------------------------------

    def cuMemAlloc(self, size: int) -> tuple[Any, int]:
        if (file := self._file(size)) is None:
            return self._real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        address = _mapped(None, size, _READ_WRITE, _SHARED, file)
        self._own[address] = file, size
        return 0, address

    def cuMemFree(self, address: int) -> tuple[int]:
        file, size = self._own.pop(address)
        self.used -= size
        os.close(file)
        _libc.munmap(address, size)
        return (0,)

    def cuIpcGetMemHandle(self, address: int) -> tuple[int, Any]:
        file, size = self._own[address]
        handle = self._real.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), f"{os.getpid()} {file} {size}".encode().ljust(64), 64)
        return 0, handle

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[int, int]:
        process, number, size = map(int, ctypes.string_at(handle.getPtr(), 64).split())
        file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        address = _mapped(None, size, _READ_WRITE, _SHARED, file)
        os.close(file)
        self._opened[address] = size
        return 0, address

    def cuIpcCloseMemHandle(self, address: int) -> tuple[int]:
        _libc.munmap(address, self._opened.pop(address))
        return (0,)

    # ---- virtual memory management ---------------------------------------------------------------------------------------------------

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[int, int]:
        return 0, _mapped(None, size, 0, _PRIVATE | _ANONYMOUS | _NO_RESERVE)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[int]:
        _libc.munmap(address, size)
        return (0,)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, int]:
        file = self._file(size)
        return (self._real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0) if file is None else (0, file)

    def cuMemExportToShareableHandle(self, handle: int, kind: Any, flags: int) -> tuple[int, int]:
        return 0, os.dup(handle)

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: Any) -> tuple[int, int]:
        return 0, os.dup(descriptor)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[int]:
        _mapped(address, size, 0, _SHARED | _FIXED, handle)
        return (0,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[int]:
        return (_libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), _READ_WRITE),)

    def cuMemUnmap(self, address: int, size: int) -> tuple[int]:
        _mapped(address, size, 0, _PRIVATE | _ANONYMOUS | _NO_RESERVE | _FIXED)
        return (0,)

    def cuMemRelease(self, handle: int) -> tuple[int]:
        os.close(handle)
        return (0,)


def bytes_at(pointer: int, size: int, device: torch.device | None = None) -> torch.Tensor:
    """The memory at an address, as a tensor."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(pointer), dtype=torch.uint8)


@contextlib.contextmanager
def host_driver(limit: int = 1 << 28) -> Iterator[HostDriver]:
    """While this lasts, arenas of this process lie on its host."""
    driver = HostDriver(limit)
    with contextlib.ExitStack() as patches:
        for target, name, value in (
            (cuda_bindings, "driver", lambda: driver),
            (torch.cuda, "synchronize", lambda device=None: None),
            (torch.cuda, "mem_get_info", lambda device=None: (limit, limit)),
            (process_memory, "pinned_fault", lambda: torch.zeros(device_memory.RECORD_WORDS, dtype=torch.int32)),
            (ipc_memory, "bytes_at", bytes_at),
            (virtual_memory, "bytes_at", bytes_at),
        ):
            patches.enter_context(mock.patch.object(target, name, value))
        yield driver
