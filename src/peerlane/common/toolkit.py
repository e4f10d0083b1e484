"""Tools of NVIDIA's toolkit on this machine: the compiler, and what shows machine code."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

DISASSEMBLER = "nvdisasm"


def find_nvcc(environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the path of nvcc: on PATH, in CUDA_HOME or CUDA_PATH, or in /usr/local/cuda; None if there is none."""
    return _find("nvcc", os.environ if environ is None else environ)


def find_disassembler(environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the path of nvdisasm, of a toolkit or of the wheel of Triton, which has one; None if there is none."""
    if found := _find(DISASSEMBLER, os.environ if environ is None else environ):
        return found
    spec = importlib.util.find_spec("triton")
    wheel = None if spec is None or spec.origin is None else Path(spec.origin).parent / "backends" / "nvidia" / "bin" / DISASSEMBLER
    return str(wheel) if wheel is not None and os.access(wheel, os.X_OK) else None


def _find(tool: str, environ: Mapping[str, str]) -> str | None:
    homes = [environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    return shutil.which(tool, path=os.pathsep.join([environ.get("PATH", ""), *(f"{home}/bin" for home in (*homes, "/usr/local/cuda"))]))
