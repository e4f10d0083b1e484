"""Problem 28, dispatch of tokens to their experts' ranks: one kernel numbers the rows, learns their places, and pushes tokens there.

The receiver alone knows how many rows of each source are for which of its experts. It tells every source where they go, while rows are
numbered. A token crosses a link once for all its experts on a rank, which reads it once and copies it to their rows, own tokens while
others are on their way. The device code is ``peerlane/moe/moe.cuh``.

The next call overwrites the results, which lie in the arena."""

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.device.moe.exchange import dispatch


def solution(
    hidden_states: torch.Tensor,
    expert_mask: torch.Tensor,
    num_experts: int,
    input_splits: list[int] | torch.Tensor,
    output_splits: list[int] | torch.Tensor,
    num_global_tokens_per_local_expert: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Size]:
    ranks, tokens = group_of(group), hidden_states.reshape(-1, hidden_states.shape[-1])
    sent, received = (splits.tolist() if isinstance(splits, torch.Tensor) else splits for splits in (input_splits, output_splits))
    routing_map = expert_mask.sum(dim=1)
    if ranks.world_size == 1:
        mapping = routing_map.nonzero()[: sum(sent), 1]
        return tokens[mapping], routing_map, mapping, tokens.shape
    lengths = num_global_tokens_per_local_expert
    rows, mapping = dispatch(ranks, tokens, routing_map, expert_mask.shape[1], sent, sum(received), lengths)
    return rows, routing_map, mapping, tokens.shape
