"""NVSHMEM as it is installed here: headers, the library for devices, the library for hosts."""

from peerlane.device.host.nvidia_wheels import Library

DEVICE_LIBRARY, HOST_LIBRARY = "libnvshmem_device.a", "libnvshmem_host.so.3"
NVSHMEM = Library(
    "NVSHMEM", (3, 4), "include/non_abi/nvshmem_version.h", ("NVSHMEM_VENDOR_", "_VERSION"),
    [f"lib/{DEVICE_LIBRARY}", f"lib/{HOST_LIBRARY}"], "whose headers and libraries are not",
)  # fmt: skip
INSTALL, find_installation, installation, what_is_missing = NVSHMEM.install, NVSHMEM.find, NVSHMEM.found, NVSHMEM.missing
