"""Random kernels leave the same bits in the emulator, run from their source and from the PTX that NVRTC makes of it."""

import pytest
import torch

from device import random_kernels as kernels
from peerlane.device import compile_cubin
from peerlane.emulator import Ptx, Scenario, build
from peerlane.emulator.job import run_job
from representatives import first

MODULES = kernels.KERNELS // kernels.KERNELS_OF_A_MODULE


def left_behind(source: str | Ptx, module: int) -> dict[str, bytes]:
    """Returns what every kernel of the module leaves, by the name of its buffer."""
    scenario = Scenario(f"module {module}", source, 1)
    first = module * kernels.KERNELS_OF_A_MODULE
    for number in range(first, first + kernels.KERNELS_OF_A_MODULE):
        given = scenario.buffer(f"in {number}", [torch.tensor(kernels.inputs(number), dtype=torch.int64).to(torch.int32)])
        out = scenario.buffer(f"out {number}", [torch.zeros(kernels.THREADS * kernels.RESULTS, dtype=torch.int32)])
        scenario.launch(f"random_{number}", 1, kernels.THREADS, [given, out])
    program = build.compile_program(source)
    answer = run_job(scenario.job(program.globals), program, schedules=1, keep=True)
    assert {finding["kind"] for finding in answer.findings} <= {"barrier"}, answer.findings  # one in the source, put there twice
    written = {region.name: b"".join(page for _, page in pages) for region, pages in answer.written.items()}
    return {name: content for name, content in written.items() if name.startswith("out ")}


@pytest.mark.parametrize("module", first(range(MODULES), 2))
def test_random_kernels_leave_the_same_bits_from_source_and_ptx(module: int) -> None:
    source = kernels.source(module)
    from_source, from_ptx = left_behind(source, module), left_behind(Ptx(compile_cubin(source).ptx()), module)
    first = module * kernels.KERNELS_OF_A_MODULE
    expected = {f"out {first + place}": kept for place, kept in enumerate(kernels.digests()[first : first + kernels.KERNELS_OF_A_MODULE])}
    assert {name: kernels.digest(left) for name, left in from_source.items()} == expected
    assert [name for name in from_source if from_source[name] != from_ptx[name]] == []
