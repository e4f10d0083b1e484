"""Pages agree with the code: the kernels that they show run, and their calls and lines are those of the headers."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from device.judged import cases, judge, require_correct
from peerlane import ops, problems
from peerlane.device import compile_cubin
from peerlane.device.host.jit import INCLUDE_DIR
from peerlane.device.host.resources import resources

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


KITTENS = Path(__file__).parents[2] / "docs" / "device" / "parallelkittens.md"


def lines(text: str) -> int:
    return sum(1 for line in text.splitlines() if re.sub(r"//.*", "", line).strip())


def device_code(file: str) -> str:
    (source,) = (path for rooms in (INCLUDE_DIR / "peerlane", INCLUDE_DIR.parent) for path in rooms.glob(f"*/{file}"))
    return source.read_text()


def test_rows_have_the_lines_of_their_files_and_known_operators() -> None:
    rows = [line.strip("| ").split(" | ") for line in KITTENS.read_text().split("## Item by item")[1].split("##")[0].splitlines()[4:]]
    rows = [row for row in rows if len(row) > 2]
    counted = 0
    for _, here, number, *operators in rows:
        files = re.findall(r"`(\w+\.cuh)`", here)
        if files:
            assert int(number) == sum(lines(device_code(file)) for file in files), (here, sum(lines(device_code(file)) for file in files))
            counted += 1
        assert all(hasattr(ops, name) for name in re.findall(r"`([a-z]\w+)`", "".join(operators))), operators
    assert counted > 15


TUTORIAL = (Path(__file__).parents[2] / "docs" / "device" / "README.md").read_text()


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """The page's pieces of CUDA, one after the other."""
    file = tmp_path / "kernel.cu"
    file.write_text("\n".join(re.findall(r"^```cuda\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)))
    return file


def python(part: str) -> str:
    """A piece of Python, by its name on the page."""
    found = re.search(rf"<!-- {part}:begin -->\n```python\n(.*?)```\n<!-- {part}:end -->", TUTORIAL, re.DOTALL)
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
    assert said == "gemm_all_gather, 2 ranks: 5 schedules, seed 0: nothing found" and said in TUTORIAL
