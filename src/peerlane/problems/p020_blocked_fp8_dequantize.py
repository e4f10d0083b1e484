"""Problem 20: block-wise dequantisation, then all-to-all."""

from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32
from peerlane.problems.families.interval import comparison
from peerlane.problems.families.quant import E4M3, E4M3_MAX, FP64, block_length, e4m3


def reference(local_y: torch.Tensor, local_s: torch.Tensor, block_size: int = 128) -> torch.Tensor:
    ranks, slice_elements = dist.get_world_size(), local_y[0].numel()
    if local_y.shape[0] != ranks or slice_elements % block_size:
        raise ValueError(
            f"local_y has shape {tuple(local_y.shape)}: expected a first axis of {ranks}, the number of ranks, and slices of a multiple of "
            f"block_size = {block_size} elements"
        )
    blocks = local_y.view(-1, block_size).to(torch.float32)
    values = (blocks * local_s.reshape(-1, 1).to(torch.float32)).view(local_y.shape)
    received = torch.empty_like(values)
    dist.all_to_all_single(received, values)
    return received


def _shape(case: pc.Case) -> tuple[int, ...]:
    """(W, *slice); with ``rows``, which all ranks' slices share equally, (W, rows / W, *row)."""
    world = case.world_size
    return (world, case["rows"] // world, *case["row"]) if "rows" in case.params else (world, *case["slice"])


def _blocks(case: pc.Case) -> int:
    return torch.Size(_shape(case)).numel() // block_length(case)


def _scale_dtype(case: pc.Case) -> torch.dtype:
    dtype: torch.dtype = case.params.get("scale_dtype", FP32)
    return dtype


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """What a quantiser gives: codes N(0, 128^2) within float8's range, or bfloat16 values N(0, 1), and scales of 2^-12 to 2^-2.

    ``case["data"]``:

    * ``all_codes``: random bytes for codes, NaN and negative zero among them
    * ``extreme``: also scales from 10^-30 to 10^30 and some of zero, so that some products overflow
    """
    shape, data = _shape(case), case.params.get("data")
    if data in ("all_codes", "extreme"):
        y = draw.bits(shape, case.dtype)
    elif case.dtype == E4M3:
        y = e4m3(draw.normal(shape, FP32, scale=128.0).clamp_(-E4M3_MAX, E4M3_MAX))
    else:
        y = draw.normal(shape, case.dtype)
    low, high = (-99.0, 119.0) if data == "extreme" else (-12.0, -2.0)
    scales = torch.exp2(draw.uniform((_blocks(case),), FP32, low=low, high=high))
    if data == "extreme":
        scales[:: 5 + rank] = 0.0
        scales[1::4] = 2.0**120  # times 448: beyond float32
    if not case.params.get("flat_scales"):
        scales = scales.view(case.world_size, -1)
    block = (case["block"],) if "block" in case.params else ()
    return (y, scales.to(_scale_dtype(case)), *block)


def _decode(case: pc.Case, y: torch.Tensor, scales: torch.Tensor, work: torch.dtype = FP32) -> torch.Tensor:
    """Elements times their blocks' scales, in y's shape."""
    return (y.reshape(-1, block_length(case)).to(work) * scales.reshape(-1, 1).to(work)).view(y.shape).to(FP32)


def _of_source(case: pc.Case, args: tuple[Any, ...], target: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slice and the scales that a source sends to ``target``."""
    return args[0][target], args[1].reshape(case.world_size, -1)[target]


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """Products of at most 32 bits are exact in float64, and rounded once."""
    return pc.exactly("received", torch.stack([_decode(case, *_of_source(case, args, rank), FP64) for args in inputs]))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Codes and scales travel, and are decoded where they arrive."""
    elements, world = torch.Size(_shape(case)).numel(), case.world_size
    coded = elements * case.dtype.itemsize + _blocks(case) * _scale_dtype(case).itemsize
    port = pc.traffic.all_to_all(coded, world)
    return pc.Cost(hbm_bytes=coded + elements * FP32.itemsize, egress_bytes=port, ingress_bytes=port, flops={"fp32": elements})


def _received(context: pc.AnswerContext, change: Any) -> torch.Tensor:
    """Every source's slice decoded with ``change(its scales)``."""
    parts = (_of_source(context.case, args, context.rank) for args in context.inputs)
    return torch.stack([_decode(context.case, y, change(scales)) for y, scales in parts])


def _scales_of_source_slice(context: pc.AnswerContext) -> torch.Tensor:
    """Slice q decoded with the scales that the source keeps for slice q, not for this rank."""
    case = context.case
    scales = [args[1].reshape(case.world_size, -1)[(context.rank + 1) % case.world_size] for args in context.inputs]
    return torch.stack([_decode(case, args[0][context.rank], s) for args, s in zip(context.inputs, scales, strict=True)])


def _own_scales(context: pc.AnswerContext) -> torch.Tensor:
    own = context.args[1].reshape(context.case.world_size, -1)
    return torch.stack([_decode(context.case, args[0][context.rank], own[q]) for q, args in enumerate(context.inputs)])


def _at_receiver(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Codes and scales exchanged first, decoded in one go."""
    parts = [_of_source(case, args, rank) for args in inputs]
    return _decode(case, torch.stack([y for y, _ in parts]), torch.stack([s for _, s in parts]))


_FLOAT32_SCALES = (
    "small/fp8",
    "small/all_codes_fp8",
    "small/extreme_fp8",
    "small/flat_scales_fp8",
    "production_deepseek_v3_dispatch/fp8",
    "production_qwen3_235b_dispatch/fp8",
    "production_bf16_payload/bf16",
)

PROBLEM = pc.Problem(
    id=20,
    slug="blocked_fp8_dequantize",
    title="Block-wise dequantisation and all-to-all",
    category="expert_parallel",
    parallelism=("expert",),
    origin="DeepSeek-V3: its block-wise dequantisation (code times block scale), placed before the exchange of expert parallelism",
    summary=(
        "local_y is (W, *C), float8_e4m3fn or another float dtype; slice d goes to rank d. Blocks are runs of block_size elements in "
        "row-major order, and local_s holds their scales in that order, in any shape. Rank r returns float32 (W, *C) whose slice q is rank "
        "q's slice r times its scales, multiplied in float32: bit for bit."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    compare=comparison(lambda _: {}),
    cost=cost,
    presets=(
        pc.preset(
            "small",
            "fp8 and bfloat16 payloads, all 256 codes, scales that are zero or overflow, scales in one axis, a slice of one axis, no rows",
            pc.case("fp8", E4M3, slice=(3, 64), block=32),
            pc.case("all_codes_fp8", E4M3, slice=(8, 64), block=32, data="all_codes"),
            pc.case("extreme_fp8", E4M3, slice=(8, 64), block=32, data="extreme"),
            pc.case("flat_scales_fp8", E4M3, slice=(3, 64), block=16, flat_scales=True),
            pc.case("one_axis_bf16", BF16, slice=(256,), scale_dtype=BF16),
            pc.case("empty_fp8", E4M3, slice=(0, 64), block=32),
        ),
        pc.preset("pkb", "the public benchmark's shape and dtypes", pc.case("bf16", BF16, slice=(1024, 1024), block=128, scale_dtype=BF16)),
        pc.preset(
            "production_deepseek_v3_dispatch",
            "4096 tokens to 8 experts each, hidden 7168, evenly spread",
            pc.case("fp8", E4M3, rows=4096 * 8, row=(7168,), block=128),
        ),
        pc.preset(
            "production_qwen3_235b_dispatch",
            "4096 tokens to 8 experts each, hidden 4096, evenly spread",
            pc.case("fp8", E4M3, rows=4096 * 8, row=(4096,), block=128),
        ),
        pc.preset("production_bf16_payload", "2048 rows of 4096 to every rank", pc.case("bf16", BF16, slice=(2048, 4096), block=128)),
    ),
    known_wrong_answers=(
        pc.wrong("scale_one", "codes as they are", lambda c: _received(c, torch.ones_like)),
        pc.wrong("scale_of_next_block", "every block with the next one's scale", lambda c: _received(c, lambda s: s.roll(1))),
        pc.wrong("scales_in_bf16", "scales rounded to bfloat16", lambda c: _received(c, lambda s: s.to(BF16).to(FP32)), _FLOAT32_SCALES),
        pc.wrong("scales_of_next_slice", "the scales of the source's next slice", _scales_of_source_slice),
        pc.wrong("own_scales", "the rank's own scales for codes from everywhere", _own_scales),
        pc.wrong("rounded_to_bf16", "the exchange in bfloat16", lambda c: c.answer.to(BF16).to(FP32)),
    ),
    alternative_solutions=pc.alternatives(decoded_by_the_receiver=_at_receiver),
    notes=(
        "The public benchmark feeds bfloat16 instead of FP8 and scales of either sign, which no quantiser gives. Here its shape keeps "
        "bfloat16, with positive scales, and the other presets are FP8.",
        "One NaN is as good as another: sign and payload of a product with NaN are not defined. Products are never denormal.",
    ),
)
