"""Problem 19: block-wise quantisation to FP8, then all-gather of codes and scales."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32, all_gather_single
from peerlane.problems.families.interval import Interval, comparison
from peerlane.problems.families.quant import E4M3, E4M3_MAX, FP64, block_length, e4m3, student_t, widened

# Elements of one FSDP-sharded Llama-3-8B transformer block: attention, MLP and norms.
_LLAMA3_8B_BLOCK = 218112000


def reference(local_tensor: torch.Tensor, block_size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    *leading, columns = local_tensor.shape
    if columns % block_size:
        raise ValueError(f"the last axis has {columns} elements and block_size is {block_size}: expected a multiple of the block size")
    blocks = local_tensor.to(torch.float32).view(*leading, columns // block_size, block_size)
    scales = blocks.abs().amax(-1) / E4M3_MAX
    divisors = torch.where(scales == 0, 1.0, scales)
    codes = (blocks / divisors.unsqueeze(-1)).to(E4M3).view(local_tensor.shape)
    # Collectives need not know float8: its bytes travel.
    return _gathered(codes.view(torch.uint8)).view(E4M3), _gathered(scales)


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.new_empty((dist.get_world_size() * tensor.shape[0], *tensor.shape[1:]))
    all_gather_single(result, tensor)
    return result


def _shape(case: pc.Case) -> tuple[int, ...]:
    """One rank's shape. ``elements`` in all on all ranks, in rows of 1024, or ``shape``."""
    if "elements" in case.params:
        return (case["elements"] // case.world_size // 1024, 1024)
    return tuple(case["shape"])


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Student's t, in rows of unlike size (1/16 to 16) and with one channel in 64 ten times as large. ``case["data"]``:

    * ``weights``: N(0, 0.02^2)
    * ``hard``: blocks are in turn all zero; zero but for one element; powers of two; small but for one of 10^4; near 10^38; near 10^-35;
      halfway between two codes; with an infinity; and ordinary
    """
    shape, data = _shape(case), case.params.get("data")
    if data == "weights":
        values = draw.normal(shape, FP32, scale=0.02)
    else:
        values = student_t(draw, shape)
        values *= torch.exp2(draw.uniform((*shape[:-1], 1), FP32, low=-4.0, high=4.0))
        values[..., draw.shared.permutation(shape[-1])[: shape[-1] // 64]] *= 10.0
    if data == "hard":
        _harden(values.view(-1, block_length(case)), draw)
    return (values.to(case.dtype), *((case["block"],) if "block" in case.params else ()))


def _harden(blocks: torch.Tensor, draw: pc.Draw) -> None:
    zero, single, powers, outlier, huge, tiny, tied, infinite = (blocks[kind::9] for kind in range(8))
    middle = blocks.shape[1] // 2
    zero.zero_()
    single[:, :middle] = 0.0
    single[:, middle + 1 :] = 0.0
    powers.copy_(torch.exp2(draw.integers(-12, 9, powers.shape, FP32)))
    outlier[:, middle] = 1e4
    for part, size in ((huge, 1e38), (tiny, 1e-35)):
        part /= part.abs().amax(1, keepdim=True)
        part *= size
    tied.copy_((1.0 + (2.0 * draw.integers(0, 7, tied.shape, FP32) + 1.0) / 16.0) * torch.exp2(draw.integers(-6, 8, tied.shape, FP32)))
    tied[:, middle] = E4M3_MAX
    infinite[:, middle] = math.inf


def _amax(tensor: torch.Tensor, block_size: int) -> torch.Tensor:
    """(..., C / block_size) float32, exact."""
    return tensor.to(FP32).view(*tensor.shape[:-1], tensor.shape[-1] // block_size, block_size).abs().amax(-1)


def _coded(tensor: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The codes of x / scale, float32, with nothing beyond the largest code, and with the tensor itself where the scale is zero."""
    block_size = tensor.shape[-1] // scales.shape[-1]
    divisors = torch.where(scales == 0, 1.0, scales).repeat_interleave(block_size, dim=-1)
    return (tensor.to(FP32) / divisors).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def _quotients(tensor: torch.Tensor, block_size: int) -> torch.Tensor:
    """x / (amax / 448) in float64, 0 in blocks of zeros."""
    amax = _amax(tensor, block_size).to(FP64)
    divisors = torch.where(amax == 0, 1.0, amax / E4M3_MAX).repeat_interleave(block_size, dim=-1)
    return tensor.to(FP64) / divisors


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, pc.Expected]:
    block_size = block_length(case)
    scales = [_amax(args[0], block_size).to(FP64) / E4M3_MAX for args in inputs]
    codes = [_coded(args[0], scale.to(FP32)) for args, scale in zip(inputs, scales, strict=True)]
    low, high = zip(*(map(e4m3, widened(_quotients(args[0], block_size))) for args in inputs), strict=True)
    return (
        Interval(name="codes", value=torch.cat(codes), dtype=E4M3, low=torch.cat(low), high=torch.cat(high)),
        pc.Expected("scales", torch.cat(scales), FP32),
    )


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """Scales: 8 roundoffs of float32, where a division costs one, a product with 1/448 two, an approximate division up to four.

    Codes must be the correctly rounded quotient; where it lies within 2^-20 of a tie, relatively, either neighbour.
    """
    words = (
        "the correctly rounded quotient x / scale; either neighbour, if the quotient is within 2^-20 of the middle of two codes, relatively"
    )
    return {"codes": pc.Tolerance(words=words), "scales": pc.Tolerance(relative=8 * pc.UNIT_ROUNDOFF[FP32])}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """The tensor is read once; one byte per element and a scale per block go to every other rank, and W of each are written."""
    elements = torch.Size(_shape(case)).numel()
    coded = elements * (1 + FP32.itemsize / block_length(case))
    port = (case.world_size - 1) * coded
    return pc.Cost(
        hbm_bytes=elements * case.dtype.itemsize + case.world_size * coded,
        egress_bytes=port,
        ingress_bytes=port,
        flops={"fp32": 2 * elements},
    )


Pair = tuple[torch.Tensor, torch.Tensor]


def _from(inputs: pc.Inputs, pair: Any) -> Pair:
    """``pair(tensor)`` of every rank's tensor, concatenated."""
    codes, scales = zip(*(pair(args[0]) for args in inputs), strict=True)
    return torch.cat(codes), torch.cat(scales)


def _with_scales(context: pc.AnswerContext, change: Any) -> Pair:
    """Every block quantised with ``change(amax) / 448``, which is also what is returned."""

    def pair(tensor: torch.Tensor) -> Pair:
        scales = change(_amax(tensor, block_length(context.case))) / E4M3_MAX
        return _coded(tensor, scales), scales

    return _from(context.inputs, pair)


def _truncated(context: pc.AnswerContext) -> Pair:
    """Rounded towards zero: one code less where the nearest one lies beyond the quotient."""
    codes, scales = context.answer
    quotients = torch.cat([_quotients(args[0], block_length(context.case)) for args in context.inputs])
    beyond = codes.to(FP64).abs() > quotients.abs()
    return (codes.view(torch.uint8) - beyond.to(torch.uint8)).view(E4M3), scales


def _scales_as(context: pc.AnswerContext, change: Any) -> Pair:
    """The right codes with other scales."""
    codes, scales = context.answer
    return codes, change(scales)


def _constant_codes(context: pc.AnswerContext) -> Pair:
    codes, scales = context.answer
    return torch.full_like(codes, float(codes.to(FP32).nan_to_num().mean())), scales


def _zero_block_one(context: pc.AnswerContext) -> Pair:
    return _scales_as(context, lambda scales: torch.where(scales == 0, 1.0, scales))


def _by_product(factor: Any) -> Any:
    """An alternative solution: codes from x times ``factor(amax, scale)``, in float32."""

    def answer(case: pc.Case, inputs: pc.Inputs, rank: int) -> Pair:
        def pair(tensor: torch.Tensor) -> Pair:
            amax = _amax(tensor, block_length(case))
            scales = amax * (1 / E4M3_MAX)
            factors = torch.where(amax == 0, 0.0, factor(amax, scales)).repeat_interleave(block_length(case), dim=-1)
            return (tensor.to(FP32) * factors).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scales

        return _from(inputs, pair)

    return answer


PRESETS = (
    pc.preset(
        "small",
        "one to three axes, blocks of 16 to 128, no rows, zero, huge and tiny blocks, outliers, ties between codes, infinities",
        pc.case("ragged_bf16", BF16, shape=(3, 256)),
        pc.case("three_axes_fp32", FP32, shape=(2, 3, 64), block=32),
        pc.case("one_axis_bf16", BF16, shape=(256,)),
        pc.case("empty_bf16", BF16, shape=(0, 128)),
        pc.case("hard_bf16", BF16, shape=(5, 256), block=16, data="hard"),
        pc.case("hard_fp32", FP32, shape=(5, 256), block=16, data="hard"),
    ),
    pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, shape=(1024, 1024), block=128)),
    pc.preset("production_deepseek_v3_activations", "4096 tokens x hidden 7168", pc.case("bf16", BF16, shape=(4096, 7168), block=128)),
    pc.preset(
        "production_llama3_8b_fsdp_params",
        "the parameters of a transformer block, in equal shards",
        pc.case("bf16", BF16, elements=_LLAMA3_8B_BLOCK, block=128, data="weights"),
    ),
    pc.preset(
        "production_kv_cache_gather", "8192 tokens x 1024 key or value channels", pc.case("bf16", BF16, shape=(8192, 1024), block=64)
    ),
)

_HARD = ("small/hard_bf16", "small/hard_fp32")
_NOT_EMPTY = pc.where(lambda c: c.label != "empty_bf16")

PROBLEM = pc.Problem(
    id=19,
    slug="blocked_fp8_quantize",
    title="Block-wise FP8 (e4m3) quantisation and all-gather of codes and scales",
    category="fsdp_zero",
    parallelism=("fsdp", "data"),
    origin="DeepSeek-V3: the activation quantisation of its inference code (blocks of 128, scale amax / 448), followed by an all-gather",
    summary=(
        "Blocks are runs of block_size elements of local_tensor's last axis. A block's scale is max|x| / 448 in float32, its codes are "
        "x / scale rounded to float8_e4m3fn, nearest even. Every rank returns all ranks' codes and scales, concatenated along the first "
        "axis in rank order: float8_e4m3fn (W n, ..., C) and float32 (W n, ..., C / block_size). A block of zeros has scale 0 and codes "
        "0; one with an infinity has an infinite scale, code NaN for infinities and 0 for finite elements."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    compare=comparison(tolerance),
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("scale_one", "elements rounded as they are, scale 1", lambda c: _with_scales(c, lambda a: torch.full_like(a, E4M3_MAX))),
        pc.wrong("constant_codes", "right scales, and every code that of the codes' mean", _constant_codes, _NOT_EMPTY),
        pc.wrong("constant_scales", "right codes, all scales 0.006", lambda c: _scales_as(c, lambda s: torch.full_like(s, 0.006))),
        pc.wrong("scales_in_bf16", "right codes, scales rounded to bfloat16", lambda c: _scales_as(c, lambda s: s.to(BF16).to(FP32))),
        pc.wrong("inverse_scales", "right codes, 448 / amax for a scale", lambda c: _scales_as(c, torch.reciprocal)),
        pc.wrong("scale_of_next_block", "quantised with the next block's scale", lambda c: _with_scales(c, lambda a: a.roll(-1, -1))),
        pc.wrong(
            "scale_of_whole_tensor",
            "one scale for all blocks of a rank",
            lambda c: _with_scales(c, lambda a: a.amax().expand_as(a)),
            _NOT_EMPTY,
        ),
        pc.wrong("truncated", "rounded towards zero", _truncated),
        pc.wrong("zero_block_scale_one", "scale 1 for blocks of zeros", _zero_block_one, _HARD),
    ),
    alternative_solutions=pc.alternatives(
        product_with_reciprocal=_by_product(lambda amax, scales: 1.0 / scales),
        product_with_448_over_amax=_by_product(lambda amax, scales: E4M3_MAX / amax),
    ),
    excused={
        "another_rank": "all ranks have the same answer",
        "input_mean": "float8 cannot hold the mean of inputs near 10^38; constant_codes and constant_scales stand in for it",
    },
    replicated=True,
    notes=(
        "The public benchmark compares scales with an absolute tolerance of 0.01. Scales are smaller, so a constant passes there. Here "
        "scales have a relative tolerance of 8 roundoffs of float32.",
        "The public benchmark compares codes with a relative tolerance below their spacing, but its own division is approximate. Half a "
        "percent of bfloat16 values lie exactly between two codes. A right answer fails there if it rounds one of them the other way. "
        "Here a tie may go either way, and no other code may differ.",
        "The sign of a zero code is not compared, and NaN elements and denormal scales are left out of the inputs: they are not defined.",
        "A transformer block's share of a rank is not a multiple of 4096; it comes in rows of 1024.",
    ),
)
