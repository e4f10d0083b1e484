"""The functions of NCCL's host library that the kit calls, by ctypes."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from peerlane.errors import DeviceError, MissingDependency

COLL_SYMMETRIC = 1
"""``NCCL_WIN_COLL_SYMMETRIC``: all ranks make the window together, with the same size"""


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``, which functions take by value."""

    _fields_ = [("internal", ctypes.c_char * 128)]


class HostLibrary:
    """``libnccl.so.2``. Functions that return a status raise DeviceError if it is not 0."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise MissingDependency(f"{path} cannot be loaded: {error}; expected NCCL's host library for this machine") from None
        self._library.ncclGetErrorString.restype = self._library.ncclGetLastError.restype = ctypes.c_char_p
        self._library.ncclGetLastError.argtypes = [ctypes.c_void_p]

    def version(self) -> tuple[int, int]:
        """Returns the version of the library: major and minor."""
        found = ctypes.c_int()
        self._checked("ncclGetVersion", ctypes.byref(found))
        return found.value // 10000, found.value // 100 % 100

    def unique_id(self) -> bytes:
        """Returns a new id, which one rank makes and all use."""
        new = UniqueId()
        self._checked("ncclGetUniqueId", ctypes.byref(new))
        return bytes(new)

    def join(self, unique_id: bytes, rank: int, ranks: int) -> int:
        """Returns a new communicator of ``ranks`` ranks; collective."""
        made = ctypes.c_void_p()
        self._checked("ncclCommInitRank", ctypes.byref(made), ranks, UniqueId.from_buffer_copy(unique_id), rank)
        return made.value or 0

    def allocate(self, nbytes: int) -> int:
        """Returns the address of memory that a window can hold."""
        made = ctypes.c_void_p()
        self._checked("ncclMemAlloc", ctypes.byref(made), ctypes.c_size_t(nbytes))
        return made.value or 0

    def free(self, pointer: int) -> None:
        """Gives such memory back."""
        self._checked("ncclMemFree", ctypes.c_void_p(pointer))

    def register(self, communicator: int, pointer: int, nbytes: int) -> int:
        """Returns a new symmetric window of such memory; collective. 0: NCCL has none here."""
        made = ctypes.c_void_p()
        place, size = ctypes.c_void_p(pointer), ctypes.c_size_t(nbytes)
        self._checked("ncclCommWindowRegister", communicator, place, size, ctypes.byref(made), COLL_SYMMETRIC)
        return made.value or 0

    def deregister(self, communicator: int, window: int) -> None:
        """Ends a window; collective."""
        self._checked("ncclCommWindowDeregister", communicator, ctypes.c_void_p(window))

    def create_device_communicator(self, communicator: int, requirements: bytes, made: Any) -> None:
        """Fills ``made``, an array of the size of ncclDevComm; collective."""
        self._checked("ncclDevCommCreate", communicator, ctypes.create_string_buffer(requirements, len(requirements)), made)

    def destroy(self, communicator: int, device_communicator: Any, *, own: bool) -> None:
        """Ends a device communicator, and the communicator if it is an ``own`` one; collective."""
        self._checked("ncclDevCommDestroy", communicator, device_communicator)
        if own:
            self._checked("ncclCommDestroy", communicator)

    def _checked(self, name: str, *arguments: Any) -> None:
        communicator = ctypes.c_void_p(arguments[0]) if isinstance(arguments[0], int) else None
        given = (communicator, *arguments[1:]) if communicator else arguments
        if status := getattr(self._library, name)(*given):
            said = self._library.ncclGetErrorString(status).decode()
            last = (self._library.ncclGetLastError(communicator) or b"").decode()
            raise DeviceError(f"{name} failed: {said}{last and ': '}{last}; NCCL_DEBUG=INFO prints what it tried")


@cache
def host_library(path: Path) -> HostLibrary:
    """Returns the library of this process, loaded once."""
    return HostLibrary(path)
