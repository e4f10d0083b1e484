"""``peerlane race``: what the GPU's compiler says, findings that people can read, and options to run less."""

import json
import time
from pathlib import Path

import pytest

from command_line import Peerlane
from peerlane.cli import race as command
from peerlane.cli.exit_codes import ExitCode
from peerlane.emulator import gpu_code

GREET = '''
import ctypes
import torch
from peerlane.emulator import Scenario

SOURCE = """
#include <peerlane/comm.cuh>
using namespace peerlane;
extern "C" __global__ void greet(const __grid_constant__ Arena arena, u64 words, u64 flag, float* out, u32 epoch) {
    const u32 peer = arena.rank ^ 1;
    for (u32 i = threadIdx.x; i < 128; i += blockDim.x) reinterpret_cast<float*>(arena.peer(peer, words))[i] = VALUE;
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::fence_system();  // release
        ptx::store_relaxed_system(reinterpret_cast<u32*>(arena.peer(peer, flag)), epoch);
        while (ptx::load_relaxed_system(reinterpret_cast<u32*>(arena.local(flag))) < epoch) {}
        ptx::fence_system();  // acquire
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < 128; i += blockDim.x) out[i] = reinterpret_cast<float*>(arena.local(words))[i];
}
"""


def race(world_size):
    for name in ("greet", "again"):
        scenario = Scenario(name, SOURCE, world_size)
        arena = scenario.arena(4096)
        words, flag = arena.take(512), arena.take(128)
        out = scenario.buffer("out", [torch.zeros(128)] * world_size)
        scenario.launch("greet", grid=1, block=32, args=[arena, ctypes.c_uint64(words), ctypes.c_uint64(flag), out, ctypes.c_uint32(1)])
        yield scenario
'''


def written(tmp_path: Path, value: str = "float(arena.rank)", without: str = "") -> Path:
    text = GREET.replace("VALUE", value)
    assert without in text
    path = tmp_path / "mine.py"
    path.write_text(text.replace(without, "") if without else text)
    return path


RELEASE = "ptx::fence_system();  // release"


def test_scenarios_of_a_file_with_an_extension_run(tmp_path: Path, peerlane: Peerlane) -> None:
    path = written(tmp_path)
    path.write_text("from torch.utils.cpp_extension import load_inline\n" + path.read_text())
    peerlane("race", path, "--world-size", 2, "--schedules", 5, "--case", "greet")


@pytest.mark.parametrize("value", ["-INFINITY", "NAN", "uint64_t(arena.rank)", "int8_t(arena.rank)"])
def test_names_that_both_worlds_know_are_right(value: str, tmp_path: Path, peerlane: Peerlane) -> None:
    said = peerlane("race", written(tmp_path, value), "--world-size", 2, "--schedules", 2, "--case", "greet").out
    assert "nothing found" in said and "registers" in said and "bytes of shared memory" in said
    assert said.endswith(", 2 ranks\n")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("M_PI", 'identifier "M_PI" is undefined'),
        ("std::max(1.0f, 2.0f)", "std"),
        ("FLT_MAX", "FLT_MAX"),
        (
            "[]{ __shared__ char all[400000]; all[threadIdx.x] = 1; __syncthreads(); return all[threadIdx.x ^ 1]; }()",
            "too much shared data",
        ),
    ],
)
def test_what_the_gpu_s_compiler_refuses_is_no_success(value: str, says: str, tmp_path: Path, peerlane: Peerlane) -> None:
    begin = time.monotonic()
    said = peerlane("race", written(tmp_path, value), "--world-size", 2, "--case", "greet", code=ExitCode.NOT_CORRECT).out
    assert "build error" in said and says in said and time.monotonic() - begin < 20
    if "shared" not in says:
        assert "mine.py(11): error" in said or "mine.py:11" in said


def test_without_a_compiler_for_gpus_the_result_says_so(tmp_path: Path, peerlane: Peerlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_code, "compiler_is_here", lambda: False)
    file = written(tmp_path)
    assert "not compiled for a GPU" in peerlane("race", file, "--world-size", 2, "--schedules", 2, "--case", "greet").out
    assert json.loads(peerlane("race", file, "--world-size", 2, "--schedules", 2, "--case", "greet", "--json").out)["compiled"] is False


def test_a_missing_release_is_one_finding_of_few_lines(tmp_path: Path, peerlane: Peerlane) -> None:
    file = written(tmp_path, without=RELEASE)
    asked = ("race", file, "--world-size", 2, "--schedules", 10, "--case", "greet")
    said = peerlane(*asked, code=ExitCode.NOT_CORRECT).out
    assert "1 findings" in said and len(said.splitlines()) < 10
    assert "arena allocation 0+0 to +512 of ranks 0, 1" in said
    assert "mine.py:11" in said and "mine.py:20" in said


def test_cases_are_chosen_and_the_first_failure_ends_the_run(tmp_path: Path, peerlane: Peerlane) -> None:
    file = written(tmp_path, without=RELEASE)
    said = peerlane("race", file, "--world-size", "2,2", "--schedules", 2, "--case", "a*", "--json", code=ExitCode.NOT_CORRECT)
    assert [row["scenario"] for row in json.loads(said.out)["reports"]] == ["again"]
    said = peerlane("race", file, "--world-size", 2, "--schedules", 2, "-x", "--json", code=ExitCode.NOT_CORRECT)
    assert [row["scenario"] for row in json.loads(said.out)["reports"]] == ["greet"]
    assert "expected one or more of greet, again" in peerlane("race", file, "--case", "none", code=ExitCode.USAGE).err


def test_a_watched_file_is_run_again_when_it_changes(tmp_path: Path, peerlane: Peerlane, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def race(world_size):\n    return 1\n")
    texts = ["def race(\n", GREET.replace("VALUE", "1")]

    def edit(_: float) -> None:
        if not texts:
            raise KeyboardInterrupt
        file.write_text(texts.pop(0))

    monkeypatch.setattr(command.time, "sleep", edit)
    monkeypatch.setattr(command, "_race", lambda asked: command.imported(asked.file) is None)
    assert "raised SyntaxError" in peerlane("race", file, "--watch", code=ExitCode.INTERRUPTED).err


def test_a_problem_of_one_s_own_is_raced(tmp_path: Path, peerlane: Peerlane, monkeypatch) -> None:
    from peerlane.settings import PROBLEM_FOLDERS

    folder = tmp_path / "probs"
    folder.mkdir()
    source = Path(__file__).parents[2] / "src" / "peerlane" / "problems" / "p002_allgather.py"
    (folder / "p1001_gather.py").write_text(source.read_text().replace("id=2,", "id=1001,").replace('slug="allgather"', 'slug="gather"'))
    monkeypatch.setenv(PROBLEM_FOLDERS, f"{folder}/")  # the same folder, spelt in another way
    monkeypatch.chdir(tmp_path)
    said = peerlane("new", 1001, "--problems", "probs").out
    assert "--problems probs --device emulated" in said and "peerlane race 1001_gather_cuda.py --problems probs" in said
    file = next(tmp_path.glob("1001_*.py"))
    asked = ("--world-size", 2, "--schedules", 1, "--case", "*bf16*", "-x")
    said = peerlane("race", file, "--problems", "probs", *asked).out
    assert "correct, nothing found" in said and " s)\n" in said and "registers" in said


def test_a_refused_scenario_does_not_end_the_file(tmp_path: Path, peerlane: Peerlane) -> None:
    path = tmp_path / "mine.py"
    odd = ".version 8.0\\n.target sm_90\\n.address_size 64\\n.visible .entry odd() { pmevent 1; ret; }"
    path.write_text(
        "import torch\nfrom peerlane.emulator import Ptx, Scenario\n"
        "RIGHT = 'extern \"C\" __global__ void right(unsigned* y) { y[threadIdx.x] = 1; }'\n"
        "def race(world_size):\n"
        f'    for name, source, grid in (("odd", Ptx("{odd}"), 1), ("right", RIGHT, 1 << 20), ("right", RIGHT, 1)):\n'
        "        scenario = Scenario(name, source, world_size)\n"
        '        args = [] if name == "odd" else [scenario.buffer("y", [torch.zeros(32, dtype=torch.int32)] * world_size)]\n'
        "        scenario.launch(name, grid, 32, args)\n"
        "        yield scenario\n"
    )
    said = peerlane("race", path, "--world-size", 1, "--schedules", 2, code=ExitCode.NOT_CORRECT).out
    assert "odd, 1 ranks: not run: kernel odd: 'pmevent 1' is not known" in said
    assert (
        "right, 1 ranks: not run: 'right' launches 33554432 threads" in said
        and "right, 1 ranks: 2 schedules, seed 0: nothing found" in said
    )
