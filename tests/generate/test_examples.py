"""The worked examples of prompts are run: on CPU ranks, in the emulator, or compiled where only a GPU could run them."""

import os
import types
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

import peerlane as pl
from command_line import Peerlane
from generate.shared_memory import SharedMemory
from peerlane import problems
from peerlane.problems.scaffolds import scaffold
from peerlane.results.verdict import BuildError, NotRun
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
    with RankPool(2) as pool:
        assert pool.run(faults_on_rank, backend, str(tmp_path)) == [[], []]


@pytest.fixture
def kit_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example as a candidate of the problem that it solves."""
    monkeypatch.setenv("PEERLANE_PROBLEMS", str(Path(__file__).parent / "neighbour"))
    path = tmp_path / "1001_neighbour_difference_cuda.py"
    path.write_text((EXAMPLES / "difference_kit.py").read_text())
    return path


def test_the_kit_s_example_is_clean_in_race(kit_example: Path, peerlane: Peerlane) -> None:
    said = peerlane("race", kit_example, "--schedules", 5, "--world-size", "4")
    assert said.out.count("correct, nothing found") == 3, "one for each dtype"


def test_the_kit_s_example_is_correct_on_emulated_ranks(kit_example: Path) -> None:
    with pl.Evaluator(2, "emulated", presets=("small",), modes=(), track="custom") as evaluator:
        result = evaluator.evaluate(path=kit_example)
    assert result.correct, result.verdict
    assert result.candidate.backend == "cuda"


def test_the_kit_s_example_compiles_for_a_gpu() -> None:
    from peerlane.device import compile_cubin
    from peerlane.device.host.resources import resources

    example = load("kit")
    defines: dict[str, str | int] = {"WORLD_SIZE": 4, "ELEMENT": "BFloat16", "ELEMENT_BYTES": 2}
    assert "difference" in resources(compile_cubin(example.DIFFERENCE.source, defines=defines))


def test_the_example_in_cuda_compiles_for_all_its_dtypes() -> None:
    """At import, by NVRTC, in about a second, with no GPU."""
    example = load("cuda")
    code = bytes(example.PROGRAM.code)
    assert [
        name for name in ("float", "__nv_bfloat16", "__half") if example.PROGRAM.symbol_mapping[f"difference<{name}>"] not in code
    ] == []


@pytest.mark.parametrize("number", [1, 36])
def test_a_new_file_in_cuda_compiles(number: int) -> None:
    source = scaffold(problems.get(number), "cuda")
    module = types.ModuleType("new")
    exec(compile(source, "new.py", "exec"), vars(module))
    assert b"gather_bytes" in bytes(module.PROGRAM.code)


def test_a_source_that_nvrtc_refuses_is_a_build_error() -> None:
    """Also on a machine without GPUs, where the builder imports the candidate."""
    source = (EXAMPLES / "difference_cuda.py").read_text().replace("T* own_data", "T* own_data,,")
    with pl.Evaluator(2, "cpu", presets=("small",), modes=()) as evaluator:
        verdict = evaluator.evaluate(1, source).verdict
        assert isinstance(verdict, BuildError), verdict
        assert "expected" in verdict.message
        assert isinstance(evaluator.evaluate(1, (EXAMPLES / "difference_cuda.py").read_text()).verdict, NotRun)
