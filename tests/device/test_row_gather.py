"""Row all-gather and products on the CPU: exact results, nothing unordered, and twins with one thing wrong are refused."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from device import emulated
from device.runs import equal, run_calls
from device.twins import use_twin
from peerlane.device import group_of
from peerlane.device.host.jit import compiler_report
from peerlane.device.products import gemm, row_gather_gemm
from peerlane.device.products.gemm import Epilogue, Tiling
from peerlane.device.products.row_gather_gemm import RowGatherGemm
from representatives import first

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
    world_size: int,
    m: int,
    k: int,
    widths: Sequence[int],
    *,
    major: str = "k",
    tiling: Tiling = SMALL,
    keeps: bool = False,
    calls: int = 2,
    schedules: int = 2,
) -> set[str]:
    """Returns the kinds of the emulator's findings for calls behind each other, and ``wrong_result`` if a result is not exact."""

    def make(rank: int) -> Any:
        kernel = RowGatherGemm(m, k, torch.bfloat16, group_of(), tiling=tiling, keeps=keeps)
        return lambda a, bs: kernel(gemm.aligned(a), bs)

    drawn = [operands(m, k, widths, world_size, major, call) for call in range(calls)]
    run = run_calls(make, drawn, schedules=schedules)
    return run.faults(all(map(equal, run.outputs, (wanted(given, keeps) for given in drawn))))


def wanted(drawn: list[tuple[torch.Tensor, list[torch.Tensor]]], keeps: bool) -> list[list[torch.Tensor]]:
    """Of every rank: the products of all rows with its right operands, and the rows themselves if it ``keeps`` them."""
    whole = torch.cat([a for a, _ in drawn])
    return [[(whole.float() @ b.float()).bfloat16() for b in bs] + [whole] * keeps for _, bs in drawn]


@pytest.mark.parametrize(
    ("world_size", "widths", "major", "keeps"),
    [
        pytest.param(2, [72], "k", False, marks=pytest.mark.long),
        (2, [72, 8, 64], "mn", True),
        pytest.param(3, [72, 130], "k", True, marks=pytest.mark.long),
        pytest.param(4, [64, 40], "mn", False, marks=pytest.mark.long),
    ],
)
def test_rows_of_all_ranks_are_multiplied_call_after_call(world_size: int, widths: list[int], major: str, keeps: bool) -> None:
    """Rows end within a tile, columns within a tile of theirs, k within a step; pieces end within a tile."""
    assert not found(world_size, 72, 136, widths, major=major, keeps=keeps)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_clusters_gather_rows_as_blocks_do(world_size: int) -> None:
    """Of the second of two tiles' rows the first block has some and the second none."""
    assert not found(world_size, 140, 72, [136, 8], tiling=PAIR, schedules=1)


def test_sums_of_gathered_rows_are_finished_as_the_epilogue_says() -> None:
    m, k, n = 40, 72, 72

    def make(rank: int) -> Any:
        kernel = RowGatherGemm(m, k, torch.bfloat16, group_of(), tiling=SMALL, epilogue=EVERYTHING)
        return lambda a, bs, bias, residual: kernel(gemm.aligned(a), bs, biases=[bias], residual=residual, scale=0.5)

    drawn = operands(m, k, [n], 2, "k", 0)
    terms = [(emulated.integers(1, n, 7 + rank)[0, :n].clone(), emulated.integers(2 * m, n, 9 + rank)[:, :n]) for rank in range(2)]
    whole = torch.cat([a for a, _ in drawn]).float()
    given = [(*operands, *own) for operands, own in zip(drawn, terms, strict=True)]
    for (_, (b,)), (bias, residual), (got,) in zip(drawn, terms, run_calls(make, [given]).clean()[0], strict=True):
        assert torch.equal(got, ((0.5 * (whole @ b.float()) + bias).relu() + residual).bfloat16())


TWINS = {
    "no wait": ("this->wait_for_rows(tile.row + Shape::first_row(), piece, tile.source);", ""),
    "wait for the next source": ("piece, tile.source);\n            ready", "piece, rank_after<W>(arena.rank, 1));\n            ready"),
    "one piece for all": ("piece, tile.source);", "0, tile.source);"),
    "rows stored as another rank's": ("Shape::first_row(group), tile.source});", "Shape::first_row(group), (tile.source + 1) % W});"),
    "rows kept before they come": ("this->peers(communicator).wait_slots(source, flag, 1, this->epoch);", ""),
    "one buffer": ("slot = own ? 0 : this->slot_of(tile.source);", "slot = own ? 0 : tile.source;"),
    "columns of another product": ("{b, tile.column, depth, 0}", "{&parameters.b[0], tile.column, depth, 0}"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", TWINS)
def test_a_broken_twin_of_the_row_gather_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_twin(monkeypatch, row_gather_gemm, "ROW_GATHER_GEMM", *TWINS[name], "products/row_gather_gemm.cuh")
    assert found(3, 40, 320, [72, 8], keeps=True, calls=3)


@pytest.mark.parametrize("tiling", first(gemm.TILINGS, 3), ids=str)
def test_the_row_gather_keeps_to_its_registers_and_memory(tiling: Tiling) -> None:
    kernel = "RowGatherGemmRoles<Shape, WORLD_SIZE, KEEPS, RowGatherGemm>"
    layout = f"using namespace peerlane;\nstatic_assert(sizeof(RoleMemory<{kernel}>) == {tiling.shared_bytes});\n"
    defines = {**tiling.defines(torch.bfloat16, "k", "k", Epilogue("silu", bias=True)), "WORLD_SIZE": 4, "KEEPS": 1}
    report = compiler_report(row_gather_gemm.ROW_GATHER_GEMM.source + layout, defines=defines)
    (spilled,) = map(int, re.findall(r"(\d+) bytes spill stores", report))
    assert spilled <= 32 and "Potential Performance Loss" not in report
