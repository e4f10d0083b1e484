"""Wrong answers to problem 74 and other right ones. Evaluations do not import this module."""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families import delta
from peerlane.problems.families.matmul import BF16, FP32
from peerlane.problems.p074_kimi_delta_attention_cp_tp import _local_length, _summed_ranks, _tokens, _until

Outputs = Callable[[Callable[[slice], delta.Tokens], int, int], torch.Tensor]


def _added(
    case: pc.Case, inputs: pc.Inputs, summed: Sequence[int], outputs: Outputs, sequence: Callable[[int], list[int]] | None = None
) -> torch.Tensor:
    """``outputs(tokens, first, length)`` of the ranks in ``summed``, rounded and added in the dtype.

    ``sequence`` names the shards that make up a rank's sequence, its own last; None: the right ones.
    """
    total: torch.Tensor | None = None
    for peer in summed:
        ranks = _until(case, peer) if sequence is None else sequence(peer)
        length = len(ranks) * _local_length(case)
        o = outputs(_tokens(inputs, ranks, FP32), length - _local_length(case), length).to(case.dtype)
        total = o if total is None else total + o
    assert total is not None
    return total.transpose(1, 2)


def _recurrent(tokens: Callable[[slice], delta.Tokens], first: int, length: int) -> torch.Tensor:
    return delta.recurrence(tokens(slice(0, length)))[..., first:, :]


def _tensor_cores(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """In chunks, with operands of products rounded to bfloat16 if the inputs are bfloat16."""
    matmul = delta.rounded_matmul if case.dtype == BF16 else torch.matmul

    def outputs(tokens: Callable[[slice], delta.Tokens], first: int, length: int) -> torch.Tensor:
        return delta.chunked_delta_rule(tokens, length, first=first, matmul=matmul)[0]

    return _added(case, inputs, _summed_ranks(case, rank), outputs)


def _mistaken(
    context: pc.AnswerContext, change: Callable[[delta.Tokens], delta.Tokens] = lambda tokens: tokens, **mistakes: bool
) -> torch.Tensor:
    """Token by token, from changed tokens or with a mistake of :func:`recurrence`."""

    def outputs(tokens: Callable[[slice], delta.Tokens], first: int, length: int) -> torch.Tensor:
        return delta.recurrence(change(tokens(slice(0, length))), **mistakes)[..., first:, :]

    return _added(context.case, context.inputs, _summed_ranks(context.case, context.rank), outputs)


def _sequence_of(context: pc.AnswerContext, sequence: Callable[[int], list[int]]) -> torch.Tensor:
    """As if a rank's sequence were these ranks' shards."""
    return _added(context.case, context.inputs, _summed_ranks(context.case, context.rank), _recurrent, sequence)


def _bias_ignored(context: pc.AnswerContext) -> torch.Tensor:
    replaced = [(*args[:6], torch.zeros_like(args[6]), *args[7:]) for args in context.inputs]
    return _added(context.case, replaced, _summed_ranks(context.case, context.rank), _recurrent)


# Where a sequence has three ranks or more, and their states are remembered.
_FAR = pc.where(lambda c: c.world_size > 2 and (c.params.get("pattern") == "carried" or "length" in c.params))

_SUMMED = ("small/summed_bf16", "small/summed_fp32", "pkb/bf16/w4", "pkb/bf16/w8", "production_kimi_linear_tp2/bf16")

KNOWN_WRONG_ANSWERS = (
    pc.wrong("no_state", "every rank's tokens from a state of zero", lambda c: _sequence_of(c, lambda rank: [rank]), delta.remembers),
    pc.wrong(
        "drop_first_rank",
        "the sequence without the first rank's tokens",
        lambda c: _sequence_of(c, lambda rank: _until(c.case, rank)[1:] or [rank]),
        delta.remembers,
    ),
    pc.wrong(
        "previous_rank_only",
        "from a state of zero at the previous rank's first token",
        lambda c: _sequence_of(c, lambda rank: _until(c.case, rank)[-2:]),
        _FAR,
    ),
    pc.wrong("not_summed", "without the other tensor-parallel ranks", lambda c: _added(c.case, c.inputs, [c.rank], _recurrent), _SUMMED),
    pc.wrong("groups_ignored", "the whole world as one sequence", lambda c: _sequence_of(c, lambda rank: list(range(rank + 1))), _SUMMED),
    pc.wrong("linear_attention", "without the correction by M^T k", lambda c: _mistaken(c, corrected=False)),
    pc.wrong("read_first", "outputs from the state before the token", lambda c: _mistaken(c, read_first=True)),
    pc.wrong(
        "decay_ignored",
        "d = 1",
        lambda c: _mistaken(c, lambda t: dataclasses.replace(t, log_decay=torch.zeros_like(t.log_decay))),
        lambda c: c.params.get("pattern") not in ("carried", "repeated"),
    ),
    pc.wrong(
        "one_decay",
        "the mean decay of a head's channels, as in Gated DeltaNet",
        lambda c: _mistaken(c, lambda t: dataclasses.replace(t, log_decay=t.log_decay.mean(-1, keepdim=True))),
        lambda c: delta.remembers(c) and c.params.get("pattern") not in ("carried", "zeros") and "tp" not in c.params,
    ),
    pc.wrong(
        "dt_bias_ignored", "decay without dt_bias", _bias_ignored, lambda c: delta.remembers(c) and c.params.get("pattern") != "carried"
    ),
    pc.wrong(
        "beta_as_given", "without the sigmoid", lambda c: _mistaken(c, lambda t: dataclasses.replace(t, beta=torch.logit(t.beta, eps=1e-6)))
    ),
    pc.wrong(
        "queries_not_scaled",
        "without the factor 1 / sqrt(K)",
        lambda c: _mistaken(c, lambda t: dataclasses.replace(t, q=t.q * c.case["key_depth"] ** 0.5)),
    ),
)

ALTERNATIVE_SOLUTIONS = pc.alternatives(
    recurrent_fp32=lambda case, inputs, rank: _added(case, inputs, _summed_ranks(case, rank), _recurrent), tensor_cores=_tensor_cores
)
