"""Wrong answers to problem 75 and other right ones. Evaluations do not import this module."""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from peerlane.problems import contract as pc
from peerlane.problems.contract.codes import eight_bits
from peerlane.problems.families import delta
from peerlane.problems.families.collective import group_members, local_length
from peerlane.problems.families.conv import without_group
from peerlane.problems.families.matmul import BF16, FP32
from peerlane.problems.p075_gated_deltanet_ulysses_cp import _heads, _tokens, _until


def _returned(case: pc.Case, o: torch.Tensor) -> torch.Tensor:
    return o.to(case.dtype).transpose(1, 2)


def _recurrent(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Token by token, in float32."""
    ranks, first, length = _until(case, rank)
    return _returned(case, delta.recurrence(_tokens(case, inputs, ranks, FP32)(slice(0, length)))[..., first:, :])


def _tensor_cores(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """In chunks, with operands of products rounded to bfloat16 if the inputs are bfloat16."""
    ranks, first, length = _until(case, rank)
    matmul = delta.rounded_matmul if case.dtype == BF16 else torch.matmul
    return _returned(case, delta.chunked_delta_rule(_tokens(case, inputs, ranks, FP32), length, first=first, matmul=matmul)[0])


def _mistaken(
    context: pc.AnswerContext, change: Callable[[delta.Tokens], delta.Tokens] = lambda tokens: tokens, **mistakes: bool
) -> torch.Tensor:
    """Token by token, from changed tokens or with a mistake of :func:`recurrence`."""
    ranks, first, length = _until(context.case, context.rank)
    tokens = change(_tokens(context.case, context.inputs, ranks, FP32)(slice(0, length)))
    return _returned(context.case, delta.recurrence(tokens, **mistakes)[..., first:, :])


def _sequence_of(context: pc.AnswerContext, ranks: Sequence[int]) -> torch.Tensor:
    """As if the sequence were these ranks' shards, the last of which is the rank's own."""
    local = local_length(context.case, context.rank)
    tokens = _tokens(context.case, context.inputs, ranks, FP32)(slice(0, len(ranks) * local))
    return _returned(context.case, delta.recurrence(tokens)[..., (len(ranks) - 1) * local :, :])


def _reset(context: pc.AnswerContext) -> torch.Tensor:
    ranks, first, length = _until(context.case, context.rank)
    tokens = _tokens(context.case, context.inputs, ranks, FP32)
    chunks = [delta.recurrence(tokens(slice(start, min(start + 64, length)))) for start in range(0, length, 64)]
    return _returned(context.case, torch.cat(chunks, -2)[..., first:, :])


def _eight_bits(context: pc.AnswerContext) -> torch.Tensor:
    """q, k and v, and o on its way back, come in 8-bit integers."""
    received = [(*(eight_bits(x) for x in args[:3]), *args[3:]) for args in context.inputs]
    return eight_bits(_recurrent(context.case, received, context.rank))


def _interleaved_heads(context: pc.AnswerContext) -> torch.Tensor:
    heads, value_heads = _heads(context.case, context.rank)
    order = [(j % heads) * (value_heads // heads) for j in range(value_heads)]  # the first of a head's repeats
    return _mistaken(context, lambda tokens: dataclasses.replace(tokens, q=tokens.q[:, order], k=tokens.k[:, order]))


def _not_normalised(context: pc.AnswerContext) -> torch.Tensor:

    def change(tokens: delta.Tokens) -> delta.Tokens:
        ranks, _, _ = _until(context.case, context.rank)
        keys = torch.cat([context.inputs[q][1] for q in ranks], dim=1).to(FP32).transpose(1, 2)
        return dataclasses.replace(tokens, k=keys.repeat_interleave(context.case.params.get("ratio", 1), dim=1))

    return _mistaken(context, change)


KNOWN_WRONG_ANSWERS = (
    pc.wrong("eight_bits", "q, k, v and o in 8-bit integers, with a scale for every 32 neighbours", _eight_bits),
    pc.wrong(
        "drop_first_rank",
        "the sequence without the first rank's tokens",
        lambda c: _sequence_of(c, _until(c.case, c.rank)[0][1:] or [c.rank]),
        delta.remembers,
    ),
    pc.wrong(
        "linear_attention",
        "without the correction by M^T k",
        lambda c: _mistaken(c, corrected=False),
        lambda c: c.params.get("pattern") not in ("fast", "zeros"),
    ),
    pc.wrong("state_reset_every_64", "a state of zero at every 64th token", _reset, ("small/carried_far_bf16",)),
    pc.wrong("read_first", "outputs from the state before the token", lambda c: _mistaken(c, read_first=True)),
    pc.wrong(
        "decay_ignored",
        "d = 1",
        lambda c: _mistaken(c, lambda t: dataclasses.replace(t, log_decay=torch.zeros_like(t.log_decay))),
        lambda c: c.params.get("pattern") not in ("carried", "repeated"),
    ),
    pc.wrong("sigmoid_of_beta", "beta taken as raw", lambda c: _mistaken(c, lambda t: dataclasses.replace(t, beta=torch.sigmoid(t.beta)))),
    pc.wrong("keys_not_normalised", "k as it is given", _not_normalised),
    pc.wrong(
        "queries_not_scaled",
        "without the factor 1 / sqrt(K)",
        lambda c: _mistaken(c, lambda t: dataclasses.replace(t, q=t.q * c.case["key_depth"] ** 0.5)),
    ),
    pc.wrong("interleaved_heads", "value head j with query head j mod H", _interleaved_heads, lambda c: c.params.get("ratio", 1) > 1),
    pc.wrong(
        "own_parameters",
        "all heads with the decay of the rank's own heads: shows where there are many and none forgets",
        lambda c: _recurrent(c.case, [(*args[:5], *c.args[5:7], *args[7:]) for args in c.inputs], c.rank),
        lambda c: delta.remembers(c) and c.params.get("pattern") != "carried" and "group" not in c.params,
    ),
    pc.wrong(
        "whole_world",
        "group ignored",
        lambda c: _sequence_of(c, list(group_members(without_group(c.case), c.rank))[: c.rank + 1]),
        pc.grouped,
    ),
)

ALTERNATIVE_SOLUTIONS = pc.alternatives(recurrent_fp32=_recurrent, tensor_cores=_tensor_cores)
