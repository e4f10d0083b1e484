"""Triton's kernels, and plain CUDA with host code in Python, on emulated ranks: right ones are right and clean, and faults are found with
both source lines."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import peerlane
from device import raw_cuda_kernels, symmetric_kernels, triton_kernels
from peerlane.emulator.findings import Finding
from peerlane.emulator.host_libraries import launches_differ
from peerlane.emulator.ranks import EmulatedRanks, RankFailure
from peerlane.emulator.sequence import findings
from peerlane.emulator.solution_run import run

TRITON = ("one_shot", "two_shot", "gather_gemm", "moe_push", "ring_sum")
CUDA = ("one_shot", "two_shot", "gather", "push", "ring")
RANKS = {"ring_sum": 3, "ring": 3}
"""with two, the ring has one step alone"""


def slow_but(names: Sequence[str], *quick: str, of: Sequence[ModuleType] = ()) -> list[Any]:
    """Returns the names, behind the module that they are ``of``, as parameters of a test, of which all but some are slow."""
    return [pytest.param(*of, name, marks=[] if name in quick else pytest.mark.slow) for name in names]


def raced(kernels: ModuleType, name: str, broken: int) -> tuple[list[torch.Tensor], list[Finding]]:
    """Returns what the last of two calls gave on each rank, and what was found."""
    given = kernels.inputs(name, RANKS.get(name, 2))
    world = EmulatedRanks(len(given), schedules=6 if kernels is triton_kernels else 8)
    world.load(lambda rank: kernels.solution(name, broken))
    outputs: list[torch.Tensor] = []
    try:
        for _ in range(2):
            outputs = world.call(given, lambda rank, output: output.clone())
    except RankFailure:
        outputs = []
    return outputs, findings(world.reports())


@pytest.mark.parametrize(
    ("kernels", "name"),
    [
        *slow_but(TRITON, "one_shot", "gather_gemm", "moe_push", of=[triton_kernels]),
        *slow_but(CUDA, "one_shot", "push", of=[raw_cuda_kernels]),
    ],
)
def test_a_right_kernel_is_right_and_clean(kernels: ModuleType, name: str) -> None:
    outputs, found = raced(kernels, name, 0)
    assert outputs and not found, "\n".join(map(str, found))
    for output, wanted in zip(outputs, kernels.expected(name, kernels.inputs(name, len(outputs))), strict=True):
        assert torch.equal(output, wanted)


TWINS = [
    pytest.param(triton_kernels, f"{name}-{broken}", marks=pytest.mark.slow if broken == 1 + number % 2 else pytest.mark.long)
    for number, name in enumerate(TRITON)
    for broken in (1, 2)
]
TWINS += slow_but([f"{name}-{broken}" for name in CUDA for broken in (1, 2)], "gather-2", of=[raw_cuda_kernels])


@pytest.mark.parametrize(("kernels", "twin"), TWINS)
def test_a_broken_twin_is_told_with_both_lines(kernels: ModuleType, twin: str) -> None:
    name, _, broken = twin.partition("-")
    _, found = raced(kernels, name, int(broken))
    told = [finding for finding in found if finding.kind in ("race", "lost_update")]
    assert told, [str(finding) for finding in found]
    file = f"{kernels.__name__.rpartition('.')[2]}.py"
    assert any(str(finding).count(f"{file}:") >= 2 for finding in told), "\n".join(map(str, told))


def symmetric(broken: int, barrier: str = "handle") -> tuple[list[torch.Tensor], list[Finding]]:
    """Returns what calls with other numbers each gave on two ranks, and what was found."""
    world = EmulatedRanks(2, schedules=6)
    world.load(lambda rank: symmetric_kernels.solution(broken, barrier))
    outputs: list[torch.Tensor] = []
    for call in range(3):
        outputs = world.call([(torch.arange(100.0) + rank + call,) for rank in range(2)], lambda rank, output: output.clone())
    return outputs, findings(world.reports())


@pytest.mark.parametrize("barrier", ["handle", "dist.barrier", pytest.param("dist.all_reduce", marks=pytest.mark.slow)])
def test_symmetric_memory_of_torch_is_right_and_clean(barrier: str) -> None:
    outputs, found = symmetric(0, barrier)
    assert not found, "\n".join(map(str, found))
    assert all(torch.equal(output, 2 * torch.arange(100.0) + 5) for output in outputs)


@pytest.mark.parametrize("barrier", ["handle", "dist.barrier"])
@pytest.mark.parametrize("broken", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_missing_barrier_is_told_with_the_copy(broken: int, barrier: str) -> None:
    _, found = symmetric(broken, barrier)
    told = [str(finding) for finding in found if finding.kind == "race"]
    assert any("copy_ of host code: symmetric_kernels.py:" in text for text in told), [str(finding) for finding in found]


def of_operators(what: str, broken: int) -> list[Finding]:
    world = EmulatedRanks(3)
    world.load(lambda rank: symmetric_kernels.by_operators(what, broken))
    for call in range(3):
        world.call([(torch.arange(4.0) + 4 * rank + call,) for rank in range(3)], lambda rank, output: output.clone())
    return findings(world.reports())


READS, WRITES = ("cat", "replayed", "indexed", "tolist"), ("copy_", "index_put_", "scatter_", "out=")


@pytest.mark.parametrize("what", [*READS, *WRITES, "beside"])
def test_operators_of_torch_behind_barriers_are_clean(what: str) -> None:
    found = of_operators(what, 0)
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(("what", "broken"), [*((what, broken) for what in READS for broken in (1, 2)), *((what, 3) for what in WRITES)])
def test_what_operators_of_torch_use_takes_part_in_races(what: str, broken: int) -> None:
    """Without a barrier, or with ranks that write the same columns."""
    told = [str(finding) for finding in of_operators(what, broken) if finding.kind == "race"]
    name = {"indexed": "index", "out=": "add", "replayed": "cat"}.get(what, what)
    assert any(f"{name} of host code: symmetric_kernels.py:" in text for text in told), told


@pytest.mark.parametrize("broken", [1, 2])
def test_what_operators_use_of_no_shared_bytes_is_no_race(broken: int) -> None:
    assert not of_operators("beside", broken)


def test_host_code_uses_bytes_at_any_place() -> None:
    world = EmulatedRanks(2)
    world.load(lambda rank: symmetric_kernels.behind_one_byte)
    given = [torch.arange(21, dtype=torch.uint8) + rank for rank in range(2)]
    assert all(torch.equal(output, torch.cat(given)) for output in world.call([(x,) for x in given], lambda rank, output: output))
    assert not findings(world.reports())


def test_a_triton_candidate_of_the_prompts_runs_as_written() -> None:
    file = Path(peerlane.__file__).parent / "generate/prompts/examples/difference_triton.py"
    given = [torch.arange(300.0) * (rank + 1) for rank in range(2)]
    outcome = run(file, [[(x,) for x in given]] * 2, schedules=3)
    assert outcome.failure is None and not outcome.findings
    assert all(torch.equal(output, given[rank] - given[rank - 1]) for rank, output in enumerate(outcome.outputs[-1]))
    assert outcome.kernels and "registers" in str(outcome.kernels[0])


@pytest.mark.parametrize("root", [0, 1])
def test_a_rank_launches_what_others_do_not(root: int) -> None:
    world = EmulatedRanks(2)
    world.load(lambda rank: symmetric_kernels.different_launches(root, "right"))
    outputs = world.call([(torch.ones(8) * (rank + 1),) for rank in range(2)], lambda rank, output: output.tolist())
    assert outputs == [[3.0 if rank == root else rank + 1.0] * 8 for rank in range(2)]
    assert not findings(world.reports())


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_caller_reads_an_output_until_the_next_call(buffers: int) -> None:
    world = EmulatedRanks(2)
    world.load(lambda rank: symmetric_kernels.outputs_by_turns(buffers))
    for call in range(4):
        outputs = world.call([(torch.ones(8),)] * 2, lambda rank, output: output.tolist())
        assert outputs == [[2.0 ** (1 + call // buffers)] * 8] * 2
    assert {finding.kind for finding in findings(world.reports())} == ({"race"} if buffers == 1 else set())


def test_different_kernels_of_ranks_race() -> None:
    world = EmulatedRanks(2)
    world.load(lambda rank: symmetric_kernels.different_launches(1, "race"))
    world.call([(torch.ones(8),)] * 2, lambda rank, output: output)
    assert {finding.kind for finding in findings(world.reports())} >= {"race"}


def test_a_kernel_that_waits_for_no_other_launch_is_not_judged() -> None:
    world = EmulatedRanks(2)
    world.load(lambda rank: symmetric_kernels.different_launches(1, "deadlock"))
    with pytest.raises(RankFailure) as raised:
        world.call([(torch.ones(8),)] * 2, lambda rank, output: output)
    assert launches_differ(str(raised.value.error), "import triton")
    assert not launches_differ(str(raised.value.error), "from peerlane.device import Arena")
