"""Problem 51: problem 31 with fewer experts than ranks, replicated in blocks of ranks."""

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
    num_experts: int,
    top_k: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    def expert(rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = down_proj(F.silu(gate_proj(rows)) * up_proj(rows))
        return result

    owners = None
    if group is None and num_experts < dist.get_world_size():
        # A block exchanges rows through the world's group, in which all parts for other blocks are empty.
        if dist.get_world_size() % num_experts:
            raise ValueError(f"got {dist.get_world_size()} ranks for {num_experts} experts: expected a multiple of the number of experts")
        first = dist.get_rank() // num_experts * num_experts
        owners = range(first, first + num_experts)
    return expert_parallel(hidden_states, gate_weight, gate_bias, expert, top_k, group, owners)


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    base = {"tokens": (65, 90, 41, 34), "hidden": 64, "inner": 32, "k": 1, **({} if "experts" in params else {"replicas": 2})}
    return pc.case(label, dtype, **{**base, **params})


PRESETS = (
    pc.preset(
        "small",
        "one to eight experts, alone or in blocks; blocks without tokens or with other loads; an interleaved group; large logits",
        _small("replicas_bf16", BF16),
        _small("replicas_fp32", FP32),
        _small("two_each_bf16", BF16, k=2, tokens=(65, 0, 41, 34), world_sizes=(4, 8)),
        _small("one_expert_bf16", BF16, experts=1),
        _small("two_experts_bf16", BF16, experts=2, exponent=0.6),
        _small("as_many_as_ranks_bf16", BF16, replicas=1),
        _small("more_than_ranks_bf16", BF16, experts=8, k=2, exponent=0.6),
        _small("idle_block_bf16", BF16, tokens=(65, 90, 0, 0), world_sizes=(4,)),
        _small("popular_in_first_block_bf16", BF16, exponent=2.0, pattern="first_block", world_sizes=(4, 8)),
        _small("strided_group_bf16", BF16, group="strided", world_sizes=(4, 8)),
        _small("alone_in_group_bf16", BF16, group="strided", world_sizes=(2,)),
        _small("large_logits_bf16", BF16, experts=8, k=2, logits=104.0, three_axes=True),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: half as many experts as ranks, one or two a token",
        pc.case("bf16", BF16, tokens=1024, hidden=1024, inner=128, replicas=2, k=2, world_sizes=(4, 8)),
        pc.case("one_each_bf16", BF16, tokens=1024, hidden=1024, inner=128, replicas=2, k=1),
    ),
    pc.preset(
        "production_mistral_4x7b",
        "4096 tokens, 2 of 4 experts: two replicas on 8 ranks",
        pc.case("bf16", BF16, tokens=4096, hidden=4096, inner=14336, experts=4, k=2),
    ),
    pc.preset(
        "production_mistral_2x7b",
        "4096 tokens, one of 2 experts: four replicas on 8 ranks",
        pc.case("bf16", BF16, tokens=4096, hidden=4096, inner=14336, experts=2, k=1),
    ),
    pc.preset(
        "production_deepseek_v3_experts",
        "4096 tokens, 2 of 4 experts of the size of DeepSeek-V3's",
        pc.case("bf16", BF16, tokens=4096, hidden=7168, inner=2048, experts=4, k=2),
    ),
    pc.preset(
        "production_vision_language",
        "8192 tokens of either modality, one expert for each, in shares that differ much between ranks",
        pc.case("bf16", BF16, tokens=8192, hidden=3584, inner=18944, experts=2, k=1, uneven=1.5),
    ),
)

PROBLEM = _layer.layer(
    PRESETS,
    id=51,
    slug="moe_ep_narrow",
    title="Mixture-of-experts layer with fewer experts than ranks, forward",
    origin="VeOmni: the expert-parallel mixture-of-experts layer",
    parallelism=("expert", "data"),
    summary=(
        "Problem 31, but without a group and with fewer experts than ranks every block of E neighbouring ranks {j E ... j E + E - 1} is a "
        f"group of its own, which holds all experts; blocks do not exchange anything. {_layer.ROUTING}{_layer.SWIGLU}{_layer.RESULT}"
    ),
    reference=reference,
    notes=(
        "The public reference creates a process group per block in its first call. Here the reference exchanges a block's rows through the "
        "world's group, whose other parts are empty; candidates may do either. An explicit group replaces the blocks.",
        "Blocks have different weights, where real replicas have the same, so that rows which went to another block are seen.",
        "On two ranks the public benchmark has one expert and nothing to route. Here there are cases with more.",
        "A timed case of two experts a token needs more than two ranks; on two ranks one expert a token is timed.",
    ),
)
