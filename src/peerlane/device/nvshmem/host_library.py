"""The functions of NVSHMEM's host library that the kit calls, by ctypes."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from peerlane.errors import DeviceError, MissingDependency

UNIQUE_ID_BYTES = 128
WITH_UNIQUE_ID = 1 << 3
INITIALIZED, LIMITED, FULL = 2, 3, 4
"""States of ``nvshmemx_init_status``: a GPU for every PE; PEs that share a GPU and must not wait for each other; those that may."""


class UniqueIdArguments(ctypes.Structure):
    """``nvshmemx_uniqueid_args_v1``."""

    _fields_ = [("version", ctypes.c_int), ("id", ctypes.c_void_p), ("rank", ctypes.c_int), ("ranks", ctypes.c_int)]


class StartArguments(ctypes.Structure):
    """``nvshmemx_init_args_v1``."""

    _fields_ = [("version", ctypes.c_int), ("unique_id", UniqueIdArguments), ("content", ctypes.c_char * 96)]


class StartAttributes(ctypes.Structure):
    """``nvshmemx_init_attr_v1``, which all versions since 3.0 take."""

    _fields_ = [("version", ctypes.c_int), ("communicator", ctypes.c_void_p), ("arguments", StartArguments)]


def start_attributes() -> StartAttributes:
    """Returns attributes with the version of each structure, which NVSHMEM checks."""
    attributes = StartAttributes()
    for structure in (attributes, attributes.arguments, attributes.arguments.unique_id):
        structure.version = (1 << 16) + ctypes.sizeof(structure)
    return attributes


class HostLibrary:
    """``libnvshmem_host.so.3``. Functions that return a status raise DeviceError if it is not 0."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise MissingDependency(f"{path} cannot be loaded: {error}; expected NVSHMEM's host library for this machine") from None
        self._library.nvshmem_malloc.restype = ctypes.c_void_p
        self._library.nvshmem_malloc.argtypes = [ctypes.c_size_t]
        self._library.nvshmem_free.argtypes = [ctypes.c_void_p]
        self._library.nvshmemx_barrier_all_on_stream.argtypes = [ctypes.c_void_p]
        for name in ("cumodule_init", "cumodule_finalize"):
            getattr(self._library, f"nvshmemx_{name}").argtypes = [ctypes.c_void_p]

    def unique_id(self) -> bytes:
        """Returns a new id, which one rank makes and all use."""
        new = ctypes.create_string_buffer(UNIQUE_ID_BYTES)
        self._checked("nvshmemx_get_uniqueid", new)
        return new.raw

    def start(self, unique_id: bytes, rank: int, ranks: int) -> int:
        """Starts this process as PE ``rank`` on the current CUDA device; collective. Returns the state."""
        attributes, known = start_attributes(), ctypes.create_string_buffer(unique_id, UNIQUE_ID_BYTES)
        self._checked("nvshmemx_set_attr_uniqueid_args", rank, ranks, known, ctypes.byref(attributes))
        self._checked("nvshmemx_hostlib_init_attr", WITH_UNIQUE_ID, ctypes.byref(attributes))
        return int(self._library.nvshmemx_init_status())

    def allocate(self, nbytes: int) -> int:
        """Returns the address of symmetric memory; collective, with the same size on all PEs. 0: there is not enough."""
        return self._library.nvshmem_malloc(nbytes) or 0

    def free(self, pointer: int) -> None:
        """Gives symmetric memory back; collective."""
        self._library.nvshmem_free(pointer)

    def attach(self, module: int) -> None:
        """Gives a loaded module NVSHMEM's state, without which its kernels cannot call the library."""
        self._checked("nvshmemx_cumodule_init", module)

    def detach(self, module: int) -> None:
        """Takes it back, before the module is unloaded."""
        self._checked("nvshmemx_cumodule_finalize", module)

    def barrier(self, stream: int) -> None:
        """Queues a barrier of all PEs, behind which earlier puts have arrived."""
        self._library.nvshmemx_barrier_all_on_stream(stream)

    def stop(self) -> None:
        """Ends NVSHMEM in this process; collective."""
        self._library.nvshmemx_hostlib_finalize()

    def _checked(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise DeviceError(f"{name} failed with status {status}; NVSHMEM_DEBUG=INFO prints what it tried")


@cache
def host_library(path: Path) -> HostLibrary:
    """Returns the library of this process, loaded once."""
    return HostLibrary(path)
