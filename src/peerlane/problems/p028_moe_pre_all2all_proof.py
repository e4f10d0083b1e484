"""Wrong answers to problem 28 and other right ones. Evaluations do not import this module."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families import moe
from peerlane.problems.families.collective import fitted, group_size, neighbours
from peerlane.problems.p028_moe_pre_all2all import _by_expert, _chunks, _mapping, _routing_map, _rows


def _with_rows(context: pc.AnswerContext, rows: torch.Tensor) -> pc.Tree:
    """The right answer but for its rows."""
    return (fitted(rows, context.answer[0].shape[0]), *context.answer[1:])


def _arranged(arrange: Callable[[list[list[torch.Tensor]]], torch.Tensor]) -> Callable[[pc.AnswerContext], pc.Tree]:
    """A wrong answer: what arrives, put in the order of ``arrange``."""
    return lambda c: _with_rows(c, arrange(_chunks(c.case, c.inputs, c.rank, _mapping)))


def _sent_as(mapping: Callable[[Any], torch.Tensor]) -> Callable[[pc.AnswerContext], pc.Tree]:
    """A wrong answer: every rank sends the rows of ``mapping(args)``."""
    return lambda c: _with_rows(c, _by_expert(_chunks(c.case, c.inputs, c.rank, mapping)))


def _tokens_reversed(args: Sequence[Any]) -> torch.Tensor:
    tokens: int = args[1].shape[2]
    mapping: torch.Tensor = tokens - 1 - _routing_map(args).flip(1).nonzero()[:, 1]
    return mapping


def _by_owner(args: Sequence[Any]) -> torch.Tensor:
    """Tokens by the rank that they go to, but not by its experts."""
    routing_map, owners = _routing_map(args), len(args[3])
    per_owner = routing_map.view(owners, routing_map.shape[0] // owners, routing_map.shape[1]).transpose(1, 2)
    mapping: torch.Tensor = per_owner.nonzero()[:, 1]
    return mapping


def _slot_major(args: Sequence[Any]) -> torch.Tensor:
    """Tokens in the order of their slots, without regard to experts."""
    mapping: torch.Tensor = (args[1].permute(1, 2, 0) != 0).nonzero()[:, 1]
    return mapping[: sum(args[3])]


def _equal_splits(context: pc.AnswerContext) -> pc.Tree:
    sources = [context.inputs[q] for q in context.members]
    parts = [_rows(args, _mapping(args)).tensor_split(len(sources))[context.place] for args in sources]
    return _with_rows(context, torch.cat(parts))


def _splits_from_mask(context: pc.AnswerContext) -> pc.Tree:
    """Rows go where the mask says, whatever the splits say."""
    local = context.case["experts"] // len(context.members)
    first = context.place * local
    rows = []
    for expert in range(first, first + local):
        for args in (context.inputs[q] for q in context.members):
            rows.append(_rows(args, _routing_map(args)[expert].nonzero()[:, 0]))
    return _with_rows(context, torch.cat(rows))


def _boolean_map(context: pc.AnswerContext) -> pc.Tree:
    rows, routing_map, mapping, shape = context.answer
    return (rows, routing_map.clamp(max=1), mapping, shape)


def _contiguous_group(context: pc.AnswerContext) -> pc.Tree:
    """The rows that the neighbours send to the same place."""
    sources = [context.inputs[q] for q in neighbours(context)]
    parts = [torch.split(_rows(args, _mapping(args)), args[3])[context.place] for args in sources]
    return _with_rows(context, torch.cat(parts))


def _several_local(case: pc.Case) -> bool:
    """Whether a rank has several experts, and receives from several ranks."""
    return moe.several_ranks(case) and case["experts"] > group_size(case)


def _as_received(chunks: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.cat([chunk for by_source in chunks for chunk in by_source])


KNOWN_WRONG_ANSWERS = (
    pc.wrong(
        "no_communication",
        "the rank's own rows, repeated or cut",
        lambda c: _with_rows(c, _rows(c.args, _mapping(c.args))),
        moe.several_ranks,
    ),
    pc.wrong("not_regrouped", "rows by source, as they arrive", _arranged(_as_received), moe.several_sources),
    pc.wrong("sources_reversed", "the last source first", _arranged(lambda chunks: _by_expert(chunks[::-1])), moe.several_sources),
    pc.wrong(
        "experts_reversed", "the last local expert first", _arranged(lambda chunks: _by_expert([c[::-1] for c in chunks])), _several_local
    ),
    pc.wrong(
        "order_of_another_call",
        "rows regrouped by counts of another call with the same splits",
        lambda c: _with_rows(c, _by_expert(_chunks(c.case, c.inputs, c.rank, _mapping, c.args[5].roll(1, 1)))),
        moe.counts_vary,
    ),
    pc.wrong("tokens_reversed", "an expert's rows with the last token first", _sent_as(_tokens_reversed)),
    pc.wrong("by_owner", "rows sent by rank and token, not by expert", _sent_as(_by_owner), _several_local),
    pc.wrong("slot_major", "rows sent in the order of slots and tokens", _sent_as(_slot_major)),
    pc.wrong(
        "equal_splits",
        "rows cut equally, whatever the splits say",
        _equal_splits,
        lambda c: moe.several_ranks(c) and bool(c.params.get("exponent")) and ("literal" not in c.params),
    ),
    pc.wrong(
        "splits_from_mask",
        "rows sent to the experts that the mask names, against the splits",
        _splits_from_mask,
        lambda c: "literal" in c.params,
    ),
    pc.wrong("mapping_one_off", "every token's number one too large", lambda c: (c.answer[0], c.answer[1], c.answer[2] + 1, c.answer[3])),
    pc.wrong("boolean_map", "the mask's sum as a flag", _boolean_map, lambda c: "duplicates" in c.params),
    pc.wrong(
        "contiguous_group", "neighbours taken for the group", _contiguous_group, lambda c: "group" in c.params and moe.several_ranks(c)
    ),
)
