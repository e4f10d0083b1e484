"""The libraries by which host code of emulated ranks communicates and launches kernels: torch.distributed, Triton and cuda.core."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
from collections.abc import Iterator

from peerlane.emulator.cuda_core import cuda_core_here
from peerlane.emulator.cuda_extensions import extensions_here
from peerlane.emulator.distributed import distributed_here
from peerlane.emulator.gpu_code import EmulatedGpu
from peerlane.emulator.triton_launches import launched_here, require_triton, wants_triton

DIFFERENT_LAUNCHES = "emulated ranks launch the same kernels in the same order"
_CUDA_CORE = re.compile(r"^\s*(import|from) cuda\.core\b", re.MULTILINE)
_EXTENSION = re.compile(r"\b(load_inline|compile_cuda_extension|cpp_extension)\b")


def runs_here(source: str) -> bool:
    """Tells whether a solution launches kernels by a library that emulated ranks have, beside the kit."""
    return wants_triton(source) or wants_cuda_core(source) or wants_extension(source)


def wants_cuda_core(source: str) -> bool:
    """Tells whether a solution's source imports cuda.core."""
    return _CUDA_CORE.search(source) is not None


def wants_extension(source: str) -> bool:
    """Tells whether a solution builds a CUDA extension with torch."""
    return _EXTENSION.search(source) is not None


def launches_differ(message: str, source: str) -> bool:
    """Tells whether an error says that ranks of a solution without the kit launch different kernels: fine on GPUs, and not emulated."""
    differ = "a launch of " in message and ("do different things" in message or "no rank can go on" in message)
    return (differ or "launch kernels of different sources" in message) and "peerlane.device" not in source


def prepare(source: str) -> None:
    """Imports the libraries that the source imports, before they are replaced. Raises MissingDependency where Triton is not installed."""
    if wants_triton(source):
        require_triton()
        importlib.import_module("triton")
    if wants_cuda_core(source) and importlib.util.find_spec("cuda") is not None:
        with contextlib.suppress(ImportError):  # the solution's own import says what is missing
            importlib.import_module("cuda.core")


@contextlib.contextmanager
def emulated_libraries(gpu: EmulatedGpu) -> Iterator[None]:
    """While this lasts, threads of emulated ranks find what runs without a GPU in place of these libraries."""
    with launched_here(gpu), distributed_here(), cuda_core_here(), extensions_here():
        yield
