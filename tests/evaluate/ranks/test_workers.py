"""What rank processes import, and how they take what a hostile peer describes."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peerlane import problems
from peerlane.errors import CompileError, DeviceTimeout, HarnessError
from peerlane.evaluate.audit import monkeypatch_check
from peerlane.evaluate.candidates import candidate_file
from peerlane.evaluate.correctness.case_runner import torn_output, verdict_of
from peerlane.evaluate.memory import slots
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.ranks import timed_block
from peerlane.evaluate.ranks.rank import classify
from peerlane.evaluate.ranks.trusted import _claimed_mismatch
from peerlane.problems.contract import describe, exactly, plainly
from peerlane.results.sanitize import LINE_CHARACTERS


@pytest.fixture(autouse=True)
def kept_fork_servers() -> None:
    """The evaluator's modules are as they are: one test looks at what is replaced in them."""


@pytest.mark.parametrize("module", ["ranks.serve", "ranks.candidate", "ranks.trusted", "processes.fork_server", "ranks.builder"])
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
        (HarnessError("allocating an arena of 5 bytes failed: cudaErrorMemoryAllocation"), "out_of_memory"),
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


def mismatch(described: Any, expected: Any, device: str = "cpu") -> str | None:
    return _claimed_mismatch(described, expected, torch.device(device))


def test_a_true_description_is_accepted() -> None:
    assert mismatch(tensor(), EXPECTED) is None


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
        {"kind": "dict", "keys": ["a", "a"], "items": [tensor(), tensor()]},
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
    reason = mismatch(described, EXPECTED)
    assert isinstance(reason, str) and reason


TWO = {"a": EXPECTED, "b": EXPECTED}


@pytest.mark.parametrize(
    ("described", "expected", "says"),
    [
        (tensor(), None, "output: got a tensor, expected None"),
        ({"kind": "value", "value": 1.5}, EXPECTED, "output: got 1.5, expected a tensor"),
        ({"kind": "list", "items": []}, EXPECTED, "output: got a list, expected a tensor"),
        (tensor(), TWO, "output: got a tensor, expected a dict with keys ['a', 'b']"),
        (
            {"kind": "dict", "keys": ["a", "c"], "items": [tensor(), tensor()]},
            TWO,
            "output: got a dict with keys ['a', 'c'], expected a dict with keys ['a', 'b']",
        ),
        ({"kind": "tuple", "items": [tensor(), tensor()]}, (EXPECTED, None), "output[1]: got a tensor, expected None"),
    ],
)
def test_a_wrong_structure_is_told_without_its_contents(described: Any, expected: Any, says: str) -> None:
    assert mismatch(described, expected) == says


def test_what_a_call_returned_and_what_it_updated_are_told_apart() -> None:
    """Problem 21 compares the pair of a norm and the gradients afterwards; a candidate returns the norm alone."""
    clipping, plain = problems.get(21), problems.get(1)
    assert plainly(clipping, "output[0]: got 1.5, expected a tensor") == "output: got 1.5, expected a tensor"
    assert plainly(clipping, "output[0][1]: got None") == "output[1]: got None"
    after = plainly(clipping, f"output[1]['{clipping.updates[0]}'][2]: got shape (2,), expected (3,)")
    assert after == f"argument `{clipping.updates[0]}` after the call[2]: got shape (2,), expected (3,)"
    assert plainly(plain, "output[0]: got None") == "output[0]: got None"


def test_the_output_whose_bits_differ_is_named() -> None:
    assert torn_output([("loss", 1), ("metrics", 2)], [("loss", 1), ("metrics", 3)]) == "metrics"
    assert torn_output([("loss", 1)], [("loss", 1)]) is None


@pytest.mark.parametrize("described", [tensor(shape=[1] * 10_000), {"kind": "other", "type": "x" * 10_000}])
def test_a_long_description_gets_a_short_answer(described: Any) -> None:
    """It has to fit into one message, with those of other slots."""
    assert len(mismatch(described, EXPECTED) or "") == LINE_CHARACTERS


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["tensor", "list", "float32"])
names = st.sampled_from(["kind", "shape", "stride", "dtype", "items", "keys", "value", "type", "name", "x"])
KINDS = st.sampled_from(["tensor", "sparse", "linear", "list", "tuple", "dict", "value", "size", "group", "other"])
anything = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5), max_leaves=12)


@settings(max_examples=500)
@given(anything | st.fixed_dictionaries({"kind": KINDS}, optional={"items": st.lists(anything, max_size=3), "shape": anything}))
def test_any_description_is_judged(described: Any) -> None:
    reason = mismatch(described, EXPECTED)
    assert isinstance(reason, str) and reason


@pytest.mark.parametrize(
    ("name", "source", "backend", "problem", "compiles"),
    [
        ("1_x_pytorch.py", "import torch", "pytorch", 1, False),
        ("13_x_cuda.py", "import torch", "pytorch", 13, False),
        ("18_x_triton.py", "import torch", "pytorch", 18, False),
        ("1_x_pytorch.py", "from cuda import core", "cuda", 1, True),
        ("1_x_pytorch.py", "from peerlane.device.triton import wait", "triton", 1, True),
        ("1_x_pytorch.py", "def solution(x):\n    import cupy", "cuda", 1, True),
        ("1_x_cuda.py", "import torch  # load_inline would be faster", "pytorch", 1, True),
        ("1_x.py", "from utils.cuda_helpers import compile_cuda_extension", "cuda", 1, True),
        ("1_x.py", "from torch.utils.cpp_extension import load_inline", "cuda", 1, True),
        ("1_x.py", "from peerlane.device import Kernel", "cuda", 1, True),
        ("1_x.py", "import triton", "triton", 1, False),
        ("1_x.py", "    import triton.language as tl", "triton", 1, False),
        ("1_x.py", "# nothing about triton", "pytorch", 1, False),
        ("mine.py", "import torch", "pytorch", None, False),
    ],
)
def test_backend_and_problem_of_a_file(name: str, source: str, backend: str, problem: int | None, compiles: bool, tmp_path: Any) -> None:
    path = tmp_path / name
    path.write_text(source + "\n")
    candidate = candidate_file(path)
    assert (candidate.backend, candidate.problem, candidate.compiles) == (backend, problem, compiles)


@pytest.mark.parametrize(("wanted", "got"), [(False, False), (True, True), (False, True), (True, False)])
def test_an_output_must_be_in_the_memory_that_the_problem_names(wanted: bool, got: bool) -> None:
    expected = exactly("counts", torch.zeros(3), host=wanted)
    claimed = {**describe(torch.zeros(3)), **({"host": True} if got else {})}
    reason = mismatch(claimed, expected, "cuda")
    assert (reason is None) == (wanted == got) and mismatch(claimed, expected) is None
    if wanted and not got:
        assert reason == "counts: got a tensor on the rank's device, expected it in host memory"


def test_what_is_replaced_in_the_evaluators_modules_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch_check.remember_originals()
    assert monkeypatch_check.replaced() == []
    monkeypatch.setattr(timed_block, "_elapsed", lambda start, end: 0.0)
    monkeypatch.setattr(timed_block.Block, "run", lambda *_: {})
    monkeypatch.setattr(slots.OutputRegions.take, "__code__", (lambda *_: []).__code__)
    monkeypatch.setattr(timed_block, "Block", None)
    places = {"ranks.timed_block._elapsed", "ranks.timed_block.Block", "ranks.timed_block.Block.run", "memory.slots.OutputRegions.take"}
    assert set(monkeypatch_check.replaced()) == {f"peerlane.evaluate.{place}" for place in places}
    monkeypatch.undo()
    assert monkeypatch_check.replaced() == []


def test_the_name_of_a_dtype_imports_nothing() -> None:
    """It may be a candidate's; attributes of torch are made when they are asked for, some by imports that take seconds."""
    script = """
import sys
from peerlane.problems.contract.tree import dtype_of
before = set(sys.modules)
for name in ("_inductor", "distributed", "half", "float", "compile", "__name__"):
    try:
        dtype_of(name)
    except ValueError:
        continue
    sys.exit(f"{name} is taken for a dtype")
sys.exit(sorted(set(sys.modules) - before)[0] if set(sys.modules) - before else None)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
