"""NVSHMEM for candidates and users of the kit: kernels that put into other ranks' memory and signal, within a node and between nodes.

    PROGRAM = nvshmem.compile(SOURCE)             NVRTC and nvJitLink, cached, no GPU needed
    world = nvshmem.world()                       collective: starts NVSHMEM on the ranks of torch.distributed
    inbox = world.zeros(1024)                     collective: a symmetric tensor
    kernel = world.kernel(PROGRAM, "push")        loaded, with NVSHMEM's state in it
    kernel.launch(8, 256, [inbox, ...])           on PyTorch's current stream

The library is NVIDIA's wheel, ``pip install 'peerlane[nvshmem]'``, or what NVSHMEM_HOME names. It is not part of peerlane.
"""

from peerlane.device.host.nvidia_wheels import Installation
from peerlane.device.nvshmem.installation import find_installation
from peerlane.device.nvshmem.program import compile
from peerlane.device.nvshmem.world import World, world

__all__ = ["Installation", "World", "compile", "find_installation", "world"]
