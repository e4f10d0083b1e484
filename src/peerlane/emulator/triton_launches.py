"""Triton's kernels on emulated ranks: its compiler makes PTX without a GPU, and this driver launches what it made in the emulator.

Triton asks its active driver for the target, and for who launches. The driver here answers for the GPU that the emulated ranks go by, so
specialisations, constexprs and heuristics are those of that GPU. Nothing is timed: the autotuner takes its first configuration.
"""

# Triton has no types.
# mypy: disable-error-code="import-untyped,no-untyped-def,misc"

import contextlib
import ctypes
import importlib.util
import os
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from peerlane.device.host.group import current_group
from peerlane.device.host.roles import SHARED_LIMIT_BYTES
from peerlane.emulator.emulated_rank import PtxLaunch, emulated_rank
from peerlane.emulator.gpu_code import EmulatedGpu
from peerlane.emulator.ptx_front_end import Ptx
from peerlane.emulator.ptx_operands import TYPES
from peerlane.emulator.ptx_text import parse
from peerlane.errors import MissingDependency, UsageError

_IMPORT = re.compile(r"^\s*(import|from) triton\b", re.MULTILINE)
INTERPRETER = "TRITON_INTERPRET"
NO_TRITON = "triton is not installed here, and the kernels are Triton's: pip install 'peerlane[triton]' (no GPU is needed)"
_MAX_REGISTERS, _MAX_THREADS = 255, 1024


def wants_triton(source: str) -> bool:
    """Tells whether a solution's source imports Triton."""
    return _IMPORT.search(source) is not None


def triton_is_here() -> bool:
    """Tells whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def require_triton() -> None:
    """Raises MissingDependency where Triton is not installed."""
    if not triton_is_here():
        raise MissingDependency(NO_TRITON)


@contextlib.contextmanager
def launched_here(gpu: EmulatedGpu) -> Iterator[None]:
    """While this lasts, Triton compiles for ``gpu`` and launches on emulated ranks. Does nothing until somebody has imported Triton."""
    if "triton" not in sys.modules:
        yield
        return
    from triton.runtime import driver

    before, driver._active = driver._active, _driver(gpu)
    try:
        yield
    finally:
        driver._active = before


@contextlib.contextmanager
def compiled_not_interpreted() -> Iterator[None]:
    """While this lasts, ``triton.jit`` makes kernels for a GPU, whatever the environment says."""
    before = os.environ.pop(INTERPRETER, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[INTERPRETER] = before


class TritonLaunch:
    """The launcher of a compiled kernel, which Triton calls."""

    def __init__(self, src: Any, metadata: Any) -> None:
        if getattr(metadata, "num_ctas", 1) != 1:
            raise UsageError(
                f"kernel {metadata.name} has clusters of {metadata.num_ctas} blocks; emulated ranks run Triton's kernels with num_ctas=1"
            )
        self._metadata = metadata
        self._types = list(_flat(src.signature.values()))
        self._ptx = _ptx_of(src, metadata)
        (self._entry,) = parse(self._ptx.text).entries

    def __call__(self, x, y, z, stream, function, packed, launch_metadata, enter_hook, exit_hook, *args) -> None:
        """Launches on every rank of the caller's group: waits until all have come here."""
        group = emulated_rank(self._entry.name)
        metadata, blocks = self._metadata, x * y * z
        if blocks == 0:
            return
        values = [value for kind, value in zip(self._types, _flat(args), strict=True) if kind != "constexpr"]
        scratch = [_scratch(getattr(metadata, f"{kind}_scratch_size", 0), blocks) for kind in ("global", "profile")]
        values += scratch[: len(self._entry.parameters) - len(values)]
        if len(values) != len(self._entry.parameters):
            raise UsageError(
                f"kernel {self._entry.name} takes {len(self._entry.parameters)} parameters, and Triton gives {len(values)}; emulated ranks "
                "know pointers and numbers, and no tensor descriptors of the host"
            )
        packed_values = [
            _packed(group, kind, name, value) for (kind, _, name, _), value in zip(self._entry.parameters, values, strict=True)
        ]
        threads = 32 * metadata.num_warps
        dependent = bool(getattr(metadata, "launch_pdl", False))
        grid = (x, y, z)
        group.launch_ptx(PtxLaunch(self._ptx, self._entry.name, grid, (threads,), packed_values, metadata.shared, dependent=dependent))


def _flat(values: Any) -> Iterator[Any]:
    """Yields the members of tuples among the values, too."""
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


def _scratch(nbytes: int, blocks: int) -> torch.Tensor | int:
    return torch.zeros(nbytes * blocks, dtype=torch.uint8) if nbytes else 0


def _packed(group: Any, kind: str, name: str, value: Any) -> Any:
    """Returns an argument as the kernel's parameter of PTX type ``kind`` has it."""
    nbytes = TYPES[kind][1]
    if value is None:
        value = 0
    value = getattr(value, "base", value) if not isinstance(value, torch.Tensor) else value  # a tensor under another type
    if isinstance(value, torch.Tensor):
        value = group.address(value)
    if isinstance(value, float):
        content = struct.pack({2: "<e", 4: "<f", 8: "<d"}[nbytes], value)
    elif isinstance(value, int):  # bool, too
        content = (value % (1 << 8 * nbytes)).to_bytes(nbytes, "little")
    else:
        raise UsageError(f"argument {name} is a {type(value).__name__}; expected a tensor or a number")
    return {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}[nbytes].from_buffer_copy(content)


def _ptx_of(src: Any, metadata: Any) -> Ptx:
    """Returns the PTX of a compiled kernel, which lies in Triton's cache beside its cubin."""
    from triton.runtime.cache import get_cache_manager

    name = src.name[:150]
    files = get_cache_manager(metadata.hash).get_group(f"{name}.json") or {}
    if f"{name}.ptx" not in files:
        raise UsageError(f"Triton's cache has no PTX of kernel {metadata.name}; unset TRITON_STORE_BINARY_ONLY and empty the cache")
    cubin = files.get(f"{name}.cubin")
    return Ptx(Path(files[f"{name}.ptx"]).read_text(), Path(cubin) if cubin else None)


class _Utils:
    """The part of a driver's library that Triton uses."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_LIMIT_BYTES,
            "max_num_regs": 65536,
            "multiprocessor_count": _sm_count(),
            "warpSize": 32,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, Any, int, int, int]:
        """Returns module, function, registers, spills and the most threads of a block; nothing is loaded here."""
        return object(), object(), _MAX_REGISTERS, 0, _MAX_THREADS


def _sm_count() -> int:
    return getattr(current_group(), "sm_count", 1)


def _driver(gpu: EmulatedGpu) -> Any:
    """Returns a driver whose target is ``gpu``."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class EmulatedDriver(DriverBase):
        utils, launcher_cls = _Utils(), TritonLaunch

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise UsageError("emulated ranks compile no launcher in C")

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", int(gpu.arch.removeprefix("sm_").rstrip("a")), 32)

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, device: int) -> None:
            return

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_device_interface(self) -> Any:
            return torch.cpu

        def get_benchmarker(self) -> Any:
            return _untimed

        def get_empty_cache_for_benchmark(self) -> torch.Tensor:
            return torch.empty(1)

        def clear_cache(self, cache: torch.Tensor) -> None:
            return

    return EmulatedDriver()


def _untimed(kernel_call: Any, *, quantiles: Sequence[float] = (), **_: Any) -> list[float]:
    """Returns the same time for every configuration."""
    return [1.0] * max(1, len(quantiles))
