"""Problem 102: tokens dispatched to experts on the ranks of several nodes, and experts' rows combined by token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import moe, two_tiers
from peerlane.problems.families.collective import BF16, FP32, FP64
from peerlane.problems.families.two_tiers import reordered


def reference(
    tokens: torch.Tensor,
    selected_experts: torch.Tensor,
    routing_weights: torch.Tensor,
    expert_outputs: torch.Tensor,
    splits: list[list[int]],
    rows_by_expert: torch.Tensor,
    node_group: dist.ProcessGroup,
    rail_group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    node, nodes = dist.get_rank(rail_group), dist.get_world_size(rail_group)
    place, places = dist.get_rank(node_group), dist.get_world_size(node_group)
    me, ranks, own_node = node * places + place, range(nodes * places), range(node * places, (node + 1) * places)
    rail = range(place, nodes * places, places)
    # Rows travel in two hops: over the rail to their node, then within it. A row's way back is its way there.
    sent_far = [sum(splits[me][n * places : (n + 1) * places]) for n in range(nodes)]
    got_far = [sum(splits[q][r] for r in own_node) for q in rail]
    sent_near = [sum(splits[q][r] for q in rail) for r in own_node]
    got_near = [sum(splits[q][me] for q in ranks if q % places == p) for p in range(places)]
    between = [[splits[q][r] for r in own_node] for q in rail]
    by_place = rows_by_expert.view(nodes, places, -1).transpose(0, 1)

    order = selected_experts.flatten().argsort(stable=True)
    rows = exchange(tokens[order // selected_experts.shape[1]], sent_far, got_far, rail_group)
    rows = exchange(swapped(rows, between), sent_near, got_near, node_group)
    dispatched = reordered(rows, by_place, (2, 1, 0))

    back = reordered(expert_outputs, by_place.permute(2, 1, 0), (2, 1, 0))
    back = exchange(back, got_near, sent_near, node_group)
    back = exchange(swapped(back, list(zip(*between, strict=True))), got_far, sent_far, rail_group)
    terms = back.new_empty((*selected_experts.shape, back.shape[1]))
    terms.view(-1, back.shape[1])[order] = back
    combined = torch.bmm(routing_weights.to(FP32).unsqueeze(1), terms.to(FP32)).squeeze(1)
    return dispatched, combined.to(tokens.dtype)


def swapped(rows: torch.Tensor, lengths: Sequence[Sequence[int]]) -> torch.Tensor:
    """Rows that lie in chunks of ``lengths[a][b]``, a outermost, with b outermost."""
    chunks, width = torch.split(rows, [length for line in lengths for length in line]), len(lengths[0])
    return torch.cat([chunk for b in range(width) for chunk in chunks[b::width]])


def exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The rows that the members of a group have for this rank, member by member."""
    arrived = rows.new_empty((sum(received), rows.shape[1]))
    dist.all_to_all_single(arrived, rows, received, sent, group=group)
    return arrived


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Tokens and experts' rows N(0, 1); a token's weights are positive and add up to 1. Splits come from the layout."""
    routing = moe.fixed_routing(case, rank, draw)
    splits = [routing.dispatch.input_splits(q) for q in range(case.world_size)]
    arriving, shape = sum(line[rank] for line in splits), routing.selected.shape
    tokens = draw.normal((shape[0], case["hidden"]), case.dtype)
    if draw.integer:
        # With at most eight experts a token, sums are integers of at most 8 x 2 x 12: exact in bfloat16.
        rows = draw.integers(-12, 13, (arriving, case["hidden"]), case.dtype)
        weights = draw.integers(1, 3, shape, FP32)
    else:
        rows = draw.normal((arriving, case["hidden"]), case.dtype)
        weights = draw.normal(shape, FP32).softmax(1)
    per_expert = routing.metadata(draw.device)[2].clone()
    return tokens, routing.selected, weights, rows, splits, per_expert, two_tiers.NODE, two_tiers.RAIL


def _own(case: pc.Case, rank: int) -> range:
    """The experts of a rank."""
    each = case["experts"] // case.world_size
    return range(rank * each, (rank + 1) * each)


def _routed(args: Sequence[Any], expert: int) -> torch.Tensor:
    """The tokens of a rank that chose an expert, ascending."""
    tokens: torch.Tensor = (args[1] == expert).any(1).nonzero()[:, 0]
    return tokens


def _chunk(inputs: pc.Inputs, source: int, expert: int) -> torch.Tensor:
    rows: torch.Tensor = inputs[source][0][_routed(inputs[source], expert)]
    return rows


def _dispatched(case: pc.Case, inputs: pc.Inputs, rank: int, sources: Sequence[int] | None = None) -> torch.Tensor:
    """The rows that arrive at a rank, by expert and then source; ``sources`` in another order."""
    order = range(case.world_size) if sources is None else sources
    return torch.cat([_chunk(inputs, source, expert) for expert in _own(case, rank) for source in order])


def _terms(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """What the experts have for every slot of a rank's tokens: (T, k, H)."""
    selected = inputs[rank][1]
    terms: torch.Tensor = inputs[rank][0].new_zeros((*selected.shape, case["hidden"]))
    for owner in range(case.world_size):
        lengths = inputs[owner][5].t()  # by expert and source, as the owner's rows lie
        starts = (lengths.flatten().cumsum(0).view_as(lengths) - lengths)[:, rank].tolist()
        for expert, start, length in zip(_own(case, owner), starts, lengths[:, rank].tolist(), strict=True):
            token, slot = (selected == expert).nonzero(as_tuple=True)
            terms[token, slot] = inputs[owner][3][start : start + length]
    return terms


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, pc.Expected]:
    weighted = _terms(case, inputs, rank).to(FP64).mul_(inputs[rank][2].to(FP64).unsqueeze(2))
    combined = pc.Expected("combined", weighted.sum(1), case.dtype, magnitude=weighted.abs().sum(1))
    return pc.exactly("dispatched", _dispatched(case, inputs, rank)), combined


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """Each of at most k products and k - 1 sums of a token is rounded: k u of the sum of |w y|, and 2 u more of it for room.

    Normwise, eight rounded products added up one after the other in bfloat16 leave 4e-3.
    """
    normwise = 1e-2 if case.dtype == BF16 else None
    return {"combined": pc.Tolerance(magnitude=(case["k"] + 2) * pc.UNIT_ROUNDOFF[case.dtype], normwise=normwise)}


def _distinct(case: pc.Case, parts: int) -> float:
    """On how many of ``parts`` equal parts of the ranks a token has experts, on average, or somewhat less.

    If there are fewer groups of experts than parts, a token has an equal share of its experts in each of the groups that it takes.
    """
    groups, chosen = case.params.get("limit", (1, 1))
    if parts <= groups or groups == 1:
        return moe.distinct_ranks(case, parts)
    in_group = {"experts": case["experts"] // groups, "k": case["k"] // chosen, "exponent": case.params.get("exponent", 0.0)}
    return float(chosen * moe.distinct_ranks(replace(case, params=in_group), parts // groups))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """A token crosses the network once to each other node with experts of its own, and one row comes back from each.

    Inside a node a token reaches each rank with experts of its own once, and what their rows add up to leaves each such rank once. Both
    are means over tokens and ranks.
    """
    row, places = case["hidden"] * case.dtype.itemsize, case.cluster.ranks_per_node
    tokens = sum(moe.routed_tokens(case, q) for q in range(case.world_size)) / case.world_size
    far = 2 * row * tokens * _distinct(case, case.nodes) * (case.nodes - 1) / case.nodes
    near = 2 * row * tokens * _distinct(case, case.world_size) * (places - 1) / places
    return pc.Cost(
        hbm_bytes=(2 * tokens + 2 * case["k"] * tokens) * row,
        egress_bytes=near,
        ingress_bytes=near,
        network_egress_bytes=far,
        network_ingress_bytes=far,
        flops={"fp32": 2 * case["k"] * tokens * case["hidden"]},
        typical=True,
    )


def _combined(
    case: pc.Case, inputs: pc.Inputs, rank: int, *, terms: torch.Tensor | None = None, weights: torch.Tensor | None = None
) -> torch.Tensor:
    terms = _terms(case, inputs, rank) if terms is None else terms
    weighted = terms.to(FP32) * (inputs[rank][2] if weights is None else weights).unsqueeze(2)
    return weighted.sum(1).to(case.dtype)


def _wide(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Tree:
    return _dispatched(case, inputs, rank), _combined(case, inputs, rank)


def _added_by_node(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Tree:
    """A token's rows of one node weighted and added up there, rounded, and added up over nodes: what sends the fewest rows."""
    weighted = _terms(case, inputs, rank).to(FP32) * inputs[rank][2].unsqueeze(2)
    node = inputs[rank][1] // (case["experts"] // case.nodes)
    partial = [(weighted * (node == n).unsqueeze(2)).sum(1).to(case.dtype).to(FP32) for n in range(case.nodes)]
    return _dispatched(case, inputs, rank), torch.stack(partial).sum(0).to(case.dtype)


def _within(ranks: Callable[[pc.Case, int], Sequence[int]]) -> Callable[[pc.AnswerContext], pc.Tree]:
    """A wrong answer: rows of some ranks alone; those of others are zero both ways."""

    def answer(context: pc.AnswerContext) -> pc.Tree:
        case, rank = context.case, context.rank
        known = ranks(case, rank)
        kept = [
            args if q in known else (torch.zeros_like(args[0]), *args[1:3], torch.zeros_like(args[3]), *args[4:])
            for q, args in enumerate(context.inputs)
        ]
        return _wide(case, kept, rank)

    return answer


def _with_rows(context: pc.AnswerContext, rows: torch.Tensor) -> pc.Tree:
    return rows, context.answer[1]


def _by_source(context: pc.AnswerContext) -> pc.Tree:
    own = _own(context.case, context.rank)
    return _with_rows(context, torch.cat([_chunk(context.inputs, q, expert) for q in context.ranks for expert in own]))


def _sources_by_rail(context: pc.AnswerContext) -> pc.Tree:
    order = [q for rail in context.case.cluster.rail_groups for q in rail]
    return _with_rows(context, _dispatched(context.case, context.inputs, context.rank, order))


def _tokens_reversed(context: pc.AnswerContext) -> pc.Tree:
    own = _own(context.case, context.rank)
    return _with_rows(context, torch.cat([_chunk(context.inputs, q, expert).flip(0) for expert in own for q in context.ranks]))


def _one_row_per_node(context: pc.AnswerContext) -> pc.Tree:
    """Of a token's experts on one node only the first counts: rows that share a message taken for one."""
    selected = context.args[1]
    node = selected // (context.case["experts"] // context.case.nodes)
    repeated = torch.stack([(node[:, :slot] == node[:, slot : slot + 1]).any(1) for slot in range(selected.shape[1])], dim=1)
    weights = context.args[2].masked_fill(repeated, 0.0)
    return context.answer[0], _combined(context.case, context.inputs, context.rank, weights=weights)


def _unweighted(context: pc.AnswerContext) -> pc.Tree:
    weights = torch.full_like(context.args[2], 1 / context.case["k"])
    return context.answer[0], _combined(context.case, context.inputs, context.rank, weights=weights)


def _slots_reversed(context: pc.AnswerContext) -> pc.Tree:
    return context.answer[0], _combined(context.case, context.inputs, context.rank, weights=context.args[2].flip(1))


def _several(case: pc.Case) -> bool:
    return bool(case["k"] > 1)


def _small(label: str, dtype: torch.dtype = BF16, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"tokens": (29, 13, 41, 0), "hidden": 16, "experts": 32, "k": 2, "exponent": 0.7, **params})


PROBLEM = pc.Problem(
    id=102,
    slug="two_tier_dispatch_combine",
    title="Dispatch of tokens to experts on several nodes, and combination",
    category="internode",
    parallelism=("expert",),
    origin="DeepEP's internode dispatch and combine: expert parallelism of DeepSeek-V3 over NVLink and RDMA",
    summary=(
        "Expert e of E is on rank e // (E / W). tokens (T, H), selected_experts (T, k), all different for a token, and "
        "routing_weights (T, k) float32 are the rank's own; T differs by rank. The first result holds a row for every token of any "
        "rank that chose an expert of this rank: by expert, then source rank, then token; exact. expert_outputs (R, H) has one row "
        "for each of these, in the same order. The second result (T, H) is, for each own token, the sum over its slots of weight "
        "times the row in the expert_outputs of the expert's rank, in any order, in tokens' dtype. The two do not depend on each "
        "other. splits[q][r]: rows from rank q to rank r. rows_by_expert (W, E / W): rows from every rank for each expert of this "
        f"one. {two_tiers.GROUPS}"
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    world_sizes=two_tiers.WORLD_SIZES,
    nodes=two_tiers.NODES,
    process_groups=pc.node_and_rail,
    bandwidth="production_deepseek_v3",
    presets=(
        pc.preset(
            "small",
            "unequal and empty ranks, empty experts, one to four experts a token, experts of few nodes",
            _small("skewed_bf16"),
            _small("skewed_fp32", FP32, k=3),
            _small("one_expert_bf16", k=1),
            _small("empty_experts_bf16", empty=9, exponent=1.2),
            _small("four_experts_bf16", k=4, exponent=0.0),
            _small("limited_bf16", k=4, limit=(8, 2), exponent=1.5),
        ),
        pc.preset(
            "pkb",
            "512 tokens a rank, hidden 512, 4 of 32 experts; the public benchmark has no such problem",
            pc.case("bf16", BF16, tokens=512, hidden=512, experts=32, k=4),
        ),
        pc.preset(
            "production_deepseek_v3",
            "4096 tokens, hidden 7168, 8 of 256 experts out of 4 of 8 groups, Zipf(0.3)",
            pc.case("bf16", BF16, tokens=4096, hidden=7168, experts=256, k=8, exponent=0.3, limit=(8, 4)),
        ),
        pc.preset(
            "production_qwen3_235b",
            "4096 tokens, hidden 4096, 8 of 128 experts, Zipf(0.6)",
            pc.case("bf16", BF16, tokens=4096, hidden=4096, experts=128, k=8, exponent=0.6),
        ),
    ),
    known_wrong_answers=(
        pc.wrong("no_communication", "the rank's own rows alone", _within(lambda case, rank: [rank])),
        pc.wrong("node_only", "the rows of the rank's own node alone", _within(two_tiers.node_of)),
        pc.wrong("rail_only", "the rows of the rank's own rail alone", _within(two_tiers.rail_of)),
        pc.wrong("by_source", "rows by source, as they arrive", _by_source),
        pc.wrong("sources_by_rail", "sources in the order of rails", _sources_by_rail),
        pc.wrong("tokens_reversed", "a chunk's rows with the last token first", _tokens_reversed),
        pc.wrong("one_row_per_node", "of a token's experts on one node only one counts", _one_row_per_node, _several),
        pc.wrong("unweighted", "the mean of the experts' rows", _unweighted, _several),
        pc.wrong("slots_reversed", "weights in the reverse order of slots", _slots_reversed, _several),
    ),
    alternative_solutions=pc.alternatives(fp32_accumulation=_wide, added_by_node=_added_by_node),
    integer_exact=True,
    notes=(
        "The reference sends a row for every expert of a token, in two hops. The bound lets a token cross the network once for each node, "
        "and one row return from it, so the reference stays far from it where tokens have several experts on a node.",
        "What the experts compute is not part of the problem: their rows are an argument, independent of the tokens.",
        "Experts of one rank exchange their counts in every call, under the same splits.",
    ),
)
