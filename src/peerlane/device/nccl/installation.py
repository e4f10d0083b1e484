"""NCCL as it is installed here: headers of its device API, and the library for hosts."""

from peerlane.common.toolkit import find_nvcc
from peerlane.device.host.nvidia_wheels import Library

HOST_LIBRARY = "libnccl.so.2"
NCCL = Library("NCCL", (2, 28), "include/nccl.h", ("NCCL_", ""), ["include/nccl_device.h"], "the headers of whose device API are not")
INSTALL, find_installation, installation = NCCL.install, NCCL.find, NCCL.found


def what_is_missing() -> str | None:
    """Returns what candidates for NCCL's device API lack here, with the command that brings it; None if nothing is missing."""
    if (missing := NCCL.missing()) is None and find_nvcc() is None:
        return "nvcc, which compiles kernels with NCCL's headers, because NVRTC cannot read them: install the CUDA toolkit"
    return missing
