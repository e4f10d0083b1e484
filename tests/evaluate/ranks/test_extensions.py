"""Extensions of candidates: the helper that public candidates import, folders of their own, locks of killed builds."""

import fcntl
import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from peerlane.errors import CompileError
from peerlane.evaluate import wire
from peerlane.evaluate.ranks import device_check, extensions
from peerlane.evaluate.ranks.builder import Builder
from peerlane.evaluate.ranks.candidate import import_candidate
from peerlane.evaluate.ranks.rank import wants_gpu
from peerlane.evaluate.requirements import needs_gpu


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERLANE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "restored afterwards")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])  # a builder refuses to import answers from then on
    for name in [name for name in sys.modules if name.startswith(("peerlane.solutions", "peerlane.ops"))]:
        monkeypatch.setitem(sys.modules, name, sys.modules[name])  # which it removes
    for name in [name for name in sys.modules if name.partition(".")[0] == "utils"]:
        monkeypatch.delitem(sys.modules, name)


def built(source: str, **changes: bool) -> wire.Built:
    """What a builder says of this candidate."""
    usual = {"path": "1_x_cuda.py", "cache": None, "granted": {}, "on_cpu": False, "gpu_only": False, "emulated": False}
    return Builder({"world_size": 1, "device": "cpu", "timed_ranks": 0}, 0, -1).build_candidate(**{**usual, "source": source, **changes})


def test_two_sources_build_in_two_folders(tmp_path: Path) -> None:
    first, second = extensions.use_own_build_folder(b"one"), extensions.use_own_build_folder(b"two")
    assert first != second
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(second)
    assert tmp_path in first.parents


def test_builder_removes_the_lock_of_a_killed_build() -> None:
    source = "import os\nFOLDER = os.environ['TORCH_EXTENSIONS_DIR']\n"
    lock = extensions.use_own_build_folder(source.encode()) / "kernel" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert built(source) == wire.Built(None, False)
    assert not lock.exists()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("AssertionError: Torch not compiled with CUDA enabled", True),
        ("OSError: CUDA_HOME environment variable is not set", True),
        ("OSError: libcuda.so.1: cannot open shared object file", True),
        ("NameError: name 'cuda' is not defined", False),
        ("ImportError: 1_x_cuda.py has no function", False),
    ],
)
def test_what_a_gpu_would_mend(line: str, expected: bool) -> None:
    assert wants_gpu(line) is expected


def test_builder_leaves_other_errors_to_the_ranks() -> None:
    assert built("raise RuntimeError('no GPU here')\n") == wire.Built("RuntimeError: no GPU here", False)


def test_public_helper_compiles_once_and_loads_the_result_after_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is replaced by one that writes a Python module where the library would be."""
    calls: list[dict[str, Any]] = []

    def load_inline(**options: Any) -> str:
        calls.append(options)
        Path(options["build_directory"], f"{options['name']}.so").write_text("")
        return "just built"

    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", load_inline)
    monkeypatch.setattr(extensions, "_load", lambda name, library: f"loaded {library.name}")
    module = import_candidate(
        tmp_path / "1_allreduce_cuda.py",
        b"from utils.cuda_helpers import compile_cuda_extension\n"
        b"first = compile_cuda_extension('kernel', 'source', extra_cuda_cflags=['-lineinfo'])\n"
        b"second = compile_cuda_extension('kernel', 'source', extra_cuda_cflags=['-lineinfo'])\n"
        b"third = compile_cuda_extension('kernel', 'source')\n",
    )
    assert (module.first, module.second, module.third) == ("just built", "loaded kernel.so", "just built")
    assert calls[0]["extra_cuda_cflags"] == ["-O3", "-lineinfo"]
    assert calls[0]["cuda_sources"] == "source"
    assert len(calls) == 2


def test_public_helpers_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    extensions.install_public_helpers()
    runtime = importlib.import_module("utils.parallelkittens_runtime")
    made: list[tuple[Any, ...]] = []

    class Extension:
        TKParallelTensor = staticmethod(lambda *args: made.append(args) or object())

    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    first, second = (runtime.get_or_create_parallel_tensor(Extension, (2, 3), multicast=False) for _ in range(2))
    assert first is second
    assert made == [([2, 3], torch.bfloat16, 1, 4, False)]
    with pytest.raises(RuntimeError, match="multicast=False does without"):
        runtime.get_or_create_barrier(Extension, num_devices=4)
    with pytest.raises(RuntimeError, match="8 devices on 4 ranks"):
        runtime.get_or_create_barrier(Extension, num_devices=8)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    assert runtime.get_or_create_barrier(Extension, num_devices=4) is runtime.get_or_create_barrier(Extension, num_devices=4)
    assert made[1:] == [([64], torch.int32, 1, 4, True)]


def test_every_build_of_the_extension_loader_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that fails, and whoever imported the loader before."""

    @functools.wraps(cpp_extension._jit_compile)
    def fail(*_: Any, **__: Any) -> None:
        told.append("building")
        raise RuntimeError("no compiler")

    told: list[Any] = []
    monkeypatch.setattr(cpp_extension, "_jit_compile", fail)
    extensions.report_builds(told.append)
    with pytest.raises(RuntimeError, match="no compiler"):
        cpp_extension.load("kernel", ["kernel.cpp"], build_directory="/nowhere")
    assert told == [True, "building", False]


def test_a_lock_that_somebody_else_holds_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built is loaded without it; who builds without it leaves torch's own lock alone, which another process may hold."""
    built: list[bool] = []

    def load_inline(**options: Any) -> str:
        built.append(Path(options["build_directory"], "lock").exists())
        return "just built"

    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", load_inline)
    monkeypatch.setattr(extensions, "_load", lambda name, library: "loaded")
    monkeypatch.setattr(extensions, "_PATIENCE_S", 0.05)
    assert extensions.compile_cuda_extension("kernel", "source") == "just built"
    (folder,) = (tmp_path / "cache" / "extensions").iterdir()
    (folder / "lock").touch()
    with (folder / "peerlane.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert extensions.compile_cuda_extension("kernel", "source") == "loaded"
        (folder / "built").unlink()
        assert extensions.compile_cuda_extension("kernel", "source") == "just built"
    (folder / "built").unlink()
    assert extensions.compile_cuda_extension("kernel", "source") == "just built"
    assert built == [False, True, False]


NVCC = """#!/bin/sh
for last; do case "$last" in *.cu) source="$last";; esac; done
if grep -q 'float x y' "$source"; then echo 'add.cu(3): error: expected a ";"' >&2; exit 2; fi
"""
EXTENSION = """
from torch.utils.cpp_extension import load_inline

extension = load_inline("add", cpp_sources="", cuda_sources="__global__ void add(float* p) { BODY }", functions=["add"])

def solution(tensor):
    return extension.add(tensor)
"""


def built_for_gpus(body: str) -> wire.Built:
    return built(EXTENSION.replace("BODY", body), on_cpu=True, gpu_only=True)


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(cpp_extension, "load_inline", cpp_extension.load_inline)
    monkeypatch.setattr(cpp_extension, "load", cpp_extension.load)


@pytest.mark.usefixtures("without_cuda")
def test_device_code_is_compiled_by_the_nvcc_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvcc").write_text(NVCC)
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert built_for_gpus("p[0] = 1;") == wire.Built(None, True)
    with pytest.raises(CompileError, match=r"nvcc refuses the device code(.|\n)*expected a"):
        built_for_gpus("float x y;")


@pytest.mark.usefixtures("without_cuda")
def test_without_nvcc_the_import_s_own_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "find_nvcc", lambda: None)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    found = built_for_gpus("p[0] = 1;")
    assert found.raised is not None and "CUDA_HOME environment variable is not set" in found.raised and not found.by_nvcc
    said = needs_gpu(found.raised, found.by_nvcc, emulated=False)
    assert "its import here ended in OSError: CUDA_HOME" in said
    assert "nvcc compiles the device code" in needs_gpu("", True, emulated=True) and "--device emulated" in needs_gpu(
        "", True, emulated=True
    )
