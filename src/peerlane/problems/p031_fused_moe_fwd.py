"""Problem 31: a mixture-of-experts layer, forward, with experts sharded across ranks."""

from typing import Any

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families import moe_layer_answers as _layer
from peerlane.problems.families.collective import BF16, FP32


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"tokens": (99, 0, 41, 65), "hidden": 64, "inner": 32, "experts_per_rank": 4, "k": 2, **params})


PRESETS = (
    pc.preset(
        "small",
        "unequal and empty ranks, empty experts, all tokens to one rank or none elsewhere, 1 or 3 experts a token, NaN, groups, big logits",
        _small("skewed_bf16", BF16, exponent=1.2, empty=1),
        _small("ragged_bf16", BF16, tokens=(63, 0, 35, 21), k=3),
        _small("ragged_fp32", FP32, tokens=(63, 0, 35, 21), k=3),
        _small("no_bias_bf16", BF16, tokens=(15, 29, 0, 13), bias=False, three_axes=True),
        _small("one_each_bf16", BF16, k=1, exponent=0.6),
        _small("own_routers_bf16", BF16, own_routers=True, tokens=(99, 65, 0, 41)),
        _small("one_rank_bf16", BF16, tokens=(99, 65, 0, 41), pattern="one_rank"),
        _small("own_bf16", BF16, pattern="own"),
        _small("nan_bf16", BF16, nan=True),
        _small("large_bf16", BF16, scale=100.0, exponent=0.6),
        _small("strided_group_bf16", BF16, group="strided", exponent=0.6, world_sizes=(4, 8)),
        _small("large_logits_bf16", BF16, logits=104.0),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape, even and skewed",
        pc.case("bf16", BF16, tokens=1024, hidden=1024, inner=128, experts=8, k=2),
        pc.case("skewed_bf16", BF16, tokens=1024, hidden=1024, inner=128, experts=8, k=2, exponent=1.2, empty=1),
    ),
    pc.preset(
        "production_mixtral_8x7b",
        "prefill, 4096 tokens, 2 of 8 experts; evenly, and by Zipf(1.2) with an expert that nobody chooses",
        pc.case("bf16", BF16, tokens=4096, hidden=4096, inner=14336, experts=8, k=2),
        pc.case("skewed_bf16", BF16, tokens=4096, hidden=4096, inner=14336, experts=8, k=2, exponent=1.2, empty=1),
    ),
    pc.preset(
        "production_deepseek_v3",
        "2048 tokens, 8 of 256 experts; evenly, and by Zipf(0.8)",
        pc.case("bf16", BF16, tokens=2048, hidden=7168, inner=2048, experts=256, k=8),
        pc.case("skewed_bf16", BF16, tokens=2048, hidden=7168, inner=2048, experts=256, k=8, exponent=0.8, empty=16),
    ),
    pc.preset(
        "production_deepseek_v3_decode",
        "128 tokens, 8 of 256 experts: latency",
        pc.case("bf16", BF16, tokens=128, hidden=7168, inner=2048, experts=256, k=8),
    ),
    pc.preset(
        "production_qwen3_30b_a3b",
        "512 tokens, 8 of 128 experts",
        pc.case("bf16", BF16, tokens=512, hidden=2048, inner=768, experts=128, k=8),
    ),
)

PROBLEM = _layer.layer(
    PRESETS,
    id=31,
    slug="fused_moe_fwd",
    title="Mixture-of-experts layer, forward",
    origin="VeOmni: the expert-parallel mixture-of-experts layer, from router to combination",
    summary=_layer.ROUTING + _layer.SWIGLU + _layer.RESULT,
    notes=("One set of weights per rank stands for all of its experts, as in the public benchmark's interface.",),
)
