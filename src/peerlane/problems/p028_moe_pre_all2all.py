"""Problem 28: dispatch of tokens to their experts' ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import moe
from peerlane.problems.families.collective import BF16, FP32, INT64, fitted, group_layout, group_members, group_size, neighbours
from peerlane.problems.p027_moe_all2all_primitive import split_list


def reference(
    hidden_states: torch.Tensor,
    expert_mask: torch.Tensor,
    num_experts: int,
    input_splits: list[int] | torch.Tensor,
    output_splits: list[int] | torch.Tensor,
    num_global_tokens_per_local_expert: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Size]:
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    sent, received = split_list(input_splits) or [], split_list(output_splits) or []
    routing_map = expert_mask.sum(dim=1)
    mapping = moe.expert_major(routing_map, sum(sent)) % max(1, tokens.shape[0])
    rows = tokens[mapping]
    arrived = rows.new_empty((sum(received), rows.shape[1]))
    dist.all_to_all_single(arrived, rows, received, sent, group=group)
    order = moe.chunk_order(num_global_tokens_per_local_expert.to(rows.device), sum(received))
    return arrived[order], routing_map, mapping, tokens.shape


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    routing = moe.fixed_routing(case, rank, draw)
    mask = routing.mask(case["experts"], case["mask"], permuted=bool(case.params.get("permuted")))
    hidden = draw.normal((moe.tokens_of(case, rank), case["hidden"]), case.dtype)
    if case.params.get("payloads"):  # every other row is made of NaN with random payloads, and infinities
        rows = hidden[::2]
        rows.copy_((draw.bits(rows.shape, case.dtype).view(torch.int16) | 0x7F80).view(case.dtype))
    if case.params.get("three_axes"):
        hidden = hidden.unsqueeze(0)
    group = pc.GroupRef(case["group"]) if "group" in case.params else None
    return (hidden, mask, case["experts"], *routing.metadata(draw.device), group)


def _routing_map(args: Sequence[Any]) -> torch.Tensor:
    total: torch.Tensor = args[1].sum(1)
    return total


def _mapping(args: Sequence[Any]) -> torch.Tensor:
    """The tokens of the rows, by expert."""
    return _routing_map(args).nonzero()[:, 1]


def _rows(args: Sequence[Any], mapping: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = args[0].reshape(-1, args[0].shape[-1])[mapping]
    return rows


def _chunks(
    case: pc.Case, inputs: pc.Inputs, rank: int, mapping: Callable[[Any], torch.Tensor], counts: torch.Tensor | None = None
) -> list[list[torch.Tensor]]:
    """What arrives, by source and local expert, if the rows of every rank are those of ``mapping(args)``; ``counts`` for the right ones."""
    members = group_members(case, rank)
    lengths = (inputs[rank][5] if counts is None else counts).tolist()
    arrived = [torch.split(_rows(inputs[q], mapping(inputs[q])), inputs[q][3])[members.index(rank)] for q in members]
    return [list(torch.split(part, sizes)) for part, sizes in zip(arrived, lengths, strict=True)]


def _by_expert(chunks: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    return torch.cat([by_source[expert] for expert in range(len(chunks[0])) for by_source in chunks])


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected | torch.Size, ...]:
    args = inputs[rank]
    return (
        pc.exactly("rows", _by_expert(_chunks(case, inputs, rank, _mapping))),
        pc.exactly("routing_map", _routing_map(args)),
        pc.exactly("mapping", _mapping(args)),
        torch.Size((args[0].shape[-2], args[0].shape[-1])),
    )


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Every token is read once, every row written once, and the mask read once; see :func:`_moe.travelling_rows` for the link."""
    row, tokens = case["hidden"] * case.dtype.itemsize, moe.tokens_of(case, rank)
    members = group_members(case, rank)
    arriving = case["k"] * sum(moe.routed_tokens(case, q) for q in members) / len(members)
    port = moe.travelling_rows(case, rank) * row
    mask = case["experts"] * case["k"] * tokens * case["mask"].itemsize
    return pc.Cost(hbm_bytes=(tokens + arriving) * row + mask, egress_bytes=port, ingress_bytes=port, typical=moe.is_drawn(case))


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


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    base = {"tokens": (29, 0, 17, 41), "hidden": 6, "experts": 16, "k": 2, "exponent": 0.7, "mask": FP32}
    return pc.case(label, dtype, **{**base, **params})


PRESETS = (
    pc.preset(
        "small",
        "unequal and empty ranks, empty experts, all rows to one rank, duplicates, NaN payloads, masks' dtypes and strides, groups",
        _small("skewed_bf16", BF16),
        _small("skewed_fp32", FP32, mask=INT64, three_axes=True),
        _small("permuted_bf16", BF16, k=3, permuted=True, payloads=True),
        _small("duplicates_bf16", BF16, duplicates=True, mask=torch.bool),
        _small("empty_experts_bf16", BF16, empty=5, exponent=1.2),
        _small("dropped_tokens_fp32", FP32, k=1, dropped=6, mask=torch.int32),
        _small("one_rank_bf16", BF16, tokens=(29, 13, 0, 17), experts=32, one_rank=True, exponent=0.0),
        _small("limited_bf16", BF16, experts=32, k=4, limit=(8, 2), exponent=1.5),
        _small("single_token_bf16", BF16, tokens=(1, 11)),
        _small("strided_group_bf16", BF16, group="strided", world_sizes=(4, 8)),
        _small("alone_bf16", BF16, tokens=29, group="strided", world_sizes=(2,)),
        _small("literal_bf16", BF16, tokens=32, literal=True, variant="pkb"),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape, with equal splits that the mask really has; a skewed one; one whose mask contradicts equal splits",
        pc.case("bf16", BF16, tokens=1024, hidden=1024, experts=8, k=2, mask=FP32),
        pc.case("skewed_bf16", BF16, tokens=1024, hidden=1024, experts=8, k=2, exponent=0.5, mask=FP32),
        pc.case("literal_bf16", BF16, tokens=1024, hidden=1024, experts=8, k=2, exponent=0.1, mask=FP32, literal=True, variant="pkb"),
    ),
    pc.preset(
        "production_qwen3_235b",
        "4096 tokens, hidden 4096, 8 of 128 experts, Zipf(0.6)",
        pc.case("bf16", BF16, tokens=4096, hidden=4096, experts=128, k=8, exponent=0.6, mask=INT64),
    ),
    pc.preset(
        "production_deepseek_v3",
        "4096 tokens, hidden 7168, 8 of 256 experts out of 4 of 8 groups, Zipf(0.3)",
        pc.case("bf16", BF16, tokens=4096, hidden=7168, experts=256, k=8, exponent=0.3, limit=(8, 4), mask=INT64),
    ),
    pc.preset(
        "production_mixtral_8x7b",
        "8192 tokens, hidden 4096, 2 of 8 experts, Zipf(0.3)",
        pc.case("bf16", BF16, tokens=8192, hidden=4096, experts=8, k=2, exponent=0.3, mask=INT64),
        pc.case("one_rank_bf16", BF16, tokens=2048, hidden=4096, experts=16, k=2, one_rank=True, mask=INT64),
    ),
)


PROBLEM = pc.Problem(
    id=28,
    slug="moe_pre_all2all",
    title="Dispatch of tokens to their experts",
    category="expert_parallel",
    parallelism=("expert",),
    origin="VeOmni and Megatron-LM: the all-to-all dispatcher of their mixture-of-experts layers, on the way to the experts",
    summary=(
        "A row is sent for every expert e and token t with a nonzero entry in expert_mask (E, k, T)[e, :, t], by expert and then token: "
        "hidden_states (..., H), flattened to (T, H), at those tokens. input_splits and output_splits are the rows to and from every rank "
        "of the group (P ranks; the world if None), and num_global_tokens_per_local_expert (P, E/P) cuts what arrives from every rank by "
        "local expert. Four results: the rows that arrive, by local expert, then source, then in the order sent; the mask summed over its "
        "slots, (E, T) in the dtype of such a sum; the tokens of the rows sent, int64; and torch.Size((T, H)). An expert that a token "
        "names twice gets one row. All exact. input_splits adds up to the number of rows."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    presets=PRESETS,
    excused={
        "neighbours_exchanged@small/one_rank_bf16": "both ranks send to a third one alone",
        "neighbours_exchanged@small/strided_group_bf16": "both ranks are in the other group, or lie beside each other in it",
    },
    known_wrong_answers=(
        pc.wrong(
            "no_communication",
            "the rank's own rows, repeated or cut",
            lambda c: _with_rows(c, _rows(c.args, _mapping(c.args))),
            moe.several_ranks,
        ),
        pc.wrong("not_regrouped", "rows by source, as they arrive", _arranged(_as_received), moe.several_sources),
        pc.wrong("sources_reversed", "the last source first", _arranged(lambda chunks: _by_expert(chunks[::-1])), moe.several_sources),
        pc.wrong(
            "experts_reversed",
            "the last local expert first",
            _arranged(lambda chunks: _by_expert([c[::-1] for c in chunks])),
            _several_local,
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
        pc.wrong(
            "mapping_one_off", "every token's number one too large", lambda c: (c.answer[0], c.answer[1], c.answer[2] + 1, c.answer[3])
        ),
        pc.wrong("boolean_map", "the mask's sum as a flag", _boolean_map, lambda c: "duplicates" in c.params),
        pc.wrong(
            "contiguous_group", "neighbours taken for the group", _contiguous_group, lambda c: "group" in c.params and moe.several_ranks(c)
        ),
    ),
    process_groups=group_layout,
    notes=(
        "The public benchmark invents equal splits and counts, which its mask contradicts, so that rows reach ranks that do not own their "
        "experts. Here splits come from the mask. Its inputs are kept as variant pkb: splits are taken literally there too.",
        "For the public shape the splits are equal, as in the public benchmark, but the mask has them; another case is skewed. Experts of "
        "one rank have unequal counts, which they exchange from call to call under the same splits.",
        "The public reference rejects split sizes given as tensors. Here one-dimensional integer tensors are accepted. Inputs hold lists.",
        "Where splits are drawn, the cost is a lower bound of their mean over slots and ranks; a token that goes to several experts of one "
        "rank travels once.",
    ),
)
