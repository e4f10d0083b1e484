"""Problem 32: a mixture-of-experts layer with low-rank adapters on its experts, forward, with experts sharded across ranks."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families import moe_layer_answers as _layer
from peerlane.problems.families.collective import BF16, FP32
from peerlane.problems.families.moe_layer import expert_parallel


@torch.no_grad()
def reference(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    gate_proj: torch.nn.Linear,
    up_proj: torch.nn.Linear,
    down_proj: torch.nn.Linear,
    lora_gate_A: torch.Tensor,
    lora_gate_B: torch.Tensor,
    lora_up_A: torch.Tensor,
    lora_up_B: torch.Tensor,
    lora_down_A: torch.Tensor,
    lora_down_B: torch.Tensor,
    num_experts: int,
    top_k: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    def adapted(rows: torch.Tensor, layer: torch.nn.Linear, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer(rows)
        return result + F.linear(F.linear(rows, a), b)

    def expert(rows: torch.Tensor) -> torch.Tensor:
        gate = adapted(rows, gate_proj, lora_gate_A, lora_gate_B)
        up = adapted(rows, up_proj, lora_up_A, lora_up_B)
        return adapted(F.silu(gate) * up, down_proj, lora_down_A, lora_down_B)

    return expert_parallel(hidden_states, gate_weight, gate_bias, expert, top_k, group)


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    base = {"tokens": (99, 0, 41, 65), "hidden": 64, "inner": 32, "experts_per_rank": 4, "k": 2, "low_rank": 4}
    return pc.case(label, dtype, **{**base, **params})


PRESETS = (
    pc.preset(
        "small",
        "ranks 1 to 16; factors that are zero, alone, or cancel the projections; unequal and empty ranks, groups, big logits",
        _small("skewed_bf16", BF16, exponent=1.2, empty=1),
        _small("ragged_fp32", FP32, tokens=(63, 0, 35, 21), k=3, low_rank=5),
        _small("rank_one_bf16", BF16, low_rank=1, bias=False, three_axes=True),
        _small("zero_factors_bf16", BF16, factors="zero", k=1),
        _small("factors_alone_bf16", BF16, factors="alone", low_rank=16),
        _small("cancelling_bf16", BF16, factors="cancelling", low_rank=16),
        _small("one_rank_bf16", BF16, tokens=(99, 65, 0, 41), pattern="one_rank"),
        _small("strided_group_bf16", BF16, group="strided", exponent=0.6, world_sizes=(4, 8)),
        _small("large_logits_bf16", BF16, logits=104.0),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape, even and skewed",
        pc.case("bf16", BF16, tokens=1024, hidden=1024, inner=128, experts=8, k=2, low_rank=8),
        pc.case("skewed_bf16", BF16, tokens=1024, hidden=1024, inner=128, experts=8, k=2, low_rank=8, exponent=1.2, empty=1),
    ),
    pc.preset(
        "production_mixtral_8x7b",
        "4096 tokens, 2 of 8 experts, adapters of rank 16",
        pc.case("bf16", BF16, tokens=4096, hidden=4096, inner=14336, experts=8, k=2, low_rank=16),
    ),
    pc.preset(
        "production_qwen3_30b_a3b",
        "512 tokens, 8 of 128 experts, adapters of rank 32",
        pc.case("bf16", BF16, tokens=512, hidden=2048, inner=768, experts=128, k=8, low_rank=32),
    ),
    pc.preset(
        "production_deepseek_v3",
        "1024 tokens, 8 of 256 experts, adapters of rank 64; evenly, and by Zipf(0.8)",
        pc.case("bf16", BF16, tokens=1024, hidden=7168, inner=2048, experts=256, k=8, low_rank=64),
        pc.case("skewed_bf16", BF16, tokens=1024, hidden=7168, inner=2048, experts=256, k=8, low_rank=64, exponent=0.8, empty=16),
    ),
)

PROBLEM = _layer.layer(
    PRESETS,
    id=32,
    slug="fused_moe_fwd_lora",
    title="Mixture-of-experts layer with low-rank adapters, forward",
    origin="VeOmni: the expert-parallel mixture-of-experts layer with LoRA on the experts' projections",
    summary=(
        f"{_layer.ROUTING}down(silu(gate(z)) * up(z)), where each projection adds lora_B (lora_A z) to its layer, without any scaling. "
        f"{_layer.RESULT}"
    ),
    reference=reference,
    notes=(
        "One set of weights and factors per rank stands for all of its experts, as in the public benchmark's interface.",
        "The public benchmark's factors are N(0, 1), which makes them 150 times as large as what they adapt. Here the product of the two "
        "factors adds half as much as the projection itself.",
    ),
)
