"""Problem 55, an attention layer whose heads are shared by one group and whose sequence by another.

The projections are torch's. Attention is one persistent kernel, ``peerlane/attention/ring_attention.cuh``, which takes queries, keys
and values where the projection leaves them. The sum over the heads is the kit's all-reduce."""

import torch
import torch.distributed as dist

from peerlane.device import communicator, group_of
from peerlane.device.attention.ring import attention_layer


def solution(
    hidden_states: torch.Tensor,
    w_qkv: torch.Tensor,
    w_o: torch.Tensor,
    num_heads: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    tensor_group = group_of(tp_group)
    heads = num_heads // tensor_group.world_size
    output = attention_layer(hidden_states, w_qkv, w_o, heads, scale=softmax_scale, causal=causal, group=cp_group)
    if tensor_group.world_size > 1:
        communicator(tensor_group).all_reduce(output)
    return output
