"""The ranks of a process group as one communicator of NCCL: windows, barriers for kernels, and the end."""

import ctypes
import math
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from peerlane import settings
from peerlane.device.host.device_memory import bytes_at
from peerlane.device.host.group import Group, current_group
from peerlane.device.host.jit import Cubin
from peerlane.device.host.launch import Kernel
from peerlane.device.nccl.host_library import HostLibrary, host_library
from peerlane.device.nccl.installation import HOST_LIBRARY, installation
from peerlane.device.nccl.program import Layout, layout
from peerlane.errors import DeviceError, UsageError

BARRIERS = 512
"""Barriers of a communicator, which blocks name by their numbers from 0."""
PAGE_BYTES = 4096
"""Windows have a multiple of this."""
NO_LSA = "NCCL lets no kernel load and store the memory of all ranks here"


class Window(ctypes.Structure):
    """A window: as a kernel's argument an ``ncclWindow_t``. ``tensor`` is this rank's own part, zeros at first."""

    _fields_ = [("handle", ctypes.c_void_p)]

    def __init__(self, handle: int, tensor: torch.Tensor) -> None:
        super().__init__(handle)
        self.tensor = tensor


class World(ABC):
    """The ranks of one group. ``comm`` is the argument for a kernel's parameter ``const __grid_constant__ ncclDevComm``."""

    rank: int
    world_size: int
    device: torch.device
    comm: Any
    sm_count: int
    """SMs of a rank: as many blocks may wait for other ranks"""
    max_threads: int
    """threads of a block that host code should not exceed: fewer on emulated ranks"""

    @abstractmethod
    def window(self, *shape: int, dtype: torch.dtype = torch.float32) -> Window:
        """Returns a window in which every rank has a tensor of this shape, all zeros before any rank goes on; collective, and slow.

        It lives until ``close``. Raises UsageError while a CUDA graph is captured, and DeviceError where NCCL has no such windows.
        """

    @abstractmethod
    def kernel(self, program: Cubin, name: str) -> Any:
        """Returns a kernel of a program. Its ``launch(grid, block, args, shared_bytes=)`` goes to PyTorch's current stream."""

    @abstractmethod
    def close(self) -> None:
        """Gives all windows back and ends the device communicator; collective. A process that was killed needs no such end."""


@dataclass(eq=False)
class GpuWorld(World):
    """Ranks that are processes with a GPU each."""

    rank: int
    world_size: int
    device: torch.device
    library: HostLibrary
    communicator: int
    own: bool
    comm: Any
    sm_count: int
    max_threads: int = 1024
    _windows: list[tuple[int, int]] = field(default_factory=list)

    def window(self, *shape: int, dtype: torch.dtype = torch.float32) -> Window:
        if torch.cuda.is_current_stream_capturing():
            raise UsageError("a window was asked for while a CUDA graph is captured; take it in the first call, and keep it")
        nbytes = math.prod(shape) * dtype.itemsize
        room = window_bytes(nbytes)
        pointer = self.library.allocate(room)
        whole = bytes_at(pointer, room, self.device).zero_()
        torch.cuda.synchronize(self.device)  # no rank leaves the call that follows before all have entered it
        handle = self.library.register(self.communicator, pointer, room)
        if not handle:
            raise DeviceError(f"{NO_LSA}: ncclCommWindowRegister made no window; is NCCL_CUMEM_ENABLE=0 or NCCL_WIN_ENABLE=0 set?")
        self._windows.append((handle, pointer))
        return Window(handle, whole[:nbytes].view(dtype).view(shape))

    def kernel(self, program: Cubin, name: str) -> Kernel:
        return Kernel(program, name)

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        for handle, pointer in reversed(self._windows):
            self.library.deregister(self.communicator, handle)
            self.library.free(pointer)
        self._windows = []
        self.library.destroy(self.communicator, self.comm, own=self.own)
        for key in [key for key, world in _worlds.items() if world is self]:
            del _worlds[key]


def window_bytes(nbytes: int) -> int:
    """Returns the size of a window that holds ``nbytes``."""
    return max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES


_worlds: dict[Any, World] = {}


def world(group: Any = None) -> World:
    """Returns the communicator of a process group (default: all ranks); every rank of it calls this with its GPU current.

    It is PyTorch's own where the group's backend is NCCL, and a new one otherwise. Later calls return the same object. On emulated ranks
    it stands for NCCL. Raises MissingDependency without NCCL, UsageError without a process group or where NCCL would use multicast, and
    DeviceError where kernels cannot reach all ranks.
    """
    if (emulated := group if isinstance(group, Group) else current_group()) is not None:
        return emulated.nccl_world()  # type: ignore[no-any-return]
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError("NCCL's device API needs the ranks of torch.distributed; call init_process_group first")
    group = group or dist.group.WORLD
    if group not in _worlds:
        _worlds[group] = start(group)
    return _worlds[group]


def start(group: Any) -> World:
    """Returns a new communicator of a process group, as ``world`` does."""
    if (refused := settings.windows_refused(nvls=settings.nvls_allowed(os.environ))) is not None:
        raise UsageError(f"{refused}; set it before torch.distributed starts")
    found, device = installation(), torch.device("cuda", torch.cuda.current_device())
    library, places = host_library(found.library(HOST_LIBRARY)), layout()
    if library.version() != found.version[:2]:
        loaded = ".".join(map(str, library.version()))
        raise UsageError(f"NCCL {loaded} is loaded, and kernels are compiled for NCCL {found}: set NCCL_HOME to the one that PyTorch uses")
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    communicator = _communicator_of(group, device)
    if own := not communicator:
        shared = [library.unique_id() if rank == 0 else b""]
        dist.broadcast_object_list(shared, group=group, group_src=0)
        communicator = library.join(shared[0], rank, world_size)
    comm = (ctypes.c_char * places.sizes["ncclDevComm"])()
    try:
        library.create_device_communicator(communicator, requirements(places), comm)
    except DeviceError as error:
        raise DeviceError(f"{NO_LSA}: {error}") from None
    ranks = places.read(bytes(comm), "ncclDevComm.lsaSize")
    if ranks != world_size:
        raise DeviceError(f"{NO_LSA}: they reach {ranks} of {world_size} ranks; expected a GPU of one node for each, with peer access")
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    return GpuWorld(rank, world_size, device, library, communicator, own, comm, sm_count)


def _communicator_of(group: Any, device: torch.device) -> int:
    """Returns the communicator of PyTorch's group, after a first collective has made it; 0 for groups of other backends."""
    backend = group._get_backend(device)
    if not hasattr(backend, "_comm_ptr"):
        return 0
    dist.all_reduce(torch.ones(1, device=device), group=group)
    torch.cuda.synchronize(device)
    return int(backend._comm_ptr())


def requirements(places: Layout, barriers: int = BARRIERS) -> bytes:
    """Returns ``ncclDevCommRequirements`` as NCCL's version wants them: barriers for kernels, and nothing else, such as multicast."""
    made = bytearray(places.requirements)
    places.fill(made, {"ncclDevCommRequirements.lsaBarrierCount": barriers})
    return bytes(made)
