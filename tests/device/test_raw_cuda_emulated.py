"""Plain CUDA with host code in Python on emulated ranks: right kernels are right and clean, and faults are found with both source lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from device import raw_cuda_kernels as kernels
from device.test_triton_emulated import slow_but
from peerlane.emulator.findings import Finding
from peerlane.emulator.ranks import EmulatedRanks, RankFailure
from peerlane.emulator.sequence import findings

NAMES = ("one_shot", "two_shot", "gather", "push", "ring")
RANKS = {"ring": 3}
"""with two, the ring has one step alone"""


def raced(name: str, broken: int) -> tuple[list[torch.Tensor], list[Finding]]:
    """Returns what the last of two calls gave on each rank, and what was found."""
    given = kernels.inputs(name, RANKS.get(name, 2))
    world = EmulatedRanks(len(given), schedules=8)
    world.load(lambda rank: kernels.solution(name, broken))
    outputs: list[torch.Tensor] = []
    try:
        for _ in range(2):
            outputs = world.call(given, lambda rank, output: output.clone())
    except RankFailure:
        outputs = []
    return outputs, findings(world.reports())


@pytest.mark.parametrize("name", slow_but(NAMES, "one_shot", "push"))
def test_a_right_cuda_kernel_is_right_and_clean(name: str) -> None:
    outputs, found = raced(name, 0)
    assert outputs and not found, "\n".join(map(str, found))
    for output, wanted in zip(outputs, kernels.expected(name, kernels.inputs(name, len(outputs))), strict=True):
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("twin", slow_but([f"{name}-{broken}" for name in NAMES for broken in (1, 2)], "gather-2"))
def test_a_broken_twin_is_told_with_both_lines(twin: str) -> None:
    name, _, broken = twin.partition("-")
    _, found = raced(name, int(broken))
    told = [finding for finding in found if finding.kind in ("race", "lost_update")]
    assert told, [str(finding) for finding in found]
    file = Path(kernels.__file__).name
    assert any(str(finding).count(f"{file}:") >= 2 for finding in told), "\n".join(map(str, told))
