"""Wrong answers to problem 22 and other right ones. Evaluations do not import this module."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families.clipping import Gradients, coefficient, device_of, every_other, narrow_power_sum, order_of, scaled
from peerlane.problems.p022_clip_grad_norm_ep import PRESETS, _divisor, _reduced, _stages

Answer = tuple[torch.Tensor, dict[str, Gradients]]


def _narrow_norm(
    case: pc.Case,
    inputs: pc.Inputs,
    rank: int,
    *,
    stages: Sequence[str | None] | None = None,
    divisor: int | None = None,
    norm_type: float | None = None,
    weights: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """The norm in float32; with other groups, another divisor of experts, or other weights of the two lists, a wrong one."""
    device, p = device_of(inputs), norm_type or order_of(case)
    fsdp, *ep_stages = _stages(case) if stages is None else stages
    sums = [narrow_power_sum(args[0], p, device) for args in inputs]
    expert_sums = [narrow_power_sum(args[1], p, device, divisor or _divisor(case)) for args in inputs]
    total = weights[0] * _reduced(case, sums, [fsdp])[rank] + weights[1] * _reduced(case, expert_sums, ep_stages)[rank]
    return total.pow(1.0 / p)


def _updated(
    case: pc.Case,
    args: tuple[Any, ...],
    norm: torch.Tensor,
    *,
    factor: torch.Tensor | None = None,
    divisor: int | None = None,
    coarse: bool = False,
) -> Answer:
    """This norm, and gradients scaled by it (or by ``factor``), those of experts divided by ``divisor`` (if None, by the right one)."""
    factor = coefficient(norm, case["max_norm"]) if factor is None else factor
    return norm, {
        "non_ep_grad_tensors": scaled(args[0], factor, coarse=coarse),
        "ep_grad_tensors": scaled(scaled(args[1], 1.0 / (divisor or _divisor(case))), factor, coarse=coarse),
    }


def _with_norm_of(context: pc.AnswerContext, **options: Any) -> Answer:
    """Everything follows from a wrong norm."""
    return _updated(context.case, context.args, _narrow_norm(context.case, context.inputs, context.rank, **options))


def _local_times_root(context: pc.AnswerContext) -> Answer:
    local = _narrow_norm(context.case, context.inputs, context.rank, stages=(None, None, None))
    return _updated(context.case, context.args, local * context.case.world_size ** (1 / order_of(context.case)))


def _every_other_element(context: pc.AnswerContext) -> Answer:
    sampled = [(every_other(args[0]), every_other(args[1])) for args in context.inputs]
    norm = _narrow_norm(context.case, sampled, context.rank) * 2 ** (1 / order_of(context.case))
    return _updated(context.case, context.args, norm)


def _right_norm(context: pc.AnswerContext, **options: Any) -> Answer:
    """The right norm, and gradients with other factors."""
    return _updated(context.case, context.args, context.answer[0], **options)


def _all_divided(context: pc.AnswerContext) -> Answer:
    non_ep, ep = (scaled(gradients, 1.0 / _divisor(context.case)) for gradients in context.args[:2])
    return _updated(context.case, (non_ep, ep), context.answer[0], divisor=1)


def _one_list_scaled(context: pc.AnswerContext, *, experts: bool) -> Answer:
    norm, right = context.answer
    _, kept = _right_norm(context, factor=torch.ones_like(norm))
    name = "non_ep_grad_tensors" if experts else "ep_grad_tensors"
    return norm, {**right, name: kept[name]}


def _float32(case: pc.Case, inputs: pc.Inputs, rank: int, *, coarse: bool = False) -> Answer:
    """Norm and products in float32; ``coarse``: with the coefficient rounded to each gradient's dtype."""
    return _updated(case, inputs[rank], _narrow_norm(case, inputs, rank), coarse=coarse)


def _folded(case: pc.Case, inputs: pc.Inputs, rank: int) -> Answer:
    """Experts' divisor and coefficient in one factor, their norm from undivided gradients."""
    fsdp, *ep_stages = _stages(case)
    device, p = device_of(inputs), order_of(case)
    sums = [narrow_power_sum(args[0], p, device) for args in inputs]
    expert_sums = [narrow_power_sum(args[1], p, device) * float(_divisor(case)) ** -p for args in inputs]
    norm = (_reduced(case, sums, [fsdp])[rank] + _reduced(case, expert_sums, ep_stages)[rank]).pow(1.0 / p)
    factor = coefficient(norm, case["max_norm"])
    non_ep, ep = inputs[rank][:2]
    return norm, {"non_ep_grad_tensors": scaled(non_ep, factor), "ep_grad_tensors": scaled(ep, factor / _divisor(case))}


_OTHERS = tuple(f"{item.name}/{spec.label}" for item in PRESETS[1:] for spec in item.cases)

_OTHERS_ON_MORE = tuple(f"{name}/w{world_size}" for name in _OTHERS for world_size in (4, 8))


_BOTH = pc.small_cases("all_ranks", "norm_1", "divisor_3")

_REDUCED = (*pc.small_cases("grid", "below", "large_experts"), *_BOTH)

KNOWN_WRONG_ANSWERS = (
    pc.wrong(
        "no_communication",
        "the norm of the rank's own gradients",
        lambda c: _with_norm_of(c, stages=(None, None, None)),
        (*_REDUCED, *pc.small_cases("no_non_ep", "no_ep", "ep_fsdp_only", "ep_only"), *_OTHERS),
    ),
    pc.wrong("local_times_root", "the rank's own norm times W^(1/p)", _local_times_root, (*_REDUCED, *_OTHERS)),
    pc.wrong("every_other_element", "the norm of every second element times 2^(1/p)", _every_other_element, (*_REDUCED, *_OTHERS)),
    pc.wrong(
        "experts_not_reduced", "experts' sum not reduced", lambda c: _with_norm_of(c, stages=("world", None, None)), (*_REDUCED, *_OTHERS)
    ),
    pc.wrong(
        "experts_reduced_over_sharers_only",
        "experts' sum not reduced over the expert-parallel group",
        lambda c: _with_norm_of(c, stages=("world", "ep_fsdp", None)),
        (*(f"{name}/w4" for name in pc.small_cases("grid")), *pc.small_cases("below"), *_BOTH, *_OTHERS_ON_MORE),
    ),
    pc.wrong(
        "experts_reduced_over_ep_group_only",
        "experts' sum not reduced over the ranks that share them",
        lambda c: _with_norm_of(c, stages=("world", None, "ep")),
        (*pc.small_cases("grid"), *(f"{name}/w4" for name in pc.small_cases("below", "norm_1", "divisor_3"))),
    ),
    pc.wrong(
        "groups_swapped",
        "the expert-parallel group in place of the ranks that share experts, or the other way round",
        lambda c: _with_norm_of(c, stages=("world", "ep", None) if _stages(c.case)[1] else (None, None, "ep_fsdp")),
        pc.small_cases("ep_fsdp_only", "ep_only"),
    ),
    pc.wrong(
        "whole_world",
        "skipped sums taken",
        lambda c: _with_norm_of(c, stages=("world", "world", None)),
        pc.small_cases("ep_fsdp_only", "ep_only/w4"),
    ),
    pc.wrong(
        "fsdp_group_ignored",
        "the other gradients' sum taken over the world",
        lambda c: _with_norm_of(c, stages=("world", *_stages(c.case)[1:])),
        pc.small_cases("hybrid", "ep_only"),
    ),
    pc.wrong(
        "others_not_reduced",
        "the other gradients' sum not reduced",
        lambda c: _with_norm_of(c, stages=(None, *_stages(c.case)[1:])),
        (*pc.small_cases("hybrid"), *_BOTH),
    ),
    pc.wrong("euclidean", "norm_type ignored", lambda c: _with_norm_of(c, norm_type=2.0), pc.small_cases("norm_1")),
    pc.wrong("experts_left_out", "the norm of the other gradients", lambda c: _with_norm_of(c, weights=(1.0, 0.0)), (*_BOTH, *_OTHERS)),
    pc.wrong("others_left_out", "the norm of experts' gradients", lambda c: _with_norm_of(c, weights=(0.0, 1.0)), (*_BOTH, *_OTHERS)),
    pc.wrong(
        "not_divided",
        "ep_size ignored",
        lambda c: _updated(c.case, c.args, _narrow_norm(c.case, c.inputs, c.rank, divisor=1), divisor=1),
        (*pc.small_cases("below", "no_non_ep", "large_experts"), *_BOTH, *_OTHERS_ON_MORE),
    ),
    pc.wrong(
        "divided_after_the_norm",
        "the norm of undivided gradients of experts",
        lambda c: _with_norm_of(c, divisor=1),
        (*pc.small_cases("below", "no_non_ep", "large_experts"), *_BOTH, *_OTHERS_ON_MORE),
    ),
    pc.wrong(
        "divided_for_the_norm_only",
        "the right norm, experts' gradients not divided",
        lambda c: _right_norm(c, divisor=1),
        (*pc.small_cases("below", "no_non_ep", "large_experts", "nan"), *_BOTH, *_OTHERS_ON_MORE),
    ),
    pc.wrong(
        "all_divided", "the other gradients divided too", _all_divided, (*pc.small_cases("below", "no_ep", "nan"), *_BOTH, *_OTHERS_ON_MORE)
    ),
    pc.wrong(
        "not_clipped",
        "the right norm, gradients not scaled by it",
        lambda c: _right_norm(c, factor=torch.ones_like(c.answer[0])),
        (*pc.small_cases("grid", "no_non_ep", "no_ep", "ep_fsdp_only", "ep_only", "large_experts", "hybrid"), *_BOTH, *_OTHERS),
    ),
    pc.wrong("only_experts_clipped", "the other gradients not scaled", lambda c: _one_list_scaled(c, experts=True), (*_BOTH, *_OTHERS)),
    pc.wrong("only_others_clipped", "experts' gradients not scaled", lambda c: _one_list_scaled(c, experts=False), (*_BOTH, *_OTHERS)),
    pc.wrong(
        "always_scaled",
        "gradients scaled to max_norm although they are below it",
        lambda c: _right_norm(c, factor=c.case["max_norm"] / c.answer[0]),
        pc.small_cases("below"),
    ),
)

ALTERNATIVE_SOLUTIONS = pc.alternatives(rounded=_float32, coefficient_rounded=partial(_float32, coarse=True), folded=_folded)
