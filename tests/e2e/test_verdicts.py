"""Every broken example gets the verdict that it is made for, and the good candidate after it is not affected."""

import os
import time
from pathlib import Path

import pytest
import torch

from e2e.runs import DEADLINES, EXAMPLES, PATIENT, judge, marked, marked_processes
from e2e.runs import GOOD as GOOD_ONE
from peerlane.cli.demo import can_run, needs_gpu
from peerlane.cli.expectations import read_expectation
from peerlane.common.toolkit import find_nvcc
from peerlane.evaluate import Result, discover
from representatives import first

RUN = f"verdicts-{os.getpid()}"  # marks this run's processes

BROKEN = [path for path in sorted((EXAMPLES / "broken").glob("*.py")) if can_run(read_expectation(path), "cpu")]
QUICK = {
    "1_collective_skipped_pytorch",
    "1_exits_with_status_0_pytorch",
    "1_forges_messages_pytorch",
    "1_modifies_input_pytorch",
    "1_raises_on_one_rank_pytorch",
    "1_returns_nan_pytorch",
    "1_right_on_rank_0_only_pytorch",
}
"""One of each verdict, for every change; the others are slow."""
GOOD = sorted(
    candidate.path
    for candidate in discover([str(EXAMPLES / folder) for folder in ("pytorch", "triton", "libraries")])
    if candidate.path is not None and not needs_gpu(candidate)
)
WAITS_S = {"1_endless_loop_pytorch": DEADLINES.first_call, "1_collective_skipped_pytorch": DEADLINES.first_call}
WAITS_S |= {"1_endless_loop_at_exit_pytorch": DEADLINES.exit}
PHASES = {
    "1_endless_loop_pytorch": "first_call",
    "1_collective_skipped_pytorch": "first_call",
    "1_endless_loop_at_exit_pytorch": "exit",
    "1_raises_at_import_pytorch": "import",
    "1_forges_messages_pytorch": "first_call",
    "1_raises_on_one_rank_pytorch": "first_call",
}
RANKS = {"1_raises_on_one_rank_pytorch": 1, "1_killed_by_signal_pytorch": 1, "1_right_on_rank_0_only_pytorch": 1}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, tuple[Result, Result]]:
    """By name of the chosen broken example: its result, and that of the next good candidate, behind every third. All from one run."""
    whole = any(item.get_closest_marker("slow") for item in request.session.items if item.path == Path(__file__))
    due = [path for path in BROKEN if whole or path.stem in QUICK]
    with marked(RUN):
        run = judge(*(path for first in range(0, len(due), 3) for path in (*due[first : first + 3], GOOD_ONE)))
        assert marked_processes(RUN) == []
    found, good = {}, run[-1]
    for result in reversed(run):
        good = result if result.candidate.name == GOOD_ONE.stem else good
        found[result.candidate.name] = (result, good)
    return found


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.slow, id=path.stem) for path in BROKEN]
)
def test_broken_candidate(path: Path, results: dict[str, tuple[Result, Result]]) -> None:
    broken, good = results[path.stem]
    assert broken.verdict.kind in read_expectation(path).on("cpu"), broken.verdict
    assert broken.verdict.reason.strip()
    assert good.correct, f"after {path.stem}: {good.verdict}"
    if path.stem in PHASES:
        assert broken.verdict.phase == PHASES[path.stem]  # type: ignore[union-attr]
    if path.stem in RANKS:
        assert broken.verdict.rank == RANKS[path.stem]  # type: ignore[union-attr]
    here_s = max(1.0, sum(good.stage_seconds.values()))  # what an evaluation without waits takes, on this machine at this time
    assert sum(broken.stage_seconds.values()) < WAITS_S.get(path.stem, 0.0) + 5.0 * here_s, "a wait was not cut short"


def test_output_of_a_failure_is_kept(results: dict[str, tuple[Result, Result]]) -> None:
    assert '"verdict": "correct"' in results["1_exits_with_status_0_pytorch"][0].log_tail


@pytest.mark.parametrize("folder", first(["pytorch", "triton", "libraries"]))
def test_good_examples(folder: str) -> None:
    files = [path for path in GOOD if path.parent.name == folder]
    for path, result in zip(files, judge(*files, deadlines=PATIENT), strict=True):
        assert result.correct, result.verdict
        assert ("aliased_output" in result.flags) == (result.candidate.name == "8_alltoall_pytorch")
        assert result.candidate.backend == path.stem.rsplit("_", 1)[-1]
        assert {item.status for item in result.speed} == {"not_measured"}
        assert all(item.timed_slots == 0 and item.slots > 0 for item in result.correctness)
        assert result.track == "open" and result.audit is not None and result.audit.operators
        assert [(item.name, item.confidence) for item in result.mechanisms] == [("gloo", "seen")]


ON_CPU = {
    "1_syntax_cuda": ("import cupy\ndef solution(:\n", "import_error", "SyntaxError"),
    "1_name_cuda": ("from peerlane.device import Kernel, cuda_graphs\n", "import_error", "cannot import name"),
    "1_no_solution_cuda": ("import peerlane.device\n", "import_error", "no function named solution"),
    "1_syntax_without_marks_cuda": ("def solution(:\n", "import_error", "SyntaxError"),
    "1_lazy_cuda": ("from peerlane.device import compile_cubin\ndef solution(x): compile_cubin('no C++')\n", "not_run", "not compiled"),
    "1_at_import_cuda": (
        "from torch.utils.cpp_extension import load_inline\n"
        "kernels = load_inline('x', '', 'no C++', build_directory='.')\n"
        "def solution(x): kernels.f(x)\n",
        *(("build_error", "x.cu(1): error") if find_nvcc() and torch.version.cuda is None else ("not_run", "its import here ended in")),
    ),
    "1_calls_cuda": (
        "import torch\ndef solution(x, **_): torch.empty(1, device='cuda')\n",  # no CUDA code of its own, whatever its name says
        "not_run",
        "Torch not compiled with CUDA" if torch.version.cuda is None else "CUDA",
    ),
    "1_stream_at_import_pytorch": ("import torch\nSTREAM = torch.cuda.Stream()\n", "not_run", "needs a GPU: "),
    "1_parses_options_pytorch": (f"{GOOD_ONE.read_text()}import argparse\nargparse.ArgumentParser().parse_args()\n", "correct", "right"),
    "1_keeps_a_pool_pytorch": (
        f"{GOOD_ONE.read_text()}import multiprocessing\nfrom concurrent.futures import ProcessPoolExecutor\n"
        "POOL = ProcessPoolExecutor(1, multiprocessing.get_context('spawn'))\nassert POOL.submit(pow, 2, 3).result() == 8\n",
        *("correct", "right"),
    ),
    "1_more_parameters_pytorch": (
        "def solution(x, rank): pass\n",
        "runtime_error",
        "'rank'; it is called by position, as solution(tensor)",
    ),
    "1_other_type_error_pytorch": ("def solution(x): len(1)\n", "runtime_error", "object of type 'int' has no len()"),
    "1_plain_cuda": ((EXAMPLES / "pytorch" / "1_allreduce_pytorch.py").read_text(), "correct", "right"),
}


def test_cuda_candidates_on_cpu(tmp_path: Path) -> None:
    """What can be found without a GPU is reported, and no more is claimed than was tried."""
    for name, (source, *_) in ON_CPU.items():
        (tmp_path / f"{name}.py").write_text(source)
    results = {result.candidate.name: result for result in judge(*(tmp_path / f"{name}.py" for name in ON_CPU))}
    for name, (_, kind, words) in ON_CPU.items():
        assert results[name].verdict.kind == kind and words in results[name].verdict.reason, results[name].verdict
    assert getattr(results["1_syntax_cuda"].verdict, "phase", "") == "import"


def test_four_ranks() -> None:
    broken = EXAMPLES / "broken" / "1_right_on_rank_0_only_pytorch.py"
    begin = time.monotonic()
    good, wrong, stuck = judge(GOOD_ONE, broken, EXAMPLES / "broken" / "1_collective_skipped_pytorch.py", world_sizes=(4,))
    assert good.correct, good.verdict
    assert wrong.verdict.kind == "wrong_result" and set(wrong.verdict.wrong_ranks) <= {1, 2, 3}
    assert stuck.verdict.kind == "hang" and set(stuck.verdict.ranks) <= {0, 2, 3}
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("path", sorted((EXAMPLES / "broken").glob("*.py")), ids=lambda path: path.stem)
def test_expectation_can_be_read(path: Path) -> None:
    expectation = read_expectation(path)
    assert expectation.cuda or expectation.cpu
