"""Kernels of the kit compile for the architectures that PyTorch supports."""

from __future__ import annotations

import pytest

from peerlane import problems
from peerlane.device.host.declare import DeclaredKernel
from peerlane.device.host.jit import compile_cubin
from peerlane.problems.scaffolds import scaffold
from peerlane.solutions import p018_tp_rms_norm

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120")


def new_kernel() -> DeclaredKernel:
    """The kernel of a file that `peerlane new` writes."""
    names: dict[str, object] = {}
    exec(compile(scaffold(problems.get(1), "kit"), "new.py", "exec"), names)
    kernel = names["GATHER"]
    assert isinstance(kernel, DeclaredKernel)
    return kernel


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_of_new_files_and_rows_compile(arch: str) -> None:
    types = dict.fromkeys(("X_TYPE", "WEIGHT_TYPE", "Y_TYPE"), "BFloat16")
    for kernel, defines in ((new_kernel(), {}), (p018_tp_rms_norm.RMS_NORM, types)):
        image = compile_cubin(kernel.source, defines={"WORLD_SIZE": 4, **defines}, arch=arch).path.read_bytes()
        assert kernel.name.encode() in image
