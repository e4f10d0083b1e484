"""Problem 75, Gated DeltaNet over a sharded sequence: one kernel that hands every head's state on from rank to rank.

The reference exchanges tokens for heads, twice; here a state of K V numbers a head moves from each rank to the next. In
bfloat16 chunks of 64 tokens go through tensor cores, ``families/delta_chunks.py``: bound by the tokens' bytes, and between ranks by the
chain of chunks. In float32 each token waits for the one before, ``families/delta_rule.py``."""

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.solutions.families.delta_rule import DeltaInputs, gated_delta_rule


def solution(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    tokens = DeltaInputs(q, k, v, gate, beta, a_log, dt_bias)
    return gated_delta_rule(group_of(group), tokens, by_channel=False, floor=1e-6, sharded=True)
