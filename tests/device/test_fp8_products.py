"""Products of operands in e4m3 with scales, on the CPU: exact where sums are, within an error model where they are not, nothing unordered; and
twins with one thing wrong are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from peerlane.device import group_of
from peerlane.device.emulator.ranks import EmulatedRanks, RankFailure
from peerlane.device.emulator.sequence import findings
from peerlane.device.products import fp8
from peerlane.device.products.fp8 import Quantised

SCALES = ("tensor", "row", "blocks")
LEFT, RIGHT = {"tensor": "tensor", "row": "row", "blocks": "block"}, {"tensor": "tensor", "row": "row", "blocks": "square"}


def exact(rows: int, k: int, by: str, seed: int) -> Quantised:
    """Small integers and scales of 1 and 2: all sums are exact, and those that travel are so in bfloat16."""
    draw = torch.Generator().manual_seed(seed)
    counts = [-(-size // part) for size, part in zip((rows, k), {"tensor": (rows, k), "row": (1, k), "block": (1, 128), "square": (128, 128)}[by], strict=True)]
    values = torch.randint(-1, 2, (rows, k), generator=draw).to(fp8.E4M3)
    return Quantised(values, 2.0 ** torch.randint(0, 2, counts, generator=draw))


def found(world_size: int, operands: Callable[[int, int], Any], call: Callable[..., Any], expected: Callable[[list[Any]], list[Any]], calls: int = 2) -> set[str]:
    """Returns the kinds of the emulator's findings for calls behind each other, and ``wrong_result`` if a result is not exact."""
    ranks, kinds = EmulatedRanks(world_size, schedules=2), set()
    try:
        ranks.load(lambda rank: lambda *given: call(group_of(), *given))
        for number in range(calls):
            drawn = [operands(number, rank) for rank in range(world_size)]
            outputs = ranks.call(drawn, lambda rank, output: [value.clone() for value in (output if isinstance(output, list) else [output])])
            for got, wanted in zip(outputs, expected(drawn), strict=True):
                if not all(map(torch.equal, got, wanted)):
                    kinds.add("wrong_result")
    except RankFailure as failure:
        kinds.add(type(failure).__name__)
    return kinds | {finding.kind for finding in findings(ranks.reports())}


def local(by: str, promoted: bool = False) -> set[str]:
    m, n, k = 72, 136, 272
    return found(
        1,
        lambda call, rank: (exact(m, k, LEFT[by], call), exact(n, k, RIGHT[by], 10 + call)),
        lambda group, a, b: fp8.product(group, a, b.t(), promoted=promoted),
        lambda drawn: [[(a.float() @ b.float().T).bfloat16()] for a, b in drawn],
        calls=1,
    )


def summed(name: str, by: str, world_size: int) -> set[str]:
    m, n = 40 * world_size, 72
    depths = (272, 144, 16)

    def operands(call: int, rank: int) -> tuple[Quantised, Quantised]:
        seed = 100 * call + 10 * rank
        return exact(m, depths[rank], LEFT[by], seed), exact(n, depths[rank], RIGHT[by], seed + 1)

    def expected(drawn: list[Any]) -> list[Any]:
        total = torch.stack([a.float() @ b.float().T for a, b in drawn]).sum(0).bfloat16()
        return [[part] for part in total.chunk(world_size)] if "scatter" in name else [[total]] * world_size

    return found(world_size, operands, lambda group, a, b: getattr(fp8, name)(group, a, b.t()), expected)


def gathered(by: str, world_size: int) -> set[str]:
    m, k, widths = 24, 144, (24, 8)

    def operands(call: int, rank: int) -> tuple[Any, ...]:
        seed = 100 * call + 10 * rank
        return exact(m, k, LEFT[by], seed), *(exact(n, k, RIGHT[by], seed + 1 + i) for i, n in enumerate(widths))

    def call(group: Any, a: Quantised, *bs: Quantised) -> list[torch.Tensor]:
        outs, whole = fp8.row_gather_products(group, a, [b.t() for b in bs], keeps=True)
        return [*outs, whole.float()]  # type: ignore[union-attr]

    def expected(drawn: list[Any]) -> list[Any]:
        whole = torch.cat([a.float() for a, *_ in drawn])
        return [[*((whole @ b.float().T).bfloat16() for b in bs), whole] for _, *bs in drawn]

    return found(world_size, operands, call, expected)



@pytest.mark.parametrize(
    ("by", "promoted"),
    [
        ("row", False),
        ("blocks", True),
        *(pytest.param(by, promoted, marks=pytest.mark.long) for by, promoted in (("tensor", False), ("tensor", True), ("row", True))),
    ],
)
def test_a_product_of_e4m3_is_its_operands_times_their_scales(by: str, promoted: bool) -> None:
    assert not local(by, promoted)


@pytest.mark.parametrize(
    ("name", "by", "world_size"),
    [
        pytest.param("product_reduce_scatter", "blocks", 2, marks=pytest.mark.slow),
        *(
            pytest.param(name, by, world_size, marks=pytest.mark.long)
            for name in ("product_reduce_scatter", "product_all_reduce")
            for by in SCALES
            for world_size in (2, 3)
        ),
    ],
)
def test_ranks_scale_what_they_add_call_after_call(name: str, by: str, world_size: int) -> None:
    """Depths differ; one ends within a block, one is less than a block."""
    assert not summed(name, by, world_size)


@pytest.mark.parametrize(
    ("by", "world_size"),
    [
        pytest.param("blocks", 2, marks=pytest.mark.slow),
        *(pytest.param(by, world_size, marks=pytest.mark.long) for by in SCALES for world_size in (2, 3)),
    ],
)
def test_rows_travel_with_their_scales(by: str, world_size: int) -> None:
    assert not gathered(by, world_size)


@pytest.mark.parametrize("by", ["row", pytest.param("blocks", marks=pytest.mark.slow), pytest.param("tensor", marks=pytest.mark.long)])
def test_errors_are_those_of_rounding_to_e4m3_once_and_to_bfloat16_once(by: str) -> None:
    """Beside float64. A number loses at most 2^-4 of itself, or half of the smallest number of e4m3; the sum of k terms k 2^-24 of their
    absolute values in fp32; the result 2^-8."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(72, 272, generator=draw), torch.randn(136, 272, generator=draw)
    x[5] *= 1000  # with a scale for all, other rows lose what is theirs
    x8, w8 = fp8.quantise(x, LEFT[by]), fp8.quantise(weight, RIGHT[by])  # type: ignore[arg-type]
    ranks = EmulatedRanks(1, schedules=1)
    ranks.load(lambda rank: lambda a, b: fp8.product(group_of(), a, b.t()))
    ((y,),) = ([out.double()] for out in ranks.call([(x8, w8)], lambda rank, output: output.clone()))
    exact_y = x8.float().double() @ w8.float().double().T
    sums = x8.float().double().abs() @ w8.float().double().abs().T
    assert bool(((y - exact_y).abs() <= 2**-8 * exact_y.abs() + 272 * 2**-24 * sums).all())
    lost = [2**-4 * full.abs() + 2**-10 * (q.float() / q.values.float()).nan_to_num(0, 0, 0).abs().amax() for full, q in ((x, x8), (weight, w8))]
    most = (x.abs() + lost[0]).double() @ (weight.abs() + lost[1]).double().T - (x.abs() @ weight.abs().T).double()
    assert bool(((exact_y - x.double() @ weight.double().T).abs() <= most).all())
