"""``peerlane compile``: what the GPU's compiler makes of a file's kernels."""

import json
import stat
from pathlib import Path

import pytest

from command_line import Peerlane
from peerlane.cli.exit_codes import ExitCode
from peerlane.common import toolkit

ROOT = Path(__file__).parents[2]
SOURCE = """extern "C" __global__ void scale(float* x, float by) {
    __shared__ float part[128];
    part[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = part[threadIdx.x ^ 1] * by + WIDTH;
}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "scale.cu"
    path.write_text(SOURCE)
    return path


def test_registers_and_shared_memory_of_a_source_are_told(file: Path, peerlane: Peerlane) -> None:
    (kernel,) = json.loads(peerlane("compile", file, "-D", "WIDTH=3", "--json").out)["kernels"]
    assert kernel["name"] == "scale" and 8 <= kernel["resources"]["registers"] <= 32 and kernel["arch"] == "sm_90a"
    assert "512 bytes of shared memory (sm_100a)" in peerlane("compile", file, "-D", "WIDTH=3", "--gpu", "b200").out


def test_ptx_lies_under_its_source_lines(file: Path, peerlane: Peerlane) -> None:
    said = peerlane("compile", file, "-D", "WIDTH=3", "--ptx")
    lines = [line.strip() for line in said.out.splitlines()]
    barrier = lines.index("// scale.cu:4: __syncthreads();")
    assert lines[barrier + 1].startswith("bar.sync") or lines[barrier + 1].startswith("barrier.sync")


def test_sass_comes_from_the_disassembler_that_is_here(
    file: Path, tmp_path: Path, peerlane: Peerlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolkit, "find_disassembler", lambda: None)
    assert "needs nvdisasm" in peerlane("compile", file, "-D", "WIDTH=3", "--sass", code=ExitCode.USAGE).err
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\nprintf '//---- .text.scale\\nBAR.SYNC 0x0\\n//---- .text.other\\nEXIT\\n'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(toolkit, "find_disassembler", lambda: str(tool))
    said = peerlane("compile", file, "-D", "WIDTH=3", "--sass").out
    assert "BAR.SYNC 0x0" in said and "EXIT" not in said


def test_what_does_not_compile_is_told_with_its_line(file: Path, peerlane: Peerlane) -> None:
    assert 'scale.cu(5): error: identifier "WIDTH" is undefined' in peerlane("compile", file, code=ExitCode.NOT_CORRECT).err


def test_kernels_of_a_solution_come_with_their_occupancy(peerlane: Peerlane) -> None:
    said = peerlane("compile", ROOT / "src" / "peerlane" / "solutions" / "p008_alltoall.py").out
    assert "exchange_packets: " in said and "blocks of" in said and "% of an SM's threads" in said


def test_headers_of_the_host_and_of_other_folders_are_found(peerlane: Peerlane, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "by.h").write_text("#define BY 3\n")
    names = (
        "algorithm", "cassert", "cstdint", "cstdio", "limits", "stdint.h", "stdio.h", "type_traits", "vector", "cuda_runtime.h", "by.h",
    )  # fmt: skip
    body = "assert(n > 0); x[std::min<int>(threadIdx.x, n)] = UINT32_MAX + std::is_same<int, int>::value + BY;"
    file = tmp_path / "foreign.cu"
    includes = "".join(f"#include <{name}>\n" for name in names)
    file.write_text(f'{includes}extern "C" __global__ void own(uint32_t* x, int n) {{ {body} }}\n')
    peerlane("compile", file, code=ExitCode.NOT_CORRECT)
    peerlane("compile", file, "-I", tmp_path / "own")


def test_host_code_in_a_source_says_what_to_do(peerlane: Peerlane, tmp_path: Path) -> None:
    file = tmp_path / "program.cu"
    file.write_text("__global__ void k() {}\nint main() { void* p; cudaMalloc(&p, 4); k<<<1, 1>>>(); }\n")
    assert "take the kernel out, or write it as a load_inline candidate" in peerlane("compile", file, code=ExitCode.NOT_CORRECT).err


def test_a_name_of_nvcc_says_which_instruction_it_is(peerlane: Peerlane, tmp_path: Path) -> None:
    file = tmp_path / "dependent.cu"
    file.write_text('extern "C" __global__ void k() { cudaGridDependencySynchronize(); }\n')
    assert "griddepcontrol.wait" in peerlane("compile", file, code=ExitCode.NOT_CORRECT).err
