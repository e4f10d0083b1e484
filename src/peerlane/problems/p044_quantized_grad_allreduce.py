"""Problem 44: mean over ranks of gradients that every rank first quantises to int8, block by block."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32
from peerlane.problems.families.interval import Interval, comparison
from peerlane.problems.families.quant import FP64, flat_blocks, student_t, widened

# Codes go from -127 to 127; a block's largest magnitude is taken to be at least the floor.
_CODES = 127.0
_FLOOR = 1e-8


def reference(flat_grad: torch.Tensor, block_size: int) -> torch.Tensor:
    count = flat_grad.numel()
    flat = flat_grad.reshape(-1).to(torch.float32)
    blocks = F.pad(flat, (0, -count % block_size)).view(-1, block_size)
    scales = blocks.abs().amax(-1, keepdim=True).clamp(min=_FLOOR) / _CODES
    codes = (blocks / scales).round_().clamp_(-_CODES, _CODES)
    total = codes.mul_(scales).view(-1)[:count].contiguous()
    dist.all_reduce(total)
    return total.div_(dist.get_world_size()).to(flat_grad.dtype).view(flat_grad.shape)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor, int]:
    """Student's t times ``case["size"]`` (10^-3) and 1.3^rank. ``case["data"]``:

    * ``rank_scale``: ranks' sizes spread over 10^6, the last is the largest
    * ``outlier``: one element in every block is 1000 times as large, so that most others get the code 0
    * ``ties``: every other element a whole or half multiple of a power of two, each block's largest 127 times it
    * ``floor``: every other block far below the floor, block 2 zero
    * ``special``: a NaN in the first block on rank 0, an infinity in the last block on the last rank
    """
    count, block_size, data = torch.Size(case["shape"]).numel(), case["block"], case.params.get("data")
    exponent = 6.0 * rank / (case.world_size - 1) - 6.0
    size = case.params.get("size", 1e-3) * (10.0**exponent if data == "rank_scale" else 1.3**rank)
    blocks = flat_blocks(student_t(draw, (count,)).mul_(size), block_size)
    if data == "outlier":
        blocks[:, draw.permutation(block_size)[:1]] *= 1000.0
    elif data == "ties":
        halves = draw.integers(-253, 254, blocks.shape, FP32)
        halves[:, 1::2] *= draw.uniform(halves[:, 1::2].shape, FP32)
        halves[:, 0] = 254.0
        blocks = halves * torch.exp2(draw.integers(-12, -3, (len(blocks), 1), FP32))
    elif data == "floor":
        blocks[::2] *= 1e-6
        blocks[2] = 0.0
    flat = blocks.reshape(-1)[:count]
    if data == "special":
        if rank == 0:
            flat[block_size // 2] = float("nan")
        if rank == case.world_size - 1:
            flat[-1] = float("inf")
    return flat.to(case.dtype).reshape(tuple(case["shape"])), block_size


def _block_scales(blocks: torch.Tensor) -> torch.Tensor:
    """(blocks, 1) float32: max(max|x|, floor) / 127 by true division."""
    return blocks.to(FP32).abs().amax(-1, keepdim=True).clamp(min=_FLOOR) / _CODES


def _codes(quotients: torch.Tensor) -> torch.Tensor:
    return quotients.round().clamp_(-_CODES, _CODES)


def _unpadded(case: pc.Case, blocks: torch.Tensor) -> torch.Tensor:
    shape = torch.Size(case["shape"])
    return blocks.reshape(-1)[: shape.numel()].reshape(shape)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """The mean in float64 of codes times scales; a code whose quotient is within 2^-20 of a tie, relatively, may be either neighbour."""
    shape = flat_blocks(inputs[0][0], case["block"]).shape
    value, low, high, magnitude = (torch.zeros(shape, dtype=FP64, device=inputs[0][0].device) for _ in range(4))
    for grad, block_size in inputs:
        blocks = flat_blocks(grad, block_size)
        scales = _block_scales(blocks)
        value += _codes(blocks.to(FP32) / scales).to(FP64) * scales
        smallest, largest = (_codes(quotients) * scales for quotients in widened(blocks.to(FP64) / scales))
        low += smallest
        high += largest
        magnitude += torch.maximum(smallest.abs(), largest.abs())
    world = case.world_size
    value, low, high, magnitude = (_unpadded(case, part / world) for part in (value, low, high, magnitude))
    return Interval(name="mean", value=value, dtype=case.dtype, low=low, high=high, magnitude=magnitude)


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """The result's rounding and, in float32, that of W - 1 additions, of the products and of scales (a roundoff, or three by a reciprocal).

    The last three are relative to the mean of the decoded magnitudes, and allowed twice. Quantisation itself has no tolerance: a code must
    be the nearest.
    """
    sums = 2 * (case.world_size + 4) * pc.UNIT_ROUNDOFF[FP32]
    return {"mean": pc.Tolerance(relative=2 * pc.UNIT_ROUNDOFF[case.dtype], magnitude=sums)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """The cheapest of three ways: codes and scales to the owners of W slices, and the means back; codes and scales to everybody; or, for
    blocks so small that scales outweigh codes, the float32 products reduced in place of both."""
    count, world = torch.Size(case["shape"]).numel(), case.world_size
    coded = count + FP32.itemsize * -(-count // case["block"])
    owners = pc.traffic.all_to_all(coded + count * case.dtype.itemsize, world)
    products = pc.traffic.all_reduce(count * FP32.itemsize, world)
    port = min(owners, (world - 1) * coded, products)
    return pc.Cost(hbm_bytes=2 * count * case.dtype.itemsize, egress_bytes=port, ingress_bytes=port, flops={"fp32": 5 * count})


def _trip(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return _codes(blocks.to(FP32) / scales) * scales


def _mean(context: pc.AnswerContext, trip: Any, divisor: int | None = None) -> torch.Tensor:
    """The mean of ``trip(blocks)`` over all ranks."""
    case = context.case
    parts = [trip(flat_blocks(args[0], case["block"])) for args in context.inputs]
    return _unpadded(case, torch.stack(parts).sum(0) / (divisor or case.world_size)).to(case.dtype)


def _plain(blocks: torch.Tensor) -> torch.Tensor:
    return _trip(blocks, _block_scales(blocks))


def _truncated(blocks: torch.Tensor) -> torch.Tensor:
    scales = _block_scales(blocks)
    return torch.trunc(blocks.to(FP32) / scales).clamp_(-_CODES, _CODES) * scales


def _without_floor(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks.to(FP32).abs().amax(-1, keepdim=True) / _CODES
    return _trip(blocks, torch.where(scales == 0, 1.0, scales))


def _one_scale(blocks: torch.Tensor) -> torch.Tensor:
    return _trip(blocks, _block_scales(blocks).amax(0))


def _decoded_with_own_scales(context: pc.AnswerContext) -> torch.Tensor:
    own = _block_scales(flat_blocks(context.args[0], context.case["block"]))
    return _mean(context, lambda blocks: _codes(blocks.to(FP32) / _block_scales(blocks)) * own)


def _quantised_again(context: pc.AnswerContext) -> torch.Tensor:
    """The mean goes through int8 once more, as if its way back were quantised too."""
    case = context.case
    return _unpadded(case, _plain(flat_blocks(_mean(context, _plain).to(FP32), case["block"]))).to(case.dtype)


def _by_reciprocal(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Products with 127 / amax and amax / 127 from reciprocals; ranks in reverse order."""
    total = torch.zeros((), device=inputs[0][0].device)
    for grad, block_size in reversed(inputs):
        blocks = flat_blocks(grad, block_size).to(FP32)
        amax = blocks.abs().amax(-1, keepdim=True).clamp(min=_FLOOR)
        total = total + _codes(blocks * (_CODES / amax)) * (amax * (1 / _CODES))
    return _unpadded(case, total * (1 / case.world_size)).to(case.dtype)


def _by_definition(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    total = torch.stack([_plain(flat_blocks(grad, block_size)) for grad, block_size in inputs]).sum(0)
    return _unpadded(case, total / case.world_size).to(case.dtype)


PRESETS = (
    pc.preset(
        "small",
        "a ragged last block, one block and none, block size 1, two axes, unlike ranks, outliers, ties, blocks below the floor, NaN",
        pc.case("ragged_bf16", BF16, shape=(1013,), block=64),
        pc.case("ragged_fp32", FP32, shape=(1013,), block=64),
        pc.case("one_short_block_fp32", FP32, shape=(13,), block=16),
        pc.case("blocks_of_one_fp32", FP32, shape=(64,), block=1),
        pc.case("two_axes_bf16", BF16, shape=(17, 15), block=16),
        pc.case("empty_bf16", BF16, shape=(0,), block=16),
        pc.case("rank_scale_fp32", FP32, shape=(1013,), block=64, data="rank_scale"),
        pc.case("outlier_bf16", BF16, shape=(1013,), block=64, data="outlier"),
        pc.case("ties_bf16", BF16, shape=(1013,), block=64, data="ties"),
        pc.case("floor_fp32", FP32, shape=(1013,), block=16, data="floor"),
        pc.case("special_bf16", BF16, shape=(1013,), block=64, data="special"),
    ),
    pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, shape=(1048576,), block=128)),
    pc.preset("production_ddp_bucket", "a 25 MiB bucket of bfloat16 gradients", pc.case("bf16", BF16, shape=(13107200,), block=128)),
    pc.preset("production_llama3_8b_block", "the gradient of a transformer block", pc.case("bf16", BF16, shape=(218112000,), block=256)),
    pc.preset("production_ragged", "a prime number of float32 gradients", pc.case("fp32", FP32, shape=(10000019,), block=128)),
)


# Blocks of one element come back as they were; a single block has no next one.
_LOSSY = pc.except_for("blocks_of_one_fp32")
_SEVERAL_BLOCKS = pc.except_for("one_short_block_fp32", "empty_bf16", "blocks_of_one_fp32")

PROBLEM = pc.Problem(
    id=44,
    slug="quantized_grad_allreduce",
    title="Mean of block-wise int8-quantised gradients across ranks",
    category="data_parallel",
    parallelism=("data",),
    origin="Quantised gradient communication in the style of ZeRO++ and of 8-bit block-wise quantisation",
    summary=(
        "Every rank cuts its gradient, in row-major order, into blocks of block_size, the last filled up with zeros. A block's scale is "
        "s = max(max|x|, 1e-8) / 127 in float32, its codes are x / s rounded to the nearest even integer in [-127, 127]. Every rank "
        "returns the mean over ranks of code times s, added in float32 and rounded once to the gradient's dtype, in its shape. A NaN or "
        "an infinity makes its whole block NaN."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    compare=comparison(tolerance),
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("not_quantised", "the mean of the gradients", lambda c: _mean(c, lambda b: b.to(FP32)), _LOSSY),
        pc.wrong("sum", "not divided by the world size", lambda c: _mean(c, _plain, 1)),
        pc.wrong("scale_one", "rounded to integers", lambda c: _mean(c, lambda b: _codes(b.to(FP32)))),
        pc.wrong(
            "scale_of_next_block",
            "every block with the next one's scale",
            lambda c: _mean(c, lambda blocks: _trip(blocks, _block_scales(blocks).roll(-1, 0))),
            _SEVERAL_BLOCKS,
        ),
        pc.wrong("one_scale", "one scale for all blocks of a rank", lambda c: _mean(c, _one_scale), _SEVERAL_BLOCKS),
        pc.wrong("own_scales", "all ranks' codes decoded with the rank's own scales", _decoded_with_own_scales),
        pc.wrong("quantised_again", "the mean quantised once more", _quantised_again, _LOSSY),
        pc.wrong("truncated", "codes rounded towards zero", lambda c: _mean(c, _truncated), _LOSSY),
        pc.wrong("no_floor", "no least scale", lambda c: _mean(c, _without_floor), ("small/floor_fp32",)),
    ),
    alternative_solutions=pc.alternatives(true_division=_by_definition, reciprocal=_by_reciprocal),
    excused={**pc.any_order("a sum does not depend on the order of its terms"), "another_rank": "all ranks have the same answer"},
    replicated=True,
    notes=(
        "The public benchmark's tolerance hides whether anything was quantised: on 8 ranks the plain mean passes. Here every element "
        "must be the mean of the nearest codes; only a quotient within 2^-20 of a tie, relatively, may be rounded either way, for "
        "division and a product with the reciprocal differ there.",
        "The public reference sends float32, more than it would without quantising; the cost here is that of codes and scales.",
    ),
)
