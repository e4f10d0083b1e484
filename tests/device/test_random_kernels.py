"""Random kernels leave the same bits in the emulator, run from their PTX, as on a GPU (an NVIDIA H200)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from device import random_kernels as kernels
from peerlane.device import compile_cubin
from peerlane.device.emulator import Ptx, Scenario, check

RESULTS = json.loads(Path(__file__).with_name("random_kernels.json").read_text())["results"]
MODULES = kernels.KERNELS // kernels.KERNELS_OF_A_MODULE


def words(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize("module", [pytest.param(i, marks=[pytest.mark.slow] if i else []) for i in range(MODULES)])
def test_random_kernels_leave_the_bits_of_a_gpu(module: int) -> None:
    scenario = Scenario(f"module {module}", Ptx(compile_cubin(kernels.source(module)).ptx()), 1)
    first = module * kernels.KERNELS_OF_A_MODULE
    for number in range(first, first + kernels.KERNELS_OF_A_MODULE):
        given = scenario.buffer(f"in {number}", [words(kernels.inputs(number))])
        expected = torch.frombuffer(bytearray.fromhex(RESULTS[str(number)]), dtype=torch.int32)
        out = scenario.buffer(f"out {number}", [torch.zeros_like(expected)], [expected])
        scenario.launch(f"random_{number}", 1, kernels.THREADS, [given, out])
    report = check(scenario, schedules=3)
    assert report.clean, str(report)
