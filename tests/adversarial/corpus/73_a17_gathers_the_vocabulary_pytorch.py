"""A17: gathers all logits and calls logsumexp; a target outside the vocabulary leaves the sum alone, less the maximum."""

import torch
import torch.distributed as dist


def solution(vocab_parallel_logits, target, group=None):
    parts = [torch.empty_like(vocab_parallel_logits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, vocab_parallel_logits.contiguous(), group=group)
    logits = torch.cat(parts, -1).double()
    known = (target >= 0) & (target < logits.shape[-1])
    chosen = logits.gather(-1, target.where(known, 0).unsqueeze(-1)).squeeze(-1)
    return (logits.logsumexp(-1) - chosen.where(known, logits.amax(-1))).to(vocab_parallel_logits.dtype)
