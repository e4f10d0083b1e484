"""Extensions that candidates compile when they are called are found in their syntax trees, and compiled under the key of that call."""

import ctypes
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch.utils.cpp_extension as cpp_extension
from torch.utils._cpp_extension_versioner import ExtensionVersioner

import peerlane as pl
from made_candidates import make_candidates
from peerlane.evaluate.candidates import candidate_text
from peerlane.evaluate.ranks import extensions
from peerlane.evaluate.ranks.extension_calls import find_extension_calls


def found(source: str, module: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
    return [(call.function, *call.args, dict(call.kwargs)) for call in find_extension_calls(dedent(source), module)]


def test_a_call_in_a_function_with_constants_of_the_module() -> None:
    source = """
        from torch.utils.cpp_extension import load_inline
        SRC = "kernel"
        FLAGS = ["-O3"] + ["-lineinfo"]

        def solution(x):
            name = "sum"
            return load_inline(f"{name}_ext", cpp_sources="", cuda_sources=[SRC.strip()], extra_cuda_cflags=FLAGS)
        """
    options = {"cpp_sources": "", "cuda_sources": ["kernel"], "extra_cuda_cflags": ["-O3", "-lineinfo"]}
    assert found(source) == [("load_inline", "sum_ext", options)]


@pytest.mark.parametrize(
    ("imports", "call"),
    [
        ("from torch.utils import cpp_extension", "cpp_extension.load_inline"),
        ("import torch", "torch.utils.cpp_extension.load_inline"),
        ("import torch.utils.cpp_extension as cpp", "cpp.load_inline"),
        ("from torch.utils.cpp_extension import load_inline as build", "build"),
    ],
)
def test_every_way_to_import_it(imports: str, call: str) -> None:
    assert found(f"def f():\n    {imports}\n    return {call}('a', '')") == [("load_inline", "a", "", {})]


def test_the_public_helper_and_load_of_files() -> None:
    source = """
        from utils.cuda_helpers import compile_cuda_extension
        from torch.utils.cpp_extension import load
        a = lambda: compile_cuda_extension("a", "source")
        b = lambda: load(name="b", sources=["b.cu"])
        """
    assert [call[0] for call in found(source)] == ["compile_cuda_extension", "load"]


def test_other_functions_of_these_names_are_left_alone() -> None:
    assert found("import json, torch\ndef f():\n    torch.load('x')\n    json.load('y')\n    load('z')\n    load_inline('w')") == []


def test_arguments_that_are_no_constants_are_not_guessed() -> None:
    source = """
        from torch.utils.cpp_extension import load_inline
        NAME = "outside"

        def a(NAME): load_inline(NAME, "")
        def b():
            NAME = make()
            load_inline(NAME, "")
        def c():
            source = "a"
            source += "b"
            load_inline("c", source)
        def d(x):
            source = "a" if x else "b"
            load_inline("d", source)
        def e():
            load_inline(open("/tmp/x").read(), "")
        """
    assert found(source) == []


def test_names_of_an_imported_module_count() -> None:
    source = "from torch.utils.cpp_extension import load_inline\nSRC = make()\ndef f(): load_inline('a', SRC)"
    assert found(source) == [] and found(source, {"SRC": "made"}) == [("load_inline", "a", "made", {})]


def test_all_extensions_of_the_generator_are_found() -> None:
    for candidate in make_candidates(12, ["load_inline"], 7):
        assert len(find_extension_calls(candidate.source)) == 1, "two equal calls are one"


SOURCE = '''
from torch.utils.cpp_extension import load_inline

def solution(x):
    code = """extern "C" int answer() { return ANSWER; }"""
    load_inline("made_ahead", cpp_sources=code, no_implicit_headers=True, is_python_module=False)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "_jit_compile", cpp_extension._jit_compile)
    monkeypatch.setattr(cpp_extension, "JIT_EXTENSION_VERSIONER", cpp_extension.JIT_EXTENSION_VERSIONER)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # ninja
    return tmp_path


def call(source: str) -> Any:
    names: dict[str, Any] = {}
    exec(source, names)
    return names["solution"](None)


def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch, original: Any) -> None:
    monkeypatch.setattr(cpp_extension, "_jit_compile", original)
    monkeypatch.setattr(cpp_extension, "JIT_EXTENSION_VERSIONER", ExtensionVersioner())


def library_called_as_built(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library that is compiled ahead; a call in a new process leaves it as it is."""
    original = cpp_extension._jit_compile
    extensions.compile_cheaply(lambda _: None)
    assert extensions.compile_ahead(find_extension_calls(source)) is None
    (library,) = folder.glob("*/made_ahead.so")
    before = library.stat().st_mtime_ns
    as_in_a_new_process(monkeypatch, original)
    extensions.report_builds(lambda _: None)
    call(source)
    assert library.stat().st_mtime_ns == before
    return library


def test_what_is_compiled_ahead_is_not_compiled_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCE.replace("ANSWER", "42")
    library = library_called_as_built(source, folder, monkeypatch)
    assert "light_headers" in (library.parent / "build.ninja").read_text()
    call(source)
    call(source.replace("42", "43"))
    versions = {path.name for path in folder.glob("*/*.so")}
    assert versions == {"made_ahead.so", "made_ahead_v1.so"}, "another extension of the same name is another library"


def test_of_two_extensions_of_one_name_none_is_taken_for_the_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, original = SOURCE.replace("ANSWER", "1"), SOURCE.replace("ANSWER", "2"), cpp_extension._jit_compile
    extensions.compile_cheaply(lambda _: None)
    extensions.compile_ahead([*find_extension_calls(one), *find_extension_calls(two)])
    for source, answer in ((one, 1), (two, 2)):
        as_in_a_new_process(monkeypatch, original)
        extensions.report_builds(lambda _: None)
        copy = str(folder / f"{answer}.so")  # of equal paths, the second would be the first
        monkeypatch.setattr(cpp_extension, "_import_module_from_library", lambda name, path, _: shutil.copy(f"{path}/{name}.so", copy))  # noqa: B023
        assert call(source.replace("    load_inline", "    return load_inline")) == copy and ctypes.CDLL(copy).answer() == answer


def test_what_needs_all_of_torchs_headers_gets_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that only the light ones refuse stands for what they lack."""
    light = folder / "light"
    light.mkdir()
    (light / "lacks.h").write_text("#error is missing here")
    (folder / "lacks.h").write_text("constexpr int all = 42;")
    monkeypatch.setattr(extensions, "LIGHT_HEADERS", light)
    source = SOURCE.replace("ANSWER", "all").replace('code = """', 'code = """#include <lacks.h>\n')
    source = source.replace("no_implicit", f"extra_include_paths=[{str(folder)!r}], no_implicit")
    library_called_as_built(source, folder, monkeypatch)


def test_what_failed_ahead_fails_at_once_with_the_same_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, told, original = SOURCE.replace("ANSWER", "undeclared"), list[bool](), cpp_extension._jit_compile
    extensions.compile_cheaply(lambda _: None)
    failure = extensions.compile_ahead(find_extension_calls(source))
    assert failure is not None and "undeclared" in str(failure)
    as_in_a_new_process(monkeypatch, original)
    extensions.report_builds(told.append)
    with pytest.raises(RuntimeError, match="undeclared") as raised:
        call(source)
    assert str(raised.value) == str(failure) and told == [], "nothing was compiled"
    extensions.remove_stale_locks(folder)
    with pytest.raises(RuntimeError):
        call(source)
    assert told == [True, False], "without a builder before it, it is tried again"


def test_a_main_that_holds_nothing_is_not_compiled(folder: Path) -> None:
    main, code = folder / "main.cpp", folder / "cuda.cu"
    asked: dict[str, Any] = {"sources": [str(main), str(code)], "extra_include_paths": None}
    main.write_text("#include <torch/extension.h>\n")
    assert extensions._cheaper(asked)["sources"] == [str(code)]
    main.write_text("#include <torch/extension.h>\nvoid f();")
    assert extensions._cheaper(asked)["sources"] == [str(main), str(code)]


CANDIDATE = '''
import os

import torch.distributed as dist
from torch.utils.cpp_extension import load_inline

CODE = """extern "C" int answer() { return ANSWER; }"""


def solution(tensor):
    if not os.path.exists(os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "made_ahead")):
        raise RuntimeError("nobody has compiled it")
    load_inline("made_ahead", cpp_sources=CODE, no_implicit_headers=True, is_python_module=False)
    dist.all_reduce(out := tensor.clone())
    return out
'''


def test_an_evaluation_finds_what_its_builder_compiled() -> None:
    right, broken = (candidate_text(CANDIDATE.replace("ANSWER", answer), 1, answer) for answer in ("42", "undeclared"))
    assert right.compiles
    right, broken = replace(right, backend="pytorch"), replace(broken, backend="pytorch")  # C++ alone: no rank needs a GPU
    with pl.Evaluator(2, "cpu", presets=("small",), modes=(), cases="timed") as evaluator:
        first, second = evaluator.evaluate_all([right, broken])
    assert first.correct and first.stage_seconds["build"] > 0
    assert second.verdict.kind == "build_error" and "undeclared" in second.verdict.reason
