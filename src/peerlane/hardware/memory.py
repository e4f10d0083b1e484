"""GPU memory in use, as the driver counts it: for a process that must not touch the GPUs itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from peerlane.hardware.topology import _nvml, _smi


@dataclass(frozen=True)
class GpuMemory:
    """The memory of one GPU. ``fault``: what the driver said instead of answering; empty where all is well."""

    used_bytes: int
    fault: str = ""


def gpu_memory(indices: Sequence[int]) -> tuple[GpuMemory, ...]:
    """Reads the memory of the GPUs with these numbers of the driver, in this order; empty where neither NVML nor nvidia-smi answers."""
    with _nvml() as nvml:
        if nvml is not None:
            return tuple(_by_nvml(nvml, index) for index in indices)
    output = _smi("--query-gpu=index,memory.used", "--format=csv,noheader,nounits")
    return () if output is None else parse_smi_memory(output, indices)


def _by_nvml(nvml: object, index: int) -> GpuMemory:
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(index))  # type: ignore[attr-defined]
    except Exception as error:  # NVMLError, whose class comes with the module: the GPU is lost, or needs a reset
        return GpuMemory(0, str(error) or type(error).__name__)
    return GpuMemory(int(info.used))


def parse_smi_memory(output: str, indices: Sequence[int]) -> tuple[GpuMemory, ...]:
    """Parses ``nvidia-smi --query-gpu=index,memory.used``, csv without header and units; a GPU not listed has a fault."""
    memory = {}
    for line in output.splitlines():
        if match := re.fullmatch(r"\s*(\d+)\s*,\s*(.*?)\s*", line):
            index, used = match.groups()
            memory[int(index)] = GpuMemory(int(used) << 20) if used.isdecimal() else GpuMemory(0, f"memory in use: {used}")
    return tuple(memory.get(index, GpuMemory(0, "nvidia-smi does not list it any more")) for index in indices)
