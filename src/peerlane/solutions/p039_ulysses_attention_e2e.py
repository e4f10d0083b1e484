"""Problem 39, an attention block with Ulysses exchanges.

The projections are torch's. The exchanges and attention are one persistent kernel, ``peerlane/attention/ulysses_attention.cuh``. It
takes queries, keys and values where the projection leaves them, and stores every result where its token lives. Sequences of up to 32
tokens have a kernel without tensor cores, ``device/attention/short.py``. Longer ones in float32, which tensor cores do not take, are
exchanged by two launches and computed by torch."""

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.device.attention.ulysses import attend_by_heads


def solution(
    hidden_states: torch.Tensor,
    w_qkv: torch.Tensor,
    w_o: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    num_heads: int = 8,
    causal: bool = False,
) -> torch.Tensor:
    qkv = torch.matmul(hidden_states, w_qkv.t()).view(*hidden_states.shape[:2], 3, num_heads, -1)
    context = attend_by_heads(*qkv.unbind(2), causal=causal, group=group_of(group))
    return torch.matmul(context.flatten(2), w_o.t())
