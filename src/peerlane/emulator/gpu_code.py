"""Device source as the GPU's compiler takes it, while g++ compiles it for the emulator: whether it compiles, and what its kernels need.

A source that g++ takes need not be one for a GPU: `M_PI`, `std::max` and 400 KB of shared memory are fine on a CPU. NVRTC needs no GPU.
"""

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from peerlane.device.host import cuda_bindings
from peerlane.device.host.jit import DEFAULT_ARCH, Cubin, compile_cubin
from peerlane.device.host.resources import Resources, resources
from peerlane.device.host.roles import SHARED_LIMIT_BYTES, BlockNeeds
from peerlane.emulator.job import Launch
from peerlane.emulator.ptx_front_end import Ptx, kernel_of
from peerlane.errors import CompileError, LaunchError, MissingDependency, UsageError

Made = TypeVar("Made")


@dataclass(frozen=True)
class EmulatedGpu:
    """A GPU whose compiler and sizes emulated ranks go by."""

    name: str
    arch: str
    sm_count: int


_KNOWN = (EmulatedGpu("h100", "sm_90a", 132), EmulatedGpu("h200", "sm_90a", 132), EmulatedGpu("b200", "sm_100a", 148))
GPUS = {gpu.name: gpu for gpu in _KNOWN}
"""as published; hardware/profiles.py has the sources"""


def default_gpu() -> EmulatedGpu:
    """Returns the GPU that emulated ranks go by where none is named."""
    return GPUS["h100"]


def gpu_named(name: str) -> EmulatedGpu:
    """Returns the GPU of this name; raises UsageError that names the others."""
    if name not in GPUS:
        raise UsageError(f"{name!r} is no GPU that the emulator knows; expected one of {', '.join(GPUS)}")
    return GPUS[name]


@dataclass(frozen=True)
class KernelNeeds:
    """A kernel as the GPU's compiler made it, and the largest block it was launched with."""

    name: str
    arch: str
    resources: Resources
    threads: int = 0
    dynamic_shared_bytes: int = 0

    def __str__(self) -> str:
        said = f"{kernel_of(self.name)}: {self.resources.registers} registers, {self.shared_bytes} bytes of shared memory"
        if self.resources.frame_bytes:
            said += f", {self.resources.frame_bytes} bytes of stack"
        if self.threads:
            said += f", {self.per_sm()} blocks of {self.threads} threads an SM"
        return f"{said} ({self.arch})"

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block, static and dynamic."""
        return self.resources.static_bytes + self.dynamic_shared_bytes

    def per_sm(self) -> int:
        """Returns how many blocks an SM holds."""
        return BlockNeeds(self.threads, self.resources.registers, self.shared_bytes).per_sm()


def needs_of(ptx: Ptx, arch: str = DEFAULT_ARCH) -> dict[str, Resources]:
    """Returns what the kernels of a PTX module need, by symbol; nothing where its cubin is not at hand."""
    if ptx.cubin is None:
        return {}
    return {ptx.symbol(name): found for name, found in resources(Cubin(ptx.cubin, arch, False)).items()}


def needs(launches: Iterable[Launch], kernels: Mapping[str, Resources] | None, arch: str) -> tuple[KernelNeeds, ...] | None:
    """Returns what every launched kernel needs, in its largest launch; None where nothing compiled it."""
    if kernels is None:
        return None
    largest: dict[str, KernelNeeds] = {}
    for launch in launches:
        if launch.kernel in kernels:
            threads = max(launch.threads, largest[launch.kernel].threads if launch.kernel in largest else 0)
            shared = max(launch.shared_bytes, largest[launch.kernel].dynamic_shared_bytes if launch.kernel in largest else 0)
            largest[launch.kernel] = KernelNeeds(launch.kernel, arch, kernels[launch.kernel], threads, shared)
    return tuple(largest.values())


def resident_blocks(launch: Launch, kernels: Mapping[str, Resources] | None, sm_count: int) -> int:
    """Returns how many blocks of the launch ``sm_count`` SMs hold. Raises LaunchError where a block fits on none."""
    known = (kernels or {}).get(launch.kernel, Resources())
    block = BlockNeeds(launch.threads, known.registers, known.static_bytes + launch.shared_bytes)
    if block.per_sm() == 0:
        raise LaunchError(
            f"kernel {kernel_of(launch.kernel)!r} cannot be launched on a GPU: a block has {block.threads} threads with "
            f"{block.registers} registers and {block.shared_bytes} bytes of shared memory; expected at most "
            f"65536 registers and {SHARED_LIMIT_BYTES} bytes in all"
        )
    return block.per_sm() * sm_count


_DEVICE_CODE = re.compile(r'\b(__CUDA_ARCH__|__CUDACC__|__CUDACC_RTC__|__NVCC__)\b|\basm\b[^;"]*"[^"\s]')


class GpuBuild:
    """A compile for a GPU on a thread of its own, begun when this is made."""

    def __init__(
        self,
        source: str | Path | Ptx,
        *,
        arch: str = DEFAULT_ARCH,
        defines: Mapping[str, str | int] | None = None,
        include_dirs: Sequence[Path] = (),
        wanted: bool = True,
    ) -> None:
        self._kernels: dict[str, Resources] | None = None
        self._error: Exception | None = None

        self._cubin: Cubin | None = None
        self._thread: threading.Thread | None = None
        self.has_device_code = False
        """whether code is for the GPU's compiler alone, so that what it makes must run"""
        if isinstance(source, Ptx):  # a compiler made it
            self._kernels = needs_of(source, arch)
            return

        def build() -> None:
            try:
                self._cubin = compile_cubin(source, arch=arch, defines=defines, include_dirs=include_dirs)
                self._kernels = resources(self._cubin)
            except MissingDependency:
                return
            except Exception as error:
                self._error = error

        if wanted and compiler_is_here():
            text = source if isinstance(source, str) else source.read_text(encoding="utf-8", errors="replace")
            self.has_device_code = _DEVICE_CODE.search(text) is not None
            self._thread = threading.Thread(target=build, name="NVRTC", daemon=True)
            self._thread.start()

    def program(self, from_source: Callable[[], Made], from_ptx: Callable[[Ptx], Made], *, want_ptx: bool = False) -> Made:
        """Returns the program for the emulator once both compilers are done: of the source, or of its PTX, if that is wanted or g++ cannot
        take the source. What the GPU's compiler refuses is told in its words."""
        if not (want_ptx or self.has_device_code):
            try:
                made = from_source()
                self.kernels()
                return made
            except CompileError:
                if self.kernels() is None:
                    raise
        return from_ptx(self.ptx())

    def ptx(self) -> Ptx:
        """Returns the PTX of the source, when the compile is over. Raises CompileError, and MissingDependency without NVRTC."""
        self.kernels()
        if self._cubin is None:
            cuda_bindings.nvrtc()
            raise UsageError("PTX of the GPU's compiler was asked for, and the source is PTX already; run it without")
        return Ptx(self._cubin.ptx())

    def kernels(self) -> dict[str, Resources] | None:
        """Returns what each kernel needs, when the compile is over; None without NVRTC. Raises CompileError where it does not compile."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._kernels


def compiler_is_here() -> bool:
    """Tells whether NVRTC can be loaded."""
    try:
        cuda_bindings.nvrtc()
    except MissingDependency:
        return False
    return True
