"""NCCL's device API for candidates and users of the kit: kernels that load and store peers' memory, and NCCL's barriers between them.

    PROGRAM = nccl.compile(SOURCE)                nvcc with the headers of NCCL's wheel, cached, no GPU needed
    world = nccl.world()                          collective: a communicator with barriers for kernels
    window = world.window(1024)                   collective: a window, with the own part as window.tensor
    kernel = world.kernel(PROGRAM, "gather")
    kernel.launch(8, 256, [world.comm, window, ...])                     on PyTorch's current stream

The same host code runs on emulated ranks. The library is NVIDIA's wheel, which comes with PyTorch, or what NCCL_HOME names.
"""

from peerlane.device.host.nvidia_wheels import Installation
from peerlane.device.nccl.installation import find_installation
from peerlane.device.nccl.program import compile
from peerlane.device.nccl.world import BARRIERS, Window, World, world

__all__ = ["BARRIERS", "Installation", "Window", "World", "compile", "find_installation", "world"]
