"""Problem 74, Kimi Delta Attention over a sharded sequence: one kernel that hands states on, and a sum over tensor-parallel ranks.

The reference gathers whole sequences on every rank; here a state of K V numbers a head moves from each rank to the next. In
bfloat16 chunks of 64 tokens go through tensor cores, ``families/delta_chunks.py``: bound by the tokens' bytes, and between ranks by the
chain of chunks. In float32 each token waits for the one before, ``families/delta_rule.py``."""

import torch
import torch.distributed as dist

from peerlane.device import communicator, group_of
from peerlane.solutions.families.delta_rule import DeltaInputs, gated_delta_rule


def solution(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cp_group: dist.ProcessGroup | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    tokens = DeltaInputs(q, k, v, g, beta, a_log, dt_bias)
    output = gated_delta_rule(group_of(cp_group), tokens, by_channel=True, floor=1e-12, sharded=False)
    if tp_group is None:
        return output
    total = torch.empty_like(output)
    communicator(tp_group).all_reduce(output, total)
    return total
