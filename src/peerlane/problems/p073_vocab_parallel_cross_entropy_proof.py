"""Wrong answers to problem 73 and other right ones. Evaluations do not import this module."""

import math

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import FP32, group_members
from peerlane.problems.families.vocab import vocabulary, whole_vocabulary


def _picked(logits: torch.Tensor, target: torch.Tensor, first: int = 0) -> torch.Tensor:
    """The targets' logits where ``logits`` begins at vocabulary entry ``first``; NaN for targets that it does not hold."""
    local = target - first
    inside = (local >= 0) & (local < logits.shape[-1])
    return logits.gather(-1, local.where(inside, 0).unsqueeze(-1)).squeeze(-1).where(inside, math.nan)


def _dense(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    maximum = logits.amax(-1)
    shifted = logits - maximum.unsqueeze(-1)
    predicted = _picked(shifted, target)
    return shifted.exp().sum(-1).log() - predicted.where((target >= 0) & (target < logits.shape[-1]), 0.0)


def _merged_shards(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Every rank's log-sum-exp, merged, in float32; a target out of range is replaced by the maximum."""
    target, (vocab, shard) = inputs[rank][1], vocabulary(case, rank)
    sums, maxima, predicted = [], [], torch.zeros(target.shape, device=target.device)
    for place, q in enumerate(group_members(case, rank)):
        logits = inputs[q][0].to(FP32)
        sums.append(torch.logsumexp(logits, -1))
        maxima.append(logits.amax(-1))
        own = target.div(shard, rounding_mode="floor") == place
        predicted = torch.where(own, _picked(logits, target, place * shard), predicted)
    predicted = predicted.where((target >= 0) & (target < vocab), torch.stack(maxima).amax(0))
    return (torch.logsumexp(torch.stack(sums), 0) - predicted).to(case.dtype)


def _online(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """One pass over blocks of the vocabulary with a running maximum and a rescaled sum, in float32.

    Blocks are of 3 entries, or a 128th of a long vocabulary: no kernel adds a hundred thousand terms one after the other.
    """
    logits, target = whole_vocabulary(inputs, group_members(case, rank)), inputs[rank][1]
    maximum, total = logits[..., 0].clone(), torch.ones(target.shape, device=target.device)
    for block in torch.split(logits[..., 1:], max(3, logits.shape[-1] // 128), dim=-1):
        larger = torch.maximum(maximum, block.amax(-1))
        # Before the first finite logit the maximum is -inf, and there is nothing to rescale.
        weights = torch.exp(block - larger.unsqueeze(-1)).sum(-1)
        total = torch.where(larger == maximum, total, total * torch.exp(maximum - larger)) + weights
        maximum = larger
    inside = (target >= 0) & (target < logits.shape[-1])
    return (total.log() - (_picked(logits, target) - maximum).where(inside, 0.0)).to(case.dtype)


def _every_step_rounded(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Every step rounded to the logits' dtype, the ranks' sums of exponentials too and what they add up to."""
    members, (_, shard), target = group_members(case, rank), vocabulary(case, rank), inputs[rank][1]
    maximum = torch.stack([inputs[q][0].amax(-1) for q in members]).amax(0)
    predicted = torch.zeros(target.shape, dtype=case.dtype, device=target.device)
    total = predicted
    for place, q in enumerate(members):
        shifted = inputs[q][0] - maximum.unsqueeze(-1)
        own = target.div(shard, rounding_mode="floor") == place
        predicted = torch.where(own, _picked(shifted, target, place * shard), predicted)
        total = total + shifted.exp().sum(-1)
    return total.log() - predicted


def _foreign_target_ignored(context: pc.AnswerContext) -> torch.Tensor:
    """The right partition sum, without the target's logit where another rank holds it."""
    logits, target = context.args[:2]
    own = target.div(logits.shape[-1], rounding_mode="floor") == context.place
    whole = whole_vocabulary(context.inputs, context.members)
    return _dense(whole, target.where(own, -1)).to(context.case.dtype)


def _sum_not_reduced(context: pc.AnswerContext) -> torch.Tensor:
    """The right maximum and target, but only the rank's own sum of exponentials."""
    whole, target = whole_vocabulary(context.inputs, context.members), context.args[1]
    maximum = whole.amax(-1)
    total = torch.exp(context.args[0].to(FP32) - maximum.unsqueeze(-1)).sum(-1)
    predicted = _picked(whole, target) - maximum
    return (total.log() - predicted.where((target >= 0) & (target < whole.shape[-1]), 0.0)).to(context.case.dtype)


def _every_other_entry(context: pc.AnswerContext) -> torch.Tensor:
    """The right maximum and target, and twice the sum of every second exponential."""
    whole, target = whole_vocabulary(context.inputs, context.members), context.args[1]
    maximum = whole.amax(-1)
    total = 2.0 * torch.exp(whole[..., ::2] - maximum.unsqueeze(-1)).sum(-1)
    predicted = _picked(whole, target) - maximum
    return (total.log() - predicted.where((target >= 0) & (target < whole.shape[-1]), 0.0)).to(context.case.dtype)


def _no_maximum(context: pc.AnswerContext) -> torch.Tensor:
    whole, target = whole_vocabulary(context.inputs, context.members), context.args[1]
    inside = (target >= 0) & (target < whole.shape[-1])
    return (whole.exp().sum(-1).log() - _picked(whole, target).where(inside, whole.amax(-1))).to(context.case.dtype)


def _outside_counts_as(context: pc.AnswerContext, value: float | None) -> torch.Tensor:
    """The right answer but for targets out of range: ``value``, or the unshifted log-partition."""
    whole, target = whole_vocabulary(context.inputs, context.members), context.args[1]
    outside = (target < 0) | (target >= whole.shape[-1])
    spoilt = torch.logsumexp(whole, -1) if value is None else torch.full(target.shape, value, device=target.device)
    return torch.where(outside, spoilt.to(context.case.dtype), context.answer)


_PATTERNS = ("peaked", "equal", "offset", "boundary", "special")

KNOWN_WRONG_ANSWERS = (
    pc.wrong("foreign_target_ignored", "no target term where another rank holds the target", _foreign_target_ignored),
    pc.wrong("sum_not_reduced", "the sum of exponentials over the rank's own shard", _sum_not_reduced),
    pc.wrong(
        "every_other_entry",
        "twice the sum of every second exponential",
        _every_other_entry,
        lambda c: c.params.get("pattern") not in _PATTERNS and (c.preset != "small" or c.label.startswith("wide")),
    ),
    pc.wrong(
        "no_maximum_subtraction",
        "exp of the bare logits",
        _no_maximum,
        ("small/peaked_fp32", "small/peaked_bf16", "small/offset_fp32", "small/offset_bf16", "pkb/bf16"),
    ),
    pc.wrong(
        "ignore_index",
        "loss 0 for targets out of range, which is right where one logit takes all the weight",
        lambda c: _outside_counts_as(c, 0.0),
        lambda c: c.params.get("pattern") not in ("peaked", "offset") and "scaled" not in c.label,
    ),
    pc.wrong("unshifted_partition", "log-partition of the bare logits for targets out of range", lambda c: _outside_counts_as(c, None)),
)

ALTERNATIVE_SOLUTIONS = pc.alternatives(merged_shards_fp32=_merged_shards, online_fp32=_online, every_step_rounded=_every_step_rounded)
