"""Row all-gather and products on the CPU: exact results, nothing unordered, and twins with one thing wrong are refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from device import emulated
from peerlane.device import group_of
from peerlane.device.emulator.ranks import EmulatedRanks, RankFailure
from peerlane.device.emulator.sequence import findings
from peerlane.device.products import gemm
from peerlane.device.products.gemm import Epilogue, Tiling
from peerlane.device.products.row_gather_gemm import RowGatherGemm

SMALL, PAIR = Tiling(groups=1, columns=64, slots=2), Tiling(groups=1, columns=128, slots=2, blocks=2)
EVERYTHING = Epilogue("relu", bias=True, residual=True, scale=True)


def operands(
    m: int, k: int, widths: Sequence[int], world_size: int, major: str, call: int
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Of every rank: its rows, and its right operands with k or n contiguous."""

    def right(n: int, seed: int) -> torch.Tensor:
        return emulated.integers(n, k, seed)[:, :k].T if major == "k" else emulated.integers(k, n, seed)[:, :n]

    return [
        (emulated.integers(m, k, 100 * call + rank)[:, :k], [right(n, 100 * call + 50 + 10 * rank + i) for i, n in enumerate(widths)])
        for rank in range(world_size)
    ]


def found(
    world_size: int, m: int, k: int, widths: Sequence[int], *, major: str = "k", tiling: Tiling = SMALL, keeps: bool = False, calls: int = 2
) -> set[str]:
    """Returns the kinds of the emulator's findings for calls behind each other, and ``wrong_result`` if a result is not exact."""
    made = EmulatedRanks(world_size, schedules=2)

    def load(rank: int) -> object:
        kernel = RowGatherGemm(m, k, torch.bfloat16, group_of(), tiling=tiling, keeps=keeps)
        return lambda a, bs: kernel(gemm.aligned(a), bs)

    kinds: set[str] = set()
    try:
        made.load(load)  # type: ignore[arg-type]
        for call in range(calls):
            drawn = operands(m, k, widths, world_size, major, call)
            whole = torch.cat([a for a, _ in drawn])
            outputs = made.call(drawn, lambda rank, output: [value.clone() for value in output])
            for (_, bs), got in zip(drawn, outputs, strict=True):
                wanted = [(whole.float() @ b.float()).bfloat16() for b in bs] + [whole] * keeps
                if not all(map(torch.equal, got, wanted)):
                    kinds.add("wrong_result")
    except RankFailure as failure:
        kinds.add(type(failure).__name__)
    return kinds | {finding.kind for finding in findings(made.reports())}


@pytest.mark.parametrize(
    ("world_size", "widths", "major", "keeps"),
    [
        (2, [72], "k", False),
        (2, [72, 8, 64], "mn", True),
        pytest.param(3, [72, 130], "k", True, marks=pytest.mark.slow),
        pytest.param(4, [64, 40], "mn", False, marks=pytest.mark.long),
    ],
)
def test_rows_of_all_ranks_are_multiplied_call_after_call(world_size: int, widths: list[int], major: str, keeps: bool) -> None:
    """Rows end within a tile, columns within a tile of theirs, k within a step; pieces end within a tile."""
    assert not found(world_size, 72, 136, widths, major=major, keeps=keeps)
