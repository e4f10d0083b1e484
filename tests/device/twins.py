"""Kernels with one thing wrong, which tests expect to be caught."""

from typing import TypeVar

from peerlane.device.host.declare import DeclaredKernel
from peerlane.device.host.jit import INCLUDE_DIR

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
