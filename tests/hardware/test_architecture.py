"""Extensions are compiled for the node's GPUs, unless the environment names others."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerlane.hardware import architecture
from peerlane.settings import ARCHITECTURE


@pytest.mark.parametrize(
    ("variable", "printed", "expected"),
    [
        ("8.0", "9.0", "8.0"),
        (None, "9.0\\n9.0", "9.0a"),
        (None, "8.9", "8.9"),
        (None, "8.0\\n10.0", "10.0a;8.0"),
        (None, "[N/A]", ARCHITECTURE),
        (None, None, ARCHITECTURE),
    ],
)
def test_the_node_decides(
    variable: str | None, printed: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    if variable is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", variable)
    if printed is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{printed}\\n'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    architecture.gpu_architectures.cache_clear()
    try:
        assert architecture.extension_architectures() == expected
    finally:
        architecture.gpu_architectures.cache_clear()
