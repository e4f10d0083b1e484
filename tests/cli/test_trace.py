"""``peerlane trace`` on CPU ranks, from the command to the files."""

import json
from pathlib import Path

import pytest

from command_line import Peerlane

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_both_sides_are_traced_into_one_file_and_one_picture(tmp_path: Path, peerlane: Peerlane) -> None:
    candidate = ROOT / "examples/pytorch/13_gemm_allreduce_pytorch.py"
    asked = ["trace", str(candidate), "--device", "cpu", "--preset", "small", "--out", str(tmp_path), "--json"]
    said = json.loads(peerlane(*asked).out)
    assert [side["candidate"] for side in said["sides"]] == ["reference", "13_gemm_allreduce_pytorch"]
    assert all(side["communicating"] > 0 and side["us_per_call"] > 0 for side in said["sides"])
    events = json.loads(Path(said["trace"]).read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 1000, 1001}
    assert any(event["cat"] == "communication" for event in events if event["ph"] == "X")
    assert "13_gemm_allreduce_pytorch:" in Path(said["picture"]).read_text()


@pytest.mark.slow
def test_without_a_timeline_the_reference_and_the_reason_remain(tmp_path: Path, peerlane: Peerlane) -> None:
    broken = tmp_path / "1_broken_pytorch.py"
    broken.write_text("def solution(tensor):\n    return tensor * 0\n")
    asked = ["trace", str(broken), "--device", "cpu", "--preset", "small", "--out", str(tmp_path / "out"), "--json"]
    result = peerlane(*asked, code=3)
    assert "no timeline of 1_broken_pytorch: wrong" in result.err
    assert [side["candidate"] for side in json.loads(result.out)["sides"]] == ["reference"]


def test_a_folder_of_candidates_is_refused(tmp_path: Path, peerlane: Peerlane) -> None:
    assert "expected one file" in peerlane("trace", str(ROOT / "examples/pytorch"), "--device", "cpu", code=2).err
