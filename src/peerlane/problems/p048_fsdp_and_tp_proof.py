"""Wrong answers to problem 48 and other right ones. Evaluations do not import this module."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import FP32, sequential_sum, wide_sum
from peerlane.problems.p048_fsdp_and_tp import _fsdp_peers, _where, _whole_weights, grid

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _partial(x: torch.Tensor, weights: Sequence[torch.Tensor], activation: Activation = _swiglu) -> torch.Tensor:
    w1, w2, w3 = weights
    return activation(x @ w1, x @ w2) @ w3


def _in_float32(
    case: pc.Case,
    inputs: pc.Inputs,
    rank: int,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    activation: Activation = _swiglu,
    zero: Callable[[int], bool] = lambda _: False,
) -> torch.Tensor:
    """The sum of the partial results of ``groups`` of ranks that share a slice (if None, the right ones), rounded once; shards of ranks
    that ``zero`` names are taken for zero.
    """
    n_tp, _ = grid(case)
    chosen = [_fsdp_peers(case, index) for index in range(n_tp)] if groups is None else groups
    known = [(x, *(torch.zeros_like(shard) if zero(q) else shard for shard in shards)) for q, (x, *shards, _, _) in enumerate(inputs)]
    x = inputs[rank][0].to(FP32)
    partials = [_partial(x, _whole_weights(known, peers, FP32), activation) for peers in chosen]
    return torch.stack(partials).sum(0).to(case.dtype)


def _every_operation_rounded(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    n_tp, _ = grid(case)
    return sequential_sum([_partial(inputs[rank][0], _whole_weights(inputs, _fsdp_peers(case, t), case.dtype)) for t in range(n_tp)])


def _rounded_partial_sums(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    n_tp, _ = grid(case)
    return wide_sum([_in_float32(case, inputs, rank, groups=[_fsdp_peers(case, t)]) for t in range(n_tp)])


@dataclass(frozen=True)
class _Place:
    """Where a rank stands in the grid, for known wrong answers."""

    rank: int
    n_tp: int
    n_fsdp: int

    @property
    def slices(self) -> list[list[int]]:
        """The ranks that share a tensor-parallel slice, by slice."""
        return [[index * self.n_tp + tp_index for index in range(self.n_fsdp)] for tp_index in range(self.n_tp)]

    @property
    def own_slice(self) -> list[int]:
        """The ranks that share the rank's own slice."""
        return self.slices[self.rank % self.n_tp]

    def fsdp_index(self, rank: int) -> int:
        """A rank's place in its FSDP group."""
        return rank // self.n_tp


def _wrong(name: str, why: str, *, tp: bool = False, fsdp: bool = False, **options: Callable[[_Place], Any]) -> pc.KnownWrongAnswer:
    """A known wrong answer with options of :func:`_in_float32`; ``tp``, ``fsdp``: only where there is more than one such rank."""

    def answer(context: pc.AnswerContext) -> torch.Tensor:
        place = _Place(context.rank, *grid(context.case))
        made = {key: option(place) for key, option in options.items()}
        return _in_float32(context.case, context.inputs, context.rank, **made)

    return pc.wrong(name, why, answer, _where(tp=tp, fsdp=fsdp))


KNOWN_WRONG_ANSWERS = (
    _wrong("not_reduced", "the partial sum of the rank's own slice", tp=True, groups=lambda p: [p.own_slice]),
    _wrong("own_slice_repeated", "the rank's own slice n_tp times", tp=True, groups=lambda p: [p.own_slice] * p.n_tp),
    _wrong("drop_last_slice", "without the last tensor-parallel rank's slice", tp=True, groups=lambda p: p.slices[:-1]),
    _wrong(
        "not_gathered",
        "other FSDP places' shards taken for zero",
        fsdp=True,
        zero=lambda p: lambda q: p.fsdp_index(q) != p.fsdp_index(p.rank),
    ),
    _wrong(
        "drop_last_shard",
        "the last FSDP place's shards taken for zero",
        fsdp=True,
        zero=lambda p: lambda q: p.fsdp_index(q) == p.n_fsdp - 1,
    ),
    _wrong(
        "grid_transposed",
        "neighbouring ranks taken for FSDP peers",
        tp=True,
        fsdp=True,
        groups=lambda p: [list(range(first, first + p.n_fsdp)) for first in range(0, p.n_tp * p.n_fsdp, p.n_fsdp)],
    ),
    _wrong("gate_and_up_swapped", "(x W1) * silu(x W2)", activation=lambda _: lambda gate, up: gate * F.silu(up)),
    _wrong("no_activation", "(x W1) * (x W2)", activation=lambda _: lambda gate, up: gate * up),
    replace(
        _wrong("gelu", "GELU for SiLU", activation=lambda _: lambda gate, up: F.gelu(gate) * up),
        cases=_where(tp=False, fsdp=False, only=lambda name, spec: name != "small" or spec.dtype == FP32),
    ),
    _wrong("no_gate", "silu(x W1) W3", activation=lambda _: lambda gate, up: F.silu(gate)),
)

ALTERNATIVE_SOLUTIONS = pc.alternatives(
    fp32_rounded_once=lambda case, inputs, rank: _in_float32(case, inputs, rank),
    rounded_partial_sums=_rounded_partial_sums,
    every_operation_rounded=_every_operation_rounded,
)
