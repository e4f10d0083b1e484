"""The libraries by which host code of emulated ranks communicates and launches kernels: torch.distributed, Triton and cuda.core."""

import contextlib
import importlib
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from peerlane.emulator.cuda_core import core_stand_ins
from peerlane.emulator.cuda_extensions import extension_stand_ins, start_runtime
from peerlane.emulator.distributed import distributed_stand_ins
from peerlane.emulator.gpu_code import EmulatedGpu
from peerlane.emulator.not_here import not_here
from peerlane.emulator.torch_cuda import torch_stand_ins
from peerlane.emulator.triton_launches import launched_here, require_triton, wants_triton

DIFFERENT_LAUNCHES = "where ranks launch different kernels, none may wait for a later launch of another rank"
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
    if wants_extension(source):
        start_runtime()
    if wants_cuda_core(source) and importlib.util.find_spec("cuda") is not None:
        with contextlib.suppress(ImportError):  # the solution's own import says what is missing
            importlib.import_module("cuda.core")


@contextlib.contextmanager
def emulated_libraries(gpu: EmulatedGpu) -> Iterator[None]:
    """While this lasts, threads of emulated ranks find what runs without a GPU in place of these libraries.

    Names that other modules have imported from them are replaced, too: at the top of a file of tests, say."""
    places: list[tuple[Any, dict[str, Any]]] = [*not_here(), *distributed_stand_ins(), *torch_stand_ins(), *core_stand_ins()]
    places += extension_stand_ins()
    with _in_place(places), launched_here(gpu):
        yield


@contextlib.contextmanager
def emulated_extensions() -> Iterator[None]:
    """While this lasts, torch's functions that build extensions build them for emulated ranks."""
    with _in_place(list(extension_stand_ins())):
        yield


@contextlib.contextmanager
def _in_place(places: list[tuple[Any, dict[str, Any]]]) -> Iterator[None]:
    """While this lasts, members of modules and classes have these in their places, under all names that users' modules give them."""
    stand_ins: dict[int, Any] = {}
    """by the identity of what they stand for"""
    for place, members in places:
        if isinstance(place, ModuleType):
            stand_ins |= {id(vars(place)[name]): member for name, member in members.items() if name in vars(place)}
    for module in _modules_of_users():
        places.append((module, {name: stand_ins[id(value)] for name, value in vars(module).items() if id(value) in stand_ins}))
    before = [(place, name, vars(place).get(name, _MISSING)) for place, members in places for name in members]
    try:
        for place, members in places:
            for name, member in members.items():
                setattr(place, name, member)
        yield
    finally:
        for place, name, member in reversed(before):
            if member is _MISSING:
                delattr(place, name)
            else:
                setattr(place, name, member)


def _modules_of_users() -> list[ModuleType]:
    """Returns the imported modules that are neither installed nor of this package."""
    installed = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "site-packages")
    found = [(module, getattr(module, "__file__", None)) for module in list(sys.modules.values())]
    return [module for module, file in found if isinstance(module, ModuleType) and file and not any(part in file for part in installed)]


_MISSING = object()
