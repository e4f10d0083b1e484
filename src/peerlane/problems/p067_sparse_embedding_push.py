"""Problem 67: push (id, row) pairs to the ranks that own the ids."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32, INT32, INT64, fitted, group_layout, group_members, neighbours
from peerlane.problems.families.graph import count_table, least_table, skewed


def reference(
    idx: torch.Tensor, value: torch.Tensor, num_nodes: int, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return idx, value
    owner = idx.remainder(ranks)
    order = owner.argsort(stable=True)
    sent = torch.zeros(ranks, dtype=torch.int64, device=idx.device).index_add_(0, owner, torch.ones_like(idx, dtype=torch.int64))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sent_sizes, received_sizes = torch.stack((sent, received)).tolist()

    def pushed(rows: torch.Tensor) -> torch.Tensor:
        result = rows.new_empty((sum(received_sizes), *rows.shape[1:]))
        dist.all_to_all_single(result, rows[order], received_sizes, sent_sizes, group=group)
        return result

    return pushed(idx), pushed(value)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """How many rows go to which owner is layout, in which places they are is not.

    An id is W q + owner with q :func:`skewed` over num_nodes / W by ``case["skew"]``; ``case["hot"]``: one q for half the ids of an owner.
    """
    members, nodes = group_members(case, rank), case["nodes"]
    ranks = len(members)
    counts = count_table(case, ranks, draw.layout)[members.index(rank)]
    total = sum(counts)
    owner = torch.arange(ranks, device=draw.device).repeat_interleave(pc.constant(counts, draw.device), output_size=total)
    quotient = skewed(draw, total, nodes // ranks, case.params.get("skew", 1.0))
    if case.params.get("hot"):
        quotient = torch.where(draw.uniform((total,), FP32) < 0.5, draw.integers(0, nodes // ranks, (1,)), quotient)
    ids = (quotient * ranks + owner)[draw.permutation(total)].to(case.params.get("index", INT64))
    group = next((pc.GroupRef(name) for name in group_layout(case)), None)
    return (ids, draw.normal((total, *case["row"]), case.dtype), nodes, group)


def _received(inputs: pc.Inputs, members: Sequence[int], me: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, rows) that every member has for member ``me``."""
    owned = [(inputs[q][0], inputs[q][1], inputs[q][0] % len(members) == me) for q in members]
    return [(ids[mine], rows[mine]) for ids, rows, mine in owned]


def _joined(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids, rows = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(rows)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, pc.Expected]:
    members = group_members(case, rank)
    ids, rows = _joined(_received(inputs, members, members.index(rank)))
    return pc.exactly("recv_idx", ids), pc.exactly("recv_value", rows)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Pairs are read and written once. An id travels as its quotient by W, in 4 bytes."""
    members = group_members(case, rank)
    me, table = members.index(rank), least_table(case, len(members))
    row, index = torch.Size(case["row"]).numel() * case.dtype.itemsize, case.params.get("index", INT64).itemsize
    sent, received = table[me], [line[me] for line in table]
    return pc.Cost(
        hbm_bytes=(sum(sent) + sum(received)) * (row + index),
        egress_bytes=(sum(sent) - sent[me]) * (row + 4),
        ingress_bytes=(sum(received) - received[me]) * (row + 4),
    )


def _by_selection(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Everything of everybody in one list, and a stable sort by owner."""
    members = group_members(case, rank)
    ids, rows = _joined([inputs[q][:2] for q in members])
    order = (ids % len(members)).argsort(stable=True)
    mine = order[(ids % len(members))[order] == members.index(rank)]
    return ids[mine], rows[mine]


def _fit(context: pc.AnswerContext, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return fitted(pair[0], len(context.answer[0])), fitted(pair[1], len(context.answer[1]))


def _parts(context: pc.AnswerContext) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return _received(context.inputs, context.members, context.place)


def _by_range(context: pc.AnswerContext) -> tuple[torch.Tensor, torch.Tensor]:
    parts = []
    for q in context.members:
        ids, rows = context.inputs[q][:2]
        mine = ids // -(-context.case["nodes"] // len(context.members)) == context.place
        parts.append((ids[mine], rows[mine]))
    return _fit(context, _joined(parts))


def _sorted_by_id(context: pc.AnswerContext) -> tuple[torch.Tensor, torch.Tensor]:
    return _joined([(ids.sort(stable=True).values, rows[ids.argsort(stable=True)]) for ids, rows in _parts(context)])


def _unpermuted_rows(context: pc.AnswerContext) -> tuple[torch.Tensor, torch.Tensor]:
    """The right ids, with every source's first rows."""
    parts = _parts(context)
    rows = [context.inputs[q][1][: len(ids)] for q, (ids, _) in zip(context.members, parts, strict=True)]
    return context.answer[0].clone(), torch.cat(rows)


def _added_up(context: pc.AnswerContext) -> tuple[torch.Tensor, torch.Tensor]:
    """Later pairs of an id get its first row, as a reduction of duplicates that keeps the shape would have it."""
    ids, rows = context.answer
    _, place = ids.unique(return_inverse=True)
    first = torch.full((len(ids) + 1,), len(ids), dtype=INT64, device=ids.device)
    first.scatter_reduce_(0, place, torch.arange(len(ids), device=ids.device), "amin")
    return ids.clone(), rows[first[place]]


def _contiguous_group(context: pc.AnswerContext) -> tuple[torch.Tensor, torch.Tensor]:
    return _fit(context, _joined(_received(context.inputs, neighbours(context), neighbours(context).index(context.rank))))


_MIXED = (
    *pc.small_cases("uneven_bf16", "uneven_fp32", "hot_bf16", "odd_row_bf16"),
    "pkb/bf16",
    "production_wikidata5m_transe/fp32",
    "production_dlrm_table/bf16",
    "production_ogbn_mag/fp32",
)

PROBLEM = pc.Problem(
    id=67,
    slug="sparse_embedding_push",
    title="Push sparse (id, row) pairs to their owners under modulo partitioning",
    category="graph_parallel",
    parallelism=("graph", "data"),
    origin="DGL: the push of sparse gradients to the owners of embedding rows, remainder partition",
    summary=(
        "Id i belongs to rank i mod W of the group (the world if None). Every rank receives the pairs (idx[k], value[k]) of all ranks "
        "whose ids it owns, sources in the order of ranks and pairs of a source in their order there: (recv_idx (m,), recv_value "
        "(m, *rest)), bit copies. Ids stay global and duplicates stay. A rank may have no pairs. num_nodes bounds the ids. On one rank "
        "the arguments themselves are returned."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    presets=(
        pc.preset(
            "small",
            "uneven owners, ranks without pairs, all ids with one owner, hot ids, odd and many-dimensional rows, int32 ids, groups",
            pc.case("uneven_bf16", BF16, splits="uneven", nodes=40, row=(4,)),
            pc.case("uneven_fp32", FP32, splits="uneven", nodes=40, row=(2, 3)),
            pc.case("uneven_int32_ids", FP32, splits="uneven", nodes=40, row=(3,), index=INT32),
            pc.case("idle_bf16", BF16, splits="idle", nodes=40, row=(4,)),
            pc.case("one_owner_bf16", BF16, splits="gather", rows=13, nodes=40, row=(4,)),
            pc.case("nothing_fp32", FP32, splits="nothing", nodes=40, row=(4,)),
            pc.case("heavy_fp32", FP32, splits="heavy", rows=10, nodes=400, row=(3,)),
            pc.case("hot_bf16", BF16, splits="popular", rows=60, nodes=4000, row=(4,), hot=True),
            pc.case("odd_row_bf16", BF16, splits="uneven", nodes=40, row=(3,)),
            pc.case("strided_group_bf16", BF16, splits="uneven", nodes=40, row=(4,), group="strided", world_sizes=(4, 8)),
        ),
        pc.preset(
            "pkb",
            "the public benchmark's shape: 1024 pairs per rank",
            pc.case("bf16", BF16, splits="equal", rows=1024, nodes=100_000, row=(128,)),
        ),
        pc.preset(
            "production_wikidata5m_transe",
            "Wikidata5M, TransE: 200 000 gradients per rank of 512, Zipf-like ids",
            pc.case("fp32", FP32, splits="popular", rows=200_000, nodes=4_800_000, row=(512,), skew=6.0),
        ),
        pc.preset(
            "production_dlrm_table",
            "DLRM-like table update: 1.5 million x 128 per rank",
            pc.case("bf16", BF16, splits="popular", rows=1_500_000, nodes=40_000_000, row=(128,), skew=3.0),
        ),
        pc.preset(
            "production_ogbn_mag",
            "ogbn-mag, learnable features: 80 000 x 128 per rank, 30 % more or less",
            pc.case("fp32", FP32, splits="ragged", rows=80_000, nodes=1_940_000, row=(128,)),
        ),
    ),
    known_wrong_answers=(
        pc.wrong("range_partition", "owners by ranges of ids", _by_range),
        pc.wrong("sorted_by_id", "a source's pairs in the order of their ids", _sorted_by_id, (*_MIXED, "small/one_owner_bf16")),
        pc.wrong("unpermuted_rows", "ids sorted by owner, rows not", _unpermuted_rows, _MIXED),
        pc.wrong("local_ids", "ids divided by W", lambda c: (c.answer[0] // len(c.members), c.answer[1].clone())),
        pc.wrong("one_row_per_id", "duplicates of an id given the same row", _added_up, ("small/hot_bf16",)),
        pc.wrong("contiguous_group", "neighbours taken for the group", _contiguous_group, ("small/strided_group_bf16",)),
    ),
    alternative_solutions=pc.alternatives(gather_and_sort=_by_selection),
    process_groups=group_layout,
    graph=False,
    graph_reason="how many pairs a rank receives depends on all ranks' ids, and the host must know it to allocate the result",
    notes=(
        "The public benchmark's uniform ids give all owners about the same number of pairs. Here owners are wanted unequally, and ranks "
        "may have no pairs. How many pairs go where is constant per slot, so that slots keep their shapes; which pairs they are is not.",
        "num_nodes is not used by the definition.",
    ),
)
