"""Problem 29, combination of experts' rows by token: one kernel adds up a token's rows where they are, and sends home one row of each rank.

The token's home knows where its rows are and what they weigh, and tells the experts' ranks. They add up, in fp32, and round once for the
link; meanwhile other warps add up the rows of own tokens, and what has come of them. Bound by HBM, which reads every row once, and the
links. The device code is ``peerlane/moe/moe.cuh``."""

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.device.moe.exchange import combine


def solution(
    expert_outputs: torch.Tensor,
    routing_weights: torch.Tensor,
    selected_experts: torch.Tensor,
    num_experts: int,
    input_splits: list[int] | torch.Tensor,
    output_splits: list[int] | torch.Tensor,
    num_global_tokens_per_local_expert: torch.Tensor,
    routing_map: torch.Tensor,
    local_input_permutation_mapping: torch.Tensor,
    org_hidden_states_shape: torch.Size,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    ranks = group_of(group)
    returned = input_splits.tolist() if isinstance(input_splits, torch.Tensor) else input_splits
    if ranks.world_size == 1:
        expert, token = routing_map.nonzero(as_tuple=True)
        weights = routing_weights[token].masked_fill(selected_experts[token] != expert.unsqueeze(1), 0).sum(1, keepdim=True)
        weighted = expert_outputs * weights
        return weighted.new_zeros(org_hidden_states_shape).index_add_(0, local_input_permutation_mapping, weighted)
    result = combine(
        ranks, expert_outputs, routing_weights, selected_experts, routing_map, local_input_permutation_mapping, returned,
        num_global_tokens_per_local_expert, org_hidden_states_shape[0],
    )  # fmt: skip
    return result.view(org_hidden_states_shape)
