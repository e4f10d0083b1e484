"""``@peerlane.race``: tests of kernels in other projects, on runners without a GPU."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import peerlane
from peerlane.device import group_of
from peerlane.testing import RaceFound

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "test-in-ci.md").read_text()
SIGNAL = "    peers.signal_all(0, epoch);  // the data is there\n"
FIRST_WAIT = "        if (rank != arena.rank) peers.wait(rank, 0, epoch);\n"


def run_pytest(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_kernels.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "peerlane.pytest_plugin", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


def on_page(part: str) -> str:
    found = re.search(rf"<!-- {part}:begin -->\n```\w+\n(.*?)```\n<!-- {part}:end -->", PAGE, re.DOTALL)
    assert found
    return found[1]


def test_the_page_s_test_passes_and_its_twins_fail_with_lines(tmp_path: Path) -> None:
    text = on_page("test")
    for name, line, instead in (("no_signal", SIGNAL, ""), ("no_wait", FIRST_WAIT, "        ;\n")):
        assert line in text
        twin = text.replace(line, instead).replace("world_size=4", "world_size=2").replace("torch.arange(4.0)", "torch.arange(2.0)")
        (tmp_path / f"test_{name}.py").write_text(twin.replace(".expand(4, 8)", ".expand(2, 8)"))
    done = run_pytest(tmp_path, text, "--race-schedules", "4")
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    assert "deadlock in gather" in done.stdout and "race: landing+" in done.stdout
    reads = text[: text.index("copy_bytes(block, args.y")].count("\n") + 1
    assert f"test_no_wait.py:{reads}" in done.stdout
    assert "kernels on emulated ranks" in done.stdout and re.search(r"gather: \d+ registers", done.stdout)


def test_notes_are_warnings_of_a_test(tmp_path: Path) -> None:
    text = on_page("test")
    flag, at = "flag_of<WORLD_SIZE>(arena, args.flags, ", text.index("    peers.acknowledge_all(1")
    relaxed = f"""    __syncthreads();
    for (int rank = 0; threadIdx.x == 0 && rank < WORLD_SIZE; ++rank)
        if (rank != arena.rank) ptx::store_relaxed_system({flag}rank, 1, arena.rank), epoch);
    for (int rank = 0; threadIdx.x == 0 && rank < WORLD_SIZE; ++rank)
        if (rank != arena.rank) while (ptx::load_relaxed_system({flag}arena.rank, 1, rank)) < epoch) {{}}
"""
    done = run_pytest(tmp_path, text[:at] + relaxed + text[text.index('}\n"""\n', at) :], "--race-schedules", "2")
    assert "1 passed" in done.stdout and "RaceNote: launch_boundary" in done.stdout, done.stdout


def test_what_a_rank_raises_fails_the_test_with_its_rank() -> None:
    @peerlane.race(world_size=3)
    def fails(wrong: int) -> None:
        assert group_of().rank != wrong, "this rank is wrong"

    with pytest.raises(AssertionError, match="this rank is wrong") as raised:
        fails(1)
    assert raised.value.__notes__ == ["on rank 1 of 3 emulated ranks"] and not isinstance(raised.value, RaceFound)
    fails(7)


def test_the_plug_in_is_found_by_pytest_and_loads_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"peerlane.pytest_plugin": "peerlane.pytest_plugin"}
    code = "import sys, peerlane.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_workflow_s_options_exist(tmp_path: Path) -> None:
    (command,) = re.findall(r"run: pytest tests/kernels (.*)", on_page("workflow"))
    options = re.findall(r"--[\w-]+", command)
    said = run_pytest(tmp_path, "", "--help").stdout
    assert options and all(option in said for option in options)
