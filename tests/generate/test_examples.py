"""The worked examples of prompts are run: on CPU ranks, in the emulator, or compiled where only a GPU could run them."""

from __future__ import annotations

import ctypes
import os
import types
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from generate.shared_memory import SharedMemory
from ranks.pool import RankPool

EXAMPLES = files("peerlane.generate") / "prompts" / "examples"


def load(backend: str, **names: Any) -> types.ModuleType:
    """The example as a module; the name ``symm_mem`` is replaced if given."""
    path = Path(str(EXAMPLES / f"difference_{backend}.py"))
    module = types.ModuleType(f"difference_{backend}")
    module.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    vars(module).update(names)
    return module


def faults_on_rank(rank: int, world_size: int, backend: str, folder: str) -> list[str]:
    os.environ["TRITON_INTERPRET"] = "1"
    example = load(backend, symm_mem=SharedMemory(Path(folder)))
    faults = []
    for call in range(3):
        for shape in ((5, 7), (2100,)):
            everyone = [
                torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) * (r + 1) + call for r in range(world_size)
            ]
            got = example.solution(everyone[rank])
            if not torch.equal(got, everyone[rank] - everyone[(rank - 1) % world_size]):
                faults.append(f"call {call}, shape {shape}")
    return faults


@pytest.mark.parametrize("backend", ["pytorch", "triton"])
def test_example_is_right_on_cpu_ranks(backend: str, tmp_path: Path) -> None:
    pool = RankPool(2)
    try:
        assert pool.run(faults_on_rank, backend, str(tmp_path)) == [[], []]
    finally:
        pool.close()


def test_the_example_for_the_kit_is_right_and_compiles() -> None:
    from peerlane.device import compile_cubin
    from peerlane.device.emulator import Scenario, check
    from peerlane.device.host.resources import resources

    example, world_size, count = load("kit"), 3, 401
    defines = {"WORLD_SIZE": world_size}
    assert "difference" in resources(compile_cubin(example.SOURCE, defines=defines))
    scenario = Scenario("difference", example.SOURCE, world_size, defines)
    arena = scenario.arena(1 << 14)
    offsets = [ctypes.c_uint64(arena.take(size)) for size in (1024, 2 * 2 * world_size * example.LINE, 4 * count)]
    for call in range(2):
        terms = [torch.arange(count, dtype=torch.float32) * (rank + 1) + call for rank in range(world_size)]
        x = scenario.buffer(f"x {call}", terms)
        wanted = [terms[rank] - terms[rank - 1] for rank in range(world_size)]
        out = scenario.buffer(f"out {call}", [torch.zeros(count)] * world_size, expected=wanted)
        scenario.launch("difference", 2, 32, (arena, *offsets, x, out, ctypes.c_uint64(4 * count)))
    report = check(scenario, schedules=20)
    assert not report.findings, str(report)


def test_example_in_cuda_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from peerlane.device import compile_cubin
    from peerlane.device.host.resources import resources

    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", lambda *args, **kwargs: None)  # needs nvcc; the kernel does not
    assert "difference" in resources(compile_cubin(load("cuda").KERNEL))
