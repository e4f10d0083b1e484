"""Triton's kernels, and plain CUDA with host code in Python, on emulated ranks: right ones are right and clean, and faults are found with
both source lines."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

import peerlane
from device import raw_cuda_kernels, symmetric_kernels, triton_kernels
from device.runs import Run, equal, run_call, run_calls
from peerlane.emulator.host_libraries import launches_differ
from peerlane.emulator.solution_run import run

TRITON = ("one_shot", "two_shot", "gather_gemm", "moe_push", "ring_sum")
CUDA = ("one_shot", "two_shot", "gather", "push", "ring")
RANKS = {"ring_sum": 3, "ring": 3}
"""with two, the ring has one step alone"""


def raced(kernels: ModuleType, name: str, broken: int) -> Run:
    """Two calls of a kernel."""
    given = kernels.inputs(name, RANKS.get(name, 2))
    return run_calls(lambda rank: kernels.solution(name, broken), [given] * 2, schedules=6 if kernels is triton_kernels else 8)


KERNELS = [*((triton_kernels, name) for name in TRITON), *((raw_cuda_kernels, name) for name in CUDA)]


@pytest.mark.parametrize(("kernels", "name"), KERNELS)
def test_a_right_kernel_is_right_and_clean(kernels: ModuleType, name: str) -> None:
    outputs = raced(kernels, name, 0).clean()[-1]
    assert equal(outputs, kernels.expected(name, kernels.inputs(name, len(outputs))))


TWINS = [
    pytest.param(triton_kernels, f"{name}-{broken}", marks=() if broken == 1 + number % 2 else pytest.mark.long)
    for number, name in enumerate(TRITON)
    for broken in (1, 2)
]
TWINS += [pytest.param(raw_cuda_kernels, f"{name}-{broken}") for name in CUDA for broken in (1, 2)]


@pytest.mark.parametrize(("kernels", "twin"), TWINS)
def test_a_broken_twin_is_told_with_both_lines(kernels: ModuleType, twin: str) -> None:
    name, _, broken = twin.partition("-")
    told = [finding for finding in raced(kernels, name, int(broken)).findings if finding.kind in ("race", "lost_update")]
    file = f"{kernels.__name__.rpartition('.')[2]}.py"
    assert any(str(finding).count(f"{file}:") >= 2 for finding in told), "\n".join(map(str, told))


def symmetric(broken: int, barrier: str = "handle") -> Run:
    """Calls with other numbers each, on two ranks."""
    calls = [[(torch.arange(100.0) + rank + call,) for rank in range(2)] for call in range(3)]
    return run_calls(lambda rank: symmetric_kernels.solution(broken, barrier), calls, schedules=6)


@pytest.mark.parametrize("barrier", ["handle", "dist.barrier", "dist.all_reduce"])
def test_symmetric_memory_of_torch_is_right_and_clean(barrier: str) -> None:
    assert equal(symmetric(0, barrier).clean()[-1], [2 * torch.arange(100.0) + 5] * 2)


@pytest.mark.parametrize("barrier", ["handle", "dist.barrier"])
@pytest.mark.parametrize("broken", [1, 2])
def test_a_missing_barrier_is_told_with_the_copy(broken: int, barrier: str) -> None:
    told = symmetric(broken, barrier).races
    assert any("copy_ of host code: symmetric_kernels.py:" in text for text in told), told


def of_operators(what: str, broken: int) -> Run:
    calls = [[(torch.arange(4.0) + 4 * rank + call,) for rank in range(3)] for call in range(3)]
    return run_calls(lambda rank: symmetric_kernels.by_operators(what, broken), calls, schedules=4)


READS, WRITES = ("cat", "replayed", "indexed", "tolist"), ("copy_", "index_put_", "scatter_", "out=")


@pytest.mark.parametrize("what", [*READS, *WRITES, "beside"])
def test_operators_of_torch_behind_barriers_are_clean(what: str) -> None:
    of_operators(what, 0).clean()


@pytest.mark.parametrize(("what", "broken"), [*((what, broken) for what in READS for broken in (1, 2)), *((what, 3) for what in WRITES)])
def test_what_operators_of_torch_use_takes_part_in_races(what: str, broken: int) -> None:
    """Without a barrier, or with ranks that write the same columns."""
    told = of_operators(what, broken).races
    name = {"indexed": "index", "out=": "add", "replayed": "cat"}.get(what, what)
    assert any(f"{name} of host code: symmetric_kernels.py:" in text for text in told), told


@pytest.mark.parametrize("broken", [1, 2])
def test_what_operators_use_of_no_shared_bytes_is_no_race(broken: int) -> None:
    of_operators("beside", broken).clean()


def test_host_code_uses_bytes_at_any_place() -> None:
    given = [torch.arange(21, dtype=torch.uint8) + rank for rank in range(2)]
    assert equal(run_call(symmetric_kernels.behind_one_byte, [(x,) for x in given], schedules=4), [torch.cat(given)] * 2)


def test_a_triton_candidate_of_the_prompts_runs_as_written() -> None:
    file = Path(peerlane.__file__).parent / "generate/prompts/examples/difference_triton.py"
    given = [torch.arange(300.0) * (rank + 1) for rank in range(2)]
    outcome = run(file, [[(x,) for x in given]] * 2, schedules=3)
    assert outcome.failure is None and not outcome.findings
    assert all(torch.equal(output, given[rank] - given[rank - 1]) for rank, output in enumerate(outcome.outputs[-1]))
    assert outcome.kernels and "registers" in str(outcome.kernels[0])


def launched(root: int, what: str) -> Run:
    given = [(torch.ones(8) * (rank + 1),) for rank in range(2)]
    return run_calls(lambda rank: symmetric_kernels.different_launches(root, what), [given], schedules=4)


@pytest.mark.parametrize("root", [0, 1])
def test_a_rank_launches_what_others_do_not(root: int) -> None:
    outputs = launched(root, "right").clean()[0]
    assert [output.tolist() for output in outputs] == [[3.0 if rank == root else rank + 1.0] * 8 for rank in range(2)]


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_caller_reads_an_output_until_the_next_call(buffers: int) -> None:
    run = run_calls(lambda rank: symmetric_kernels.outputs_by_turns(buffers), [[(torch.ones(8),)] * 2] * 4, schedules=4)
    for call, outputs in enumerate(run.outputs):
        assert equal(outputs, [torch.full((8,), 2.0 ** (1 + call // buffers))] * 2)
    assert run.kinds == ({"race"} if buffers == 1 else set()) and len(run.outputs) == 4


def test_different_kernels_of_ranks_race() -> None:
    assert launched(1, "race").races


def test_a_kernel_that_waits_for_no_other_launch_is_not_judged() -> None:
    error = str(launched(1, "deadlock").failure)
    assert launches_differ(error, "import triton")
    assert not launches_differ(error, "from peerlane.device import Arena")
