"""Resources that a kernel takes of an SM, read from its cubin without a driver or a GPU; and sections of ELF files."""

import struct
from dataclasses import dataclass, replace
from pathlib import Path

from peerlane.device.host.jit import Cubin
from peerlane.errors import DeviceError

# Of the section `.nv.info`: one attribute per kernel, as pairs of a symbol's number and a value.
_SIZED_VALUE = 4
_REGISTERS, _FRAME_BYTES = 0x2F, 0x11
SYSTEM_BYTES = 1024
"""What the system keeps of a block's shared memory."""
_SYMBOL_TABLE, _NO_BITS = 2, 8


@dataclass(frozen=True)
class Resources:
    """Registers of a thread, bytes of its stack frame (spilled registers are there), bytes of a block's static shared memory.

    Where there are static variables, ``shared_bytes`` counts what the system keeps of a block's shared memory, too."""

    registers: int = 0
    frame_bytes: int = 0
    shared_bytes: int = 0

    @property
    def static_bytes(self) -> int:
        """The kernel's own variables in shared memory."""
        return max(0, self.shared_bytes - SYSTEM_BYTES)


def resources(cubin: Cubin) -> dict[str, Resources]:
    """Returns the resources of every kernel of a cubin, by name."""
    image = cubin.path.read_bytes()
    if image[:4] != b"\x7fELF" or image[4] != 2:
        raise DeviceError(f"{cubin.path} is not a 64-bit ELF file; remove it from the cache and compile again")
    sections = _sections(image)
    symbols = next(content for kind, _, content in sections if kind == _SYMBOL_TABLE)
    strings = next(content for _, name, content in sections if name == ".strtab")
    by_kernel: dict[str, Resources] = {}
    for _, name, content in sections:
        if name == ".nv.info":
            for attribute, symbol, value in _attributes(content):
                kernel = _name(strings, struct.unpack_from("<I", symbols, 24 * symbol)[0])
                known = by_kernel.get(kernel, Resources())
                if attribute == _REGISTERS:
                    by_kernel[kernel] = replace(known, registers=value)
                elif attribute == _FRAME_BYTES:
                    by_kernel[kernel] = replace(known, frame_bytes=value)
    shared = {name: len(content) for _, name, content in sections}
    return {
        kernel: replace(known, shared_bytes=shared.get(f".nv.shared.{kernel}", 0))
        for kernel, known in by_kernel.items()
        if not kernel.startswith("$")  # functions that ptxas adds, a division say; their registers are the caller's
    }


def elf_section(path: Path, name: str) -> bytes:
    """Returns the content of the section ``name`` of a 64-bit ELF file; empty where there is none."""
    return next((content for _, found, content in _sections(path.read_bytes()) if found == name), b"")


def _sections(image: bytes) -> list[tuple[int, str, bytes]]:
    """Returns kind, name and content of every section; a section that takes no room in the file has as many zeros as it is long."""
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, table + size * index) for index in range(count)]
    strings = headers[names][4]
    return [
        (kind, _name(image, strings + name), bytes(length) if kind == _NO_BITS else image[offset : offset + length])
        for name, kind, _, _, offset, length in headers
    ]


def _attributes(content: bytes) -> list[tuple[int, int, int]]:
    """Returns attribute, symbol and value of the entries that have both."""
    attributes, at = [], 0
    while at + 4 <= len(content):
        form, attribute, size = struct.unpack_from("<BBH", content, at)
        at += 4
        if form == _SIZED_VALUE:
            if size == 8:
                attributes.append((attribute, *struct.unpack_from("<II", content, at)))
            at += size
    return attributes


def _name(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()
