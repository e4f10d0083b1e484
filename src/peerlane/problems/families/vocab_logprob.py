"""Problems 82 and 83, log-probabilities of tokens under a filter: their oracle, comparison, cost and wrong answers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import FP32, FP64, group_members
from peerlane.problems.families.vocab import (
    CHUNK_BYTES,
    cut_margin,
    direct_filter,
    filter_wrong_answers,
    filters,
    keep_largest,
    keep_nucleus,
    labels,
    own_filters,
    shape_of,
    unfiltered,
    vocabulary,
)

# Error of a log-probability y, whose natural unit is one: room for sums over the vocabulary in float32.
ABSOLUTE, RELATIVE = 1e-3, 2e-3


@dataclass(kw_only=True)
class FilteredLogProbability(pc.Expected):
    """A log-probability whose token the filter may keep or drop, with all answers that are right before rounding errors.

    ``value`` follows the definition to the letter. -inf is right where ``may_drop``; a number in [``low``, ``high``] where ``may_keep``.
    """

    may_keep: torch.Tensor
    may_drop: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> FilteredLogProbability:
    """Ranks tokens by probability: one is kept if less than top_p lies above it, equal logits being ranked from the highest index down."""
    members, (vocab, _), shape = group_members(case, rank), vocabulary(case, rank), shape_of(case, rank)
    shards = [inputs[q][0].flatten(0, 1) for q in members]
    target = inputs[rank][1].flatten()
    chunk = max(1, CHUNK_BYTES // (vocab * FP64.itemsize))
    parts = [slice(first, first + chunk) for first in range(0, target.numel(), chunk)]
    answers = [_log_probability(case, torch.cat([shard[part].to(FP64) for shard in shards], dim=-1), target[part]) for part in parts]
    value, may_keep, may_drop, low, high = (torch.cat(columns).view(shape) for columns in zip(*answers, strict=True))
    return FilteredLogProbability(name="log_probability", value=value, dtype=FP32, may_keep=may_keep, may_drop=may_drop, low=low, high=high)


def _log_probability(case: pc.Case, logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(value, may_keep, may_drop, low, high) of every row, see :class:`FilteredLogProbability`."""
    vocab, column = logits.shape[-1], target.unsqueeze(-1)
    top_k, top_p = filters(case, vocab)
    if top_k is not None:
        logits.masked_fill_(logits < logits.topk(top_k, dim=-1).values[:, -1:], -math.inf)
    logits -= logits.logsumexp(-1, keepdim=True)
    own = logits.gather(-1, column)
    plain, survives = own.squeeze(-1), own.squeeze(-1) > -math.inf
    if top_p is None:
        return plain, survives, ~survives, plain, plain

    margin, probabilities = cut_margin(case, vocab), logits.exp()
    ranked = probabilities.sort(dim=-1, descending=True).values
    above = ranked.cumsum(-1) - ranked
    above[:, 0] = -math.inf  # the largest is always kept
    certain, kept, possible = ((ranked * (above < cut)).sum(-1).log() for cut in (top_p - margin, top_p, top_p + margin))

    # Mass above the target if it is the first, in its true place, or the last among the logits that equal it.
    equal = logits == own
    own_probability = own.squeeze(-1).exp()
    first = (probabilities * (logits > own)).sum(-1)
    ahead = (equal & (torch.arange(vocab, device=logits.device) > column)).sum(-1)
    last = first + (equal.sum(-1) - 1) * own_probability
    largest = logits.amax(-1) == plain
    keeps = survives & ((first + ahead * own_probability < top_p) | (largest & (ahead == 0)))
    may_keep = survives & ((first < top_p + margin) | largest)
    may_drop = ~survives | ((last >= top_p - margin) & ~(largest & (equal.sum(-1) == 1)))
    return (plain - kept).masked_fill(~keeps, -math.inf), may_keep, may_drop, plain - possible, plain - certain


def compare(case: pc.Case, got: torch.Tensor, expected: FilteredLogProbability, kind: str) -> list[pc.Score]:
    """A log-probability may differ by 0.001 + 0.002 |want|. It must be -inf where top-k or top-p drops the target.

    Where rounding of the logits may decide at a threshold, whatever either decision gives is right.
    """
    got = got.to(FP64)
    nearest = torch.minimum(torch.maximum(got, expected.low), expected.high)
    ratio = (got - nearest).abs() / (ABSOLUTE + RELATIVE * nearest.abs())
    ratio = torch.where(expected.may_keep, ratio, math.inf)
    ratio = torch.where((got == -math.inf) & expected.may_drop, 0.0, ratio).nan_to_num(nan=math.inf, posinf=math.inf)
    flat = int(ratio.argmax())
    index = (flat // ratio.shape[1], flat % ratio.shape[1])
    accepted = " or ".join(
        [f"[{float(expected.low[index]):.6g}, {float(expected.high[index]):.6g}]"] * bool(expected.may_keep[index])
        + ["-inf"] * bool(expected.may_drop[index])
    )
    detail = f"{int((ratio > 1).sum())} of {ratio.numel()} log-probabilities wrong; accepted here: {accepted}"
    worst = float(ratio[index])
    return [pc.Score("log_probability", worst, detail, index, float(got[index]), float(expected.value[index]))]


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Logits are read once: while the ranks agree on a token's cut, its part of the vocabulary can stay on chip.

    Per token the sum over the kept part of a shard and the target's logit (float32) go to one rank, and the result comes back: less than
    any known algorithm sends to find the threshold.
    """
    (batch, sequence), (_, shard), ranks = shape_of(case, rank), vocabulary(case, rank), len(group_members(case, rank))
    tokens = batch * sequence
    port = pc.traffic.all_to_all(12 * tokens, ranks)
    return pc.Cost(
        hbm_bytes=tokens * (shard * case.dtype.itemsize + 8 + 4), egress_bytes=port, ingress_bytes=port, flops={"fp32": 4 * tokens * shard}
    )


def log_softmax_at(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def log_probability_answer(case: pc.Case, rank: int, args: tuple[Any, ...], kept: torch.Tensor) -> torch.Tensor:
    """The targets' log-probabilities among the filtered logits."""
    return log_softmax_at(kept, args[1])


def _never_dropped(context: pc.AnswerContext) -> torch.Tensor:
    """The right normaliser, and every target's logit."""
    kept = direct_filter(context.case, context.inputs, context.rank)
    return unfiltered(context).gather(-1, context.args[1].unsqueeze(-1)).squeeze(-1) - kept.logsumexp(-1)


def _local(context: pc.AnswerContext, normalised: bool) -> torch.Tensor:
    """-inf for targets on other ranks; for the rank's own the right answer, or, if ``normalised``, that over its shard alone."""
    logits, target = context.args[:2]
    _, shard = vocabulary(context.case, context.rank)
    local = target - context.place * shard
    own = (local >= 0) & (local < shard)
    top_k, top_p = filters(context.case, shard)
    kept = keep_nucleus(keep_largest(logits.to(FP32), top_k), top_p)
    answer = log_softmax_at(kept, local.where(own, 0)) if normalised else context.answer
    return torch.where(own, answer, -math.inf)


def _no_maximum(context: pc.AnswerContext) -> torch.Tensor:
    kept = direct_filter(context.case, context.inputs, context.rank)
    return kept.gather(-1, context.args[1].unsqueeze(-1)).squeeze(-1) - kept.exp().sum(-1).log()


def _no_maximum_in_top_p(context: pc.AnswerContext) -> torch.Tensor:
    """Where the sum overflows, probabilities are NaN, and top-p drops nothing."""
    logits, (top_k, _) = unfiltered(context), own_filters(context)
    kept, largest = direct_filter(context.case, context.inputs, context.rank), keep_largest(logits, top_k)
    return log_softmax_at(torch.where(largest.exp().sum(-1, keepdim=True).isinf(), largest, kept), context.args[1])


def log_probability_wrong_answers(
    presets: Sequence[pc.Preset], *, idle_top_k: Sequence[str], idle_top_p: Sequence[str], ties: Sequence[str]
) -> tuple[pc.KnownWrongAnswer, ...]:
    """Wrong log-probabilities, also where logits overflow: in cases ``one_hot_fp32`` and, with top-p, ``one_hot_both_bf16``.

    The arguments are those of :func:`filter_wrong_answers`.
    """
    filtered = (*labels(presets, "top_k", without=idle_top_k), *labels(presets, "top_p", without=idle_top_p))
    return (
        pc.wrong("all_dropped", "-inf everywhere", lambda c: torch.full_like(c.answer, -math.inf)),
        pc.wrong("foreign_target_dropped", "-inf where another rank holds the target", lambda c: _local(c, False)),
        pc.wrong("never_dropped", "a finite answer for targets that the filter drops", _never_dropped, filtered),
        pc.wrong("no_maximum", "exponentials of the logits as they are", _no_maximum, ("small/one_hot_fp32",)),
        pc.wrong("no_maximum_in_top_p", "the same in top-p's softmax alone", _no_maximum_in_top_p, ("small/one_hot_both_bf16",)),
        *filter_wrong_answers(log_probability_answer, presets, idle_top_k=idle_top_k, idle_top_p=idle_top_p, ties=ties),
    )
