"""GPU architectures that extensions of torch are compiled for. Does not initialise CUDA, and needs no torch."""

from __future__ import annotations

import functools
import os
import subprocess

from peerlane.settings import ARCHITECTURE

_QUERY_S = 20.0
_WITH_SUFFIX = ("9.0", "10.0", "10.3", "12.0")  # these have instructions that code for plain 9.0 and so on cannot use


def extension_architectures() -> str:
    """Returns a value for TORCH_CUDA_ARCH_LIST: the environment's, else that of this node's GPUs, else the default of settings."""
    return os.environ.get("TORCH_CUDA_ARCH_LIST") or gpu_architectures() or ARCHITECTURE


@functools.cache
def gpu_architectures() -> str:
    """Returns the architectures of this node's GPUs as ``9.0a;8.0``, or an empty string where nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    capabilities = sorted({line.strip() for line in ran.stdout.splitlines() if line.strip().replace(".", "", 1).isdecimal()})
    return ";".join(f"{item}a" if item in _WITH_SUFFIX else item for item in capabilities) if ran.returncode == 0 else ""
