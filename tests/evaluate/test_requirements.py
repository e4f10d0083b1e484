"""What a candidate needs that this machine lacks, as its source and its verdict show."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerlane import problems
from peerlane.evaluate.candidates import candidate_text
from peerlane.evaluate.requirements import missing_before, missing_behind
from peerlane.settings import passes_to_ranks
from sample_results import wrong_result

KITTENS = "from utils.parallelkittens_runtime import get_or_create_parallel_tensor as t, get_or_create_barrier\n"


@pytest.mark.parametrize(
    ("root", "multicast", "call", "missing"),
    [
        (False, "0", "", "THUNDERKITTENS_ROOT"),
        (True, "1", "get_or_create_barrier(ext, num_devices=4)", "multicast"),
        (True, "1", "u.create_parallel_tensor(ext, (8,))", "multicast"),
        (True, "1", "u.create_parallel_tensor(ext, (8,), multicast=False)", None),
        (True, "0", "get_or_create_barrier(ext, num_devices=4)", None),
    ],
)
def test_what_thunderkittens_needs(
    root: bool, multicast: str, call: str, missing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "include").mkdir()
    monkeypatch.setenv("THUNDERKITTENS_ROOT", str(tmp_path if root else tmp_path / "absent"))
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", multicast)
    found = missing_before(KITTENS + call)
    assert found is None if missing is None else missing in str(found)
    assert missing_before(call) is None, "it does not use ThunderKittens"
    assert passes_to_ranks("THUNDERKITTENS_ROOT")


@pytest.mark.parametrize(
    ("number", "name", "source", "wrong_ranks", "to_blame"),
    [
        (19, "a_triton", "y = x.to(tl.float8e4nv)", (0, 1), "Triton's interpreter"),
        (19, "a_pytorch", "y = x.to(torch.float8_e4m3fn)", (0, 1), None),
        (19, "a_triton", "y = x + 1", (0, 1), None),
        (4, "a_pytorch", "dist.reduce(x, dst=0)", (1,), "gloo"),
        (4, "a_pytorch", "dist.reduce(x, dst=0)", (0, 1), None),
        (4, "a_pytorch", "dist.all_reduce(x)", (1,), None),
        (1, "a_pytorch", "dist.reduce(x, dst=0)", (1,), None),
    ],
)
def test_what_cpu_ranks_are_to_blame_for(number: int, name: str, source: str, wrong_ranks: tuple[int, ...], to_blame: str | None) -> None:
    verdict = wrong_result(wrong_ranks=wrong_ranks, detail="off")
    found = missing_behind(verdict, candidate_text(source, number, name), source, problems.get(number), 2)
    assert found is None if to_blame is None else to_blame in str(found) and "off" in str(found)
