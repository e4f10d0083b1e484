"""Problem 52: reduce-scatter (mean) of gradients after a round trip through FP8 with an amax history."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import quant
from peerlane.problems.families.collective import BF16, FP32, reduce_scatter_single, sequential_sum, sum_tolerance, wide_sum
from peerlane.problems.families.interval import Interval, comparison
from peerlane.problems.families.quant import FP64


def reference(flat_grads: torch.Tensor, amax_history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    world = dist.get_world_size()
    decoded, history = quant.fp8_round_trip(flat_grads, amax_history)
    shard = decoded.new_empty(decoded.numel() // world)
    reduce_scatter_single(shard, decoded)
    return shard.div_(world), history


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor, torch.Tensor]:
    return quant.vector_and_history(case, rank, draw, case.world_size * quant.shard_length(case))


def _slice(case: pc.Case, vector: torch.Tensor, rank: int) -> torch.Tensor:
    return vector.narrow(0, rank * quant.shard_length(case), quant.shard_length(case))


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, pc.Expected]:
    """The mean in float64 of what the ranks' slices may be after their round trips."""
    zeros = torch.zeros(quant.shard_length(case), dtype=FP64, device=inputs[0][0].device)
    value, low, high, magnitude = zeros, zeros.clone(), zeros.clone(), zeros.clone()
    for flat, history in inputs:
        trip = quant.decoded(_slice(case, flat, rank), quant.exact_scale(quant.push_history(flat, history)))
        value += trip.value
        low += trip.low
        high += trip.high
        magnitude += torch.maximum(trip.low.abs(), trip.high.abs())
    for part in (value, low, high, magnitude):
        part /= case.world_size
    shard = Interval(name="shard", value=value, dtype=case.dtype, low=low, high=high, magnitude=magnitude)
    return shard, quant.history_answer(inputs[rank])


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """That of a sum over ranks in the working dtype. Quantisation itself has none: every code must be the nearest."""
    return {"shard": sum_tolerance(case, quant.shard_length(case))["sum"]}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Codes of one byte go to the owners of the slices, with a float32 scale to each."""
    shard, world = quant.shard_length(case), case.world_size
    port = (world - 1) * (shard + FP32.itemsize)
    return pc.Cost(
        hbm_bytes=(world + 1) * shard * case.dtype.itemsize, egress_bytes=port, ingress_bytes=port, flops={"fp32": 3 * world * shard}
    )


Answer = tuple[torch.Tensor, torch.Tensor]


def _mean(case: pc.Case, vectors: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    return (_sum(case, vectors, rank) / case.world_size).to(case.dtype)


def _sum(case: pc.Case, vectors: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """The float32 sum of the rank's slices of all ranks' vectors."""
    return torch.stack([_slice(case, vector, rank).to(FP32) for vector in vectors]).sum(0)


def _combine(add: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> Callable[[pc.Case, list[torch.Tensor], pc.Inputs, int], Answer]:
    def combine(case: pc.Case, vectors: list[torch.Tensor], inputs: pc.Inputs, rank: int) -> Answer:
        total = add([_slice(case, vector, rank) for vector in vectors])
        return total / case.world_size, quant.history_to_the_letter(*inputs[rank])

    return combine


PRESETS = (
    pc.preset(
        "small",
        "histories of 1 to 16 entries, ranks of unlike scale, an outlier, ties between codes, tiny and zero gradients, NaN and infinity",
        pc.case("history_4_bf16", BF16, shard=317, history=4),
        pc.case("history_16_fp32", FP32, shard=317, history=16),
        pc.case("history_1_fp32", FP32, shard=317, history=1),
        pc.case("bf16_history_fp32", FP32, shard=317, history=4, history_dtype=BF16),
        pc.case("rank_scale_bf16", BF16, shard=317, history=4, data="rank_scale"),
        pc.case("outlier_bf16", BF16, shard=317, history=4, data="outlier"),
        pc.case("ties_bf16", BF16, shard=1031, history=4, data="ties"),
        pc.case("tiny_bf16", BF16, shard=317, history=4, size=1e-6),
        pc.case("idle_bf16", BF16, shard=317, history=4, data="idle"),
        pc.case("nan_bf16", BF16, shard=37, history=4, data="nan"),
        pc.case("inf_fp32", FP32, shard=37, history=4, data="inf"),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape; and its history, which never decides",
        pc.case("bf16", BF16, shard=4096, history=16),
        pc.case("quiet_bf16", BF16, shard=4096, history=16, history_of="quiet"),
    ),
    pc.preset("production_ddp_bucket", "a 25 MiB bucket of bfloat16 gradients", pc.case("bf16", BF16, elements=13107200, history=16)),
    pc.preset("production_llama3_8b_block", "the gradient of a transformer block", pc.case("bf16", BF16, elements=218112000, history=1024)),
    pc.preset(
        "production_llama3_70b_block", "the gradient of a transformer block", pc.case("bf16", BF16, elements=855654400, history=1024)
    ),
)

_POISONED = ("nan_bf16", "inf_fp32")


_FINITE = pc.except_for(*_POISONED)
_WRONG_CASES = {
    # Without older entries that are larger, the current amax decides.
    "history_ignored": pc.except_for(*_POISONED, "history_1_fp32", "quiet_bf16", "outlier_bf16", "ties_bf16"),
    # The history may decide on every rank.
    "current_ignored": pc.except_for(*_POISONED, "rank_scale_bf16", "outlier_bf16", "idle_bf16"),
    # The other rank of two has a zero gradient.
    "common_scale": pc.except_for(*_POISONED, "idle_bf16"),
    "history_not_shifted": pc.except_for(*_POISONED, "history_1_fp32", "quiet_bf16"),
}

PROBLEM = pc.Problem(
    id=52,
    slug="fp8_reduce_scatter_grads",
    title="Reduce-scatter (mean) of gradients through FP8 with an amax history",
    category="fsdp_zero",
    parallelism=("fsdp", "zero", "data"),
    origin="Per-tensor FP8 scaling from an amax history, as in NVIDIA Transformer Engine, with the FP8 gradient exchange of FP8-LM",
    summary=(
        "Every rank drops the oldest entry (the first) of its amax_history and appends max|x| of its flat_grads. Its scale is "
        "s = max(largest entry, 1e-12) / 448 in float32; its gradients become float8_e4m3fn(x / s) times s, rounded to their dtype. Rank r "
        "returns the mean over ranks of slice r of W (n / W elements, sums in any order and in the gradients' dtype or wider) and its own "
        "new history. Scales differ between ranks. NaN or infinity anywhere makes a rank's whole contribution NaN."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    compare=comparison(tolerance),
    cost=cost,
    bandwidth="production_llama3_8b_block",
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong(
            "not_quantised",
            "the mean of the gradients as they are",
            lambda c: (_mean(c.case, [flat for flat, _ in c.inputs], c.rank), c.answer[1]),
            _FINITE,
        ),
        pc.wrong(
            "sum",
            "not divided by the world size",
            lambda c: (_sum(c.case, [quant.by_division(*args) for args in c.inputs], c.rank).to(c.case.dtype), c.answer[1]),
            _FINITE,
        ),
        *quant.trip_wrong_answers(_mean, _WRONG_CASES, _FINITE),
    ),
    alternative_solutions=(
        *(quant.trip_variants(_combine(wide_sum))),
        pc.AlternativeSolution(
            "added_in_dtype",
            lambda case, inputs, rank: _combine(sequential_sum)(case, [quant.by_division(*args) for args in inputs], inputs, rank),
        ),
    ),
    excused={
        "neighbours_exchanged": "a sum does not depend on the order of its terms",
        **{
            f"{name}/shard@small/{label}": "the shard is NaN on every rank and in every call"
            for name in ("nan", "previous", "another_rank")
            for label in _POISONED
        },
    },
    notes=(
        "The public benchmark's history is constant and tiny, so that it never decides, and all ranks have nearly the same amax. Here the "
        "oldest entry is the largest and is dropped, another of the old ones decides the scale on every other rank and the current amax on "
        "the rest, and ranks' scales differ.",
        "The gradients' size changes from run to run by up to 2^21, so that codes of few bits and zeros decide whether anything was "
        "quantised: among normal numbers 4 bits and 8 differ too little to be told apart by the tolerance of a bfloat16 sum.",
        "The scale is computed in float32 from the history, whatever its dtype. A quotient within 2^-20 of a tie, relatively, may be "
        "rounded either way. NaN gradients give a NaN entry in the history.",
    ),
)
