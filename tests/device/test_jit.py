"""The compiler and its cache. No GPU is needed: everything ends at the cubin."""

import fcntl
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peerlane.device import compile_cubin
from peerlane.device.host import cuda_bindings, jit
from peerlane.errors import CompileError, MissingDependency, UsageError
from peerlane.evaluate.correctness.jitter import SM_HOLDER

ELF_MAGIC = b"\x7fELF"
KERNEL = 'extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= FACTOR; }\n'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEERLANE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_source_text_becomes_a_cubin_that_holds_the_kernel() -> None:
    cubin = compile_cubin(KERNEL, defines={"FACTOR": 2})
    image = cubin.path.read_bytes()
    assert cubin.compiled_here and cubin.arch == "sm_90a"
    assert image.startswith(ELF_MAGIC) and b"scale" in image


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_kernel_that_holds_sms_compiles(arch: str) -> None:
    assert b"hold_sm" in compile_cubin(SM_HOLDER, arch=arch).path.read_bytes()


def test_the_second_use_finds_the_first_ones_file() -> None:
    first = compile_cubin(KERNEL, defines={"FACTOR": 2})
    second = compile_cubin(KERNEL, defines={"FACTOR": 2})
    assert first.compiled_here and not second.compiled_here
    assert first.path == second.path


@pytest.mark.parametrize(
    "change", [{"defines": {"FACTOR": 3}}, {"arch": "sm_90"}, {"flags": ("--use_fast_math",)}], ids=["define", "arch", "flag"]
)
def test_what_goes_into_the_compiler_goes_into_the_key(change: dict[str, object]) -> None:
    usual = compile_cubin(KERNEL, defines={"FACTOR": 2})
    changed = compile_cubin(KERNEL, **{"defines": {"FACTOR": 2}, **change})  # type: ignore[arg-type]
    assert changed.compiled_here and changed.path != usual.path


def test_the_version_of_nvrtc_goes_into_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = compile_cubin(KERNEL, defines={"FACTOR": 2})
    monkeypatch.setattr(cuda_bindings.nvrtc(), "nvrtcVersion", lambda: (0, 99, 0))
    assert compile_cubin(KERNEL, defines={"FACTOR": 2}).path != usual.path


def test_a_header_included_by_a_header_goes_into_the_key(tmp_path: Path) -> None:
    (tmp_path / "kernel.cu").write_text('#include "outer.cuh"\n' + KERNEL)
    (tmp_path / "outer.cuh").write_text('#pragma once\n#  include "sub/inner.cuh"\n')
    (tmp_path / "sub").mkdir()
    inner = tmp_path / "sub" / "inner.cuh"
    inner.write_text("#define FACTOR 2\n")
    before = compile_cubin(tmp_path / "kernel.cu")
    assert not compile_cubin(tmp_path / "kernel.cu").compiled_here
    inner.write_text("#define FACTOR 3\n")
    after = compile_cubin(tmp_path / "kernel.cu")
    assert after.compiled_here and after.path != before.path
    assert after.path.read_bytes() != before.path.read_bytes()


def test_cpp20_is_the_language() -> None:
    concept = "template <class T> concept Any = true;\ntemplate <Any T> __device__ T same(T x) { return x; }\n"
    assert compile_cubin(concept + 'extern "C" __global__ void k(int* x) { *x = same(1); }\n').compiled_here


def test_an_error_quotes_the_line_and_caches_nothing(cache: Path) -> None:
    source = 'extern "C" __global__ void k(int* x) {\n    *x = undeclared_name + 1;\n}\n'
    with pytest.raises(CompileError) as error:
        compile_cubin(source)
    message = str(error.value)
    assert "source.cu(2): error" in message and "*x = undeclared_name + 1;" in message and "sm_90a" in message
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_an_error_names_the_source_file(tmp_path: Path) -> None:
    (tmp_path / "broken.cu").write_text("nonsense;\n")
    with pytest.raises(CompileError, match=r"broken\.cu\(1\)"):
        compile_cubin(tmp_path / "broken.cu")


def test_a_missing_source_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can not be read"):
        compile_cubin(tmp_path / "absent.cu")


def test_an_unwritable_cache_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PEERLANE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="PEERLANE_CACHE_DIR"):
        compile_cubin(KERNEL, defines={"FACTOR": 2})


def test_absent_bindings_name_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    cuda_bindings.nvrtc.cache_clear()
    with pytest.raises(MissingDependency, match=r"pip install 'peerlane\[cuda\]'"):
        cuda_bindings.nvrtc()


# Both wait for the file `go`, so that they reach the cache together. The pause in the compiler makes sure that they overlap there.
_RACER = """
import pathlib, sys, time
from peerlane.device.host import cuda_bindings, jit
nvrtc = cuda_bindings.nvrtc()
compile_program = nvrtc.nvrtcCompileProgram
nvrtc.nvrtcCompileProgram = lambda *args: (time.sleep(0.5), compile_program(*args))[1]
folder = pathlib.Path(sys.argv[1])
(folder / f"ready{sys.argv[2]}").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
cubin = jit.compile_cubin('extern "C" __global__ void k(int* x) { *x = 1; }')
print(int(cubin.compiled_here), cubin.path, cubin.path.stat().st_size > 0)
"""


def test_two_processes_compile_once(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen([sys.executable, "-c", _RACER, str(tmp_path), str(i)], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        for i in range(2)
    ]
    try:
        deadline = time.monotonic() + 90
        while not all((tmp_path / f"ready{i}").exists() for i in range(2)) and time.monotonic() < deadline:
            time.sleep(0.01)
        (tmp_path / "go").touch()
        answers = [racer.communicate(timeout=90)[0].split() for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
    assert sorted(answer[0] for answer in answers) == ["0", "1"]
    assert answers[0][1:] == answers[1][1:] and answers[0][2] == "True"


def test_after_the_timeout_a_process_compiles_itself(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = compile_cubin(KERNEL, defines={"FACTOR": 2})
    cubin.path.unlink()
    clock = itertools.count(time.monotonic(), 30.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with cubin.path.with_suffix(".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert compile_cubin(KERNEL, defines={"FACTOR": 2}).compiled_here


def test_headers_come_from_the_toolkit_where_there_is_no_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    for folder in (nvcc.parent, tmp_path / "cuda" / "include" / "cccl"):
        folder.mkdir(parents=True)
    nvcc.touch(0o755)
    monkeypatch.setenv("PATH", str(nvcc.parent))
    assert all("site-packages" in str(folder) for folder in jit.toolkit_dirs.__wrapped__())
    monkeypatch.setattr(jit.importlib.util, "find_spec", lambda name: None)
    assert jit.toolkit_dirs.__wrapped__() == (tmp_path / "cuda" / "include", tmp_path / "cuda" / "include" / "cccl")
