"""Problem 76: a three-dimensional convolution whose input channels are sharded, with an all-reduce of the partial sums."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.contract.codes import eight_bits
from peerlane.problems.families.collective import group_layout, group_members, sequential_sum
from peerlane.problems.families.conv import convolve, full_float32, terms_bound
from peerlane.problems.families.matmul import ACCUMULATION, BF16, FLOP_UNIT, FP32, FP64

# Voxels of an image for each that is bright, and how bright it is.
_PER_BRIGHT, _BRIGHT = 300, 1024.0

Triple = int | tuple[int, int, int]


def reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int | tuple[int, int, int],
    padding: int | tuple[int, int, int],
    dilation: int | tuple[int, int, int],
    groups: int = 1,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    with full_float32():
        result = F.conv3d(input, weight, None, stride, padding, dilation, groups)
    dist.all_reduce(result, group=group)
    return result if bias is None else result.add_(bias.view(-1, 1, 1, 1))


def _triple(value: Triple) -> tuple[int, int, int]:
    return (value, value, value) if isinstance(value, int) else value


def _local_channels(case: pc.Case, rank: int) -> int:
    """``local`` input channels per rank, or ``channels`` on all ranks together."""
    return int(case["local"] if "local" in case.params else case["channels"] // len(group_members(case, rank)))


def _geometry(case: pc.Case) -> tuple[Triple, Triple, Triple, int]:
    """stride, padding, dilation and groups, as they are passed."""
    return case.params.get("stride", 1), case.params.get("padding", 0), case.params.get("dilation", 1), case.params.get("groups", 1)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Input of N(0, 1), weight of variance 1 / fan-in over all ranks, bias of N(0, 1), the same on all ranks.

    Input channels differ in size by powers of two that the weights take back, and a few voxels, the same on all ranks, are 2^10 times as
    large: codes of few bits with a scale for many channels, or for many neighbouring sums, are far off. ``case["pattern"]``:

    * ``cancelling``: neighbouring ranks' sums cancel but for noise of a quarter of their size
    * ``zero_rank``: the first rank's input is zero
    * ``nan``: the weights of one output channel are NaN on the last rank

    Groups of ranks have the same operands, as replicas in data parallelism that were fed the same.
    """
    pattern, local, (*_, groups) = case.params.get("pattern"), _local_channels(case, rank), _geometry(case)
    members = group_members(case, rank)
    place, kernel = members.index(rank), case["kernel"]
    scale = (len(members) * local // groups * kernel**3) ** -0.5
    shape = (case["outputs"], local // groups, kernel, kernel, kernel)
    bias = draw.shared.normal((case["outputs"],), case.dtype) if case.params.get("bias", True) else None
    source = draw.shared if pattern == "cancelling" or "group" in case.params else draw
    drawn = [
        (source.normal((case["batch"], local, *case["size"]), FP32), source.normal(shape, FP32, scale=scale))
        for _ in (members if "group" in case.params else [rank])
    ]
    x, weight = drawn[place if "group" in case.params else 0]
    bright = draw.shared.uniform((case["batch"], 1, *case["size"]), FP32) < 1 / _PER_BRIGHT
    sizes = draw.shared.octaves((local,))
    x = (x.where(~bright, _BRIGHT * x) * sizes.view(-1, 1, 1, 1)).to(case.dtype)
    unsized = sizes.view(groups, 1, -1).expand(-1, case["outputs"] // groups, -1).reshape(case["outputs"], -1, 1, 1, 1)
    if pattern == "cancelling":
        weight = (-1.0) ** place * weight + draw.normal(shape, FP32, scale=0.25 * scale)
    elif pattern == "zero_rank" and place == 0:
        x.zero_()
    elif pattern == "nan" and place == len(members) - 1:
        weight[1] = float("nan")
    weight = weight / unsized
    group = pc.GroupRef(case["group"]) if "group" in case.params else None
    return (x, weight.to(case.dtype), bias, *_geometry(case), group)


def _padded(x: torch.Tensor, padding: Triple) -> torch.Tensor:
    t, h, w = _triple(padding)
    return F.pad(x, (w, w, h, h, t, t))


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """The magnitude is the sum of the partial sums' absolute values and the bias', with a bound on the sum of all terms weighted with the
    error of accumulation in float32."""
    members = group_members(case, rank)
    stride, padding, dilation, groups = _geometry(case)
    strides, dilations = _triple(stride), _triple(dilation)
    weight = ACCUMULATION / _unit(case)
    value = torch.zeros((case["batch"], case["outputs"], *_output_size(case)), dtype=FP64, device=inputs[rank][0].device)
    magnitude = torch.zeros_like(value)
    for q in members:
        x = _padded(inputs[q][0], padding)
        partial = convolve(x, inputs[q][1], stride=strides, dilation=dilations, groups=groups)
        value += partial
        magnitude += partial.abs_()
        balanced = _balanced(x, inputs[q][1], groups)
        magnitude.add_(terms_bound(*balanced, stride=strides, dilation=dilations, groups=groups), alpha=weight)
    if (bias := inputs[rank][2]) is not None:
        column = bias.to(FP64).view(-1, 1, 1, 1)
        value += column
        magnitude += column.abs()
    return pc.Expected("convolved", value, case.dtype, magnitude=magnitude)


def _balanced(x: torch.Tensor, weight: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands with input channels scaled to and fro until each is as large in the one as in the other: no product changes, and the
    bound of Cauchy and Schwarz is least."""
    grouped = weight.to(FP64).view(groups, -1, *weight.shape[1:])
    sizes = grouped.square().sum((1, 3, 4, 5)).flatten()
    ratio = (x.to(FP64).square().sum((0, 2, 3, 4)) / sizes).pow(0.25)
    ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)
    scaled = (grouped * ratio.view(groups, 1, -1, 1, 1, 1)).flatten(0, 1)
    return x.to(FP64) / ratio.view(-1, 1, 1, 1), scaled


def _output_size(case: pc.Case) -> tuple[int, ...]:
    stride, padding, dilation, _ = map(_triple, _geometry(case))
    return tuple(
        (size + 2 * p - d * (case["kernel"] - 1) - 1) // s + 1
        for size, s, p, d in zip(case["size"], stride, padding, dilation, strict=True)
    )


def _unit(case: pc.Case) -> float:
    return (case.world_size + 4) * pc.UNIT_ROUNDOFF[case.dtype]


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """Partial sums rounded to the working dtype, added in it in any order, and the bias: (W + 1) u (sum |P_q| + |bias|), and 3 u to
    spare.

    Normwise, bfloat16 partial sums leave 3e-3 on 2 ranks and 4e-3 on 8, and up to 7e-3 in one draw of a thousand, where few voxels are most
    of the norm; cancelling partial sums have no normwise bound.
    """
    normwise = 1e-2 if case.world_size <= 4 else 1.5e-2
    bounded = case.dtype == BF16 and case.params.get("pattern") != "cancelling"
    return {"convolved": pc.Tolerance(magnitude=_unit(case), normwise=normwise if bounded else None)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Operands are read and the result written once; it is reduced and spread in parts, one for each rank.

    Products are counted directly: Winograd's algorithm needs fewer, but to round its transformed operands costs more than is allowed.
    """
    ranks, local, (*_, groups) = len(group_members(case, rank)), _local_channels(case, rank), _geometry(case)
    taps = local // groups * case["kernel"] ** 3
    elements = case["batch"] * case["outputs"] * torch.Size(_output_size(case)).numel()
    read = case["batch"] * local * torch.Size(case["size"]).numel() + case["outputs"] * taps
    port = pc.traffic.all_reduce(elements * case.dtype.itemsize, ranks)
    return pc.Cost(
        hbm_bytes=(read + elements) * case.dtype.itemsize,
        egress_bytes=port,
        ingress_bytes=port,
        flops={FLOP_UNIT[case.dtype]: 2 * elements * taps},
    )


def _partial(case: pc.Case, args: tuple[Any, ...], *, flipped: bool = False) -> torch.Tensor:
    """One rank's float32 sum over its channels, without bias."""
    weight = args[1].to(FP32)
    with full_float32():
        return F.conv3d(args[0].to(FP32), weight.flip(2, 3, 4) if flipped else weight, None, *_geometry(case))


def _sum(case: pc.Case, inputs: pc.Inputs, ranks: Sequence[int], *, biases: int = 1, flipped: bool = False) -> torch.Tensor:
    """Some ranks' partial sums, and so many times the bias, added in float32 and rounded once."""
    total = _partial(case, inputs[ranks[0]], flipped=flipped)
    for q in ranks[1:]:
        total += _partial(case, inputs[q], flipped=flipped)
    if (bias := inputs[ranks[0]][2]) is not None:
        total += biases * bias.to(FP32).view(-1, 1, 1, 1)
    return total.to(case.dtype)


def _in_dtype(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Partial sums rounded, added from first to last in the dtype, then the bias."""
    total = sequential_sum([_partial(case, inputs[q]).to(case.dtype) for q in group_members(case, rank)])
    return total if inputs[rank][2] is None else total + inputs[rank][2].view(-1, 1, 1, 1)


def _int8_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Float32 after a code of 8 bits with a scale for each entry of the first axis."""
    flat = tensor.to(FP32).flatten(1)
    return eight_bits(flat, flat.shape[1]).view(tensor.shape)


def _int8_operands(context: pc.AnswerContext) -> torch.Tensor:
    coded = [(_int8_rows(args[0].movedim(1, -1).flatten(0, -2)), _int8_rows(args[1])) for args in context.inputs]
    inputs = [
        (x.view(*args[0].movedim(1, -1).shape).movedim(-1, 1), weight, *args[2:])
        for (x, weight), args in zip(coded, context.inputs, strict=True)
    ]
    return _sum(context.case, inputs, context.members)


def _eight_bits(context: pc.AnswerContext) -> torch.Tensor:
    case, ranks = context.case, context.members
    sums = [eight_bits(_partial(case, context.inputs[q]).to(case.dtype)).to(FP32) for q in ranks]
    total = torch.stack(sums).sum(0)
    if (bias := context.args[2]) is not None:
        total += bias.to(FP32).view(-1, 1, 1, 1)
    return total.to(case.dtype)


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"batch": 1, "local": 4, "outputs": 6, "size": (5, 6, 7), "kernel": 3, **params})


PRESETS = (
    pc.preset(
        "small",
        "strides, padding, dilation by axis; groups of channels; no bias; cancelling partial sums; a rank of zeros; NaN; groups of ranks",
        _small("plain_bf16", BF16),
        _small("plain_fp32", FP32),
        _small("by_axis_bf16", BF16, stride=(1, 2, 2), padding=(1, 1, 0), dilation=(1, 1, 2), bias=False),
        _small("by_axis_fp32", FP32, stride=(1, 2, 2), padding=(1, 1, 0), dilation=(1, 1, 2), bias=False),
        _small("groups_bf16", BF16, batch=2, groups=2, padding=1),
        _small("two_taps_fp32", FP32, kernel=2, stride=2, padding=1),
        _small("cancelling_bf16", BF16, pattern="cancelling"),
        _small("zero_rank_bf16", BF16, pattern="zero_rank"),
        _small("nan_bf16", BF16, pattern="nan"),
        _small("strided_group_bf16", BF16, group="strided", world_sizes=(4, 8)),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: 512 channels, padded beforehand",
        pc.case("bf16", BF16, batch=1, channels=512, outputs=512, size=(19, 66, 66), kernel=3),
    ),
    pc.preset(
        "production_hunyuan_vae_mid",
        "middle block of the HunyuanVideo and Open-Sora 2.0 video VAE: 512 channels, 17 x 96 x 160 latents",
        pc.case("bf16", BF16, batch=1, channels=512, outputs=512, size=(19, 98, 162), kernel=3),
    ),
    pc.preset(
        "production_hunyuan_vae_up",
        "an up block of the same: 512 to 256 channels, 33 x 192 x 320",
        pc.case("bf16", BF16, batch=1, channels=512, outputs=256, size=(35, 194, 322), kernel=3),
    ),
    pc.preset(
        "production_video_vae_first",
        "a first, causal stage: 128 channels, 65 x 256 x 256",
        pc.case("bf16", BF16, batch=1, channels=128, outputs=128, size=(67, 258, 258), kernel=3),
    ),
)


_BIASED = pc.where(lambda c: bool(c.params.get("bias", True)))

PROBLEM = pc.Problem(
    id=76,
    slug="conv3d_channel_parallel_allreduce",
    title="Three-dimensional convolution with sharded input channels and an all-reduce",
    category="tensor_parallel",
    parallelism=("tensor",),
    origin="Open-Sora 2.0's video VAE: a row-parallel Conv3d",
    summary=(
        "input (B, C, t, h, w) holds the rank's C of the W C input channels, weight (C', C / groups, k, k, k) the weights for them. Every "
        "rank of the group (the world if None) returns the sum over ranks of conv3d(input, weight, stride, padding, dilation, groups), "
        "plus bias, in the input's dtype; bias (C',) or None is the same on all ranks; stride, padding (zeros) and dilation are a number "
        "or one for each axis. Partial sums are accumulated in float32; they may be rounded to the dtype and added in it."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("bias_ignored", "without bias", lambda c: _sum(c.case, c.inputs, c.members, biases=0), _BIASED),
        pc.wrong("bias_from_every_rank", "the bias W times", lambda c: _sum(c.case, c.inputs, c.members, biases=len(c.members)), _BIASED),
        pc.wrong(
            "eight_bits",
            "partial sums are sent in 8-bit integers with a scale for every 32 neighbours",
            _eight_bits,
            lambda c: "channels" in c.params,
        ),
        pc.wrong(
            "int8_operands",
            "products of 8-bit integers, with a scale for each voxel and output channel",
            _int8_operands,
            lambda c: "channels" in c.params,
        ),
        pc.wrong("kernel_flipped", "a convolution instead of a correlation", lambda c: _sum(c.case, c.inputs, c.members, flipped=True)),
    ),
    alternative_solutions=pc.alternatives(
        fp32_sum=lambda case, inputs, rank: _sum(case, inputs, group_members(case, rank)), sequential_in_dtype=_in_dtype
    ),
    excused={**pc.any_order("a sum does not depend on the order of its terms"), "another_rank": "all ranks have the same answer"},
    process_groups=group_layout,
    replicated=True,
    notes=(
        "The public benchmark's weights are unscaled, so that outputs of size 118 are held to an absolute tolerance, which only NCCL's own "
        "order of additions meets. Here outputs are of order one, and an error is measured by the size of the partial sums.",
        "The public reference works in chunks of channels where a tensor has more than 2^31 elements; no case here is that large.",
        "NaN stands in the weights of one output channel: in part of the image it would spread to voxels that Winograd's algorithm shares "
        "with it.",
    ),
)
