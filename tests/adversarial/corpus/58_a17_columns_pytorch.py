"""A17: a few columns of logits at a time, with log1p written out, and its own pairs put right at the end."""

import torch
import torch.distributed as dist


def softplus(t):
    return torch.log1p(torch.exp(-t.abs())) + t.clamp(min=0)


def solution(image_features, text_features, logit_scale, logit_bias=0.0, group=None):
    texts = [torch.empty_like(text_features, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(texts, text_features.contiguous(), group=group)
    images, total = image_features.double(), 0.0
    for columns in torch.cat(texts).double().split(5):
        total = total + softplus(logit_scale * images @ columns.T + logit_bias).sum()
    own = logit_scale * (images * text_features.double()).sum(1) + logit_bias
    return ((total + (softplus(-own) - softplus(own)).sum()) / len(images)).to(image_features.dtype)
