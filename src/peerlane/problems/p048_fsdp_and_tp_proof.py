"""Wrong answers to problem 48 and other right ones. Evaluations do not import this module."""

from collections.abc import Callable, Sequence
from dataclasses import replace
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


def _slices(case: pc.Case) -> list[list[int]]:
    """The ranks that share a tensor-parallel slice, by slice."""
    return [_fsdp_peers(case, index) for index in range(grid(case)[0])]


def _own_slice(case: pc.Case, rank: int) -> list[int]:
    """The ranks that share the rank's own slice."""
    return _slices(case)[rank % grid(case)[0]]


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
    chosen = _slices(case) if groups is None else groups
    known = [(x, *(torch.zeros_like(shard) if zero(q) else shard for shard in shards)) for q, (x, *shards, _, _) in enumerate(inputs)]
    x = inputs[rank][0].to(FP32)
    partials = [_partial(x, _whole_weights(known, peers, FP32), activation) for peers in chosen]
    return torch.stack(partials).sum(0).to(case.dtype)


def _every_operation_rounded(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    return sequential_sum([_partial(inputs[rank][0], _whole_weights(inputs, peers, case.dtype)) for peers in _slices(case)])


def _rounded_partial_sums(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    return wide_sum([_in_float32(case, inputs, rank, groups=[peers]) for peers in _slices(case)])


def _wrong(name: str, why: str, *, tp: bool = False, fsdp: bool = False, **options: Callable[[pc.Case, int], Any]) -> pc.KnownWrongAnswer:
    """A known wrong answer with options of :func:`_in_float32`, made from case and rank.

    ``tp``, ``fsdp``: only where there is more than one such rank.
    """

    def answer(context: pc.AnswerContext) -> torch.Tensor:
        made = {key: option(context.case, context.rank) for key, option in options.items()}
        return _in_float32(context.case, context.inputs, context.rank, **made)

    return pc.wrong(name, why, answer, _where(tp=tp, fsdp=fsdp))


def _rows_of_grid(case: pc.Case, _: int) -> list[list[int]]:
    """Blocks of neighbouring ranks."""
    _, n_fsdp = grid(case)
    return [list(range(first, first + n_fsdp)) for first in range(0, case.world_size, n_fsdp)]


KNOWN_WRONG_ANSWERS = (
    _wrong("not_reduced", "the partial sum of the rank's own slice", tp=True, groups=lambda case, rank: [_own_slice(case, rank)]),
    _wrong(
        "own_slice_repeated", "the rank's own slice n_tp times", tp=True, groups=lambda case, rank: [_own_slice(case, rank)] * grid(case)[0]
    ),
    _wrong("drop_last_slice", "without the last tensor-parallel rank's slice", tp=True, groups=lambda case, _: _slices(case)[:-1]),
    _wrong(
        "not_gathered",
        "other FSDP places' shards taken for zero",
        fsdp=True,
        zero=lambda case, rank: lambda q: q // grid(case)[0] != rank // grid(case)[0],
    ),
    _wrong(
        "drop_last_shard",
        "the last FSDP place's shards taken for zero",
        fsdp=True,
        zero=lambda case, _: lambda q: q // grid(case)[0] == grid(case)[1] - 1,
    ),
    _wrong(
        "grid_transposed",
        "neighbouring ranks taken for FSDP peers",
        tp=True,
        fsdp=True,
        groups=_rows_of_grid,
    ),
    _wrong("gate_and_up_swapped", "(x W1) * silu(x W2)", activation=lambda *_: lambda gate, up: gate * F.silu(up)),
    _wrong("no_activation", "(x W1) * (x W2)", activation=lambda *_: lambda gate, up: gate * up),
    replace(
        _wrong("gelu", "GELU for SiLU", activation=lambda *_: lambda gate, up: F.gelu(gate) * up),
        cases=_where(tp=False, fsdp=False, only=lambda name, spec: name != "small" or spec.dtype == FP32),
    ),
    _wrong("no_gate", "silu(x W1) W3", activation=lambda *_: lambda gate, up: F.silu(gate)),
)

ALTERNATIVE_SOLUTIONS = pc.alternatives(
    fp32_rounded_once=lambda case, inputs, rank: _in_float32(case, inputs, rank),
    rounded_partial_sums=_rounded_partial_sums,
    every_operation_rounded=_every_operation_rounded,
)
