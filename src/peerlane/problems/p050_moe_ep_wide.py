"""Problem 50: problem 31 with several experts per rank."""

from typing import Any

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families import moe_layer_answers as _layer
from peerlane.problems.families.collective import BF16, FP32


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    base = {"tokens": (65, 0, 41, 90), "hidden": 64, "inner": 32, "experts_per_rank": 2, "k": 2}
    return pc.case(label, dtype, **{**base, **params})


PRESETS = (
    pc.preset(
        "small",
        "two to four experts per rank, one to four a token; a token's experts on one rank or several, empty experts, groups, big logits",
        _small("wide_bf16", BF16, tokens=(129, 0, 41, 90), experts_per_rank=3, k=3),
        _small("wide_fp32", FP32, experts_per_rank=3, k=4),
        _small("one_each_bf16", BF16, k=1, exponent=0.6),
        _small("together_bf16", BF16, experts_per_rank=4, pattern="together"),
        _small("spread_bf16", BF16, experts_per_rank=4, pattern="spread"),
        _small("skewed_bf16", BF16, experts_per_rank=4, exponent=1.2, empty=3),
        _small("one_rank_bf16", BF16, experts_per_rank=4, tokens=(65, 41, 0, 90), pattern="one_rank"),
        _small("strided_group_bf16", BF16, group="strided", tokens=(65, 41, 0, 90), exponent=0.6, world_sizes=(4, 8)),
        _small("large_logits_bf16", BF16, logits=104.0, three_axes=True),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape, even and skewed",
        pc.case("bf16", BF16, tokens=1024, hidden=1024, inner=128, experts_per_rank=2, k=2),
        pc.case("skewed_bf16", BF16, tokens=1024, hidden=1024, inner=128, experts_per_rank=2, k=2, exponent=1.2, empty=1),
    ),
    pc.preset(
        "production_dbrx", "4096 tokens, 4 of 16 experts", pc.case("bf16", BF16, tokens=4096, hidden=6144, inner=10752, experts=16, k=4)
    ),
    pc.preset(
        "production_qwen3_235b",
        "1024 tokens, 8 of 128 experts; evenly, and by Zipf(0.8)",
        pc.case("bf16", BF16, tokens=1024, hidden=4096, inner=1536, experts=128, k=8),
        pc.case("skewed_bf16", BF16, tokens=1024, hidden=4096, inner=1536, experts=128, k=8, exponent=0.8, empty=8),
    ),
    pc.preset(
        "production_gpt_oss_120b",
        "4096 tokens, 4 of 128 experts",
        pc.case("bf16", BF16, tokens=4096, hidden=2880, inner=2880, experts=128, k=4),
    ),
    pc.preset(
        "production_deepseek_v3",
        "4096 tokens, 8 of 256 experts; evenly, and by Zipf(0.8)",
        pc.case("bf16", BF16, tokens=4096, hidden=7168, inner=2048, experts=256, k=8),
        pc.case("skewed_bf16", BF16, tokens=4096, hidden=7168, inner=2048, experts=256, k=8, exponent=0.8, empty=16),
    ),
    pc.preset(
        "production_deepseek_v3_decode",
        "128 tokens, 8 of 256 experts: latency",
        pc.case("bf16", BF16, tokens=128, hidden=7168, inner=2048, experts=256, k=8),
    ),
)

PROBLEM = _layer.layer(
    PRESETS,
    id=50,
    slug="moe_ep_wide",
    title="Mixture-of-experts layer with several experts per rank, forward",
    origin="VeOmni: the expert-parallel mixture-of-experts layer",
    summary=f"Problem 31 with several experts per rank. {_layer.ROUTING}{_layer.SWIGLU}{_layer.RESULT}",
    notes=(
        "The public benchmark's two experts per rank hardly make it wide; production cases have up to 64 per rank.",
        "One set of weights per rank stands for all of its experts, as in the public benchmark's interface, so that a token needs to "
        "travel once per rank.",
    ),
)
