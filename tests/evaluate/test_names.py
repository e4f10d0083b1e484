"""File names of candidates that were written for the public benchmark mean the problems that they answer."""

from pathlib import Path

import pytest

from peerlane.common.problem_files import slugs
from peerlane.errors import CandidateNotFound
from peerlane.evaluate import discover
from peerlane.evaluate.problem_names import OLDER_NAMES, PUBLIC_SLUGS, resolve


def test_a_folder_of_old_numbers_and_public_slugs_is_resolved(tmp_path: Path) -> None:
    """Every older name in one folder, every name of today in another: each file is its problem's, and what was removed is skipped."""
    older, today = tmp_path / "older", tmp_path / "today"
    older.mkdir()
    today.mkdir()
    for number, slug in OLDER_NAMES:
        (older / f"{number}_{slug}_cuda.py").touch()
    for number, slug in (dict(slugs()) | dict(PUBLIC_SLUGS)).items():
        (today / f"{number}_{slug}_triton.py").touch()
    notes: list[str] = []
    found = {item.name: item.problem for item in discover([str(older)], notes.append)}
    assert found == {f"{number}_{slug}_cuda": problem for (number, slug), problem in OLDER_NAMES.items() if problem is not None}
    assert sum("was removed from the public benchmark" in note and note.endswith("it is skipped") for note in notes) == 1
    assert len(notes) == sum(problem != number for (number, _), problem in OLDER_NAMES.items())
    notes.clear()
    assert [item.problem for item in discover([str(today)], notes.append)] == list(slugs())
    assert notes == []


@pytest.mark.parametrize(
    ("stem", "problem", "said"),
    [
        ("13_gemm_allreduce_cuda", 13, ""),
        ("p013_mine", 13, ""),
        ("4_reduce_scatter_v2_cuda", 4, ""),
        ("88_conv2d_boundary_exchange_cuda", 87, "88_conv2d_boundary_exchange is problem 87 here (conv2d_patch_parallel_halo)"),
        ("55_ring_attention_v2_cuda", 54, "is problem 54 here"),
        ("55_ring_attention_tp_cuda", 55, ""),
        ("12_gemm_allgather_cuda", 12, ""),
        ("14_gemm_allgather_cuda", 14, ""),
        ("3_ddp_cuda", 40, "3_ddp is problem 40 here"),
        ("90_unknown_cuda", None, "there is no problem 90"),
    ],
)
def test_number_and_slug(stem: str, problem: int | None, said: str) -> None:
    found = resolve(stem, slugs())
    assert found is not None and found.problem == problem and (said in found.note if said else found.note == "")


def test_a_file_that_means_no_problem_is_skipped(tmp_path: Path) -> None:
    for name in ("47_fsdp_adamw_sharded_cuda", "1_allreduce_cuda"):
        (tmp_path / f"{name}.py").touch()
    notes: list[str] = []
    assert [item.problem for item in discover(sorted(map(str, tmp_path.iterdir())), notes.append)] == [1]
    assert len(notes) == 1
    with pytest.raises(CandidateNotFound, match="was removed"):
        discover([str(tmp_path / "47_fsdp_adamw_sharded_cuda.py")])
