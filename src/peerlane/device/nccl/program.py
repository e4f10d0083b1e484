"""Compiles CUDA C++ that uses NCCL's device API, by nvcc: NVRTC cannot read NCCL's headers, which include headers of the host.

The structures that the host fills, or that emulated ranks fill, are laid out as NCCL's own headers say: a program of constants is compiled
with them, and its PTX is read.
"""

import functools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from peerlane.device.host import jit
from peerlane.device.host.declare import written_in
from peerlane.device.host.jit import Cubin
from peerlane.device.host.nvidia_wheels import compile_by_nvcc, nvcc_identity
from peerlane.device.host.source_tokens import token_hash
from peerlane.device.nccl.installation import installation
from peerlane.errors import CompileError

_FIELDS = (
    *(f"ncclDevComm.{name}" for name in ("rank", "nRanks", "nRanks_rcp32", "lsaRank", "lsaSize", "lsaSize_rcp32", "resourceWindow")),
    *("ncclDevComm.resourceWindow_inlined", "ncclDevComm.lsaMultimem", "ncclDevComm.lsaBarrier"),
    *(f"ncclWindow_vidmem.{name}" for name in ("lsaFlatBase", "lsaRank", "worldRank", "stride4G")),
    *("ncclLsaBarrierHandle.bufHandle", "ncclLsaBarrierHandle.nBarriers"),
    "ncclDevCommRequirements.lsaBarrierCount",
)
_STRUCTURES = ("ncclDevComm", "ncclWindow_vidmem", "ncclDevCommRequirements")
_PLACES = ", ".join(f"offsetof({field.replace('.', ', ')})" for field in _FIELDS)
_LAYOUT = f"""
#include <cstddef>
#ifndef NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER  // it begins with 2.29
#define NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER {{}}
#endif
extern "C" __device__ unsigned places[] = {{{", ".join(f"sizeof({name})" for name in _STRUCTURES)}, {_PLACES}}};
extern "C" __device__ ncclDevCommRequirements requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
"""


def compile(
    source: str | Path, *, arch: str | None = None, defines: Mapping[str, str | int] | None = None, include_dirs: Sequence[Path] = ()
) -> Cubin:
    """Compiles ``source`` (text, or the Path of a file) as C++20 for ``arch``: by default the current device's, else sm_90a.

    ``nccl_device.h`` is included already. Kernels are declared ``extern "C" __global__``, and functions ``__device__``. Load them by
    ``world().kernel``. Raises CompileError with nvcc's log, and MissingDependency without NCCL's headers or nvcc.
    """
    found, arch = installation(), arch or jit.device_arch()
    name, text, own_dir = jit.read_source(source)
    line = 1
    if isinstance(source, str):
        name, line = written_in(sys._getframe(1).f_code.co_filename, source)
    tokens = token_hash(text)
    text = f'#include <nccl_device.h>\n#line {line} "{name}"\n{text}'
    own = [*own_dir, *include_dirs, jit.INCLUDE_DIR]
    options = jit.gpu_options(arch, defines or {})
    key = jit.cache_key(text, [*options, f"NCCL {found} in {found.root}"], own, nvcc_identity())
    folders = [f"--include-path={folder}" for folder in (*own, found.include)]
    instead = "install the CUDA toolkit: NVRTC cannot read NCCL's headers"
    return jit.cached_cubin(key, arch, tokens, lambda: compile_by_nvcc(name, text, [*options, *folders], instead=instead))


class Layout:
    """Offsets of the fields that the host fills in NCCL's structures, such as ``ncclDevComm.rank``."""

    def __init__(self, ptx: str) -> None:
        places = [int.from_bytes(_contents(ptx, "places")[at : at + 4], "little") for at in range(0, 4 * len(_STRUCTURES + _FIELDS), 4)]
        self.sizes = dict(zip(_STRUCTURES, places, strict=False))
        self.offsets = dict(zip(_FIELDS, places[len(_STRUCTURES) :], strict=True))
        self.requirements = _contents(ptx, "requirements")

    def fill(self, structure: bytearray, values: Mapping[str, int], nbytes: int = 4, base: int = 0) -> None:
        """Writes integers of ``nbytes`` bytes to the fields of a structure that begins at ``base``."""
        for name, value in values.items():
            at = base + self.offsets[name]
            structure[at : at + nbytes] = (value % (1 << 8 * nbytes)).to_bytes(nbytes, "little")

    def read(self, structure: bytes, name: str) -> int:
        """Returns a field of four bytes."""
        return int.from_bytes(structure[self.offsets[name] : self.offsets[name] + 4], "little")


@functools.cache
def layout() -> Layout:
    """Returns the layout of the installed headers."""
    return Layout(compile(_LAYOUT).ptx())


def _contents(ptx: str, variable: str) -> bytes:
    """Returns the first bytes of a device variable."""
    found = re.search(rf"\.global\s+\.align\s+\d+\s+\.(b8|u32|b32)\s+{variable}\[(\d+)\](?:\s*=\s*\{{([^}}]*)\}})?;", ptx)
    if found is None:
        raise CompileError(f"nvcc's PTX has no variable {variable!r}: expected one, from which the layout of NCCL's structures is read")
    width = 1 if found[1] == "b8" else 4
    numbers = [int(item, 0) for item in (found[3] or "").split(",") if item.strip()]
    return b"".join(number.to_bytes(width, "little") for number in numbers).ljust(width * int(found[2]), b"\0")
