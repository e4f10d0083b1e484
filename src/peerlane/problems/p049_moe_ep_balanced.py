"""Problem 49: problem 31 with one expert per rank."""

from typing import Any

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families import moe_layer_answers as _layer
from peerlane.problems.families.collective import BF16, FP32


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    experts = {} if "replicas" in params else {"experts_per_rank": 1}
    base = {"tokens": (96, 0, 40, 64), "hidden": 64, "inner": 32, "k": 1, **experts}
    return pc.case(label, dtype, **{**base, **params})


PRESETS = (
    pc.preset(
        "small",
        "exactly balanced, to one peer after the other, nothing remote, every rank, an expert that nobody chooses, groups, big logits",
        _small("balanced_bf16", BF16, pattern="balanced"),
        _small("balanced_fp32", FP32, pattern="balanced"),
        _small("rotated_bf16", BF16, pattern="rotated"),
        _small("own_bf16", BF16, pattern="own"),
        _small("one_rank_bf16", BF16, pattern="one_rank", tokens=(96, 64, 0, 40)),
        _small("every_rank_bf16", BF16, k=2, tokens=(63, 0, 35, 21)),
        _small("dead_expert_bf16", BF16, k=2, empty=1, exponent=0.6, world_sizes=(4, 8)),
        _small("three_of_four_bf16", BF16, k=3, bias=False, world_sizes=(4, 8)),
        _small("strided_group_bf16", BF16, group="strided", replicas=2, tokens=(63, 35, 0, 21), world_sizes=(4, 8)),
        _small("large_logits_bf16", BF16, logits=104.0, three_axes=True),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape, exactly balanced; and drawn",
        pc.case("bf16", BF16, tokens=1024, hidden=1024, inner=128, experts_per_rank=1, k=2, pattern="balanced"),
        pc.case("drawn_bf16", BF16, tokens=1024, hidden=1024, inner=128, experts_per_rank=1, k=2),
    ),
    pc.preset(
        "production_mixtral_8x7b",
        "prefill, 4096 tokens, 2 experts, balanced, and drawn; on 8 ranks the model, on fewer as many of its experts",
        pc.case("bf16", BF16, tokens=4096, hidden=4096, inner=14336, experts_per_rank=1, k=2, pattern="balanced"),
        pc.case("drawn_bf16", BF16, tokens=4096, hidden=4096, inner=14336, experts_per_rank=1, k=2),
    ),
    pc.preset(
        "production_mixtral_8x22b",
        "2048 tokens, 2 experts, drawn evenly; on 8 ranks the model, on fewer as many of its experts",
        pc.case("bf16", BF16, tokens=2048, hidden=6144, inner=16384, experts_per_rank=1, k=2),
    ),
    pc.preset(
        "production_deepseek_v3_experts",
        "4096 tokens, 2 experts, of the size of DeepSeek-V3's, drawn evenly",
        pc.case("bf16", BF16, tokens=4096, hidden=7168, inner=2048, experts_per_rank=1, k=2),
    ),
    pc.preset(
        "production_mixtral_8x7b_decode",
        "64 tokens: bound by reading the weights",
        pc.case("bf16", BF16, tokens=64, hidden=4096, inner=14336, experts_per_rank=1, k=2),
    ),
)

PROBLEM = _layer.layer(
    PRESETS,
    id=49,
    slug="moe_ep_balanced",
    title="Mixture-of-experts layer with one expert per rank, forward",
    origin="VeOmni: the expert-parallel mixture-of-experts layer",
    summary=f"Problem 31 with as many experts as ranks. {_layer.ROUTING}{_layer.SWIGLU}{_layer.RESULT}",
    notes=(
        "The public benchmark's problem is named for its balance, but its routing is drawn. Here the timed public shape has exactly "
        "T k / E rows for every pair of ranks, and other cases are as unbalanced as can be.",
        "On two ranks with two experts each there is nothing to choose; the cases with one expert per token have a choice there too.",
    ),
    speed_note=(
        "Likely because the public one waits for the device five times or more and records a graph for autograd; this one reads split "
        "sizes once and runs without gradients."
    ),
)
