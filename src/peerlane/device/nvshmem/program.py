"""Compiles CUDA C++ that calls NVSHMEM: relocatable code from NVRTC, linked with NVSHMEM's device library by nvJitLink.

Where NVRTC or nvJitLink is missing, nvcc does both. Needs no GPU.
"""

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from peerlane.device.host import cuda_bindings, jit
from peerlane.device.host.jit import Compiled, Cubin
from peerlane.device.host.nvidia_wheels import Installation, compile_by_nvcc, nvcc_identity
from peerlane.device.host.source_tokens import token_hash
from peerlane.device.nvshmem.installation import DEVICE_LIBRARY, INSTALL, installation
from peerlane.errors import CompileError, MissingDependency

INCLUDE_DIR = Path(__file__).parent / "include"


def compile(
    source: str | Path, *, arch: str | None = None, defines: Mapping[str, str | int] | None = None, include_dirs: Sequence[Path] = ()
) -> Cubin:
    """Compiles ``source`` (text, or the Path of a file) as C++20 for ``arch``: by default the current device's, else sm_90a.

    ``nvshmem.h``, ``nvshmemx.h`` and ``peerlane/nvshmem.cuh`` are included already. Kernels are declared ``extern "C"``. Load them by
    ``world().kernel``. Raises CompileError with the compiler's log, and MissingDependency without NVSHMEM or without any compiler.
    """
    found, arch = installation(), arch or jit.device_arch()
    name, text, own_dir = jit.read_source(source)
    tokens = token_hash(text)
    text = f'#include <peerlane/nvshmem.cuh>\n#line 1 "{name}"\n{text}'
    own = [*own_dir, *include_dirs, INCLUDE_DIR, jit.INCLUDE_DIR]
    options = [*jit.gpu_options(arch, defines or {}), "--relocatable-device-code=true"]
    linker = nvjitlink()
    # NVIDIA's headers are known by the version: reading them all would take longer than the rest of the look-up.
    said = [*options, f"NVSHMEM {found} in {found.root}"]
    key = jit.cache_key(text, said, own, nvcc_identity() if linker is None else "")
    folders = [f"--include-path={folder}" for folder in (*own, found.include, *jit.toolkit_dirs())]
    if linker is None:
        instead = f"or run {INSTALL}, which brings NVRTC and nvJitLink"
        build = partial(compile_by_nvcc, name, text, [*options, *folders], instead=instead, library=found.library(DEVICE_LIBRARY))
        return jit.cached_cubin(key, arch, tokens, build)
    return jit.cached_cubin(key, arch, tokens, lambda: _by_nvrtc(linker, name, text, [*options, *folders], found))


def nvjitlink() -> ModuleType | None:
    """Returns ``cuda.bindings.nvjitlink``, if both NVRTC and nvJitLink can be loaded; else None."""
    try:
        cuda_bindings.nvrtc()
        module = importlib.import_module("cuda.bindings.nvjitlink")
        module.version()
    except (ImportError, RuntimeError, MissingDependency):
        return None
    return module


def _by_nvrtc(linker: ModuleType, name: str, text: str, options: Sequence[str], found: Installation) -> Compiled:
    compiled = jit.compile_text(name, text, options)
    arch = next(option.partition("=")[2] for option in options if option.startswith("--gpu-architecture="))
    handle = linker.create(1, [f"-arch={arch}"])
    try:
        linker.add_data(handle, linker.InputType.CUBIN, compiled.cubin, len(compiled.cubin), name)
        linker.add_file(handle, linker.InputType.LIBRARY, str(found.library(DEVICE_LIBRARY)))
        linker.complete(handle)
        cubin = bytearray(linker.get_linked_cubin_size(handle))
        linker.get_linked_cubin(handle, cubin)
    except linker.nvJitLinkError as error:
        log = bytearray(linker.get_error_log_size(handle))
        linker.get_error_log(handle, log)
        said = log.decode(errors="replace").strip("\0\n ")
        raise CompileError(f"{name} cannot be linked with NVSHMEM {found}:\n{said}\n({error})") from None
    finally:
        linker.destroy(handle)
    return Compiled(bytes(cubin), compiled.ptx, compiled.log)
