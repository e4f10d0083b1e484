"""A perceptron of two layers in one launch: right numbers, nothing unordered, and twins with one line wrong are caught."""

import math
from collections.abc import Sequence

import pytest
import torch

from device.runs import Run, run_calls
from device.twins import use_twin
from peerlane import solutions
from peerlane.device import compile_cubin
from peerlane.device.products import gemm, perceptron
from peerlane.device.tools.lint import lint
from representatives import first

LOCAL_K, INNER, OUT = 40, 72, 24
"""Two columns of tiles in the first product, one in the second. Up to 64 rows are one row of tiles."""


def multiplied(world_size: int, sizes: Sequence[int] = (40, 40)) -> tuple[Run, float]:
    """What came of calls of problem 15's solution, of so many rows each, and the largest error of a result, relative to all of it."""
    generator = torch.Generator().manual_seed(world_size)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / math.sqrt(shape[0])).to(torch.bfloat16)

    given = [
        [(draw(world_size * rows, LOCAL_K) * 8, draw(world_size * LOCAL_K, INNER), draw(INNER, OUT)) for _ in range(world_size)]
        for rows in sizes
    ]
    run = run_calls(lambda rank: solutions.load(15), given, sm_count=4)
    worst = 0.0
    for rows, arguments, outputs in zip(sizes, given, run.outputs, strict=False):
        whole = torch.cat([x for x, _, _ in arguments], 1).float()
        for rank, (output, (_, w1, w2)) in enumerate(zip(outputs, arguments, strict=True)):
            hidden = torch.nn.functional.silu(whole[rank * rows : (rank + 1) * rows] @ w1.float())
            wanted = hidden @ w2.float()
            worst = max(worst, float((output - wanted).norm() / wanted.norm()))
    return run, worst


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [(2, (40, 40)), (2, (24, 60, 5)), (2, (72, 72)), pytest.param(4, (72, 72), marks=pytest.mark.long)],
)
def test_it_is_right_call_after_call(world_size: int, sizes: tuple[int, ...]) -> None:
    run, worst = multiplied(world_size, sizes)
    run.clean(worst < 0.02)


TWINS = {
    "no wait for the first product": ("flags(parameters.done).wait_slots(", "if (false) flags(parameters.done).wait_slots("),
    "a wait for its first column": ("Shape::roles.consumer_groups * parameters.tiles.columns;", "Shape::roles.consumer_groups;"),
    "no wait for the ranks' pieces": ("flags(parameters.flags).wait_all_slots(", "if (false) flags(parameters.flags).wait_all_slots("),
}


@pytest.mark.parametrize("name", first(TWINS))
def test_a_twin_with_one_thing_wrong_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_twin(monkeypatch, perceptron, "PERCEPTRON", *TWINS[name], "products/perceptron.cuh")
    run, worst = multiplied(2)
    assert run.faults(worst <= 0.02)


def test_the_kernel_obeys_the_rules() -> None:
    defines = {**gemm.Tiling(1, 64, 8).defines(torch.bfloat16, "k", "mn", gemm.Epilogue("silu")), "WORLD_SIZE": 4}
    assert lint(compile_cubin(perceptron.PERCEPTRON.source, defines=defines).ptx()) == []
