"""NVSHMEM as it is installed here: headers, the library for devices, the library for hosts."""

from pathlib import Path

from peerlane import settings
from peerlane.device.host.nvidia_wheels import Installation, header_version, wheel_folders
from peerlane.errors import MissingDependency

INSTALL = "pip install 'peerlane[nvshmem]'"
OLDEST = (3, 4)
_HEADER = Path("include", "non_abi", "nvshmem_version.h")
DEVICE_LIBRARY, HOST_LIBRARY = "libnvshmem_device.a", "libnvshmem_host.so.3"


def find_installation() -> Installation | None:
    """Returns NVSHMEM of the folder that NVSHMEM_HOME names, else of NVIDIA's wheel; None if there is none, or only a part of one."""
    named = settings.nvshmem_home()
    for root in [named] if named is not None else wheel_folders("nvshmem"):
        found = Installation(root, header_version(root / _HEADER, "NVSHMEM_VENDOR_", "_VERSION"))
        if found.version >= OLDEST and all(found.library(name).is_file() for name in (DEVICE_LIBRARY, HOST_LIBRARY)):
            return found
    return None


def installation() -> Installation:
    """Returns NVSHMEM; raises MissingDependency if it is not here."""
    found = find_installation()
    if found is None:
        raise MissingDependency(what_is_missing() or "")
    return found


def what_is_missing() -> str | None:
    """Returns what candidates for NVSHMEM lack here, with the command that brings it; None if nothing is missing."""
    if find_installation() is not None:
        return None
    named, oldest = settings.nvshmem_home(), ".".join(map(str, OLDEST))
    where = f"in {named}, which NVSHMEM_HOME names" if named is not None else "among the installed packages"
    return f"NVSHMEM {oldest} or newer, whose headers and libraries are not {where}: run {INSTALL}"
