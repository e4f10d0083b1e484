"""NCCL as it is installed here: headers of its device API, and the library for hosts."""

from peerlane import settings
from peerlane.common.toolkit import find_nvcc
from peerlane.device.host.nvidia_wheels import Installation, header_version, wheel_folders
from peerlane.errors import MissingDependency

INSTALL = "pip install 'peerlane[nccl]'"
OLDEST = (2, 28)
HOST_LIBRARY = "libnccl.so.2"


def find_installation() -> Installation | None:
    """Returns NCCL of the folder that NCCL_HOME names, else of NVIDIA's wheel; None if there is none with a device API."""
    named = settings.nccl_home()
    for root in [named] if named is not None else wheel_folders("nccl"):
        found = Installation(root, header_version(root / "include" / "nccl.h", "NCCL_"))
        if found.version >= OLDEST and (found.include / "nccl_device.h").is_file():
            return found
    return None


def installation() -> Installation:
    """Returns NCCL; raises MissingDependency if it is not here."""
    found = find_installation()
    if found is None:
        raise MissingDependency(what_is_missing() or "")
    return found


def what_is_missing() -> str | None:
    """Returns what candidates for NCCL's device API lack here, with the command that brings it; None if nothing is missing."""
    if find_installation() is None:
        named = settings.nccl_home()
        where = f"in {named}, which NCCL_HOME names" if named is not None else "among the installed packages"
        return f"NCCL {'.'.join(map(str, OLDEST))} or newer, the headers of whose device API are not {where}: run {INSTALL}"
    if find_nvcc() is None:
        return "nvcc, which compiles kernels with NCCL's headers, because NVRTC cannot read them: install the CUDA toolkit"
    return None
