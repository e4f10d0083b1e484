"""Products of Newton-Schulz iterations on the CPU: symmetric results of half of the tiles, results in two parts, and broken twins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from device.runs import equal, run_calls
from device.twins import use_header
from peerlane.device import group_of
from peerlane.device.host.jit import compiler_report
from peerlane.device.products import gemm
from peerlane.device.products import newton_schulz as ns
from peerlane.device.products.gemm import TILINGS, Tiling
from peerlane.errors import UsageError
from representatives import every_second

SMALL, TALL, PAIR = Tiling(1, 64, 2), Tiling(2, 64, 2), Tiling(1, 128, 2, blocks=2)
ROWS, COLUMNS = 136, 72
SCALE, SHARE = 0.5, 3.0


def signs(rows: int, columns: int, seed: int) -> torch.Tensor:
    """-1, 0 and 1: their products are exact in 16 bits."""
    return torch.randint(-1, 2, (rows, columns), generator=torch.Generator().manual_seed(seed)).half()


def found_in_gram(tiling: Tiling, world_size: int) -> set[str]:
    """Ranks of unequal depth; two calls. Returns the kinds of findings, and ``wrong_result``."""
    depths = (72, 13, 64, 8)[:world_size]
    calls = [[(signs(ROWS, depth, 10 * call + rank),) for rank, depth in enumerate(depths)] for call in range(2)]

    def make(rank: int) -> Callable[..., Any]:
        kernel = ns.GramAllReduce(group_of(), ROWS, torch.float16, tiling)
        return lambda x: kernel(gemm.aligned(x)).float()

    run = run_calls(make, calls, schedules=2, sm_count=2)
    wanted = [[torch.stack([x.float() @ x.float().T for (x,) in operands]).sum(0)] * world_size for operands in calls]
    return run.faults(all(map(equal, run.outputs, wanted)))


def found_alone(tiling: Tiling) -> set[str]:
    """The two products that one rank computes alone."""
    g = signs(ROWS, ROWS, 1)
    g, high, low = g.triu() + g.triu(1).T, 1024 * signs(ROWS, COLUMNS, 2), signs(ROWS, COLUMNS, 3) / 8

    def multiply(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        group, (g, high, low) = group_of(), map(gemm.aligned, given)
        p = ns.SymmetricProduct(group, ROWS, g.dtype, tiling)(g, SCALE, SHARE)
        parts = ns.PartsProduct(group, ROWS, COLUMNS, g.dtype, tiling=tiling)(g, (high, low), SCALE, SHARE)
        rounded, _ = ns.PartsProduct(group, ROWS, COLUMNS, g.dtype, torch.bfloat16, tiling)(g, (high, low), SCALE, SHARE)
        return p.float(), *parts, rounded

    run = run_calls(lambda rank: multiply, [[(g, high, low)]], schedules=2, sm_count=2)
    square = SCALE * (g.float() @ g.float()) + SHARE * g.float()
    whole = SCALE * (g.float() @ high.float()) + SHARE * (high.float() + low.float())
    wanted = square, whole.half(), (whole - whole.half().float()).half(), whole.bfloat16()
    return run.faults(all(equal(got, [wanted]) for got in run.outputs))


@pytest.mark.long
@pytest.mark.parametrize(("tiling", "world_size"), [(TALL, 2), (SMALL, 3), (PAIR, 2), (SMALL, 4)], ids=str)
def test_every_rank_gets_the_same_symmetric_gram_matrix(tiling: Tiling, world_size: int) -> None:
    assert not found_in_gram(tiling, world_size)


@pytest.mark.long
@pytest.mark.parametrize("tiling", [TALL, SMALL, PAIR], ids=str)
def test_products_of_one_rank_are_right_in_every_part(tiling: Tiling) -> None:
    assert not found_alone(tiling)


def test_half_of_the_tiles_are_computed() -> None:
    assert ns.triangle_count(Tiling(2, 128, 6), 4096, 4096) == 32 * 33 // 2
    for tiling in TILINGS:
        rows, columns = tiling.grid(4096, 4096)
        needed = sum((column + 1) * tiling.columns > row * tiling.rows for row in range(rows) for column in range(columns))
        assert ns.triangle_count(tiling, 4096, 4096) == needed


def test_a_gram_matrix_in_float32_is_refused() -> None:
    with pytest.raises(UsageError, match=r"12 rows in torch\.float32: expected bfloat16 or float16"):
        ns.GramAllReduce(None, 12, torch.float32)  # type: ignore[arg-type]


KERNELS = {
    "gram": (ns.GRAM_ALL_REDUCE.source, "GramAllReduceRoles<Shape, WORLD_SIZE, GramAllReduce>", "k"),
    "symmetric": (ns.SYMMETRIC_PRODUCT.source, "SymmetricProductRoles<Shape, SymmetricProduct>", "mn"),
    "parts": (ns.PARTS_PRODUCT.source, "PartsProductRoles<Shape, true, Float16, PartsProduct>", "mn"),
}


@pytest.mark.parametrize(("kernel", "tiling"), every_second(KERNELS, TILINGS))
def test_kernels_keep_to_their_registers_and_their_memory(kernel: str, tiling: Tiling) -> None:
    source, roles, major = KERNELS[kernel]
    more = {"WORLD_SIZE": 4, "IN_PARTS": 1, "RESULT": "peerlane::Float16"}
    layout = f"static_assert(sizeof(RoleMemory<{roles}>) == {tiling.shared_bytes});\n"
    report = compiler_report(source + layout, defines=tiling.defines(torch.float16, "k", major) | more)  # type: ignore[arg-type]
    assert "0 bytes spill stores, 0 bytes spill loads" in report and "Potential Performance Loss" not in report


TWINS = {
    "tile told of before it is stored": (
        False,
        "        store_mirrored<Shape>(out, tile.row + Shape::first_row(group), tile.column, this->everywhere());\n",
        "        this->tell(tile, group);\n"
        "        store_mirrored<Shape>(out, tile.row + Shape::first_row(group), tile.column, this->everywhere());\n",
        {"race"},
    ),
    "mirrored but not transposed": (False, "sum.store_transposed(", "sum.store(", {"wrong_result"}),
    "pieces below the diagonal have two writers": (
        False,
        "if (column + j > row) copy(row, column + j);",
        "if (column + j > row) copy(row, row);",
        {"race", "wrong_result"},
    ),
    "slot given back while it is read": (True, "ptx::bulk_wait_read<1>();", "ptx::bulk_wait_read<2>();", {"race"}),
    "last slot given back while it is read": (True, "ptx::bulk_wait_read<0>();", ";", {"race"}),
    "one part of the residual": (
        True,
        "        load_partial<Shape>(in, &this->parameters.residual_low, at);",
        "        load_partial<Shape>(in, &this->parameters.residual, at);",
        {"wrong_result"},
    ),
    "first tile of a row below the diagonal left out": (
        True,
        "first = ++row * tile_rows / tile_columns",
        "first = (++row * tile_rows + tile_columns) / tile_columns",
        {"wrong_result"},
    ),
}
"""Whether it is a kernel of one rank, a line of ``newton_schulz.cuh``, what stands there instead, and findings that are right."""


@pytest.mark.long
@pytest.mark.parametrize("name", TWINS)
def test_a_twin_with_one_line_wrong_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, line, instead, kinds = TWINS[name]
    use_header(monkeypatch, tmp_path, "products/newton_schulz.cuh", line, instead)
    found = found_alone(SMALL) if alone else found_in_gram(SMALL, 2)
    assert found & kinds, found
