"""``cuda.core`` on emulated ranks: NVRTC compiles without a GPU, and the PTX that it makes is launched in the emulator.

Host code that compiles by ``Program`` and launches by ``launch`` runs as written. Pointers are those of emulated memory, which
``tensor.data_ptr()`` gives. All streams of a rank are one.
"""

# cuda.core has no types here.
# mypy: disable-error-code="no-untyped-def,misc"

import ctypes
import functools
import hashlib
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from peerlane.common.files import write_atomically
from peerlane.device.host import cuda_bindings
from peerlane.device.host.declare import written_in
from peerlane.emulator.build import folder
from peerlane.emulator.emulated_rank import PtxLaunch, emulated_rank
from peerlane.emulator.ptx_front_end import Ptx, cluster_of
from peerlane.emulator.ptx_operands import TYPES
from peerlane.emulator.ptx_text import Function, parse
from peerlane.emulator.torch_cuda import TORCH_CUDA, Stream
from peerlane.errors import CompileError, LaunchError, UsageError

_SYSTEM = "cuda.core"
_DYNAMIC_SHARED_BYTES = 48 << 10
"""the most that a launch may ask for, as long as nobody has raised the kernel's limit; cuda.core has no call for that"""


@functools.cache
def _compiled(source: str, options: tuple[bytes, ...], names: tuple[str, ...]) -> tuple[Ptx, Mapping[str, str]]:
    """Returns the PTX with the path of its cubin, and the names that the compiler gave to instances of templates."""
    nvrtc = cuda_bindings.nvrtc()
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"source.cu", 0, [], [])
    try:
        for name in names:
            nvrtc.nvrtcAddNameExpression(program, name.encode())
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), list(options))
        if status:
            log = _bytes(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
            raise CompileError(f"NVRTC_ERROR_COMPILATION: the source does not compile for a GPU:\n{log.rstrip(chr(0))}")
        lowered = {name: nvrtc.nvrtcGetLoweredName(program, name.encode())[1].decode() for name in names}
        ptx = _bytes(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0").decode()
        cubin = _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    path = folder() / f"{hashlib.sha256(cubin).hexdigest()}.cubin"
    write_atomically(path, cubin)
    return Ptx(ptx, path), lowered


def _bytes(size, get, program) -> bytes:
    _, nbytes = size(program)
    content = bytearray(nbytes)
    get(program, content)
    return bytes(content)


class Program:
    """Stands for ``cuda.core.Program``."""

    def __init__(self, code: str, code_type: str, options: Any = None) -> None:
        if code_type != "c++":
            raise UsageError(f"emulated ranks compile cuda.core programs of code type 'c++', got {code_type!r}")
        caller = sys._getframe(1).f_code.co_filename
        file, line = written_in(caller, code)
        self._source = f'#line {line} "{Path(file).name}"\n{code}'
        found = [] if options is None else list(options.as_bytes("nvrtc"))
        if not any(option.startswith((b"-arch", b"--gpu-architecture")) for option in found):
            found.append(b"-arch=sm_90a")
        self._options = (*found, b"--generate-line-info")

    def compile(self, target_type: str, name_expressions: Sequence[Any] = (), **_: Any) -> "ObjectCode":
        names = tuple(name.decode() if isinstance(name, bytes) else name for name in name_expressions)
        return ObjectCode(*_compiled(self._source, self._options, names))

    def close(self) -> None:
        return


class ObjectCode:
    """Stands for ``cuda.core.ObjectCode``."""

    def __init__(self, ptx: Ptx, names: Mapping[str, str]) -> None:
        self._ptx, self._names = ptx, names
        self._entries = {entry.name: entry for entry in parse(ptx.text).entries}

    def get_kernel(self, name: str | bytes) -> "CoreKernel":
        name = name.decode() if isinstance(name, bytes) else name
        symbol = self._names.get(name, name)
        if symbol not in self._entries:
            raise LaunchError(f"the program has no kernel {name!r}; it has {', '.join([*self._names, *self._entries])}")
        return CoreKernel(self._ptx, self._entries[symbol])


@dataclass(frozen=True)
class CoreKernel:
    """Stands for ``cuda.core.Kernel``."""

    ptx: Ptx
    entry: Function


def launch(stream: Any, config: Any, kernel: CoreKernel, *args: Any) -> None:
    """Launches on every rank of the caller's group: waits until all have come here."""
    group = emulated_rank(kernel.entry.name)
    parameters = kernel.entry.parameters
    if len(args) != len(parameters):
        raise UsageError(f"kernel {kernel.entry.name} takes {len(parameters)} parameters, and {len(args)} are given")
    if config.shmem_size > _DYNAMIC_SHARED_BYTES:
        raise LaunchError(
            f"kernel {kernel.entry.name} got {config.shmem_size} bytes of dynamic shared memory; expected at most {_DYNAMIC_SHARED_BYTES}: "
            "a GPU refuses more until cuKernelSetAttribute has raised the kernel's limit, which emulated ranks do not have"
        )
    values = [
        _packed(group, kernel.entry.name, index, (length or 1) * TYPES[kind][1], value)
        for index, ((kind, _, _, length), value) in enumerate(zip(parameters, args, strict=True))
    ]
    cluster = 1 if config.cluster is None else config.cluster[0] * config.cluster[1] * config.cluster[2]
    blocks = cluster_of(kernel.entry, cluster)
    group.launch_ptx(PtxLaunch(kernel.ptx, kernel.entry.name, config.grid, config.block, values, config.shmem_size, blocks))


def _packed(group: Any, kernel: str, index: int, nbytes: int, value: Any) -> Any:
    """Returns an argument as the first bytes of what cuda.core would pass."""
    if isinstance(value, torch.Tensor):
        value = group.address(value)
    if isinstance(value, bool):
        content = struct.pack("<?", value)
    elif isinstance(value, int):
        content = struct.pack("<q" if value < 0 else "<Q", value)
    elif isinstance(value, float):
        content = struct.pack("<d", value)
    else:
        content = bytes(value)
    if len(content) < nbytes:
        raise UsageError(f"argument {index} of kernel {kernel} has {len(content)} bytes; expected {nbytes}: a ctypes value says its width")
    return (ctypes.c_char * nbytes).from_buffer_copy(content[:nbytes])


class ComputeCapability(NamedTuple):
    """Stands for what ``cuda.core.Device`` says of a GPU's architecture."""

    major: int
    minor: int


class Device:
    """Stands for ``cuda.core.Device``."""

    def __init__(self, device_id: int | None = None) -> None:
        self.device_id = device_id or 0
        self.compute_capability = ComputeCapability(*TORCH_CUDA["get_device_capability"]())
        self.properties = SimpleNamespace(multiprocessor_count=TORCH_CUDA["get_device_properties"]().multi_processor_count)
        self.arch = "{}{}".format(*self.compute_capability)
        self.default_stream = Stream()

    def set_current(self, *_: Any) -> None:
        return

    def sync(self) -> None:
        return

    def create_stream(self, *_: Any, **__: Any) -> Stream:
        return Stream()


_CORE: dict[str, Any] = {"Program": Program, "launch": launch, "Stream": Stream, "Device": Device}


def core_stand_ins() -> list[tuple[Any, dict[str, Any]]]:
    """Returns cuda.core with what stands for its members on emulated ranks; nothing until somebody has imported it."""
    return [(sys.modules[_SYSTEM], _CORE)] if _SYSTEM in sys.modules else []
