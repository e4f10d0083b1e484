"""Problem 58, the sigmoid contrastive loss: torch.compile makes one pass over the logits, which cuBLAS has written."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F


@torch.compile
def loss_of(logits: torch.Tensor, scale: float, bias: float, first: int) -> torch.Tensor:
    """The sum of all pairs' losses per image; text ``first`` + i is that of image i."""
    z = logits.to(torch.float32) * scale + bias
    images, texts = (torch.arange(size, device=z.device) for size in z.shape)
    own = texts == images.unsqueeze(1) + first
    return F.softplus(torch.where(own, -z, z)).sum() / z.shape[0]


def solution(
    image_features: torch.Tensor,
    text_features: torch.Tensor,
    logit_scale: float,
    logit_bias: float = 0.0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    texts = text_features.new_empty(dist.get_world_size(group) * text_features.numel())
    dist.all_gather_into_tensor(texts, text_features.contiguous().view(-1), group=group)
    logits = image_features @ texts.view(-1, text_features.shape[1]).t()
    first = dist.get_rank(group) * image_features.shape[0]
    return loss_of(logits, logit_scale, logit_bias, first).to(image_features.dtype)
