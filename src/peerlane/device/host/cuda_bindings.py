"""The CUDA bindings, imported when first used."""

import importlib
from functools import cache
from types import ModuleType
from typing import Any

from peerlane.errors import MissingDependency

INSTALL = "pip install 'peerlane[cuda]'"


@cache
def nvrtc() -> ModuleType:
    """``cuda.bindings.nvrtc`` with its library loaded. Needs no GPU."""
    module = _bindings("nvrtc")
    try:
        module.nvrtcVersion()
    except RuntimeError as error:
        raise MissingDependency(f"the NVRTC library was not found ({error}); expected nvidia-cuda-nvrtc 13.x: run {INSTALL}") from error
    return module


@cache
def driver() -> ModuleType:
    """``cuda.bindings.driver``. Needs the NVIDIA driver as soon as one of its functions is called."""
    return _bindings("driver")


def _bindings(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise MissingDependency(
            f"cuda.bindings.{name} can not be imported ({error}); expected cuda-bindings 13.x: run {INSTALL}"
        ) from error


def describe(status: Any) -> str:
    """A driver status as ``NAME (number): what it means``."""
    _, text = driver().cuGetErrorString(status)
    return f"{status.name} ({int(status)}): {text.decode() if text else 'unknown'}"
