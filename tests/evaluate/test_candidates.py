"""What is judged is what was hashed, and only what a record and a message can hold is taken."""

import importlib.util
import inspect
import os
import py_compile
import sys
import traceback
from pathlib import Path

import pytest

from e2e.runs import GOOD, judge
from peerlane.errors import CandidateChanged, CandidateNotFound
from peerlane.evaluate import EvaluationPlan, discover, evaluate
from peerlane.evaluate.candidates import candidate_file, candidate_text, reference_candidate
from peerlane.evaluate.ranks.candidate import import_candidate

SOURCE = b'# -*- coding: latin-1 -*-\nNAME = "\xe9"\n\n\ndef solution(tensor):\n    return tensor\n'


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "restored afterwards")
    for name in ("utils", "utils.cuda_helpers"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_compiled_copies_beside_a_file_are_not_looked_at(tmp_path: Path) -> None:
    """Neither one that says it need not be checked, nor one of a file of this size and time; and none is written."""
    path = tmp_path / "1_x_pytorch.py"
    path.write_text("def solution(tensor):\n    return 'hidden'\n")
    py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    path.write_text("def solution(tensor):\n    return 'honest'\n")
    assert import_candidate(path, path.read_bytes()).solution(None) == "honest"
    os.remove(importlib.util.cache_from_source(str(path)))
    import_candidate(path, path.read_bytes())
    assert not list(tmp_path.rglob("*.pyc"))


@pytest.mark.parametrize("on_disk", [None, "def solution(tensor):\n    return 'another'\n"])
def test_a_module_is_what_was_given(on_disk: str | None, tmp_path: Path) -> None:
    """Triton compiles what inspect finds; it must be what was hashed, wherever the file has gone."""
    path = tmp_path / "1_x_pytorch.py"
    if on_disk is not None:
        path.write_text(on_disk)
    module = import_candidate(path, SOURCE)
    assert module.NAME == "é" and sys.modules[module.__name__] is module
    assert module.__file__ == str(path) and module.__spec__ is not None and module.__spec__.origin == str(path)
    assert inspect.getsource(module.solution) == "def solution(tensor):\n    return tensor\n"
    assert inspect.getsource(module).splitlines()[1] == 'NAME = "é"'
    with pytest.raises(SyntaxError, match=r"1_x_pytorch\.py"):
        import_candidate(path, b"def solution(\n")
    with pytest.raises(ZeroDivisionError) as caught:
        import_candidate(path, b"x = 1 / 0\n")
    assert "x = 1 / 0" in "".join(traceback.format_exception(caught.value))


def test_a_file_that_changed_is_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "1_x_pytorch.py"
    path.write_bytes(SOURCE)
    found = candidate_file(path)
    assert (found.source() or "").encode("latin-1") == SOURCE and reference_candidate().source() is None
    path.write_bytes(SOURCE + b"\n")
    with pytest.raises(CandidateChanged, match=r"has changed .* got sha256 .*, expected .*; run again"):
        found.source()
    path.unlink()
    with pytest.raises(CandidateChanged, match="cannot be read any more"):
        found.source()


@pytest.mark.parametrize("name", ["1_\udcff_pytorch.py", "1_\x1b[2J_pytorch.py", "1_\u202e_pytorch.py", "1_a\nb_pytorch.py"])
def test_a_name_that_no_record_can_hold_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(SOURCE)
    with pytest.raises(CandidateNotFound, match="cannot be printed: rename it") as caught:
        discover([str(tmp_path)])
    assert str(caught.value).isprintable()


def test_a_file_that_no_message_can_hold_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "1_x_pytorch.py"
    path.write_bytes(b"#" * (3 << 20))
    with pytest.raises(CandidateNotFound, match="expected at most 2097152"):
        candidate_file(path)


def test_a_file_that_changes_while_it_waits_is_not_judged(tmp_path: Path) -> None:
    path = tmp_path / "1_x_pytorch.py"
    path.write_bytes(SOURCE)
    found = discover([str(path), str(GOOD)])
    path.write_bytes(GOOD.read_bytes())
    changed, good = evaluate(EvaluationPlan(candidates=found, presets=("small",), world_sizes=(2,), device="cpu"))
    assert changed.verdict.kind == "not_run" and "has changed since the run began" in changed.verdict.reason
    assert good.correct, good.verdict
    assert judge(path)[0].correct


def test_a_numbered_file_with_another_name_is_skipped_aloud(tmp_path: Path) -> None:
    for name in ("1_right_cuda.py", "1.py", "2-allgather.py", "3_BROADCAST.PY", "helpers.py", "1_notes.txt"):
        (tmp_path / name).write_text("")
    notes: list[str] = []
    assert [item.name for item in discover([str(tmp_path)], notes.append)] == ["1_right_cuda"]
    skipped = ("1.py", "2-allgather.py", "3_BROADCAST.PY")
    assert notes == [f"{tmp_path / name}: expected a name like <id>_<name>_<backend>.py; it is skipped" for name in skipped]


def test_samples_in_subfolders_are_told_apart_and_a_bad_name_stops_nobody(tmp_path: Path) -> None:
    for sample in ("sample0", "sample1", ".hidden", "__pycache__"):
        (tmp_path / sample).mkdir()
        (tmp_path / sample / "1_x_pytorch.py").write_bytes(SOURCE)
    (tmp_path / "1_a\nb_pytorch.py").write_bytes(SOURCE)
    (tmp_path / "999_x_pytorch.py").write_bytes(SOURCE)
    notes: list[str] = []
    found = discover([str(tmp_path)], notes.append)
    assert [(item.name, item.problem) for item in found] == [("sample0/1_x_pytorch", 1), ("sample1/1_x_pytorch", 1)]
    assert len(notes) == 2 and all("it is skipped" in text for text in notes)


INLINE = "from torch.utils.cpp_extension import load_inline\nmodule = load_inline({})\n"


@pytest.mark.parametrize(
    ("source", "backend"),
    [
        (INLINE.format("'a', CPP, functions=['f']"), "pytorch"),
        (INLINE.format("'a', cpp_sources=[CPP], cuda_sources=None, with_cuda=False"), "pytorch"),
        ("import torch.utils.cpp_extension as build\nbuild.load_inline('a', cpp_sources='int f();')\n", "pytorch"),
        (INLINE.format("'a', CPP, CUDA"), "cuda"),
        (INLINE.format("'a', cpp_sources=CPP, cuda_sources=CUDA"), "cuda"),
        (INLINE.format("'a', CPP, with_cuda=True"), "cuda"),
        (INLINE.format("'a', **ARGUMENTS"), "cuda"),
        (INLINE.format("*ARGUMENTS"), "cuda"),
        (INLINE.format("'a', cpp_sources='#include <cuda_runtime.h>'"), "cuda"),
        (INLINE.format("'a', CPP") + "other = load_inline\n", "cuda"),
        ("from torch.utils import cpp_extension\ncpp_extension.load('a', ['a.cu'])\n", "cuda"),
        ("from torch.utils.cpp_extension import load_inline as build\nbuild('a', CPP, CUDA)\n", "cuda"),
        ("from torch.utils.cpp_extension import CUDAExtension\n", "cuda"),
    ],
)
def test_extensions_of_cpp_alone_need_no_gpu(source: str, backend: str) -> None:
    candidate = candidate_text(source)
    assert (candidate.backend, candidate.compiles) == (backend, True)
