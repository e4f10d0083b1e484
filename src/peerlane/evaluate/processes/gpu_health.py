"""GPUs that do not answer any more, by what the driver says. How full their memory is says nothing: others may use them too."""

from __future__ import annotations

from collections.abc import Sequence

from peerlane.hardware.memory import gpu_memory


def lost_gpus(indices: Sequence[int]) -> str | None:
    """Why the GPUs with these numbers cannot be used, and what to do; None if they all answer, or there is no driver to ask."""
    found = [f"GPU {index} does not answer: {gpu.fault}" for index, gpu in zip(indices, gpu_memory(indices), strict=False) if gpu.fault]
    return f"{'; '.join(found)}. Leave it out with CUDA_VISIBLE_DEVICES, and tell the machine's administrator" if found else None
