"""Problem 65: gather feature rows and exchange them, in chunks whose order is relative to the own rank."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.common.places import rows_figure
from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32, fitted, group_layout, group_members
from peerlane.problems.families.graph import count_table, expected_distinct, least_table, skewed


def reference(
    local_features: torch.Tensor,
    seed_inverse_ids: torch.Tensor,
    counts_sent: list[int],
    counts_received: list[int],
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    # Chunk j is for rank (rank + j) mod W: the first W - rank chunks are for ranks from this one on. Gathered in the ranks' order.
    rows = local_features[seed_inverse_ids.roll(-sum(counts_received[: ranks - rank]))]
    received = rows.new_empty((sum(counts_sent), *rows.shape[1:]))
    dist.all_to_all_single(received, rows, by_rank(counts_sent, rank), by_rank(counts_received, rank), group=group)

    # What lower ranks sent comes last.
    return received.roll(-sum(counts_sent[ranks - rank :]), 0)


def by_rank(counts: list[int], rank: int) -> list[int]:
    """Counts relative to ``rank``, in the order of absolute ranks."""
    return [counts[(q - rank) % len(counts)] for q in range(len(counts))]


def relative(counts: Sequence[int], rank: int) -> list[int]:
    """Counts in the order of absolute ranks, relative to ``rank``: entry j is that of rank (rank + j) mod W."""
    return [counts[(rank + j) % len(counts)] for j in range(len(counts))]


def relative_counts(table: list[list[int]], me: int) -> tuple[list[int], list[int]]:
    """(counts_sent, counts_received) of a rank, from the rows that every rank (first index) provides for every rank."""
    return relative([row[me] for row in table], me), relative(table[me], me)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Features are random bits. ``case["ids"]``: absent (uniform), ``sorted``, or ``hot``: one id in half the places."""
    members = group_members(case, rank)
    table = count_table(case, len(members), draw.layout)
    sent, received = relative_counts(table, members.index(rank))
    ids = skewed(draw, sum(received), case["seeds"])
    if case.params.get("ids") == "sorted":
        ids = ids.sort().values
    elif case.params.get("ids") == "hot":
        ids = torch.where(draw.uniform(ids.shape, FP32) < 0.5, draw.integers(0, case["seeds"], (1,)), ids)
    features = draw.bits((case["seeds"], *case["row"]), case.dtype)
    group = next((pc.GroupRef(name) for name in group_layout(case)), None)
    return (features, ids, sent, received, group)


def _chunk(inputs: pc.Inputs, source: int, number: int) -> torch.Tensor:
    """Chunk ``number`` of what world rank ``source`` provides."""
    features, ids, _, counts = inputs[source][:4]
    first = sum(counts[:number])
    rows: torch.Tensor = features[ids[first : first + counts[number]]]
    return rows


def _received(case: pc.Case, inputs: pc.Inputs, rank: int) -> list[torch.Tensor]:
    """The parts of the answer, in its order."""
    members = group_members(case, rank)
    me, ranks = members.index(rank), len(members)
    return [_chunk(inputs, members[(me + j) % ranks], -j % ranks) for j in range(ranks)]


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return pc.exactly("features", torch.cat(_received(case, inputs, rank)))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Of every part of the rows, each different one is sent once; each different row of the features is read once.

    Of how often the drawn ids repeat, the mean is taken; where one id is hot, a single row per part is the bound.
    """
    members = group_members(case, rank)
    me, table, hot = members.index(rank), least_table(case, len(members)), case.params.get("ids") == "hot"
    row, seeds = torch.Size(case["row"]).numel() * case.dtype.itemsize, case["seeds"]

    def distinct(rows: int) -> float:
        return min(rows, 1) if hot else expected_distinct(rows, seeds)

    provided, obtained = table[me], [line[me] for line in table]
    return pc.Cost(
        hbm_bytes=row * (distinct(sum(provided)) + sum(obtained)) + 8 * sum(provided),
        egress_bytes=row * sum(distinct(rows) for q, rows in enumerate(provided) if q != me),
        ingress_bytes=row * sum(distinct(rows) for q, rows in enumerate(obtained) if q != me),
    )


def _gathered_once(case: pc.Case, rank: int) -> pc.Steps:
    """Owners read rows as often as they are named, and store them in the results of whoever wants them."""
    members = group_members(case, rank)
    me, table, row = members.index(rank), least_table(case, len(members)), torch.Size(case["row"]).numel() * case.dtype.itemsize
    provided, obtained = sum(table[me]), sum(line[me] for line in table)
    link = row * max(provided, obtained) - row * table[me][me]
    places = {rows_figure("read_rows", row): float(row * provided), "hbm_copy_tbps": row * obtained + 8.0 * provided}
    return (pc.step("rows to whoever wants them", hbm=row * (provided + obtained) + 8 * provided, link=link, barriers=2, places=places),)


def _gather_at_the_end(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Every rank's whole features and ids, gathered by the rank that wants them."""
    members = group_members(case, rank)
    me, ranks = members.index(rank), len(members)
    parts = []
    for j in range(ranks):
        features, ids, _, counts = inputs[members[(me + j) % ranks]][:4]
        ends = torch.tensor(counts).cumsum(0).tolist()
        parts.append(features.index_select(0, ids[ends[-j % ranks] - counts[-j % ranks] : ends[-j % ranks]]))
    return torch.cat(parts)


def _chunks(context: pc.AnswerContext, source: Any, number: Any) -> torch.Tensor:
    """Chunk ``number(me, j, W)`` of group rank ``source(me, j, W)`` for every j, cut or repeated to the answer's length."""
    me, ranks = context.place, len(context.members)
    parts = [_chunk(context.inputs, context.members[source(me, j, ranks) % ranks], number(me, j, ranks) % ranks) for j in range(ranks)]
    return fitted(torch.cat(parts), len(context.answer))


def _wrong_counts(context: pc.AnswerContext) -> torch.Tensor:
    me, ranks = context.place, len(context.members)
    parts = []
    for j in range(ranks):
        features, ids, counts, _ = context.inputs[context.members[(me + j) % ranks]][:4]
        first = sum(counts[: -j % ranks])
        parts.append(features[ids[first : first + context.args[2][j]]])
    return fitted(torch.cat(parts), len(context.answer))


def _ids_ignored(context: pc.AnswerContext) -> torch.Tensor:
    """The features' first rows, in order, in place of those that the ids name."""
    inputs = [(args[0], torch.arange(len(args[1]), device=args[1].device) % len(args[0]), *args[2:]) for args in context.inputs]
    return torch.cat(_received(context.case, inputs, context.rank))


_UNEVEN = ("small/uneven_bf16", "small/uneven_fp32", "small/hot_bf16", "small/sorted_fp32", "small/odd_row_bf16")
_PRODUCTION = ("production_papers100m_sage/fp32", "production_mag240m/bf16", "production_sage_hidden/bf16")
_ROTATED = (*_UNEVEN, "pkb/bf16", *_PRODUCTION)


def _beyond_two(labels: Sequence[str]) -> tuple[str, ...]:
    """The cases on more than two ranks; on two, where j and -j are the same chunk, the mistake makes no difference."""
    return tuple(f"{name}/w{world_size}" for name in labels for world_size in (4, 8))


PROBLEM = pc.Problem(
    id=65,
    slug="cooperative_feature_exchange",
    title="Cooperative mini-batch feature gather and all-to-all in rank-relative order",
    category="graph_parallel",
    parallelism=("graph", "data"),
    origin="DGL GraphBolt, cooperative mini-batching: forward of the feature exchange",
    summary=(
        "The rows local_features[seed_inverse_ids] are cut into W chunks of counts_received[0], counts_received[1], ... rows. Chunk j of "
        "rank r is for rank (r + j) mod W of the group (the world if None). The result is the chunks received, that of rank (r + j) mod W "
        "at place j, counts_sent[j] rows: (sum(counts_sent), *rest), a bit copy. Zeros are legal. The counts are named after the requests "
        "for rows, which go the other way: counts_sent is what this rank obtains, counts_received what it provides."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    attainable=pc.Algorithm("rows read once and stored where they are wanted", "parts meet in one kernel", _gathered_once),
    presets=(
        pc.preset(
            "small",
            "uneven, empty and one-sided counts, repeated and sorted ids, odd and many-dimensional rows, groups",
            pc.case("uneven_bf16", BF16, splits="uneven", seeds=9, row=(5,)),
            pc.case("uneven_fp32", FP32, splits="uneven", seeds=9, row=(2, 3)),
            pc.case("uneven_int64", torch.int64, splits="uneven", seeds=9, row=()),
            pc.case("idle_bf16", BF16, splits="idle", seeds=9, row=(5,)),
            pc.case("heavy_fp32", FP32, splits="heavy", rows=10, seeds=9, row=(3,)),
            pc.case("nothing_bf16", BF16, splits="nothing", seeds=9, row=(5,)),
            pc.case("hot_bf16", BF16, splits="uneven", seeds=9, row=(5,), ids="hot"),
            pc.case("sorted_fp32", FP32, splits="uneven", seeds=40, row=(3,), ids="sorted"),
            pc.case("odd_row_bf16", BF16, splits="uneven", seeds=7, row=(5, 1, 3)),
            pc.case("strided_group_fp32", FP32, splits="uneven", seeds=9, row=(3,), group="strided", world_sizes=(4, 8)),
        ),
        pc.preset(
            "pkb", "the public benchmark's shape and equal counts", pc.case("bf16", BF16, splits="equal", rows=1024, seeds=768, row=(128,))
        ),
        pc.preset(
            "production_papers100m_sage",
            "ogbn-papers100M, three-layer GraphSAGE: 200 000 rows per rank of 128 features",
            pc.case("fp32", FP32, splits="diagonal", rows=200_000, seeds=150_000, row=(128,)),
        ),
        pc.preset(
            "production_mag240m",
            "MAG240M: 300 000 rows per rank of 768 features",
            pc.case("bf16", BF16, splits="diagonal", rows=300_000, seeds=200_000, row=(768,)),
        ),
        pc.preset(
            "production_sage_hidden",
            "a hidden layer: 120 000 rows per rank of 256",
            pc.case("bf16", BF16, splits="diagonal", rows=120_000, seeds=90_000, row=(256,)),
        ),
    ),
    known_wrong_answers=(
        pc.wrong(
            "absolute_order",
            "chunks received in the order of ranks",
            lambda c: _chunks(c, lambda me, j, w: j, lambda me, j, w: me - j),
            _ROTATED,
        ),
        pc.wrong(
            "absolute_chunks",
            "chunk r taken to be for rank r",
            lambda c: _chunks(c, lambda me, j, w: me + j, lambda me, j, w: me),
            _ROTATED,
        ),
        pc.wrong(
            "same_chunk_number",
            "chunk j of rank r + j in place j",
            lambda c: _chunks(c, lambda me, j, w: me + j, lambda me, j, w: j),
            _beyond_two(_ROTATED),
        ),
        pc.wrong("wrong_counts", "rows cut by the counts of the other direction", _wrong_counts, _beyond_two(_UNEVEN)),
        pc.wrong("ids_ignored", "rows in order instead of those that the ids name", _ids_ignored),
    ),
    alternative_solutions=pc.alternatives(gather_at_the_end=_gather_at_the_end),
    process_groups=group_layout,
    notes=(
        "The public benchmark's counts are all equal, so that it does not matter which list cuts which rows. Here they differ for every "
        "pair of ranks and from slot to slot, some are zero, and one rank may provide nearly everything.",
        "How many rows of a part are different, which is all that must be sent, depends on the ids; the cost takes the mean.",
    ),
)
