"""The complete kernel on the page about rows is right, and the calls that it lists are those of the headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from device.judged import cases, judge, require_correct
from peerlane import problems
from peerlane.device.host.jit import INCLUDE_DIR

PAGE = (Path(__file__).parents[2] / "docs" / "device" / "rows.md").read_text()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = re.search(r"<!-- kernel:begin -->\n```python\n(.*?)```\n<!-- kernel:end -->", PAGE, re.DOTALL)
    assert found
    path = tmp_path / "18_mine_cuda.py"
    path.write_text(found[1])
    return path


@pytest.mark.parametrize("number", [0, 1])
def test_the_page_s_kernel_is_right_and_clean(file: Path, number: int) -> None:
    require_correct(judge(file, 18, cases(problems.get(18), 2)[number]))


def test_a_pull_that_is_left_out_is_found(file: Path) -> None:
    text = file.read_text()
    assert "sums.pull(row, square_sum(row), [](float a, float b) { return a + b; })" in text
    file.write_text(text.replace("sums.pull(row, square_sum(row), [](float a, float b) { return a + b; })", "square_sum(row) * WORLD_SIZE"))
    judged = judge(file, 18, cases(problems.get(18), 2)[0])
    assert not judged.correct


def test_every_call_of_the_page_is_in_the_headers() -> None:
    headers = "".join((INCLUDE_DIR / "peerlane" / name).read_text() for name in ("rows.cuh", "peers/packet.cuh"))
    calls = re.findall(r"^\| `(\w+)\(([^`]*)\)` \| a (?:warp|thread) \|", PAGE, re.MULTILINE)
    assert len(calls) == 8
    for name, parameters in calls:
        assert f"{name}({parameters})" in headers, name
    for name in re.findall(r"^\| `(\w+)[<(]", PAGE, re.MULTILINE):
        assert re.search(rf"\b{name}\(", headers), name
