"""The device kit: compile CUDA C++ from Python, launch it, and let ranks write into each other's memory.

    cubin = compile_cubin(source)                     NVRTC, cached, no GPU needed
    kernel = Kernel(cubin, "name")                    loaded into PyTorch's context
    launch = kernel.bind(grid, block, args)           a few microseconds per call afterwards
    arena = Arena(nbytes)                             memory that every rank of a group can address
    Communicator().all_reduce(tensor)                 collectives on it

Device headers lie in ``include/peerlane`` and are included as ``<peerlane/comm.cuh>``.
"""

from peerlane.device.arena import Arena, ArenaView
from peerlane.device.collectives import Communicator, communicator
from peerlane.device.group import Group, group_of, per_group
from peerlane.device.jit import Cubin, compile_cubin
from peerlane.device.launch import Kernel, Launch

__all__ = [
    "Arena",
    "ArenaView",
    "Communicator",
    "Cubin",
    "Group",
    "Kernel",
    "Launch",
    "communicator",
    "compile_cubin",
    "group_of",
    "per_group",
]
