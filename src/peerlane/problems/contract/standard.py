"""The wrong answers that every problem must reject on every output."""

import math
from typing import Any

import torch

from peerlane.problems.contract.spec import AnswerContext, KnownWrongAnswer
from peerlane.problems.contract.tree import Tree, leaves, map_leaves


def _filled(context: AnswerContext, function: Any) -> Tree:
    return map_leaves(context.answer, function)


def _mean(tensor: torch.Tensor) -> float:
    """The mean of the finite elements, 0 if there are none; of the real part where complex."""
    real = tensor.real if tensor.is_complex() else tensor
    return float(torch.nan_to_num(real.to(torch.float64), 0.0, 0.0, 0.0).mean()) if real.numel() else 0.0


def _input_mean(context: AnswerContext) -> float:
    means = [_mean(argument) for argument in leaves(context.args)]
    return sum(means) / len(means) if means else 0.0


def _echo(context: AnswerContext) -> Tree:
    """Every output filled from the first tensor argument, repeated or cut to size."""
    source = next((a for a in leaves(context.args) if a.numel()), None)

    def fill(leaf: torch.Tensor) -> torch.Tensor:
        if source is None or leaf.numel() == 0:
            return torch.zeros_like(leaf)
        flat = source.detach().reshape(-1)
        if flat.is_complex() and not leaf.is_complex():
            flat = flat.real
        repeats = -(-leaf.numel() // flat.numel())
        return flat.repeat(repeats)[: leaf.numel()].reshape(leaf.shape).to(leaf.dtype)

    return _filled(context, fill)


STANDARD_WRONG_ANSWERS: tuple[KnownWrongAnswer, ...] = (
    KnownWrongAnswer("zeros", "all outputs zero", lambda c: _filled(c, torch.zeros_like)),
    KnownWrongAnswer("ones", "all outputs one", lambda c: _filled(c, torch.ones_like)),
    KnownWrongAnswer(
        "previous_mean",
        "every output is the mean of the right answer to the slot before: a constant that could have been learnt",
        lambda c: map_leaves(c.previous, lambda t: _constant(t, _mean(t))),
    ),
    KnownWrongAnswer(
        "input_mean", "every output is the mean of the rank's own inputs", lambda c: _filled(c, lambda t: _constant(t, _input_mean(c)))
    ),
    KnownWrongAnswer("nan", "all outputs NaN, or the largest value of an integer dtype", lambda c: _filled(c, _poison)),
    KnownWrongAnswer("echo", "the rank's own first tensor, cut or repeated to the output's size", _echo),
    KnownWrongAnswer("previous", "the right answer to the slot before", lambda c: c.previous),
    KnownWrongAnswer("another_rank", "the right answer of the next rank", lambda c: c.answers[(c.rank + 1) % c.case.world_size]),
)


def _constant(leaf: torch.Tensor, value: float) -> torch.Tensor:
    """Filled with the value, or with what comes nearest to it in the dtype."""
    if leaf.dtype.is_complex or leaf.dtype == torch.bool:
        return torch.full_like(leaf, value)
    exact = leaf.dtype.is_floating_point
    info = torch.finfo(leaf.dtype) if exact else torch.iinfo(leaf.dtype)
    return torch.full_like(leaf, min(max(value if exact else int(value), info.min), info.max))


def _poison(leaf: torch.Tensor) -> torch.Tensor:
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        return torch.full_like(leaf, math.nan)
    if leaf.dtype == torch.bool:
        return ~leaf
    return torch.full_like(leaf, torch.iinfo(leaf.dtype).max)
