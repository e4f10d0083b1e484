"""C46: attends to its own keys only, skipping all steps of the ring."""

import torch.nn.functional as F


def solution(q, k, v, softmax_scale=None, causal=False, group=None):
    keys, values = (part.transpose(1, 2).expand(-1, q.shape[2], -1, -1) for part in (k, v))
    return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=causal, scale=softmax_scale).transpose(1, 2)
