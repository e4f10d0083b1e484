"""Memory of the second tier as kernels get it."""

from __future__ import annotations

import ctypes


class RemoteView(ctypes.Structure):
    """Memory that other ranks reach by messages alone: ``Remote`` of remote.cuh.

    ``own`` is the address of this rank's part, ``stride`` the distance from rank to rank in the emulator; on GPUs it is 0.
    """

    _fields_ = (("own", ctypes.c_uint64), ("stride", ctypes.c_uint64), ("rank", ctypes.c_uint32), ("world_size", ctypes.c_uint32))
