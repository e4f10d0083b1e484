"""Problem 82, log-probabilities under top-k and top-p: the cut is found by bisection of the logits' bits, a pass of torch.compile each."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist


def key(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the logits, of 16 bits for those of bfloat16."""
    bits = x.to(torch.float32).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> (16 if x.dtype == torch.bfloat16 else 0)


@torch.compile
def weight_above(x: torch.Tensor, largest: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
    """The sum of exponentials of each token's logits (tokens, W, Vp) whose keys are above the cut (tokens, 1, 1)."""
    return torch.exp(x.to(torch.float32) - largest).where(key(x) > cut, 0.0).sum((1, 2), keepdim=True)


@torch.compile
def answer(x: torch.Tensor, largest: torch.Tensor, missing: torch.Tensor, cut: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(2, tokens, 1, 1): the target's logit if it is kept, and the weight of the logits at the cut that are, the last of equal ones."""
    equal, place = key(x) == cut, torch.arange(x[0].numel(), device=x.device).view(x.shape[1:])
    share = torch.exp(x.to(torch.float32) - largest).where(equal, 0.0).amax((1, 2), keepdim=True)
    count = (missing / share).ceil().clamp(min=1.0)
    own = x.flatten(1).gather(1, target.view(-1, 1)).unsqueeze(2)
    later = (equal & (place >= target)).sum((1, 2), keepdim=True)
    kept = (key(own) > cut) | ((key(own) == cut) & (later <= count))
    return torch.stack((own.to(torch.float32).where(kept, -math.inf), (count * share).nan_to_num(0.0)))


def solution(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    tp_group: dist.ProcessGroup | None = None,
    top_k: int | None = None,
    top_p: float | None = 1.0,
) -> torch.Tensor:
    ranks, received = dist.get_world_size(tp_group), torch.empty_like(vocab_parallel_logits)
    dist.all_to_all_single(received, vocab_parallel_logits, group=tp_group)
    x = received.view(ranks, -1, received.shape[-1]).transpose(0, 1)
    if top_k is not None and 0 < top_k < x[0].numel():
        x = x.masked_fill(x < x.flatten(1).topk(top_k).values[:, -1:, None], -math.inf)
    largest, bits = x.amax((1, 2), keepdim=True).to(torch.float32), 16 if x.dtype == torch.bfloat16 else 32
    low = torch.full_like(largest, -(1 << (bits - 1)) - 1, dtype=torch.int64)
    high = torch.full_like(low, 1 << (bits - 1))
    wanted = weight_above(x, largest, low) * (top_p if top_p is not None and top_p < 1.0 else math.inf)
    for _ in range(bits + 1):
        middle = (low + high) >> 1
        less = weight_above(x, largest, middle) < wanted
        low, high = torch.where(less, low, middle), torch.where(less, middle, high)
    above = weight_above(x, largest, high)
    own, rest = answer(x, largest, wanted - above, high, target.view(ranks, -1, 1, 1)[dist.get_rank(tp_group)])
    result = (own - largest - (above + rest).log()).flatten()
    gathered = result.new_empty(target.numel())
    dist.all_gather_into_tensor(gathered, result, group=tp_group)
    return gathered.view(target.shape)
