"""Products of operands in e4m3 with scales, on the CPU: exact where sums are, within an error model where they are not, nothing unordered;
and twins with one thing wrong are refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from device.runs import equal, run_call, run_calls
from device.twins import use_header
from peerlane import ops
from peerlane.device import group_of
from peerlane.device.host.jit import compiler_report
from peerlane.device.products import fp8, gemm, grouped_gemm, row_gather_gemm
from peerlane.device.products.gemm_all_reduce import GEMM_ALL_REDUCE
from peerlane.device.products.gemm_reduce_scatter import GEMM_REDUCE_SCATTER
from peerlane.device.products.quantised import E4M3, Quantised, packed, quantise, quantise_rows, quantise_squares
from peerlane.device.products.scales import Scaling
from peerlane.errors import UsageError
from representatives import first

SCALES = ("tensor", "row", "blocks")
LEFT, RIGHT = {"tensor": "tensor", "row": "row", "blocks": "block"}, {"tensor": "tensor", "row": "row", "blocks": "square"}


def exact(rows: int, k: int, by: str, seed: int) -> Quantised:
    """Small integers and scales of 1 and 2: all sums are exact, and those that travel are so in bfloat16."""
    draw = torch.Generator().manual_seed(seed)
    counts = [
        -(-size // part)
        for size, part in zip((rows, k), {"tensor": (rows, k), "row": (1, k), "block": (1, 128), "square": (128, 128)}[by], strict=True)
    ]
    values = torch.randint(-1, 2, (rows, k), generator=draw).to(E4M3)
    return Quantised(values, 2.0 ** torch.randint(0, 2, counts, generator=draw))


def found(
    world_size: int,
    operands: Callable[[int, int], Any],
    call: Callable[..., Any],
    expected: Callable[[list[Any]], list[Any]],
    calls: int = 2,
) -> set[str]:
    """Returns the kinds of the emulator's findings for calls behind each other, and ``wrong_result`` if a result is not exact."""
    drawn = [[operands(number, rank) for rank in range(world_size)] for number in range(calls)]
    run = run_calls(lambda rank: lambda *given: call(group_of(), *given), drawn, schedules=2)
    return run.faults(all(map(equal, run.outputs, map(expected, drawn))))


def local(by: str, promoted: bool = False) -> set[str]:
    m, n, k = 72, 136, 272
    return found(
        1,
        lambda call, rank: (exact(m, k, LEFT[by], call), exact(n, k, RIGHT[by], 10 + call)),
        lambda group, a, b: fp8.product(group, a, b.t(), promoted=promoted),
        lambda drawn: [(a.float() @ b.float().T).bfloat16() for a, b in drawn],
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
        return list(total.chunk(world_size)) if "scatter" in name else [total] * world_size

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
        ("product_reduce_scatter", "blocks", 2),
        *(
            pytest.param(name, by, world_size, marks=pytest.mark.long)
            for name in ("product_reduce_scatter", "product_all_reduce")
            for by in SCALES
            for world_size in (2, 3)
            if (name, by, world_size) != ("product_reduce_scatter", "blocks", 2)
        ),
    ],
)
def test_ranks_scale_what_they_add_call_after_call(name: str, by: str, world_size: int) -> None:
    """Depths differ; one ends within a block, one is less than a block."""
    assert not summed(name, by, world_size)


@pytest.mark.parametrize(
    ("by", "world_size"),
    [
        ("blocks", 2),
        *(
            pytest.param(by, world_size, marks=pytest.mark.long)
            for by in SCALES
            for world_size in (2, 3)
            if (by, world_size) != ("blocks", 2)
        ),
    ],
)
def test_rows_travel_with_their_scales(by: str, world_size: int) -> None:
    assert not gathered(by, world_size)


@pytest.mark.parametrize("by", first(["row", "blocks", "tensor"], 2))
def test_errors_are_those_of_rounding_once_each_way(by: str) -> None:
    """Beside float64. A number loses at most 2^-4 of itself, or half of the smallest number of e4m3; the sum of k terms k 2^-24 of their
    absolute values in fp32; the result 2^-8."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(72, 272, generator=draw), torch.randn(136, 272, generator=draw)
    x[5] *= 1000  # with a scale for all, other rows lose what is theirs
    x8, w8 = quantise(x, LEFT[by]), quantise(weight, RIGHT[by])  # type: ignore[arg-type]
    (y,) = run_call(lambda a, b: fp8.product(group_of(), a, b.t()).double(), [(x8, w8)])
    exact_y = x8.float().double() @ w8.float().double().T
    sums = x8.float().double().abs() @ w8.float().double().abs().T
    assert bool(((y - exact_y).abs() <= 2**-8 * exact_y.abs() + 272 * 2**-24 * sums).all())
    lost = [
        2**-4 * full.abs() + 2**-10 * (q.float() / q.values.float()).nan_to_num(0, 0, 0).abs().amax() for full, q in ((x, x8), (weight, w8))
    ]
    most = (x.abs() + lost[0]).double() @ (weight.abs() + lost[1]).double().T - (x.abs() @ weight.abs().T).double()
    assert bool(((exact_y - x.double() @ weight.double().T).abs() <= most).all())


def test_operators_run_the_kernels_and_copy_no_scaled_rows() -> None:
    """A layer's two products, with a bias and an activation; rows that ``quantise`` made travel from where they are."""
    m, k, n = 16, 144, 24

    def layer(x: torch.Tensor, up: Quantised, down: Quantised, bias: torch.Tensor) -> list[torch.Tensor]:
        x8 = quantise(x, "block")
        assert packed(x8, "fp8_blocks", torch.bfloat16).data_ptr() == x8.scales.data_ptr()
        (hidden,) = ops.row_gather_gemm_fp8(x8.values, x8.scales, [up.t().values], [up.t().scales], [bias], activation="relu")
        y8, y_scales = ops.quantize_fp8(torch.nn.functional.pad(hidden, (0, 8)), "tensor")
        return [hidden, ops.gemm_reduce_scatter_fp8(y8, y_scales, down.t().values, down.t().scales, promoted=True)]

    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(m, k, generator=draw).bfloat16() for _ in range(2)]
    layers = [
        (quantise(torch.randn(n, k, generator=draw), "square"), quantise(torch.randn(40, n + 8, generator=draw), "row")) for _ in range(2)
    ]
    bias = torch.randn(n, generator=draw).bfloat16()
    given = [(x, *own, bias.clone()) for x, own in zip(xs, layers, strict=True)]
    outputs = run_call(layer, given)
    whole, total = torch.cat([quantise(x, "block").float() for x in xs]), torch.zeros(2 * m, 40)
    for (hidden, _), (up, down) in zip(outputs, layers, strict=True):
        torch.testing.assert_close(hidden.float(), (whole @ up.float().T + bias.float()).relu(), rtol=2**-7, atol=2**-6)
        total += quantise(torch.nn.functional.pad(hidden, (0, 8)), "tensor").float() @ down.float().T
    torch.testing.assert_close(torch.cat([part for _, part in outputs]).float(), total, rtol=2**-6, atol=2**-7 * float(total.abs().max()))


@pytest.mark.parametrize("by", first(["row", "blocks"]))
def test_each_group_of_rows_meets_its_own_matrix_and_scales(by: str) -> None:
    counts, n, k = (67, 0, 9), 72, 144
    a, b = exact(sum(counts) + 5, k, LEFT[by], 0), [exact(n, k, RIGHT[by], 1 + g) for g in range(len(counts))]
    matrices = Quantised(*(torch.stack([getattr(one, name) for one in b]) for name in ("values", "scales")))
    ends = torch.tensor(counts).cumsum(0).int()
    (out,) = run_call(lambda *given: fp8.grouped(group_of(), *given), [(a, matrices.t(), ends)])
    rows = a.float().split([*counts, 5])
    wanted = torch.cat([part @ one.float().T for part, one in zip(rows, b, strict=False)])
    assert torch.equal(out[: sum(counts)], wanted.bfloat16())


TWINS = {
    "scales of another block of k": ("products/scales.cuh", "at = step * ", "at = step / 2 * ", lambda: local("blocks")),
    "columns' scales of another block of k": ("products/scales.cuh", "[step * scales.b.block_stride]", "[0]", lambda: local("blocks")),
    "one scale for both of a thread's rows": ("products/scales.cuh", "+ 8 * half", "", lambda: local("row")),
    "a part that is not begun anew": (
        "products/gemm.cuh", "operands.b, p * columns, true)", "operands.b, p * columns, step == 0)", lambda: local("row", promoted=True),
    ),
    "own scales for gathered rows": (
        "products/row_gather_gemm.cuh",
        "own ? parameters.local : arena.local(this->gathered_memory_of(tile.source))",
        "parameters.local",
        lambda: gathered("row", 2),
    ),
    "scales read before they come": (
        "products/gemm.cuh",
        "        const auto& operands = in.wait().operands;\n#pragma unroll\n        for (int p",
        "        step_scales.load(scales, step);\n        const auto& operands = in.wait().operands;\n#pragma unroll\n        for (int p",
        lambda: gathered("blocks", 2),
    ),
    "sums that are scaled by their owner": (
        "products/owner_sum.cuh", "parameters.a_scales, parameters.b_scales, row,", "parameters.a_scales, parameters.a_scales, row,",
        lambda: summed("product_reduce_scatter", "row", 2),
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", TWINS)
def test_a_twin_with_one_line_wrong_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, line, instead, run = TWINS[name]
    use_header(monkeypatch, tmp_path, header, line, instead)
    assert run() & {"wrong_result", "race"}


KERNELS = {
    "gemm": gemm.GEMM,
    "gemm_reduce_scatter": GEMM_REDUCE_SCATTER,
    "gemm_all_reduce": GEMM_ALL_REDUCE,
    "row_gather_gemm": row_gather_gemm.ROW_GATHER_GEMM,
    "grouped_gemm": grouped_gemm.GROUPED_GEMM,
}


@pytest.mark.parametrize(
    ("name", "scaling", "tiling"),
    [
        ("gemm", "fp8", gemm.TILINGS[0]),
        ("gemm", "fp8_blocks", gemm.TILINGS[0]),
        *(
            pytest.param(name, scaling, tiling, marks=pytest.mark.long)
            for name in KERNELS
            for scaling in ("fp8", "fp8_promoted", "fp8_blocks")
            for tiling in gemm.TILINGS
        ),
    ],
)
def test_two_sums_of_a_promoted_product_fit_the_registers(name: str, scaling: Scaling, tiling: gemm.Tiling) -> None:
    defines = {**tiling.defines(torch.bfloat16, "k", "k", gemm.Epilogue(scaling=scaling)), "WORLD_SIZE": 4, "KEEPS": 1}
    report = compiler_report(KERNELS[name].source, defines=defines)
    (spilled,) = map(int, re.findall(r"(\d+) bytes spill stores", report))
    assert spilled <= (0 if name == "gemm" else 48) and "Potential Performance Loss" not in report  # a few addresses, once a tile


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (((8, 24), (8, 1)), ((24, 8), (1, 8))),
        (((8, 32), (8, 2)), ((32, 8), (1, 8))),
        (((8, 32), (1, 1)), ((48, 8), (1, 1))),
        (((8, 256), (8, 2)), ((256, 8), (2, 8))),
    ],
    ids=["k", "scales of a", "depth", "scales of b"],
)
def test_operands_that_do_not_fit_are_refused(a: Any, b: Any) -> None:
    left, right = (Quantised(torch.zeros(of[0], dtype=E4M3), torch.ones(of[1])) for of in (a, b))
    with pytest.raises(UsageError, match=r"expected \(m, k\) and \(k, n\) in torch.float8_e4m3fn, k a multiple of 16, and float32 scales"):
        fp8.scaling_of(left, right, promoted=False)


@pytest.mark.parametrize("by", ["row", "block"])
def test_a_kernel_quantises_rows_as_torch_does(by: Any) -> None:
    """Rows longer than a warp takes at a time; a row of zeros; one whose largest number is at its end."""
    x = torch.randn(9, 528, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[3], x[4, -1] = 0, 100
    half = torch.nn.functional.silu(x[:, :256].float()) * x[:, 256:512].float()
    calls = [(x, False)], [(x[:, :512].contiguous(), True)]
    run = run_calls(lambda rank: lambda given, gated: quantise_rows(group_of(), given, by, gated=gated), calls)
    (found,), (product,) = run.clean()
    wanted = quantise(x, by)
    assert torch.equal(found.values.view(torch.uint8), wanted.values.view(torch.uint8)) and torch.equal(found.scales, wanted.scales)
    torch.testing.assert_close(product.float(), half, rtol=2**-4, atol=2**-9 * float(product.scales.max()))


def test_a_kernel_quantises_squares_and_transposes_them() -> None:
    x = torch.randn(2, 144, 272, generator=torch.Generator().manual_seed(0)).bfloat16()
    ((found, turned),) = run_call(lambda given: quantise_squares(group_of(), given, transposes=True), [(x,)])
    wanted = quantise(x, "square")
    assert torch.equal(found.values.view(torch.uint8), wanted.values.view(torch.uint8)) and torch.equal(found.scales, wanted.scales)
    assert turned.values.is_contiguous() and torch.equal(turned.float(), wanted.float().mT)


@pytest.mark.long
def test_experts_in_e4m3_are_four_operators() -> None:
    """Dispatch, two grouped products with a gated activation between them, and combine."""
    own, hidden, inner, topk_idx = 2, 128, 64, torch.tensor([[0, 1], [1, -1], [3, 0]])
    draw = torch.Generator().manual_seed(0)
    up, down = (torch.randn(2 * own, *shape, generator=draw) / 16 for shape in ((2 * inner, hidden), (hidden, inner)))
    xs = [torch.randn(3, hidden, generator=draw).bfloat16() for _ in range(2)]

    def layer(x: torch.Tensor, topk_idx: torch.Tensor, up: Quantised, down: Quantised) -> torch.Tensor:
        rows, scales, weights, handle = ops.dispatch_fp8(x, topk_idx, torch.full((3, 2), 0.5), ops.DispatchConfig(2 * own, 3))
        both = ops.grouped_gemm_fp8(rows, scales, up.t().values, up.t().scales, handle.ends)
        middle = ops.quantize_fp8(both, "block", gated=True)
        return ops.combine(ops.grouped_gemm_fp8(*middle, down.t().values, down.t().scales, handle.ends), handle, weights)

    own_of = [[quantise(w[own * rank : own * rank + own], "square") for w in (up, down)] for rank in range(2)]
    given = [(x, topk_idx.clone(), *layers) for x, layers in zip(xs, own_of, strict=True)]
    for x, y in zip(xs, run_call(layer, given), strict=True):
        wanted = torch.zeros(3, hidden)
        for token, slot in topk_idx.ge(0).nonzero().tolist():
            gate, linear = (up[topk_idx[token, slot]] @ x[token].float()).chunk(2)
            wanted[token] += 0.5 * (down[topk_idx[token, slot]] @ (torch.nn.functional.silu(gate) * linear))
        assert float((y.float() - wanted).norm()) <= 0.1 * float(wanted.norm())  # three roundings to e4m3
