"""Problem 66: the adjoint of problem 65: gradients go back to the rows they came from, and add up there."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from peerlane.common.places import rows_figure
from peerlane.problems import contract as pc
from peerlane.problems.families.collective import FP32, FP64, fitted, group_layout, group_members
from peerlane.problems.families.graph import count_table, least_table, skewed
from peerlane.problems.p065_cooperative_feature_exchange import by_rank, relative_counts

# Bytes of float64 rows that the oracle holds at a time; it needs about three times as much.
_CHUNK_BYTES = 2**30


def reference(
    grad_output: torch.Tensor,
    seed_inverse_ids: torch.Tensor,
    seed_size: int,
    counts_sent: list[int],
    counts_received: list[int],
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    # Chunk j goes to rank (rank + j) mod W; rows, and the ids of those that come back, in the order of absolute ranks.
    sent = grad_output.roll(-sum(counts_sent[: ranks - rank]), 0)
    ids = seed_inverse_ids.roll(-sum(counts_received[: ranks - rank]))
    received = sent.new_empty((ids.numel(), *sent.shape[1:]))
    dist.all_to_all_single(received, sent, by_rank(counts_received, rank), by_rank(counts_sent, rank), group=group)
    return received.new_zeros((seed_size, *received.shape[1:])).index_add_(0, ids, received)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Gradients N(0, 1), in an integer draw whole numbers. Ids are :func:`skewed` by ``case["skew"]`` and below ``case["used"]``.

    ``case["pattern"]``:

    * ``one_row``: all ids are equal
    * ``sorted``: ids ascend
    * ``cancelling``: a gradient of about 1e4 in even rows is taken back, but for a rest of about 1, in the odd rows of the same id
    """
    members = group_members(case, rank)
    table, pattern = count_table(case, len(members), draw.layout), case.params.get("pattern")
    sent, received = relative_counts(table, members.index(rank))
    shape, used = (sum(sent), case["depth"]), case.params.get("used", case["seeds"])
    ids = skewed(draw, sum(received), used, case.params.get("skew", 1.0))
    if pattern == "one_row":
        ids = draw.integers(0, used, (1,)).expand(ids.shape).clone()
    elif pattern == "sorted":
        ids = ids.sort().values
    elif pattern == "cancelling":
        ids[1::2] = ids[: ids.numel() - 1 : 2]
    gradient = draw.integers(-8, 9, shape, FP32) if draw.integer else draw.normal(shape, FP32)
    if pattern == "cancelling" and not draw.integer:
        large = draw.shared.normal((1, case["depth"]), FP32, scale=1e4)
        gradient[::2] += large
        gradient[1::2] -= large
    group = next((pc.GroupRef(name) for name in group_layout(case)), None)
    return (gradient, ids, case["seeds"], sent, received, group)


def _chunk(inputs: pc.Inputs, source: int, number: int) -> torch.Tensor:
    """Chunk ``number`` of what world rank ``source`` sends."""
    gradient, counts = inputs[source][0], inputs[source][3]
    first = sum(counts[:number])
    rows: torch.Tensor = gradient[first : first + counts[number]]
    return rows


def _received(case: pc.Case, inputs: pc.Inputs, rank: int) -> list[torch.Tensor]:
    """The chunks that come back to ``rank``, in the order of its ids."""
    members = group_members(case, rank)
    me, ranks = members.index(rank), len(members)
    return [_chunk(inputs, members[(me + j) % ranks], -j % ranks) for j in range(ranks)]


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """The float64 sums. The magnitude of a sum of m terms is m times the sum of their absolute values."""
    ids, rows = inputs[rank][1], torch.cat(_received(case, inputs, rank))
    value = torch.zeros((case["seeds"], case["depth"]), dtype=FP64, device=rows.device)
    magnitude = torch.zeros_like(value)
    step = max(1, _CHUNK_BYTES // (case["depth"] * FP64.itemsize))
    for first in range(0, len(ids), step):
        part = slice(first, first + step)
        wide = rows[part].to(FP64)
        value.index_add_(0, ids[part], wide)
        magnitude.index_add_(0, ids[part], wide.abs_())
    terms = torch.zeros(case["seeds"], dtype=FP64, device=rows.device).index_add_(0, ids, torch.ones_like(ids, dtype=FP64))
    return pc.Expected("gradient", value, FP32, magnitude=magnitude.mul_(terms.unsqueeze(1)))


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """m terms added in float32 in any order err by (m - 1) u times the sum of their absolute values at most; twice m u is allowed.

    A row that no id names is 0, exactly.
    """
    size = "m times the sum of the absolute values of the m terms"
    return {"gradient": pc.Tolerance(magnitude=2 * pc.UNIT_ROUNDOFF[FP32], size=size)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """The sender does not know which of its rows the receiver will add up, so every row is sent; sums are written once."""
    members = group_members(case, rank)
    me, table = members.index(rank), least_table(case, len(members))
    row = case["depth"] * FP32.itemsize
    sent, received = [line[me] for line in table], table[me]
    return pc.Cost(
        hbm_bytes=row * (sum(sent) + case["seeds"]) + 8 * sum(received),
        egress_bytes=row * (sum(sent) - sent[me]),
        ingress_bytes=row * (sum(received) - received[me]),
        flops={"fp32": case["depth"] * sum(received)},
    )


def _added_in_memory(case: pc.Case, rank: int) -> pc.Steps:
    """Sums begin as zeros; what stays on the rank is added while the rest travels, and then that."""
    members = group_members(case, rank)
    me, table, row = members.index(rank), least_table(case, len(members)), case["depth"] * FP32.itemsize
    received, own, link = sum(table[me]), table[me][me], max(sum(line[me] for line in table), sum(table[me])) - table[me][me]

    def added(rows: int) -> dict[str, float]:
        return {rows_figure("add_rows", row): float(rows * row)}

    flops = {"fp32": float(case["depth"] * received)}
    return (
        pc.step("zeros", hbm=row * case["seeds"]),
        pc.step("sums of what stays", hbm=(row + 8) * own + 2 * row * link, link=row * link, barriers=2, places=added(own)),
        pc.step("sums of what has come", hbm=(row + 8) * (received - own), flops=flops, places=added(received - own)),
    )


def _added(context: pc.AnswerContext, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(context.answer).index_add_(0, ids, fitted(rows, len(ids)))


def _chunks(context: pc.AnswerContext, source: Any, number: Any) -> torch.Tensor:
    """Added up: for every j chunk ``number(me, j, W)`` of group rank ``source(me, j, W)``."""
    me, ranks = context.place, len(context.members)
    parts = [_chunk(context.inputs, context.members[source(me, j, ranks) % ranks], number(me, j, ranks) % ranks) for j in range(ranks)]
    return _added(context, torch.cat(parts), context.args[1])


def _last_wins(context: pc.AnswerContext) -> torch.Tensor:
    """Of rows with the same id, one is written over the others."""
    rows = torch.cat(_received(context.case, context.inputs, context.rank))
    result = torch.zeros_like(context.answer)
    for id_, row in zip(context.args[1].tolist(), rows, strict=True):
        result[id_] = row
    return result


def _received_sums(order: str) -> Any:
    """Sums in float32, in the order of ids, or chunk by chunk from the last."""

    def answer(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
        ids, parts = inputs[rank][1], _received(case, inputs, rank)
        if order == "sorted":
            places = ids.argsort(stable=True)
            rows = torch.cat(parts)[places]
            return torch.zeros((case["seeds"], case["depth"]), device=rows.device).index_add_(0, ids[places], rows)
        total = torch.zeros((case["seeds"], case["depth"]), device=ids.device)
        for part, where in reversed(list(zip(parts, torch.split(ids, inputs[rank][4]), strict=True))):
            total += torch.zeros_like(total).index_add_(0, where, part)
        return total

    return answer


_REPEATED = ("small/uneven", "small/sorted", "small/one_row", "small/hot", "pkb/fp32")
_UNEVEN = ("small/uneven", "small/sorted", "small/unused_rows")

PROBLEM = pc.Problem(
    id=66,
    slug="cooperative_feature_exchange_backward",
    title="Adjoint of the cooperative feature exchange: route gradients back and add them to seed rows",
    category="graph_parallel",
    parallelism=("graph", "data"),
    origin="DGL GraphBolt, cooperative mini-batching: backward of the feature exchange",
    summary=(
        "The vector-Jacobian product of problem 65. grad_output (sum(counts_sent), D) float32 is cut into W chunks of counts_sent rows; "
        "chunk j of rank r goes back to rank (r + j) mod W of the group (the world if None), where it is chunk -j mod W, of "
        "counts_received rows. Row m of the chunks received, in that order, is added to row seed_inverse_ids[m] of the result "
        "(seed_size, D) float32; rows that no id names are 0."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    attainable=pc.Algorithm("additions in memory", "gradients that stay are added while others travel; the L2 adds", _added_in_memory),
    presets=(
        pc.preset(
            "small",
            "uneven, empty and one-sided counts; sorted, hot and unused rows, one row for all; cancellation; groups",
            pc.case("uneven", FP32, splits="uneven", seeds=7, depth=5),
            pc.case("idle", FP32, splits="idle", seeds=7, depth=5),
            pc.case("heavy", FP32, splits="heavy", rows=10, seeds=9, depth=3),
            pc.case("sorted", FP32, splits="uneven", seeds=7, depth=5, pattern="sorted"),
            pc.case("one_row", FP32, splits="uneven", seeds=7, depth=5, pattern="one_row"),
            pc.case("hot", FP32, splits="uneven", seeds=9, depth=4, skew=4.0),
            pc.case("unused_rows", FP32, splits="uneven", seeds=30, used=8, depth=3),
            pc.case("cancelling", FP32, splits="equal", rows=16, seeds=7, depth=5, pattern="cancelling"),
            pc.case("strided_group", FP32, splits="uneven", seeds=7, depth=5, group="strided", world_sizes=(4, 8)),
        ),
        pc.preset(
            "pkb", "the public benchmark's shape and equal counts", pc.case("fp32", FP32, splits="equal", rows=1024, seeds=512, depth=128)
        ),
        pc.preset(
            "production_sage_hidden",
            "GraphSAGE with 256 hidden features: 120 000 rows per rank into 40 000, a row's share a power law",
            pc.case("fp32", FP32, splits="diagonal", rows=120_000, seeds=40_000, depth=256, skew=1.8),
        ),
        pc.preset(
            "production_mag240m",
            "MAG240M: gradients of features, 300 000 x 768 per rank into 200 000 rows",
            pc.case("fp32", FP32, splits="diagonal", rows=300_000, seeds=200_000, depth=768),
        ),
        pc.preset(
            "production_papers100m_sage",
            "ogbn-papers100M: 200 000 x 128 per rank into 150 000 rows",
            pc.case("fp32", FP32, splits="diagonal", rows=200_000, seeds=150_000, depth=128),
        ),
    ),
    known_wrong_answers=(
        pc.wrong(
            "absolute_order",
            "chunks taken in the order of ranks",
            lambda c: _chunks(c, lambda me, j, w: j, lambda me, j, w: me - j),
            (*_UNEVEN, "pkb/fp32"),
        ),
        pc.wrong(
            "absolute_chunks",
            "chunk r taken to be for rank r",
            lambda c: _chunks(c, lambda me, j, w: me + j, lambda me, j, w: me),
            (*_UNEVEN, "pkb/fp32"),
        ),
        pc.wrong("last_wins", "of rows with the same id one, not the sum", _last_wins, _REPEATED),
        pc.wrong(
            "mean",
            "means in place of sums",
            lambda c: c.answer / torch.bincount(c.args[1], minlength=c.case["seeds"]).clamp(min=1).unsqueeze(1),
            _REPEATED,
        ),
        pc.wrong(
            "own_chunk_missing",
            "only what other ranks send",
            lambda c: _added(c, torch.cat(_received(c.case, c.inputs, c.rank))[c.args[4][0] :], c.args[1][c.args[4][0] :]),
            (*_UNEVEN, "small/heavy", "pkb/fp32"),
        ),
    ),
    alternative_solutions=pc.alternatives(sorted_fp32=_received_sums("sorted"), chunkwise_reversed_fp32=_received_sums("chunkwise")),
    process_groups=group_layout,
    integer_exact=True,
    notes=(
        "The public benchmark's counts are all equal and its ids uniform. Here counts differ for every pair of ranks, and one row may "
        "get all gradients.",
        "Gradients are in float32, as the interface says; there is no bfloat16 preset.",
    ),
    speed_note="The public one builds and sorts a sparse matrix in every call to add up rows; this one adds them with index_add_.",
)
