"""Problem 29: experts' rows sent back, weighted and added up by token."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import moe
from peerlane.problems.families.collective import BF16, FP32, INT64, fitted, group_layout, group_members, neighbours
from peerlane.problems.families.matmul import FP64
from peerlane.problems.p027_moe_all2all_primitive import split_list


def reference(
    expert_outputs: torch.Tensor,
    routing_weights: torch.Tensor,
    selected_experts: torch.Tensor,
    num_experts: int,
    input_splits: list[int] | torch.Tensor,
    output_splits: list[int] | torch.Tensor,
    num_global_tokens_per_local_expert: torch.Tensor,
    routing_map: torch.Tensor,
    local_input_permutation_mapping: torch.Tensor,
    org_hidden_states_shape: torch.Size,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    returned, sent = split_list(input_splits) or [], split_list(output_splits) or []
    by_expert = num_global_tokens_per_local_expert.to(expert_outputs.device).t()
    rows = expert_outputs[moe.chunk_order(by_expert, sum(sent))]
    arrived = rows.new_empty((sum(returned), rows.shape[1]))
    dist.all_to_all_single(arrived, rows, returned, sent, group=group)

    table = routing_weights.new_zeros((routing_weights.shape[0], num_experts))
    table.scatter_add_(1, selected_experts, routing_weights)
    weights = table.t().flatten()[moe.expert_major(routing_map, sum(returned))]
    weighted = arrived * weights.unsqueeze(1)
    return weighted.new_zeros(org_hidden_states_shape).index_add_(0, local_input_permutation_mapping, weighted)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Rows N(0, 1); a token's weights are positive and add up to ``case["scale"]`` (1 if absent).

    ``case["poisoned"]``: a third of the rows is NaN, and half of the weights are 0. ``case["renamed"]``: the rank's tokens are shuffled in
    the permutation mapping alone, so that where a row goes no longer follows from the routing map, which gives its weight.
    """
    routing = moe.fixed_routing(case, rank, draw)
    sent, received, per_local = routing.metadata(draw.device)
    shape, weights_dtype = (sum(received), case["hidden"]), case["weights"]
    if draw.integer:
        # With at most nine slots a token, sums are integers of at most 9 x 2 x 12: exact in bfloat16.
        rows = draw.integers(-12, 13, shape, case.dtype)
        weights = draw.integers(1, 3, routing.selected.shape, weights_dtype)
    else:
        rows = draw.normal(shape, case.dtype)
        weights = draw.normal(routing.selected.shape, FP32).softmax(1) * case.params.get("scale", 1.0)
        if case.params.get("poisoned"):
            rows[draw.permutation(shape[0])[: shape[0] // 3]] = float("nan")
            weights = weights * draw.integers(0, 2, weights.shape)
        weights = weights.to(weights_dtype)
    routing_map = routing.mask(case["experts"], INT64).sum(1)
    mapping = moe.expert_major(routing_map, sum(sent)) % max(1, routing_map.shape[1])
    if case.params.get("renamed"):
        mapping = draw.permutation(routing_map.shape[1])[mapping]
    return (
        rows,
        weights,
        routing.selected,
        case["experts"],
        sent,
        received,
        per_local,
        routing_map.to(case.params.get("map", torch.bool)),
        mapping,
        torch.Size((moe.tokens_of(case, rank), case["hidden"])),
        pc.GroupRef(case["group"]) if "group" in case.params else None,
    )


def _parts(case: pc.Case, inputs: pc.Inputs, rank: int, *, ungroup: bool = True, shift: int = 0) -> list[torch.Tensor]:
    """The rows that every member of the group sends back to the rank; ``ungroup`` False: cut from the rows as the experts left them.

    ``shift``: local experts take each other's counts.
    """
    members = group_members(case, rank)
    parts = []
    for q in members:
        rows, lengths, splits = inputs[q][0], inputs[q][6].roll(shift, 1), inputs[q][5]
        if ungroup:
            chunks = torch.split(rows, lengths.t().flatten().tolist())
            rows = torch.cat([chunk for source in range(len(members)) for chunk in chunks[source :: len(members)]])
        parts.append(torch.split(rows, splits)[members.index(rank)])
    return parts


def _row_weights(args: Sequence[Any]) -> torch.Tensor:
    """The weight of every row, by expert and token, in float64: all of the token's slots that name the expert count."""
    expert, token = (args[7] != 0).nonzero(as_tuple=True)
    named = args[2][token] == expert.unsqueeze(1)
    weights: torch.Tensor = args[1][token].to(FP64).masked_fill(~named, 0.0).sum(1)
    return weights


def _summed(args: Sequence[Any], terms: torch.Tensor, mapping: torch.Tensor | None = None) -> torch.Tensor:
    return terms.new_zeros(tuple(args[9])).index_add_(0, args[8] if mapping is None else mapping, terms)


def _dtype(args: Sequence[Any]) -> torch.dtype:
    return torch.promote_types(args[0].dtype, args[1].dtype)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    args = inputs[rank]
    terms = torch.cat(_parts(case, inputs, rank)).to(FP64).mul_(_row_weights(args).unsqueeze(1))
    value = _summed(args, terms)
    return pc.Expected("output", value, _dtype(args), magnitude=_summed(args, terms.abs_()))


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """Each of at most k products and k - 1 sums of a token is rounded: k u of the sum of |w y|, and 2 u more of it for room.

    Normwise, eight rounded products added up one after the other in bfloat16 leave 4e-3.
    """
    dtype = torch.promote_types(case.dtype, case["weights"])
    slots = case["k"] + (1 if case.params.get("duplicates") else 0)
    normwise = 1e-2 if dtype == BF16 else None
    return {"output": pc.Tolerance(magnitude=(slots + 2) * pc.UNIT_ROUNDOFF[dtype], normwise=normwise)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Every expert's row is read once, every token written once; see :func:`_moe.travelling_rows` for the link."""
    members = group_members(case, rank)
    arriving = case["k"] * sum(moe.routed_tokens(case, q) for q in members) / len(members)
    row, out = case["hidden"] * case.dtype.itemsize, torch.promote_types(case.dtype, case["weights"]).itemsize
    port = moe.travelling_rows(case, rank) * row
    return pc.Cost(
        hbm_bytes=arriving * row + moe.tokens_of(case, rank) * case["hidden"] * out,
        egress_bytes=port,
        ingress_bytes=port,
        flops={"fp32": 2 * case["k"] * moe.routed_tokens(case, rank) * case["hidden"]},
        typical=moe.is_drawn(case),
    )


def _sums_first(case: pc.Case, rank: int) -> pc.Steps:
    """The ranks of a token's experts add up its rows, and each sends one."""
    ranks, least = len(group_members(case, rank)), cost(case, rank)
    out = moe.tokens_of(case, rank) * case["hidden"] * torch.promote_types(case.dtype, case["weights"]).itemsize
    parts = least.egress_bytes * ranks / max(1, ranks - 1)
    return (
        pc.step(
            "sums of a token's rows on a rank", hbm=least.hbm_bytes - out + parts, link=least.egress_bytes, barriers=1, flops=least.flops
        ),
        pc.step("sums of the ranks' parts", hbm=parts + out),
    )


def _wide(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Products and sums in float32, one rounding."""
    args = inputs[rank]
    terms = torch.cat(_parts(case, inputs, rank)).to(FP32) * _row_weights(args).to(FP32).unsqueeze(1)
    return _summed(args, terms).to(_dtype(args))


def _added_by_rank(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """A token's rows on one rank weighted and added up there, rounded, and added up over ranks: what sends the fewest rows."""
    args, dtype = inputs[rank], _dtype(inputs[rank])
    weights = torch.split(_row_weights(args).to(FP32), args[4])
    targets = torch.split(args[8], args[4])
    partial = [
        _summed(args, part.to(FP32) * weight.unsqueeze(1), target).to(dtype)
        for part, weight, target in zip(_parts(case, inputs, rank), weights, targets, strict=True)
    ]
    return torch.stack(partial).to(FP32).sum(0).to(dtype)


def _combined(
    context: pc.AnswerContext, *, rows: torch.Tensor | None = None, weights: torch.Tensor | None = None, mapping: torch.Tensor | None = None
) -> torch.Tensor:
    """The answer with other rows, weights or targets of the rows."""
    args = context.args
    own = _row_weights(args)
    rows = torch.cat(_parts(context.case, context.inputs, context.rank)) if rows is None else fitted(rows, own.shape[0])
    terms = rows.to(FP32) * (own if weights is None else weights).to(FP32).unsqueeze(1)
    return _summed(args, terms, mapping).to(_dtype(args))


def _not_ungrouped(context: pc.AnswerContext) -> torch.Tensor:
    return _combined(context, rows=torch.cat(_parts(context.case, context.inputs, context.rank, ungroup=False)))


def _sources_reversed(context: pc.AnswerContext) -> torch.Tensor:
    return _combined(context, rows=torch.cat(_parts(context.case, context.inputs, context.rank)[::-1]))


def _unweighted(context: pc.AnswerContext) -> torch.Tensor:
    weights = _row_weights(context.args)
    return _combined(context, weights=torch.full_like(weights, float(weights.mean()) if weights.numel() else 0.0))


def _weights_by_token(context: pc.AnswerContext) -> torch.Tensor:
    weights: torch.Tensor = context.args[1].flatten()
    return _combined(context, weights=fitted(weights, context.args[8].shape[0]))


def _mapping_derived(context: pc.AnswerContext) -> torch.Tensor:
    _, token = (context.args[7] != 0).nonzero(as_tuple=True)
    return _combined(context, mapping=token)


def _one_row_each(context: pc.AnswerContext) -> torch.Tensor:
    """Every token overwritten with its last expert's row instead of added to."""
    expert, token = (context.args[7] != 0).nonzero(as_tuple=True)
    last = torch.zeros(context.args[9][0], dtype=INT64, device=expert.device).scatter_reduce_(0, token, expert, "amax")
    return _combined(context, weights=_row_weights(context.args) * (last[token] == expert))


def _zero_weights_skipped(context: pc.AnswerContext) -> torch.Tensor:
    rows = torch.cat(_parts(context.case, context.inputs, context.rank))
    return _combined(context, rows=rows.masked_fill((_row_weights(context.args) == 0).unsqueeze(1), 0.0))


def _first_slot_only(context: pc.AnswerContext) -> torch.Tensor:
    """An expert's weight taken from the first slot that names it."""
    args = context.args
    expert, token = (args[7] != 0).nonzero(as_tuple=True)
    slot = (args[2][token] == expert.unsqueeze(1)).to(torch.uint8).argmax(1)
    return _combined(context, weights=args[1][token, slot])


def _contiguous_group(context: pc.AnswerContext) -> torch.Tensor:
    """The rows that the neighbours send back to the same place."""
    rows = torch.cat([torch.split(args[0], args[5])[context.place] for args in (context.inputs[q] for q in neighbours(context))])
    return _combined(context, rows=rows)


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    base = {"tokens": (29, 0, 17, 41), "hidden": 6, "experts": 16, "k": 2, "exponent": 0.7, "weights": dtype}
    return pc.case(label, dtype, **{**base, **params})


PRESETS = (
    pc.preset(
        "small",
        "unequal and empty ranks, empty experts, one to four experts a token, duplicates, mixed dtypes, tiny weights, NaN rows, "
        "shuffled tokens, groups",
        _small("skewed_bf16", BF16),
        _small("skewed_fp32", FP32, k=3, map=FP32),
        _small("fp32_weights_bf16", BF16, weights=FP32, k=4),
        _small("duplicates_bf16", BF16, duplicates=True, map=INT64),
        _small("dropped_tokens_bf16", BF16, k=1, dropped=6, scale=1.3),
        _small("tiny_weights_bf16", BF16, scale=1e-8, empty=5, exponent=1.2),
        _small("poisoned_fp32", FP32, poisoned=True),
        _small("one_rank_bf16", BF16, tokens=(29, 13, 0, 17), experts=32, one_rank=True),
        _small("limited_bf16", BF16, experts=32, k=4, limit=(8, 2), exponent=1.5),
        _small("strided_group_bf16", BF16, group="strided", world_sizes=(4, 8)),
        _small("alone_bf16", BF16, tokens=29, group="strided", world_sizes=(2,)),
        _small("renamed_tokens_fp32", FP32, k=3, renamed=True),
        _small("literal_bf16", BF16, tokens=32, literal=True, variant="pkb"),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape, with equal splits that the routing really has; a skewed one; one that contradicts equal splits",
        pc.case("bf16", BF16, tokens=1024, hidden=1024, experts=8, k=2, weights=BF16),
        pc.case("skewed_bf16", BF16, tokens=1024, hidden=1024, experts=8, k=2, exponent=0.5, weights=BF16),
        pc.case("literal_bf16", BF16, tokens=1024, hidden=1024, experts=8, k=2, exponent=0.1, weights=BF16, literal=True, variant="pkb"),
    ),
    pc.preset(
        "production_qwen3_235b",
        "4096 tokens, hidden 4096, 8 of 128 experts, Zipf(0.6), float32 weights",
        pc.case("bf16", BF16, tokens=4096, hidden=4096, experts=128, k=8, exponent=0.6, weights=FP32),
    ),
    pc.preset(
        "production_deepseek_v3",
        "4096 tokens, hidden 7168, 8 of 256 experts out of 4 of 8 groups, Zipf(0.3), weights that add up to 2.5",
        pc.case("bf16", BF16, tokens=4096, hidden=7168, experts=256, k=8, exponent=0.3, limit=(8, 4), weights=BF16, scale=2.5),
    ),
    pc.preset(
        "production_mixtral_8x7b",
        "8192 tokens, hidden 4096, 2 of 8 experts, Zipf(0.3)",
        pc.case("bf16", BF16, tokens=8192, hidden=4096, experts=8, k=2, exponent=0.3, weights=BF16),
        pc.case("one_rank_bf16", BF16, tokens=2048, hidden=4096, experts=16, k=2, one_rank=True, weights=BF16),
    ),
)


def _several_returned(case: pc.Case) -> bool:
    """Whether a rank's rows come back from several ranks."""
    return moe.several_ranks(case) and "one_rank" not in case.params


PROBLEM = pc.Problem(
    id=29,
    slug="moe_post_all2all",
    title="Combination of experts' rows by token",
    category="expert_parallel",
    parallelism=("expert",),
    origin="VeOmni and Megatron-LM: the all-to-all dispatcher of their mixture-of-experts layers, on the way back from the experts",
    summary=(
        "expert_outputs lies in the order in which problem 28 delivers rows: by local expert, then source, as "
        "num_global_tokens_per_local_expert (P, E/P) says. Put in order of sources, output_splits[q] rows go back to rank q, and "
        "input_splits[q] rows come back from it: row i is that of the i-th nonzero entry (e, t) of routing_map (E, T), by expert and then "
        "token. Its weight is the sum of routing_weights[t, j] over the slots j with selected_experts[t, j] = e, and it is added, times "
        "its weight, to token local_input_permutation_mapping[i] of the result, of shape org_hidden_states_shape (T, H), zero where there "
        "are no rows. The result has the dtype of a product of the two; NaN times weight 0 is NaN."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    attainable=pc.Algorithm("sums on the experts' ranks, then of their parts", "a token's rows for one rank travel as one", _sums_first),
    presets=PRESETS,
    excused={"eight_bits@small/literal_bf16": "misses by 4 and 8 times only: bfloat16 weights sum the rows with errors of that size"},
    known_wrong_answers=(
        pc.wrong("not_ungrouped", "rows sent back as the experts left them", _not_ungrouped, moe.several_sources),
        pc.wrong(
            "order_of_another_call",
            "rows put in order by counts of another call with the same splits",
            lambda c: _combined(c, rows=torch.cat(_parts(c.case, c.inputs, c.rank, shift=1))),
            moe.counts_vary,
        ),
        pc.wrong("sources_reversed", "the last source first", _sources_reversed, _several_returned),
        pc.wrong("unweighted", "the mean weight for every row", _unweighted, lambda c: c["k"] > 1),
        pc.wrong("weights_by_token", "weights in the order of tokens and slots", _weights_by_token, lambda c: c["k"] > 1),
        pc.wrong("mapping_ignored", "rows taken to be in the order of tokens", lambda c: _combined(c, mapping=c.args[8].sort().values)),
        pc.wrong(
            "mapping_derived",
            "rows added to the tokens of the routing map, the permutation mapping ignored",
            _mapping_derived,
            lambda c: "renamed" in c.params,
        ),
        pc.wrong("one_row_each", "the last row of a token alone", _one_row_each, lambda c: c["k"] > 1),
        pc.wrong(
            "zero_weights_skipped", "rows of weight 0 left out, NaN among them", _zero_weights_skipped, lambda c: "poisoned" in c.params
        ),
        pc.wrong(
            "first_slot_only", "only the first slot that names an expert counts", _first_slot_only, lambda c: "duplicates" in c.params
        ),
        pc.wrong(
            "contiguous_group", "neighbours taken for the group", _contiguous_group, lambda c: "group" in c.params and moe.several_ranks(c)
        ),
    ),
    alternative_solutions=pc.alternatives(fp32_accumulation=_wide, added_by_rank=_added_by_rank),
    process_groups=group_layout,
    integer_exact=True,
    notes=(
        "The public benchmark invents equal splits and counts, which its routing contradicts. Here splits come from the routing. Its "
        "inputs are kept as variant pkb: splits are taken literally there too.",
        "Experts of one rank have unequal counts, which they exchange from call to call under the same splits.",
        "The public benchmark always has two experts in ascending order for a token. Here they are in random order, one to eight of them.",
        "The permutation mapping and the routing map are used as they are given: in one small case the mapping shuffles the tokens.",
        "The order of a token's sum is free, and it may be kept in float32: with more than two experts the public reference's atomic "
        "additions have no fixed order.",
        "The public reference rejects split sizes given as tensors. Here one-dimensional integer tensors are accepted. Inputs hold lists.",
        "Where splits are drawn, the cost is a lower bound of their mean over slots and ranks; a token's rows from one rank travel as one.",
    ),
)
