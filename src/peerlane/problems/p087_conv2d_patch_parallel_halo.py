"""Problem 87: a two-dimensional convolution over an image whose rows are sharded, with border rows exchanged between neighbours."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import group_layout, group_members
from peerlane.problems.families.conv import convolve, exchange_with_neighbours, full_float32, terms_bound
from peerlane.problems.families.matmul import ACCUMULATION, BF16, FLOP_UNIT, FP32, FP64


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int = 1,
    padding: int = 1,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    top, bottom = x[:, :, :padding].contiguous(), x[:, :, x.shape[2] - padding :].contiguous()
    above, below = exchange_with_neighbours(top, bottom, group)
    with full_float32():
        return F.conv2d(torch.cat([above, x, below], 2), weight, bias, stride=stride, padding=(0, padding))


def _size(case: pc.Case, rank: int) -> tuple[int, int]:
    """Rows of the rank's stripe and columns: ``rows`` per rank, or ``height`` of the whole image."""
    return int(case["rows"] if "rows" in case.params else case["height"] // len(group_members(case, rank))), case["columns"]


def _output_size(case: pc.Case, rank: int) -> tuple[int, int]:
    kernel, padding, stride = case["kernel"], case["padding"], case.params.get("stride", 1)
    rows, columns = ((size + 2 * padding - kernel) // stride + 1 for size in _size(case, rank))
    return rows, columns


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """x of N(0, 1), twice as large on odd ranks; replicated weight of variance 1 / fan-in and bias of N(0, 1).

    ``border``: x is zero but for a stripe's first and last row.
    """
    rows, columns = _size(case, rank)
    channels, outputs, kernel = case["channels"], case["outputs"], case["kernel"]
    x = draw.normal((case["batch"], channels, rows, columns), case.dtype, scale=2.0 ** (rank % 2))
    if case.params.get("border"):
        x[:, :, 1 : rows - 1] = 0.0
    weight = draw.shared.normal((outputs, channels, kernel, kernel), case.dtype, scale=(channels * kernel**2) ** -0.5)
    bias = draw.shared.normal((outputs,), case.dtype) if case.params.get("bias", True) else None
    group = pc.GroupRef(case["group"]) if "group" in case.params else None
    return (x, weight, bias, case.params.get("stride", 1), case["padding"], group)


def _rows_from(case: pc.Case, inputs: pc.Inputs, rank: int, place: int, side: int) -> torch.Tensor:
    """The ``padding`` rows next to a border of the rank at ``place``: its last ones (side 1) or its first (0); zeros beyond the image."""
    members, count = group_members(case, rank), case["padding"]
    if not 0 <= place < len(members):
        return torch.zeros_like(inputs[rank][0][:, :, :count])
    x: torch.Tensor = inputs[members[place]][0]
    return x[:, :, x.shape[2] - count :] if side else x[:, :, :count]


def _padded(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """The rank's rows with those of its neighbours, and zero columns on both sides."""
    place = group_members(case, rank).index(rank)
    return _pad(case, inputs[rank][0], _rows_from(case, inputs, rank, place - 1, 1), _rows_from(case, inputs, rank, place + 1, 0))


def _pad(case: pc.Case, x: torch.Tensor, above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    return F.pad(torch.cat([above, x, below], 2), (case["padding"], case["padding"]))


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """The magnitude is |bias|, with a bound on the sum of terms weighted with the error of accumulation in float32."""
    _, weight, bias, stride, _, _ = inputs[rank]
    padded, strides = _padded(case, inputs, rank), (stride, stride)
    value = convolve(padded, weight, stride=strides, dilation=(1, 1))
    magnitude = terms_bound(padded, weight, stride=strides, dilation=(1, 1)).mul_(ACCUMULATION / _bias_unit(case))
    if bias is not None:
        column = bias.to(FP64).view(-1, 1, 1)
        value += column
        magnitude += column.abs()
    return pc.Expected("convolved", value, case.dtype, magnitude=magnitude)


def _bias_unit(case: pc.Case) -> float:
    return 2 * pc.UNIT_ROUNDOFF[case.dtype]


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """A sum accumulated in float32 and rounded, bias included, or rounded before the bias is added and again after it.

    The latter errs by u (|o| + |bias|) and u |o|; the bound is twice that. Normwise each rounding leaves 0.43 u (1.7e-3 in bfloat16).
    """
    large = case["batch"] * case["outputs"] * torch.Size(_output_size(case, 0)).numel() >= 256
    normwise = 6e-3 if case.dtype == BF16 and large else None
    return {"convolved": pc.Tolerance(relative=4 * pc.UNIT_ROUNDOFF[case.dtype], magnitude=_bias_unit(case), normwise=normwise)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """The rows of the neighbours that some window covers travel (or, if channels are fewer there, sums from them).

    Products are counted directly: Winograd's algorithm needs fewer, but to round its transformed operands costs more than is allowed.
    """
    (rows, columns), (rows_out, columns_out) = _size(case, rank), _output_size(case, rank)
    members, padding, kernel = group_members(case, rank), case["padding"], case["kernel"]
    place = members.index(rank)
    covered = {case.params.get("stride", 1) * i + j for i in range(rows_out) for j in range(kernel)}
    above, below = len(covered.intersection(range(padding))), len(covered.intersection(range(padding + rows, rows + 2 * padding)))
    row = case["batch"] * min(case["channels"], case["outputs"]) * columns * case.dtype.itemsize
    first, last = place == 0, place == len(members) - 1
    taps = case["channels"] * kernel**2
    read = case["batch"] * case["channels"] * rows * columns + case["outputs"] * taps
    written = case["batch"] * case["outputs"] * rows_out * columns_out
    return pc.Cost(
        hbm_bytes=(read + written) * case.dtype.itemsize,
        egress_bytes=row * (below * (not first) + above * (not last)),
        ingress_bytes=row * (above * (not first) + below * (not last)),
        flops={FLOP_UNIT[case.dtype]: 2 * written * taps},
    )


def _fp32(case: pc.Case, padded: torch.Tensor, args: tuple[Any, ...], *, flipped: bool = False, biased: bool = True) -> torch.Tensor:
    """One float32 convolution of the stripe with its halo, rounded once."""
    _, weight, bias, stride, _, _ = args
    with full_float32():
        result = F.conv2d(padded.to(FP32), weight.flip(2, 3).to(FP32) if flipped else weight.to(FP32), stride=stride)
    if bias is not None and biased:
        result = result + bias.to(FP32).view(-1, 1, 1)
    return result.to(case.dtype)


def _single(case: pc.Case, inputs: pc.Inputs, rank: int, **mistakes: bool) -> torch.Tensor:
    return _fp32(case, _padded(case, inputs, rank), inputs[rank], **mistakes)


def _late_bias(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """As one matrix product over unfolded patches, rounded, and the bias added to that."""
    _, weight, bias, stride, _, _ = inputs[rank]
    patches = F.unfold(_padded(case, inputs, rank).to(FP32), case["kernel"], stride=stride)
    result = torch.matmul(weight.to(FP32).flatten(1), patches).to(case.dtype)
    result = result.view(patches.shape[0], -1, *_output_size(case, rank))
    return result if bias is None else result + bias.view(-1, 1, 1)


def _with_halos(context: pc.AnswerContext, above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    return _fp32(context.case, _pad(context.case, context.args[0], above, below), context.args)


def _rows(context: pc.AnswerContext, distance: int, side: int, *, around: bool = False) -> torch.Tensor:
    """Border rows of the rank at a distance in the group; ``around``: the first and the last rank are neighbours."""
    place = context.place + distance
    return _rows_from(context.case, context.inputs, context.rank, place % len(context.members) if around else place, side)


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    sizes = {"batch": 2, "channels": 3, "outputs": 4, "rows": 6, "columns": 7, "kernel": 3, "padding": 1}
    return pc.case(label, dtype, **{**sizes, **params})


PRESETS = (
    pc.preset(
        "small",
        "no halo, a halo of two rows, kernels of one and of two taps, stripes as thin as the halo, strides, border rows alone, groups",
        _small("three_bf16", BF16),
        _small("three_fp32", FP32),
        _small("unpadded_bf16", BF16, padding=0),
        _small("five_no_bias_fp32", FP32, kernel=5, padding=2, bias=False),
        _small("five_bf16", BF16, kernel=5, padding=2),
        _small("one_bf16", BF16, kernel=1),
        _small("two_fp32", FP32, kernel=2),
        _small("thin_bf16", BF16, rows=2, kernel=5, padding=2),
        _small("stride_two_bf16", BF16, stride=2),
        _small("stride_two_odd_bf16", BF16, stride=2, rows=5),
        _small("border_bf16", BF16, border=True),
        _small("strided_group_bf16", BF16, group="strided", world_sizes=(4, 8)),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: 256 rows, of 128 columns, in all",
        pc.case("bf16", BF16, batch=1, channels=1280, outputs=1280, height=256, columns=128, kernel=3, padding=1),
    ),
    pc.preset(
        "production_sdxl_1024_level0",
        "the U-Net's first level at 1024 x 1024 pixels: 320 channels on 128 x 128, both branches of classifier-free guidance",
        pc.case("bf16", BF16, batch=2, channels=320, outputs=320, height=128, columns=128, kernel=3, padding=1),
        pc.case("single_bf16", BF16, batch=1, channels=320, outputs=320, height=128, columns=128, kernel=3, padding=1),
    ),
    pc.preset(
        "production_sdxl_3840_level0",
        "the first level at 3840 x 3840 pixels: 320 channels on 480 x 480",
        pc.case("bf16", BF16, batch=1, channels=320, outputs=320, height=480, columns=480, kernel=3, padding=1),
    ),
    pc.preset(
        "production_sdxl_3840_level1",
        "the second level at 3840 x 3840 pixels: 640 channels on 240 x 240",
        pc.case("bf16", BF16, batch=1, channels=640, outputs=640, height=240, columns=240, kernel=3, padding=1),
    ),
    pc.preset(
        "production_sdxl_1024_level2",
        "the third level at 1024 x 1024 pixels: 1280 channels on 32 x 32, both branches of guidance: thin stripes, latency",
        pc.case("bf16", BF16, batch=2, channels=1280, outputs=1280, height=32, columns=32, kernel=3, padding=1),
    ),
)


_HALO = pc.where(lambda c: c["padding"] > 0)

PROBLEM = pc.Problem(
    id=87,
    slug="conv2d_patch_parallel_halo",
    title="Patch-parallel two-dimensional convolution with exchange of border rows",
    category="geometric_spatial",
    parallelism=("spatial",),
    origin="DistriFusion's patch-parallel convolution of diffusion U-Nets, in its synchronous mode",
    summary=(
        "x (B, C, h, w) is the rank's stripe of an image of W h rows, in the order of the group (the world if None); weight "
        "(C', C, k_h, k_w) and bias (C',) or None are the same on all ranks. Rank r convolves rows [r h - p, (r + 1) h + p) of the image, "
        "zero beyond its edges, p = padding <= h, with p zero columns on either side, and the given stride, from its first row on: "
        "(h + 2 p - k_h) // stride + 1 rows. Sums in float32; returned in x's dtype."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    bandwidth="production_sdxl_3840_level0",
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong(
            "own_border_repeated",
            "the rank's own border rows in place of the neighbours'",
            lambda c: _with_halos(c, _rows(c, 0, 0), _rows(c, 0, 1)),
            _HALO,
        ),
        pc.wrong(
            "wrong_side",
            "the neighbours' rows from the far border",
            lambda c: _with_halos(c, _rows(c, -1, 0), _rows(c, 1, 1)),
            lambda c: _HALO(c) and c.label != "thin_bf16",
        ),
        pc.wrong(
            "wraps_around",
            "the first and the last rank as neighbours",
            lambda c: _with_halos(c, _rows(c, -1, 1, around=True), _rows(c, 1, 0, around=True)),
            _HALO,
        ),
        pc.wrong(
            "nothing_from_below",
            "zeros in place of the next rank's rows",
            lambda c: _with_halos(c, _rows(c, -1, 1), torch.zeros_like(_rows(c, 0, 0))),
            lambda c: _HALO(c) and c.params.get("stride", 1) == 1,
        ),
        pc.wrong(
            "kernel_flipped", "a convolution instead of a correlation", lambda c: c.by(_single, flipped=True), lambda c: c["kernel"] >= 2
        ),
        pc.wrong("bias_ignored", "without bias", lambda c: c.by(_single, biased=False), pc.except_for("five_no_bias_fp32")),
    ),
    alternative_solutions=pc.alternatives(fp32_rounded_once=_single, bias_after_rounding=_late_bias),
    process_groups=group_layout,
    notes=(
        "The public benchmark draws another weight and bias on every rank, unscaled. Here they are replicated and outputs of order one.",
        "With stride 1 and k_h = 2 p + 1 the result is the rank's rows of the whole image's convolution. With a stride the rank starts "
        "anew at its own first row: that is the same only if h is a multiple of the stride. The public semantics is kept.",
        "NaN is not tested: in one row of the image it would spread to rows that Winograd's algorithm shares with it.",
    ),
)
