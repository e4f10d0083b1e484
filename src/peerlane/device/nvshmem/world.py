"""The ranks of torch.distributed as PEs of NVSHMEM: symmetric tensors, kernels that may call the library, and the end."""

import functools
import math
import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from peerlane import settings
from peerlane.device.host.arena import RemoteView
from peerlane.device.host.device_memory import bytes_at
from peerlane.device.host.ipc import host_name
from peerlane.device.host.jit import Cubin
from peerlane.device.host.launch import Kernel, module_of
from peerlane.device.nvshmem.host_library import LIMITED, HostLibrary, host_library
from peerlane.device.nvshmem.installation import HOST_LIBRARY, installation
from peerlane.errors import DeviceError, UsageError

NEEDS_MPS = "NVSHMEM lets the kernels of ranks that share a GPU wait for each other under MPS alone"
NO_TRANSPORT = "NVSHMEM has no transport between the nodes of a virtual cluster"
_SOCKETS = "/tmp"  # where NVSHMEM makes the sockets by which PEs of one host hand memory on


class Seat(NamedTuple):
    """The place of a rank, which all ranks must know before NVSHMEM starts."""

    host: str
    gpu: str
    sockets: bool
    virtual: bool = False
    """whether the host is the node of a virtual cluster"""


@dataclass(eq=False)
class World:
    """NVSHMEM on all ranks of the default group; PE and rank have the same number. Every method but ``kernel`` is collective."""

    rank: int
    world_size: int
    device: torch.device
    library: HostLibrary
    _pointers: list[int] = field(default_factory=list)
    _modules: dict[int, None] = field(default_factory=dict)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns a symmetric tensor: every rank has one of this shape, and kernels name a peer's by the address of their own.

        It lives until ``close``, and has a multiple of 16 bytes. Raises DeviceError if the symmetric heap is full.
        """
        if torch.cuda.is_current_stream_capturing():
            raise UsageError("symmetric memory was asked for while a CUDA graph is captured; take it in the first call, and keep it")
        nbytes = math.prod(shape) * dtype.itemsize
        pointer = self.library.allocate(max(16, -(-nbytes // 16) * 16))
        if not pointer:
            raise DeviceError(f"NVSHMEM has no {nbytes} bytes of symmetric memory left; take less, or set NVSHMEM_SYMMETRIC_SIZE")
        self._pointers.append(pointer)
        return bytes_at(pointer, nbytes, self.device).view(dtype).view(shape)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns a symmetric tensor that is 0 on every rank before any rank goes on: signals begin so."""
        tensor = self.empty(*shape, dtype=dtype).zero_()
        self.barrier()
        torch.cuda.synchronize(self.device)
        return tensor

    def remote(self, nbytes: int) -> RemoteView:
        """Returns zeroed symmetric memory as kernels with <peerlane/peers/remote.cuh> get it, which run in the emulator too."""
        return RemoteView(self.zeros(nbytes, dtype=torch.uint8).data_ptr(), 0, self.rank, self.world_size)

    def kernel(self, program: Cubin, name: str) -> Kernel:
        """Returns the kernel of a program that ``compile`` made, ready to call NVSHMEM. Launches go to PyTorch's current stream."""
        kernel = Kernel(program, name)
        module = int(module_of(program, kernel.device))
        if module not in self._modules:
            self.library.attach(module)
            self._modules[module] = None
        return kernel

    def barrier(self) -> None:
        """Queues a barrier of all ranks on the current stream."""
        self.library.barrier(torch.cuda.current_stream(self.device).cuda_stream)

    def close(self) -> None:
        """Gives all memory back and ends NVSHMEM. A process that was killed needs no such end."""
        torch.cuda.synchronize(self.device)
        for module in self._modules:
            self.library.detach(module)
        for pointer in self._pointers:
            self.library.free(pointer)
        self._modules, self._pointers = {}, []
        self.library.stop()
        world.cache_clear()


def environment(seats: Sequence[Seat]) -> dict[str, str]:
    """Returns the variables that NVSHMEM needs, the same on every rank: they decide how PEs reach each other's memory.

    Raises UsageError in a virtual cluster, between whose nodes NVSHMEM would map memory.
    """
    hosts = {seat.host for seat in seats}
    if len(hosts) > 1 and any(seat.virtual for seat in seats):
        raise UsageError(f"{NO_TRANSPORT}; use torch.distributed between its nodes")
    return settings.nvshmem_environment(
        one_host=len(hosts) == 1,
        shares_gpu=len({(seat.host, seat.gpu) for seat in seats}) < len(seats),
        sockets=all(seat.sockets for seat in seats),
    )


@functools.cache
def world() -> World:
    """Starts NVSHMEM on the ranks of torch.distributed's default group, once; every rank calls it with its GPU current.

    Raises MissingDependency without NVSHMEM, UsageError without a process group, and DeviceError if it does not start, or if ranks share
    a GPU without MPS.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError("NVSHMEM starts on the ranks of torch.distributed; call init_process_group first")
    library_path, device = installation().library(HOST_LIBRARY), torch.device("cuda", torch.cuda.current_device())
    torch.empty(1, device=device)  # makes PyTorch's context the current one, to which the PE is bound
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seats: list[Seat] = [own_seat(device)] * world_size
    dist.all_gather_object(seats, seats[0])
    os.environ.update(environment(seats))
    library = host_library(library_path)
    shared = [library.unique_id() if rank == 0 else b""]
    dist.broadcast_object_list(shared, src=0)
    if library.start(shared[0], rank, world_size) == LIMITED:
        raise DeviceError(f"{NEEDS_MPS}, and it found none: put nvidia-cuda-mps-control on PATH, or give every rank a GPU")
    return World(rank, world_size, device, library)


def own_seat(device: torch.device) -> Seat:
    """Returns where this rank sits."""
    try:
        with tempfile.TemporaryDirectory(dir=_SOCKETS) as folder, socket.socket(socket.AF_UNIX) as tried:
            tried.bind(f"{folder}/s")
        sockets = True
    except OSError:
        sockets = False
    return Seat(host_name(), str(torch.cuda.get_device_properties(device).uuid), sockets, bool(settings.virtual_host()))
