"""Triton's kernels on emulated ranks: right ones are right and clean, and faults are found with both source lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from device import triton_kernels as kernels
from peerlane.device.emulator.findings import Finding
from peerlane.device.emulator.ranks import EmulatedRanks, RankFailure
from peerlane.device.emulator.sequence import findings

NAMES = ("one_shot", "two_shot", "gather_gemm", "moe_push", "ring_sum")
CALLS = 2
RANKS = {"ring_sum": 3}
"""with two, the ring has one step alone"""


def raced(name: str, broken: int, schedules: int = 6) -> tuple[list[torch.Tensor], list[Finding]]:
    """Returns what the last call gave on each rank, and what was found."""
    given = kernels.inputs(name, RANKS.get(name, 2))
    world = EmulatedRanks(len(given), schedules=schedules)
    world.load(lambda rank: kernels.solution(name, broken))
    outputs: list[torch.Tensor] = []
    try:
        for _ in range(CALLS):
            outputs = world.call(given, lambda rank, output: output.clone())
    except RankFailure:
        outputs = []
    return outputs, findings(world.reports())


@pytest.mark.parametrize("name", NAMES)
def test_a_right_triton_kernel_is_right_and_clean(name: str) -> None:
    outputs, found = raced(name, 0)
    assert outputs and not found, "\n".join(map(str, found))
    for output, wanted in zip(outputs, kernels.expected(name, kernels.inputs(name, len(outputs))), strict=True):
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("broken", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_broken_twin_is_told_with_both_lines(name: str, broken: int) -> None:
    _, found = raced(name, broken)
    told = [finding for finding in found if finding.kind in ("race", "lost_update")]
    assert told, [str(finding) for finding in found]
    file = Path(kernels.__file__).name
    assert any(str(finding).count(f"{file}:") >= 2 for finding in told), "\n".join(map(str, told))
