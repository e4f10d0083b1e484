"""What rank processes import, and how they take what a hostile peer describes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peerlane.errors import CompileError, DeviceTimeout
from peerlane.evaluate.candidates import candidate_file
from peerlane.evaluate.groups import GroupFailure
from peerlane.evaluate.readable import LINE_CHARACTERS
from peerlane.evaluate.trial import verdict_of
from peerlane.evaluate.trusted import _claimed_mismatch, _misplaced
from peerlane.evaluate.worker import classify
from peerlane.problems._spec import exactly
from peerlane.problems._tree import describe


@pytest.mark.parametrize("module", ["worker", "candidate", "trusted", "nursery", "build"])
def test_ranks_import_only_what_they_need(module: str) -> None:
    script = f"import sys, peerlane.evaluate.{module}; print(*(name.partition('.')[0] for name in sys.modules))"
    loaded = set(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split())
    assert "peerlane" in loaded and not loaded & {"pydantic", "pydantic_core", "typer", "rich", "click", "ray", "triton"}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no"), "runtime_error"),
        (MemoryError(), "out_of_memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (OSError(12, "Cannot allocate memory"), "out_of_memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "cuda_error"),
        (RuntimeError("CUDA error: device-side assert triggered"), "cuda_error"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (DeviceTimeout("rank 1 waited"), "cuda_error"),
        (CompileError("expected a ;"), "build_error"),
        (RuntimeError("Error building extension 'x': [1/2] nvcc"), "build_error"),
        (ModuleNotFoundError("No module named 'triton'", name="triton"), "not_run"),
        (ModuleNotFoundError("No module named 'flash'", name="flash"), "runtime_error"),
    ],
)
def test_kinds_of_failure(error: BaseException, kind: str) -> None:
    assert classify(error) == kind


@pytest.mark.parametrize(("installed", "kind"), [(True, "import_error"), (False, "not_run")])
def test_missing_triton_must_be_missing(installed: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate cannot excuse itself with a module that is there."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    failure = GroupFailure("not_run", "import", "ModuleNotFoundError: No module named 'triton'", rank=0)
    assert verdict_of(failure).kind == kind


def tensor(**changes: Any) -> dict[str, Any]:
    return {"kind": "tensor", "shape": [2, 3], "stride": [3, 1], "dtype": "float32", **changes}


EXPECTED = exactly("sum", torch.zeros(2, 3))


def test_a_true_description_is_accepted() -> None:
    assert _claimed_mismatch(tensor(), EXPECTED) is None


@pytest.mark.parametrize(
    "described",
    [
        tensor(shape=[3, 2]),
        tensor(shape=[2, -3]),
        tensor(shape=[10**30]),
        tensor(shape=["2", 3]),
        tensor(shape=None),
        tensor(dtype="float64"),
        tensor(dtype="load"),
        tensor(dtype="__class__"),
        tensor(dtype=3),
        tensor(kind="other", type="Lazy"),
        tensor(kind="group", name="world"),
        tensor(kind=[]),
        {"kind": "tensor"},
        {"kind": "value", "value": 0},
        {"kind": "list", "items": [tensor()]},
        {"kind": "tuple", "items": 5},
        {"kind": "dict", "keys": ["a"], "items": []},
        {"kind": "dict", "keys": [["a"]], "items": [tensor()]},
        {"kind": "value", "value": [0]},
        {"kind": "size", "value": "abc"},
        {"kind": "other", "type": {}},
        {"kind": "linear", "items": []},
        {"kind": "linear", "items": [tensor(shape=[])]},
        {"kind": "sparse", "shape": [3], "items": [tensor()]},
        tensor(items=[tensor()]),
        {},
        [],
        None,
        "tensor",
        7,
    ],
)
def test_a_false_description_is_refused(described: Any) -> None:
    """Whatever a candidate's rank claims, the answer is a reason, never an exception of the trusted rank."""
    reason = _claimed_mismatch(described, EXPECTED)
    assert isinstance(reason, str) and reason


@pytest.mark.parametrize("described", [tensor(shape=[1] * 10_000), {"kind": "other", "type": "x" * 10_000}])
def test_a_long_description_gets_a_short_answer(described: Any) -> None:
    """It has to fit into one message, with those of other slots."""
    assert len(_claimed_mismatch(described, EXPECTED) or "") == LINE_CHARACTERS


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["tensor", "list", "float32"])
names = st.sampled_from(["kind", "shape", "stride", "dtype", "items", "keys", "value", "type", "name", "x"])
KINDS = st.sampled_from(["tensor", "sparse", "linear", "list", "tuple", "dict", "value", "size", "group", "other"])
anything = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5), max_leaves=12)


@settings(max_examples=500)
@given(anything | st.fixed_dictionaries({"kind": KINDS}, optional={"items": st.lists(anything, max_size=3), "shape": anything}))
def test_any_description_is_judged(described: Any) -> None:
    reason = _claimed_mismatch(described, EXPECTED)
    assert isinstance(reason, str) and reason


@pytest.mark.parametrize(
    ("name", "source", "backend", "problem", "extensions"),
    [
        ("1_x_pytorch.py", "import torch", "pytorch", 1, False),
        ("13_x_cuda.py", "import torch", "cuda", 13, False),
        ("18_x_triton.py", "import torch", "triton", 18, False),
        ("1_x.py", "from utils.cuda_helpers import compile_cuda_extension", "cuda", 1, True),
        ("1_x.py", "from torch.utils.cpp_extension import load_inline", "cuda", 1, True),
        ("1_x.py", "from peerlane.device import Kernel", "cuda", 1, False),
        ("1_x.py", "import triton", "triton", 1, False),
        ("1_x.py", "    import triton.language as tl", "triton", 1, False),
        ("1_x.py", "# nothing about triton", "pytorch", 1, False),
        ("mine.py", "import torch", "pytorch", None, False),
    ],
)
def test_backend_and_problem_of_a_file(name: str, source: str, backend: str, problem: int | None, extensions: bool, tmp_path: Any) -> None:
    path = tmp_path / name
    path.write_text(source + "\n")
    candidate = candidate_file(path)
    assert (candidate.backend, candidate.problem, candidate.uses_extensions) == (backend, problem, extensions)


@pytest.mark.parametrize(("wanted", "got"), [(False, False), (True, True), (False, True), (True, False)])
def test_an_output_must_be_in_the_memory_that_the_problem_names(wanted: bool, got: bool) -> None:
    expected = exactly("counts", torch.zeros(3), host=wanted)
    claimed = {**describe(torch.zeros(3)), **({"host": True} if got else {})}
    reason = _misplaced(claimed, expected, torch.device("cuda"))
    assert (reason is None) == (wanted == got) and _misplaced(claimed, expected, torch.device("cpu")) is None
    if wanted and not got:
        assert reason == "counts: got a tensor on the rank's device, expected it in host memory"
