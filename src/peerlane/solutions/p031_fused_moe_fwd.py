"""Problem 31, a mixture-of-experts layer: two kernels behind the router.

The first one counts, tells the counts, and pushes every token once to each rank that has an expert of it, while the gated layer
starts on what has come. The second one is the layer behind it, whose tiles go straight home, and the weighted sum. The host waits for
nothing. The device code is ``peerlane/moe/moe_layer.cuh``."""

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.device.moe.layer import gated_experts


@torch.no_grad()
def solution(
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
    ranks, tokens = group_of(group), hidden_states.reshape(-1, hidden_states.shape[-1])
    return gated_experts(ranks, tokens, (gate_weight, gate_bias), (gate_proj, up_proj, down_proj), top_k)
