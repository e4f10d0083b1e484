"""The copy of the package for machines with one GPU can be made of the package as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpu import on_one_gpu


@pytest.mark.parametrize("ranks", sorted(on_one_gpu.CHANGES))
def test_a_changed_copy_can_be_made_and_imported(ranks: int, tmp_path: Path) -> None:
    on_one_gpu.changed_copy(ranks, tmp_path)
    for name in on_one_gpu.CHANGES[ranks]:
        assert (tmp_path / "peerlane" / name).read_text() != (on_one_gpu.PACKAGE / name).read_text()
    modules = ", ".join(f"peerlane.{name.removesuffix('.py').replace('/', '.')}" for name in on_one_gpu.CHANGES[ranks])
    code = f"import {modules}; from peerlane.selftest import table; table.load(); print(peerlane.__file__)"
    found = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(tmp_path)


def test_a_package_that_has_changed_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(on_one_gpu.CHANGES, 1, {"settings.py": {"no such text": ""}})
    with pytest.raises(LookupError, match=r"settings\.py holds 'no such text' 0 times"):
        on_one_gpu.changed_copy(1, tmp_path)
