"""The tutorial's kernel is compiled for the GPU and run on the CPU, as it stands on the page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peerlane.device import compile_cubin
from peerlane.device.host.resources import resources

PAGE = (Path(__file__).parents[2] / "docs" / "device" / "README.md").read_text()


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """The page's pieces of CUDA, one after the other."""
    file = tmp_path / "kernel.cu"
    file.write_text("\n".join(re.findall(r"^```cuda\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)))
    return file


def python(part: str) -> str:
    """A piece of Python, by its name on the page."""
    found = re.search(rf"<!-- {part}:begin -->\n```python\n(.*?)```\n<!-- {part}:end -->", PAGE, re.DOTALL)
    assert found
    return found[1]


def test_the_tutorials_kernel_compiles_for_the_gpu(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(kernel.parent)
    declared: dict[str, Any] = {}
    exec(python("declared"), declared)
    source = declared["GEMM_ALL_GATHER"].source
    assert "gemm_all_gather" in resources(compile_cubin(source, defines={"WORLD_SIZE": declared["W"]}))


def test_the_tutorials_ranks_find_nothing(kernel: Path) -> None:
    code = python("declared") + python("emulated")
    done = subprocess.run([sys.executable, "-c", code], cwd=kernel.parent, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (said,) = done.stdout.splitlines()
    assert said == "gemm_all_gather, 2 ranks: 5 schedules, seed 0: nothing found" and said in PAGE
