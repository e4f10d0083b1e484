"""Dispatch and combination of experts' rows: right on emulated ranks, compiled for GPUs, and caught with one line lost."""

from __future__ import annotations

import pytest
import torch

from device.judged import cases, judge, require_correct
from peerlane import problems, solutions
from peerlane.device import compile_cubin, moe
from peerlane.device.declare import DeclaredKernel
from peerlane.device.kernels import ELEMENT_TYPES
from peerlane.evaluate.correctness.emulated import EmulatedJudgement

NUMBERS = {"dispatch": 28, "combine": 29}
KERNELS = {"dispatch": "MOE_DISPATCH", "combine": "MOE_COMBINE"}


def judged(number: int, label: str, world_size: int, schedules: int = 2) -> EmulatedJudgement:
    case = next(case for case in cases(problems.get(number), world_size) if case.label == label)
    return judge(solutions.files()[number], number, case, schedules=schedules)


@pytest.mark.parametrize(
    ("number", "label", "world_size"),
    [
        (28, "duplicates_bf16", 2),
        (29, "duplicates_bf16", 2),
        *(pytest.param(number, "strided_group_bf16", 4, marks=pytest.mark.slow) for number in (28, 29)),
        pytest.param(29, "renamed_tokens_fp32", 4, marks=pytest.mark.slow),
    ],
)
def test_rows_go_to_their_experts_and_come_back(number: int, label: str, world_size: int) -> None:
    require_correct(judged(number, label, world_size))


@pytest.mark.parametrize("kernel", KERNELS.values())
def test_the_kernels_compile(kernel: str) -> None:
    types = {"ROW": torch.bfloat16, "WEIGHT": torch.float32, "RESULT": torch.float32}
    defines = {"WORLD_SIZE": 8, "MAP": "u8", **{name: ELEMENT_TYPES[dtype] for name, dtype in types.items()}}
    compile_cubin(getattr(moe, kernel).source, defines=defines)


LOST = {
    "places of rows that nobody has told of": ("dispatch", "    peers.wait_all(0, epoch);", {"race"}),
    "rows before they are numbered": ("dispatch", "    meet_blocks(peers, arena, 1 + gridDim.x, epoch);\n", {"race"}),
    "an end before all rows have come": ("dispatch", "    meet_ranks(peers, arena, 1 + 2 * gridDim.x, epoch);\n", {"race"}),
    "lists before they are empty": ("combine", "    meet_blocks(peers, arena, 1, epoch);\n", {"race"}),
    "sums before all rows are back": ("combine", "    meet_ranks(peers, arena, 1 + gridDim.x, epoch);\n", {"race"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOST)
def test_a_kernel_that_has_lost_a_line_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way, line, kinds = LOST[name]
    given: DeclaredKernel = getattr(moe, KERNELS[way])
    source = str(given._given)
    assert source.count(line) == 1
    monkeypatch.setattr(moe, KERNELS[way], DeclaredKernel(given.name, source.replace(line, ""), **given.fields))
    outcome = judged(NUMBERS[way], "duplicates_bf16", 2, schedules=12).outcome
    assert {finding.kind for finding in outcome.findings} & kinds
