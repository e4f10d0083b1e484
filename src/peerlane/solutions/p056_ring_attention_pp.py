"""Problem 56, attention layers as stages of a pipeline, each with its sequence in shards.

The projections are torch's. Attention is one persistent kernel, ``peerlane/attention/ring_attention.cuh``. A large batch goes through
the pipeline entry by entry, so that stages work at the same time. A small kernel hands each entry over."""

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.device.attention.ring import attention_layer
from peerlane.solutions.families.hand_over import pipeline

LARGE_PART = 1 << 20
"""Elements of an entry from which on a part is one entry: the work on it takes longer than a launch."""


def solution(
    hidden_states: torch.Tensor,
    w_qkv: torch.Tensor,
    w_o: torch.Tensor,
    num_heads: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    cp_group: dist.ProcessGroup | None = None,
    pp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    def layer(part: torch.Tensor) -> torch.Tensor:
        return attention_layer(part, w_qkv, w_o, num_heads, scale=softmax_scale, causal=causal, group=cp_group)

    stages = None if pp_group is None else group_of(pp_group)
    if stages is None or stages.world_size == 1:
        return layer(hidden_states)
    parts = hidden_states.shape[0] if hidden_states[0].numel() >= LARGE_PART else 1
    given = hidden_states.chunk(parts)
    line = pipeline(stages, tuple(given[0].shape), hidden_states.dtype, parts)
    outputs, received = [], None
    for number in range(line.rounds + 1):
        mine, own = number - stages.rank, None
        if 0 <= mine < parts:
            own = layer(given[mine] if received is None else received)
            outputs.append(own)
        if number < line.rounds:
            received = line.hand_over(own)
    return outputs[0] if parts == 1 else torch.cat(outputs)
