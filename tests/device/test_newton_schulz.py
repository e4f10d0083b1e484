"""Products of Newton-Schulz iterations on the CPU: symmetric results of half of the tiles, results in two parts, and broken twins."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from device.twins import use_header
from peerlane.device.host.jit import compiler_report
from peerlane.device.products import newton_schulz as ns
from peerlane.device.products.gemm import TILINGS, Tiling
from peerlane.emulator import solution_run
from peerlane.errors import UsageError
from representatives import every_second

SMALL, TALL, PAIR = Tiling(1, 64, 2), Tiling(2, 64, 2), Tiling(1, 128, 2, blocks=2)
ROWS, COLUMNS = 136, 72
SCALE, SHARE = 0.5, 3.0

GRAM = """
from peerlane.device import group_of, per_group
from peerlane.device.products import gemm
from peerlane.device.products.newton_schulz import GramAllReduce

@per_group
def kernel(group, m, dtype):
    return GramAllReduce(group, m, dtype, gemm.{tiling})

def solution(x):
    return kernel(group_of(), x.shape[0], x.dtype)(gemm.aligned(x))
"""

LOCAL = """
from peerlane.device import group_of
from peerlane.device.products import gemm
from peerlane.device.products.newton_schulz import PartsProduct, SymmetricProduct
import torch

def solution(g, high, low):
    (m, n), group, tiling = high.shape, group_of(), gemm.{tiling}
    g, high, low = map(gemm.aligned, (g, high, low))
    p = SymmetricProduct(group, m, g.dtype, tiling)(g, {scale}, {share})
    parts = PartsProduct(group, m, n, g.dtype, tiling=tiling)(g, (high, low), {scale}, {share})
    rounded, _ = PartsProduct(group, m, n, g.dtype, torch.bfloat16, tiling)(g, (high, low), {scale}, {share})
    return p, *parts, rounded
"""


def signs(rows: int, columns: int, seed: int) -> torch.Tensor:
    """-1, 0 and 1: their products are exact in 16 bits."""
    return torch.randint(-1, 2, (rows, columns), generator=torch.Generator().manual_seed(seed)).half()


def run(folder: Path, source: str, calls: list[list[tuple[torch.Tensor, ...]]], tiling: Tiling) -> solution_run.Outcome:
    path = folder / "products.py"
    path.write_text(source.format(tiling=tiling, scale=SCALE, share=SHARE))
    return solution_run.run(path, calls, schedules=2, sm_count=2)


def found_in_gram(folder: Path, tiling: Tiling, world_size: int) -> set[str]:
    """Ranks of unequal depth; two calls. Returns the kinds of findings, and ``wrong_result``."""
    depths = (72, 13, 64, 8)[:world_size]
    calls: list[list[tuple[torch.Tensor, ...]]] = [
        [(signs(ROWS, depth, 10 * call + rank),) for rank, depth in enumerate(depths)] for call in range(2)
    ]
    outcome = run(folder, GRAM, calls, tiling)
    kinds = {finding.kind for finding in outcome.findings}
    if outcome.failure is not None:
        if not kinds:
            raise outcome.failure[1]
        return kinds
    for operands, outputs in zip(calls, outcome.outputs, strict=True):
        expected = torch.stack([x.float() @ x.float().T for (x,) in operands]).sum(0)
        if not all(torch.equal(got.float(), expected) for got in outputs):
            kinds.add("wrong_result")
    return kinds


def found_alone(folder: Path, tiling: Tiling) -> set[str]:
    """The two products that one rank computes alone."""
    g = signs(ROWS, ROWS, 1)
    g, high, low = g.triu() + g.triu(1).T, 1024 * signs(ROWS, COLUMNS, 2), signs(ROWS, COLUMNS, 3) / 8
    outcome = run(folder, LOCAL, [[(g, high, low)]], tiling)
    kinds = {finding.kind for finding in outcome.findings}
    if outcome.failure is not None:
        if not kinds:
            raise outcome.failure[1]
        return kinds
    p, got_high, got_low, rounded = outcome.outputs[0][0]
    square = SCALE * (g.float() @ g.float()) + SHARE * g.float()
    whole = SCALE * (g.float() @ high.float()) + SHARE * (high.float() + low.float())
    right = torch.equal(p.float(), square) and torch.equal(got_high, whole.half()) and torch.equal(rounded, whole.bfloat16())
    return kinds if right and torch.equal(got_low.float(), whole - whole.half().float()) else kinds | {"wrong_result"}


@pytest.mark.long
@pytest.mark.parametrize(("tiling", "world_size"), [(TALL, 2), (SMALL, 3), (PAIR, 2), (SMALL, 4)], ids=str)
def test_every_rank_gets_the_same_symmetric_gram_matrix(tiling: Tiling, world_size: int, tmp_path: Path) -> None:
    assert not found_in_gram(tmp_path, tiling, world_size)


@pytest.mark.long
@pytest.mark.parametrize("tiling", [TALL, SMALL, PAIR], ids=str)
def test_products_of_one_rank_are_right_in_every_part(tiling: Tiling, tmp_path: Path) -> None:
    assert not found_alone(tmp_path, tiling)


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


@dataclass(frozen=True)
class Twin:
    """Kernels with one line of ``newton_schulz.cuh`` replaced."""

    alone: bool
    line: str
    instead: str
    kinds: frozenset[str]


TWINS = {
    "tile told of before it is stored": Twin(
        False,
        "        store_mirrored<Shape>(out, tile.row + Shape::first_row(group), tile.column, this->everywhere());\n",
        "        this->tell(tile, group);\n"
        "        store_mirrored<Shape>(out, tile.row + Shape::first_row(group), tile.column, this->everywhere());\n",
        frozenset({"race"}),
    ),
    "mirrored but not transposed": Twin(False, "sum.store_transposed(", "sum.store(", frozenset({"wrong_result"})),
    "pieces below the diagonal have two writers": Twin(
        False, "if (column + j > row) copy(row, column + j);", "if (column + j > row) copy(row, row);", frozenset({"race", "wrong_result"})
    ),
    "slot given back while it is read": Twin(True, "ptx::bulk_wait_read<1>();", "ptx::bulk_wait_read<2>();", frozenset({"race"})),
    "last slot given back while it is read": Twin(True, "ptx::bulk_wait_read<0>();", ";", frozenset({"race"})),
    "one part of the residual": Twin(
        True,
        "        load_partial<Shape>(in, &this->parameters.residual_low, at);",
        "        load_partial<Shape>(in, &this->parameters.residual, at);",
        frozenset({"wrong_result"}),
    ),
    "first tile of a row below the diagonal left out": Twin(
        True,
        "first = ++row * tile_rows / tile_columns",
        "first = (++row * tile_rows + tile_columns) / tile_columns",
        frozenset({"wrong_result"}),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", TWINS)
def test_a_twin_with_one_line_wrong_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = TWINS[name]
    use_header(monkeypatch, tmp_path, "products/newton_schulz.cuh", twin.line, twin.instead)
    found = found_alone(tmp_path, SMALL) if twin.alone else found_in_gram(tmp_path, SMALL, 2)
    assert found & twin.kinds, found
