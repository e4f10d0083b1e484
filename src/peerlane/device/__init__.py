"""The device kit: compile CUDA C++ from Python, launch it, and let ranks write into each other's memory.

    SCALE = DeclaredKernel("scale", SOURCE, x=Pointer(), flags=Flags(), epochs=Epochs())
    launch = SCALE.bind(group_of(), grid=8, block=256, sizes={"flags": 8})       collective
    launch(x=tensor)                                                             a few microseconds

    communicator().all_reduce(tensor)                 ready collectives, one kernel each

    cubin = compile_cubin(source)                     NVRTC, cached, no GPU needed
    kernel = Kernel(cubin, "name")                    loaded into PyTorch's context
    arena = Arena(nbytes)                             memory that every rank of a group can address

Its rooms, each of which imports only those before it:

    host          groups of ranks, arenas, compilation, launches, declared kernels
    collectives   torch.distributed's collectives, exchanges of strided tensors, counts, copy engines
    nvshmem       kernels that put and signal by NVSHMEM, NVIDIA's library
    nccl          kernels that load and store in windows of NCCL's device API
    products      matrix products, alone and fused with collectives
    attention     attention on one rank, over a ring, and by heads
    moe           mixtures of experts
    backend       the torch.distributed backend ``peerlane``
    tools         mechanisms, lint, resources, traces

Device headers lie in rooms of the same names below ``include/peerlane``, above three lower ones: ``ptx`` has instructions, ``peers`` has
what ranks say to each other, ``tiles`` has the template of fused kernels. Kernels of any kind include ``<peerlane/comm.cuh>``,
``<peerlane/rows.cuh>`` and ``<peerlane/grid.cuh>``. The other headers beside the rooms stand for one in a room.
"""

from peerlane.device.collectives.communicator import Communicator, communicator
from peerlane.device.host.arena import Arena, ArenaView
from peerlane.device.host.declare import (
    F32,
    F64,
    I32,
    U32,
    U64,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Field,
    Flags,
    LocalKernel,
    Map,
    Packets,
    Pointer,
    array,
    compile_ahead,
    structure,
)
from peerlane.device.host.element_types import element_type
from peerlane.device.host.group import Group, per_group
from peerlane.device.host.group_of import group_of
from peerlane.device.host.jit import Cubin, compile_cubin
from peerlane.device.host.launch import Kernel, Launch

__all__ = [
    "F32", "F64", "I32", "U32", "U64", "Arena", "ArenaView", "BoundKernel", "Buffer", "Communicator", "Cubin", "DeclaredKernel", "Epochs",
    "Field", "Flags", "Group", "Kernel", "Launch", "LocalKernel", "Map", "Packets", "Pointer", "array", "communicator", "compile_ahead",
    "compile_cubin", "element_type", "group_of", "per_group", "structure",
]  # fmt: skip
