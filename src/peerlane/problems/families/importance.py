"""Log-probabilities of tokens under a language-model head, their rounding errors, and what those do to importance ratios and means."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families.matmul import ACCUMULATION, FP64

# Log-ratios are clamped to [-20, 20].
CLAMP = 20.0

# Bytes of float64 logits that are held at a time; about three times as much is needed.
_CHUNK_BYTES = 2**29


@dataclass
class Tokens:
    """What one rank's tokens come to, flattened, in float64. Ignored tokens have zeros.

    ``error`` is the worst error of a log-probability l = z_y - m - log S, S = sum of exp(z_v - m), m the largest logit, to first order. All
    that is rounded to the logits' dtype, of unit roundoff ``u``: l itself, u |l|; the logits, u (1 - p_y) |z_y| + u sum over v != y of
    p_v |z_v|; S and log S, u (1 + log S). And the accumulation in float32.
    """

    valid: torch.Tensor
    log_probability: torch.Tensor
    error: torch.Tensor
    log_ratio: torch.Tensor
    policy_gradient: torch.Tensor
    u: float

    @property
    def ratio(self) -> torch.Tensor:
        """exp(log_ratio) of valid tokens, 0 of others."""
        return torch.where(self.valid, self.log_ratio.exp(), 0.0)

    @property
    def excess(self) -> torch.Tensor:
        """ratio - log_ratio - 1, an estimate of the divergence."""
        return self.log_ratio.expm1() - self.log_ratio

    @property
    def log_ratio_error(self) -> torch.Tensor:
        """Twice the worst error of the log-ratio."""
        return torch.where(self.valid, 2 * (self.error + self.u * self.log_ratio.abs()), 0.0)

    @property
    def ratio_error(self) -> torch.Tensor:
        """The relative error of a ratio, of the log-ratio's error, with room for its rounding and that of a product with it."""
        return self.log_ratio_error.expm1() + 4 * self.u

    @property
    def excess_error(self) -> torch.Tensor:
        """By the slope of the log-ratio, and the rounding of the three numbers; the second order is :meth:`curvature`."""
        rounding = 2 * self.u * (self.ratio + self.log_ratio.abs() + 1.0)
        return torch.where(self.valid, self.log_ratio.expm1().abs() * self.log_ratio_error + rounding, 0.0)

    @property
    def curvature(self) -> torch.Tensor:
        """The second order of a ratio's error: never negative, so that it adds up over tokens."""
        return self.ratio * (self.log_ratio_error.expm1() - self.log_ratio_error)


def evaluate(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    ignore_index: int,
) -> Tokens:
    """One rank's tokens: hidden states (T, H), head (V, H), and three of (T,). Channels may differ in size, if states make up for it."""
    u, valid = pc.UNIT_ROUNDOFF[hidden.dtype], labels != ignore_index
    index, head = labels.masked_fill(~valid, 0).unsqueeze(-1), weight.to(FP64, copy=True)
    channels = head.norm(dim=0)
    head /= channels.masked_fill_(channels == 0, 1.0)
    longest = head.norm(dim=1).max()
    values, errors = [], []
    rows = max(1, _CHUNK_BYTES // (len(head) * FP64.itemsize))
    for first in range(0, len(hidden), rows):
        part = slice(first, first + rows)
        states = hidden[part].to(FP64) * channels
        logits = states @ head.t()
        own, partition, largest = logits.gather(-1, index[part]).squeeze(-1), logits.logsumexp(-1), logits.amax(-1)
        value = own - partition
        mean_size = (logits - partition.unsqueeze(-1)).exp_().mul_(logits.abs_()).sum(-1)
        rounding = value.abs() + mean_size + (1.0 - 2.0 * value.exp()) * own.abs() + 1.0 + (partition - largest)
        values.append(value)
        errors.append(u * rounding + 2 * ACCUMULATION * states.norm(dim=1) * longest)
    value, error = (torch.where(valid, torch.cat(parts), 0.0) for parts in (values, errors))
    log_ratio = torch.where(valid, value - old_logprobs.to(FP64), 0.0).clamp(-CLAMP, CLAMP)
    gradient = torch.where(valid, -log_ratio.exp() * advantages.to(FP64), 0.0)
    return Tokens(valid, value, error, log_ratio, gradient, u)


def global_mean(
    parts: Sequence[torch.Tensor], errors: Sequence[torch.Tensor], count: torch.Tensor, u: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of all ranks' terms over ``count``, and what it may be off by.

    Terms' errors are independent and add up as their squares do; they are given as twice their worst, which is six times or more what they
    are on average. Local sums are rounded to a dtype of unit roundoff u, and added in it: W roundings of sum |S_q|, and room for two more.
    """
    sums = torch.stack([part.sum() for part in parts])
    walk = torch.stack([part.square().sum() for part in errors]).sum().sqrt()
    accumulated = ACCUMULATION * torch.stack([part.abs().sum() for part in parts]).sum()
    rounded = (len(parts) + 2) * u * sums.abs().sum()
    return sums.sum() / count, (walk + accumulated + rounded) / count


def extremes(tokens: Sequence[Tokens]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The least and the largest ratio of all ranks' valid tokens (infinities if there are none), and what each may be off by."""
    ratio, valid, error = (torch.cat([getattr(part, name) for part in tokens]) for name in ("ratio", "valid", "ratio_error"))
    found = []
    for sign in (1.0, -1.0):
        exact, low, high = (
            sign * torch.where(valid, sign * ratio * f, math.inf).min() for f in (1.0 + 0.0 * error, 1.0 - error, 1.0 + error)
        )
        found.append((exact, torch.maximum((exact - low).abs(), (high - exact).abs())))
    return found
