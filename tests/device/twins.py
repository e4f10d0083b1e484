"""Kernels and solutions with one thing wrong, which tests expect to be caught."""

import shutil
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest

from peerlane import solutions
from peerlane.device.host.declare import DeclaredKernel
from peerlane.device.host.jit import INCLUDE_DIR
from peerlane.emulator import build

Declared = TypeVar("Declared", bound=DeclaredKernel)


def twin(kernel: Declared, old: str, new: str, *headers: str) -> Declared:
    """The kernel with ``new`` for ``old``, which stands once in its source or in the ``headers``. Their text replaces their includes."""
    text = kernel.text
    for header in headers:
        include = f"#include <peerlane/{header}>"
        assert text.count(include) == 1, f"{kernel.name} does not include {header}"
        text = text.replace(include, (INCLUDE_DIR / "peerlane" / header).read_text().replace("#pragma once", ""))
    assert text.count(old) == 1, f"{text.count(old)} times in {kernel.name}: {old}"
    return type(kernel)(kernel.name, text.replace(old, new), **kernel.fields)


def use_twin(monkeypatch: pytest.MonkeyPatch, module: ModuleType, kernel: str, old: str, new: str, *headers: str) -> None:
    """Puts a twin in the place of the module's kernel."""
    monkeypatch.setattr(module, kernel, twin(getattr(module, kernel), old, new, *headers))


def changed(text: str, old: str, new: str) -> str:
    """The text with ``new`` for ``old``, which stands once in it."""
    assert text.count(old) == 1, f"{text.count(old)} times: {old}"
    return text.replace(old, new)


def write_header(folder: Path, header: str, old: str, new: str) -> Path:
    """Writes the kit's header, changed, below ``folder``, and returns that: a folder of headers before the kit's own."""
    (folder / "peerlane" / header).parent.mkdir(parents=True, exist_ok=True)
    (folder / "peerlane" / header).write_text(changed((INCLUDE_DIR / "peerlane" / header).read_text(), old, new))
    return folder


def use_header(monkeypatch: pytest.MonkeyPatch, folder: Path, header: str, old: str, new: str) -> None:
    """Has the emulator compile with a changed header instead of the kit's own."""
    shutil.copytree(INCLUDE_DIR, folder / "include")
    monkeypatch.setattr(build, "INCLUDE_DIR", write_header(folder / "include", header, old, new))


def write_solution(folder: Path, number: int, old: str, new: str) -> Path:
    """Writes the problem's solution, changed."""
    path = folder / f"{number}_twin_cuda.py"
    path.write_text(changed(solutions.files()[number].read_text(), old, new))
    return path
