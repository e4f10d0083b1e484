"""Tools of NVIDIA's toolkit on this machine, and the architectures that extensions of torch are compiled for; needs no torch."""

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from peerlane.settings import ARCHITECTURE

DISASSEMBLER = "nvdisasm"


def find_nvcc(environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the path of nvcc: on PATH, in CUDA_HOME or CUDA_PATH, or in /usr/local/cuda; None if there is none."""
    return _find("nvcc", os.environ if environ is None else environ)


def find_disassembler(tool: str = DISASSEMBLER) -> str | None:
    """Returns the path of nvdisasm, or of cuobjdump, of a toolkit or of the wheel of Triton, which has both; None if there is none."""
    if found := _find(tool, os.environ):
        return found
    spec = importlib.util.find_spec("triton")
    wheel = None if spec is None or spec.origin is None else Path(spec.origin).parent / "backends" / "nvidia" / "bin" / tool
    return str(wheel) if wheel is not None and os.access(wheel, os.X_OK) else None


def _find(tool: str, environ: Mapping[str, str]) -> str | None:
    homes = [environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    return shutil.which(tool, path=os.pathsep.join([environ.get("PATH", ""), *(f"{home}/bin" for home in (*homes, "/usr/local/cuda"))]))


_QUERY_S = 20.0
_WITH_SUFFIX = ("9.0", "10.0", "10.3", "12.0")  # these have instructions that code for plain 9.0 and so on cannot use


def extension_architectures() -> str:
    """Returns a value for TORCH_CUDA_ARCH_LIST: the environment's, else that of this node's GPUs, else the default of settings."""
    return os.environ.get("TORCH_CUDA_ARCH_LIST") or gpu_architectures() or ARCHITECTURE


@functools.cache
def gpu_architectures() -> str:
    """Returns the architectures of this node's GPUs as ``9.0a;8.0``, or an empty string where nvidia-smi does not say."""
    told = output_of(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], _QUERY_S) or ""
    capabilities = sorted({line.strip() for line in told.splitlines() if line.strip().replace(".", "", 1).isdecimal()})
    return ";".join(f"{item}a" if item in _WITH_SUFFIX else item for item in capabilities)


def output_of(command: Sequence[str], limit_s: float, *, given: str | None = None, environ: Mapping[str, str] | None = None) -> str | None:
    """Returns what a program prints; None if it is missing, fails or takes longer than ``limit_s`` seconds. ``given``: its input."""
    try:
        done = subprocess.run(command, input=given, env=environ, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
