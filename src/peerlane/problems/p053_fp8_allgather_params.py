"""Problem 53: all-gather of parameter shards after a round trip through FP8 with an amax history."""

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import quant
from peerlane.problems.families.collective import BF16, FP32, all_gather_single
from peerlane.problems.families.interval import Interval, comparison


def reference(flat_param_shard: torch.Tensor, amax_history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    decoded, history = quant.fp8_round_trip(flat_param_shard, amax_history)
    full = decoded.new_empty(dist.get_world_size() * decoded.numel())
    all_gather_single(full, decoded)
    return full, history


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor, torch.Tensor]:
    return quant.vector_and_history(case, rank, draw, quant.shard_length(case))


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, pc.Expected]:
    trips = [quant.decoded(flat, quant.exact_scale(quant.push_history(flat, history))) for flat, history in inputs]
    value, low, high = (torch.cat([getattr(trip, part) for trip in trips]) for part in ("value", "low", "high"))
    return Interval(name="full", value=value, dtype=case.dtype, low=low, high=high), quant.history_answer(inputs[rank])


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Codes of one byte and a float32 scale go to every other rank; the shard is read and W of them are written."""
    shard, world = quant.shard_length(case), case.world_size
    port = (world - 1) * (shard + FP32.itemsize)
    return pc.Cost(
        hbm_bytes=(world + 1) * shard * case.dtype.itemsize, egress_bytes=port, ingress_bytes=port, flops={"fp32": (2 + world) * shard}
    )


Answer = tuple[torch.Tensor, torch.Tensor]


def _gathered(case: pc.Case, vectors: list[torch.Tensor], inputs: pc.Inputs, rank: int) -> Answer:
    return torch.cat(vectors), quant.history_to_the_letter(*inputs[rank])


PRESETS = (
    pc.preset(
        "small",
        "histories of 1 to 16 entries, different scales, an outlier, ties between codes, tiny, floored and zero shards, NaN, infinity",
        pc.case("history_4_bf16", BF16, shard=37, history=4),
        pc.case("history_16_fp32", FP32, shard=37, history=16),
        pc.case("history_1_fp32", FP32, shard=37, history=1),
        pc.case("bf16_history_fp32", FP32, shard=37, history=4, history_dtype=BF16),
        pc.case("rank_scale_bf16", BF16, shard=317, history=4, data="rank_scale"),
        pc.case("outlier_bf16", BF16, shard=317, history=4, data="outlier"),
        pc.case("ties_bf16", BF16, shard=317, history=4, data="ties"),
        pc.case("idle_bf16", BF16, shard=317, history=4, data="idle"),
        pc.case("floor_bf16", BF16, shard=317, history=4, data="floor"),
        pc.case("nan_bf16", BF16, shard=37, history=4, data="nan"),
        pc.case("inf_fp32", FP32, shard=37, history=4, data="inf"),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape; and its history, which never decides",
        pc.case("bf16", BF16, shard=4096, history=16),
        pc.case("quiet_bf16", BF16, shard=4096, history=16, history_of="quiet"),
    ),
    pc.preset(
        "production_fsdp_bucket", "a 25 MiB bucket of bfloat16 parameters", pc.case("bf16", BF16, elements=13107200, size=0.02, history=16)
    ),
    pc.preset(
        "production_llama3_8b_block",
        "the parameters of a transformer block",
        pc.case("bf16", BF16, elements=218112000, size=0.02, history=1024),
    ),
    pc.preset(
        "production_llama3_70b_block",
        "the parameters of a transformer block",
        pc.case("bf16", BF16, elements=855654400, size=0.02, history=1024),
    ),
)


_WRONG_CASES = {
    # Without older entries that are larger, the current amax decides.
    "history_ignored": pc.except_for("history_1_fp32", "quiet_bf16", "outlier_bf16"),
    # The history may decide on every rank.
    "current_ignored": pc.except_for("rank_scale_bf16", "outlier_bf16", "idle_bf16", "floor_bf16"),
    # The other rank of two has a shard of zeros.
    "common_scale": pc.except_for("idle_bf16", "floor_bf16"),
    "history_not_shifted": pc.except_for("history_1_fp32", "quiet_bf16"),
}

PROBLEM = pc.Problem(
    id=53,
    slug="fp8_allgather_params",
    title="All-gather of parameter shards through FP8 with an amax history",
    category="fsdp_zero",
    parallelism=("fsdp",),
    origin="The FP8 parameter all-gather of FSDP2 in torchao, with the amax history of NVIDIA Transformer Engine",
    summary=(
        "Every rank drops the oldest entry (the first) of its amax_history and appends max|x| of its flat_param_shard. Its scale is "
        "s = max(largest entry, 1e-12) / 448 in float32. Its parameters become float8_e4m3fn(x / s) times s, rounded to their dtype. Every "
        "rank returns all ranks' parameters in rank order (W p elements), and its own new history. Scales differ between ranks. NaN or "
        "infinity in a shard makes that whole shard NaN, and no other."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    compare=comparison(lambda _: {}),
    cost=cost,
    bandwidth="production_llama3_8b_block",
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("not_quantised", "the parameters as they are", lambda c: (torch.cat([args[0] for args in c.inputs]).clone(), c.answer[1])),
        *quant.trip_wrong_answers(lambda case, vectors, rank: torch.cat(vectors), _WRONG_CASES),
    ),
    alternative_solutions=quant.trip_variants(_gathered),
    excused={"another_rank/full": "all ranks have the same parameters"},
    replicated=("full",),
    notes=(
        "The public benchmark's history is constant and tiny, so it never decides, and all ranks have nearly the same amax. Here the "
        "oldest entry is the largest and is dropped. Another old entry decides the scale on every other rank, and the current amax on the "
        "rest. Scales differ between ranks.",
        "Codes and scales may travel and be decoded where they arrive: the bits are the same. A quotient within 2^-20 of a tie may be "
        "rounded either way. So may the last rounding of a product that near to a tie.",
        "The scale is computed in float32 from the history, whatever its dtype.",
    ),
)
