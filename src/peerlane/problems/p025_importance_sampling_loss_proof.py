"""Wrong answers to problem 25 and other right ones. Evaluations do not import this module."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.contract.codes import eight_bit_floats
from peerlane.problems.families.importance import CLAMP
from peerlane.problems.families.matmul import FP32
from peerlane.problems.p025_importance_sampling_loss import _aux_dtype, _ignore_index, _tokens

Answer = tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, torch.Tensor]


def _token_terms(args: Sequence[Any], cross_entropy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """valid, log-probability, log-ratio, ratio and policy gradient, in the widest dtype of the cross entropy and the arguments."""
    valid = args[2] != _ignore_index(args)
    log_ratio = torch.where(valid, -cross_entropy - args[3], 0.0).clamp(-CLAMP, CLAMP)
    ratio = log_ratio.exp()
    return valid, -cross_entropy, log_ratio, ratio, torch.where(valid, -ratio * args[4], 0.0)


def _cross_entropy(args: Sequence[Any], logits: torch.Tensor) -> torch.Tensor:
    flat = F.cross_entropy(logits, args[2].flatten(), ignore_index=_ignore_index(args), reduction="none")
    return flat.view(args[2].shape)


def _assembled(case: pc.Case, every: Sequence[tuple[torch.Tensor, ...]], rank: int, sum_dtype: torch.dtype) -> Answer:
    """The answer from all ranks' :func:`_token_terms`, local sums and their sum rounded to ``sum_dtype``."""

    def total(term: Callable[..., torch.Tensor]) -> torch.Tensor:
        locals_ = [torch.where(terms[0], term(*terms[1:]), 0.0).to(FP32).sum().to(sum_dtype) for terms in every]
        result = locals_[0]
        for part in locals_[1:]:
            result = result + part
        return result.to(FP32) / count

    count = torch.stack([terms[0].sum() for terms in every]).sum().clamp(min=1)
    ratios = [(valid, ratio.to(FP32)) for valid, _, _, ratio, _ in every]
    metrics = (
        total(lambda lp, d, rho, pg: rho),
        torch.stack([torch.where(valid, rho, math.inf).min() for valid, rho in ratios]).min(),
        torch.stack([torch.where(valid, rho, -math.inf).max() for valid, rho in ratios]).max(),
        total(lambda lp, d, rho, pg: rho - d - 1.0),
        total(lambda lp, d, rho, pg: -lp),
    )
    _, lp, _, _, pg = every[rank]
    gradient_dtype = torch.promote_types(case.dtype, _aux_dtype(case))
    return total(lambda lp, d, rho, pg: pg), None, lp.to(case.dtype), pg.to(gradient_dtype), torch.stack(metrics)


def _wide_logits(case: pc.Case, inputs: pc.Inputs, rank: int) -> Answer:
    """Logits and everything after them in float32, rounded once."""
    every = [_token_terms(args, _cross_entropy(args, args[0].flatten(0, -2).to(FP32) @ args[1].to(FP32).t())) for args in inputs]
    return _assembled(case, every, rank, FP32)


def _in_dtype(case: pc.Case, inputs: pc.Inputs, rank: int) -> Answer:
    """Everything rounded to the inputs' dtype after every operation, as the public reference does it."""
    every = [
        _token_terms(args, _cross_entropy(args, (args[0].flatten(0, -2).to(FP32) @ args[1].to(FP32).t()).to(case.dtype))) for args in inputs
    ]
    return _assembled(case, every, rank, case.dtype)


def _carrying_gradient(case: pc.Case, inputs: pc.Inputs, rank: int) -> Answer:
    """The loss plus and less a sum over the rank's own tokens, through which the public reference's gradient flows."""
    loss, _, lp, pg, metrics = _wide_logits(case, inputs, rank)
    count = sum(int((args[2] != _ignore_index(args)).sum()) for args in inputs)
    carrier = (pg.to(FP32) * lp.to(FP32)).sum() / max(count, 1)
    return loss + carrier - carrier, None, lp, pg, metrics


def _with_arguments(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Callable[[pc.AnswerContext], Answer]:
    """The answer to other arguments."""

    def answer(context: pc.AnswerContext) -> Answer:
        return _wide_logits(context.case, [change(args) for args in context.inputs], context.rank)

    return answer


def _from_partition(context: pc.AnswerContext, partition: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Answer:
    """Log-probabilities from the label's logit and ``partition``, a guess at the log-sum-exp from it, hidden states and head."""
    every = []
    for args in context.inputs:
        hidden, weight = args[0].flatten(0, -2).to(FP32), args[1].to(FP32)
        labels = args[2].flatten()
        own = (hidden * weight[labels.masked_fill(labels == _ignore_index(args), 0)]).sum(-1)
        cross_entropy = partition(own, hidden, weight) - own
        every.append(_token_terms(args, cross_entropy.masked_fill(labels == _ignore_index(args), 0.0).view(args[2].shape)))
    return _assembled(context.case, every, context.rank, FP32)


def _average_vocabulary(own: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What independent normal logits with the variances of the head's channels come to, beside the label's."""
    return torch.logaddexp(own, math.log(len(weight)) + hidden.square() @ weight.var(0) / 2)


def _half_vocabulary(own: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(own, (hidden @ weight[::2].t()).logsumexp(-1) + math.log(2.0))


def _no_maximum(_: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp from the exponentials of the logits as they are."""
    return (hidden @ weight.t()).exp().sum(-1).log()


def _eight_bit_product(context: pc.AnswerContext) -> Answer:
    def coded(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (eight_bit_floats(args[0]), eight_bit_floats(args[1]), *args[2:])

    return _with_arguments(coded)(context)


def _no_communication(context: pc.AnswerContext) -> Answer:
    return _wide_logits(context.case, [context.args], 0)


def _clamped_constant(context: pc.AnswerContext) -> Answer:
    """What all tokens clamped to exp(-20) would give: no loss, no gradient, and the cross entropy right."""
    loss, _, lp, pg, metrics = context.answer
    zero = torch.zeros_like(metrics[0])
    return torch.zeros_like(loss), None, lp, torch.zeros_like(pg), torch.stack([zero, zero, zero, zero + 19.0, metrics[4]])


def _ratio_one(context: pc.AnswerContext) -> Answer:
    """Every ratio one: gradients are the advantages."""
    gradients = [torch.where(args[2] != _ignore_index(args), -args[4], 0.0) for args in context.inputs]
    count = sum(int((args[2] != _ignore_index(args)).sum()) for args in context.inputs)
    _, _, lp, pg, metrics = context.answer
    known = torch.stack([metrics.new_ones(()), metrics.new_ones(()), metrics.new_ones(()), metrics.new_zeros(()), metrics[4]])
    return (torch.stack([part.to(FP32).sum() for part in gradients]).sum() / count, None, lp, gradients[context.rank].to(pg.dtype), known)


def _local_extremes(context: pc.AnswerContext) -> Answer:
    loss, _, lp, pg, metrics = context.answer
    own = _no_communication(context)[4]
    return loss, None, lp, pg, torch.stack([metrics[0], own[1], own[2], metrics[3], metrics[4]])


def _mean_of_means(context: pc.AnswerContext) -> Answer:
    own = [_wide_logits(context.case, [args], 0) for args in context.inputs]
    metrics = torch.stack([answer[4] for answer in own]).mean(0)
    return torch.stack([answer[0] for answer in own]).mean(0), None, *context.answer[2:4], metrics


def _all_tokens_counted(context: pc.AnswerContext) -> Answer:
    share = sum(int((args[2] != _ignore_index(args)).sum()) for args in context.inputs) / (_tokens(context.case) * context.case.world_size)
    loss, _, lp, pg, metrics = context.answer
    return loss * share, None, lp, pg, metrics * metrics.new_tensor([share, 1.0, 1.0, share, share])


_VALID = pc.except_for("none_valid_fp32")

_VALID_FP32 = pc.where(lambda c: _VALID(c) and c.dtype == FP32)

KNOWN_WRONG_ANSWERS = (
    pc.wrong("clamped_constant", "as if all ratios were exp(-20)", _clamped_constant, _VALID),
    pc.wrong("ratio_one", "old_logprobs ignored", _ratio_one, _VALID),
    pc.wrong("advantage_one", "advantages ignored", _with_arguments(lambda a: (*a[:4], torch.ones_like(a[4]), *a[5:])), _VALID),
    pc.wrong(
        "local_extremes", "least and largest ratio of the rank alone: may be within the error of bfloat16", _local_extremes, _VALID_FP32
    ),
    pc.wrong(
        "mean_of_means",
        "ranks' means averaged, whatever their numbers of tokens: within the error of bfloat16",
        _mean_of_means,
        lambda c: _VALID_FP32(c) and c.label not in ("silent_rank_fp32", "one_ratio_fp32"),
    ),
    pc.wrong(
        "average_vocabulary",
        "the label's logit, and a closed form for all others",
        lambda c: _from_partition(c, _average_vocabulary),
        _VALID,
    ),
    pc.wrong("half_vocabulary", "the label's logit, and every second other one", lambda c: _from_partition(c, _half_vocabulary), _VALID),
    pc.wrong(
        "eight_bit_product",
        "logits from hidden states and head in 8-bit floating point, with a scale for every token and every entry",
        _eight_bit_product,
        _VALID,
    ),
    pc.wrong(
        "no_maximum", "exponentials of the logits as they are", lambda c: _from_partition(c, _no_maximum), ("small/large_logits_fp32",)
    ),
    pc.wrong("all_tokens_counted", "divided by the number of all tokens", _all_tokens_counted, _VALID_FP32),
)

ALTERNATIVE_SOLUTIONS = pc.alternatives(fp32_logits=_wide_logits, everything_in_dtype=_in_dtype, carrying_gradient=_carrying_gradient)
