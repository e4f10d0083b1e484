"""Problem 10: lookup in an embedding table whose rows are sharded across ranks."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from peerlane.common.places import rows_figure
from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32

# A prime larger than any table: multiplying ids by it modulo the table's size permutes them.
_HASH = 2654435761


def reference(indices: torch.Tensor, local_shard: torch.Tensor) -> torch.Tensor:
    world, (rows, width) = dist.get_world_size(), local_shard.shape
    owners, order = torch.sort(indices // rows, stable=True)
    bounds = torch.searchsorted(owners, torch.arange(world + 1, device=indices.device))
    wanted = bounds.diff()
    asked = torch.empty_like(wanted)
    dist.all_to_all_single(asked, wanted)
    wanted_list, asked_list = torch.stack((wanted, asked)).tolist()
    ids = indices.new_empty(sum(asked_list))
    dist.all_to_all_single(ids, indices[order], asked_list, wanted_list)
    found = local_shard[ids - dist.get_rank() * rows]
    vectors = local_shard.new_empty((indices.shape[0], width))
    dist.all_to_all_single(vectors, found, wanted_list, asked_list)
    return vectors


def _rows(case: pc.Case) -> int:
    """Rows per rank: ``rows``, or its share of ``vocab``."""
    return int(case["rows"] if "rows" in case.params else case["vocab"] // case.world_size)


def _count(case: pc.Case, rank: int) -> int:
    """Indices on the rank: ``count``, or its entry of ``counts``."""
    return int(case["count"] if "count" in case.params else case["counts"][rank])


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of random bits, and ids that ``case["ids"]`` describes; the same distribution on all ranks, but for ``own``.

    * uniform; ascending, descending: uniform ids, sorted
    * zipf: small ids are more frequent, by :func:`zipf_below`; if ``case["hashed"]``, the frequent ones are scattered over the table
    * last_owner: all on the last rank
    * own: all on the rank itself
    * same: one id, everywhere
    * edges: first and last rows of shards
    """
    rows, count, world = _rows(case), _count(case, rank), case.world_size
    match case["ids"]:
        case "uniform":
            ids = draw.integers(0, world * rows, (count,))
        case "ascending" | "descending":
            ids = draw.integers(0, world * rows, (count,)).sort(descending=case["ids"] == "descending").values
        case "zipf":
            # One float32 is too coarse for the largest tables.
            uniform = draw.uniform((count,), torch.float64) + draw.uniform((count,), torch.float64) * 2.0**-24
            ids = zipf(uniform, world * rows, case["exponent"])
            if case.params.get("hashed"):
                ids = (ids * _HASH + draw.shared.integers(0, world * rows, (1,))) % (world * rows)
        case "last_owner":
            ids = draw.integers((world - 1) * rows, world * rows, (count,))
        case "own":
            ids = draw.integers(rank * rows, (rank + 1) * rows, (count,))
        case "same":
            ids = draw.shared.integers(0, world * rows, (1,)).repeat(count)
        case "edges":
            edge = draw.integers(0, 2 * world, (count,))
            ids = edge // 2 * rows + edge % 2 * (rows - 1)
        case other:
            raise ValueError(f"unknown ids {other!r}")
    return ids, draw.bits((rows, case["width"]), case.dtype)


def zipf(uniform: torch.Tensor, size: int, exponent: float) -> torch.Tensor:
    """Ids in [0, size) from uniform float64 numbers in [0, 1), by inversion of :func:`zipf_below`."""
    if exponent == 1.0:
        place = torch.exp(uniform * math.log(size + 1))
    else:
        place = (1.0 + uniform * ((size + 1) ** (1 - exponent) - 1)) ** (1 / (1 - exponent))
    return (place.to(torch.int64) - 1).clamp_(0, size - 1)


def zipf_below(bound: torch.Tensor, size: int, exponent: float) -> torch.Tensor:
    """The probability of an id below ``bound``: the integral of x ** -exponent up to bound + 1, as a share of that up to size + 1."""
    if exponent == 1.0:
        return torch.log(bound + 1) / math.log(size + 1)
    return torch.div((bound + 1) ** (1 - exponent) - 1, (size + 1) ** (1 - exponent) - 1)


def distinct(case: pc.Case, draws: int, owner: int) -> float:
    """Different rows of one owner among so many ids, on average; 0 where ids are made to be special, not drawn from the whole table."""
    rows, size = _rows(case), _rows(case) * case.world_size
    match case["ids"]:
        case "uniform" | "ascending" | "descending":
            return rows * _presence(torch.tensor(1.0 / size, dtype=torch.float64), draws).item()
        case "zipf":
            hashed = case.params.get("hashed", False)
            bounds = _bounds(0, size) if hashed else _bounds(owner * rows, (owner + 1) * rows)
            ids, probability = bounds.diff(), zipf_below(bounds, size, case["exponent"]).diff()
            total = float((ids * _presence(probability / ids.clamp(min=1.0), draws)).sum())
            return total / case.world_size if hashed else total
        case _:
            return 0.0


def _presence(probability: torch.Tensor, draws: int) -> torch.Tensor:
    """The probability that an id is among ``draws``."""
    return -torch.expm1(draws * torch.log1p(-probability))


def _bounds(first: int, last: int) -> torch.Tensor:
    """Of ranges of ids in [first, last) that are nearly equally frequent in Zipf's law: one id each, then wider ones; some empty."""
    single, wide = torch.arange(1000, dtype=torch.float64), 1000 * 1.01 ** torch.arange(1500, dtype=torch.float64)
    return torch.cat((single, wide.floor())).clamp(first, last)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return pc.exactly("vectors", _by_owner(case, inputs, rank, lambda ids: ids))


def _by_owner(case: pc.Case, inputs: pc.Inputs, rank: int, order: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The vectors of every owner in turn; ``order`` arranges the ids of one owner, which come in the rank's order."""
    ids, rows = inputs[rank][0], _rows(case)
    return torch.cat([shard[order(ids[ids // rows == owner]) - owner * rows] for owner, (_, shard) in enumerate(inputs)])


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Every different row crosses a rank's port once, however often it is wanted there; asking for rows by direct loads sends nothing."""
    row, counts = case["width"] * case.dtype.itemsize, [_count(case, q) for q in range(case.world_size)]
    received = sum(distinct(case, counts[rank], owner) for owner in range(case.world_size) if owner != rank)
    return pc.Cost(
        hbm_bytes=counts[rank] * (torch.int64.itemsize + row) + distinct(case, sum(counts), rank) * row,
        egress_bytes=distinct(case, sum(counts) - counts[rank], rank) * row,
        ingress_bytes=received * row,
        typical=True,
    )


def _read_where_they_are(case: pc.Case, rank: int) -> pc.Steps:
    """A rank numbers its ids by owner, and reads their rows, its own and over links, where a row that it names twice comes twice."""
    row, count = case["width"] * case.dtype.itemsize, _count(case, rank)
    others = count * (case.world_size - 1) / case.world_size
    least = cost(case, rank)
    places = {rows_figure("read_rows", row): count * row - others * row, rows_figure("peer_read_rows", row): others * row}
    return (
        pc.step("ids by owner", hbm=3 * torch.int64.itemsize * count, barriers=1),
        pc.step("rows", hbm=least.hbm_bytes, link=max(others * row, least.egress_bytes, least.ingress_bytes), barriers=1, places=places),
    )


def _lookup(context: pc.AnswerContext, ids: torch.Tensor) -> torch.Tensor:
    """The vectors of the ids, in their order."""
    rows, answer = _rows(context.case), torch.empty_like(context.answer)
    for owner, (_, shard) in enumerate(context.inputs):
        held = ids // rows == owner
        answer[held] = shard[ids[held] - owner * rows]
    return answer


def _ids_by_owner(context: pc.AnswerContext) -> torch.Tensor:
    ids: torch.Tensor = context.args[0]
    return ids[torch.argsort(ids // _rows(context.case), stable=True)]


def _no_communication(context: pc.AnswerContext) -> pc.Tree:
    return context.args[1][_ids_by_owner(context) % _rows(context.case)]


def _clamped(context: pc.AnswerContext) -> pc.Tree:
    rows = _rows(context.case)
    return context.args[1][(_ids_by_owner(context) - context.rank * rows).clamp(0, rows - 1)]


def _dealt_out(context: pc.AnswerContext) -> torch.Tensor:
    """As if row i were the i // W-th of rank i % W."""
    rows, world = _rows(context.case), context.case.world_size
    ids = _ids_by_owner(context)
    return _lookup(context, ids % world * rows + ids // world)


def _owners_reversed(context: pc.AnswerContext) -> torch.Tensor:
    ids: torch.Tensor = context.args[0]
    return _lookup(context, ids[torch.argsort(ids // _rows(context.case), stable=True, descending=True)])


def _first_ids_again(context: pc.AnswerContext) -> torch.Tensor:
    """This call's table and the order of owners, but every owner's first id in place of all."""
    return _by_owner(context.case, context.inputs, context.rank, lambda ids: ids[:1].expand(ids.shape[0]))


_COUNTS = (17, 0, 29, 14, 23, 1, 15, 16)


def _small(label: str, dtype: torch.dtype, ids: str, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"rows": 8, "width": 3, "counts": _COUNTS, "ids": ids, **params})


_MIXED = pc.small_cases("uniform_fp32", "uniform_bf16", "edges_bf16", "descending_bf16", "zipf_bf16", "wide_bf16")
_REMOTE = (*_MIXED, "small/ascending_bf16", "small/last_owner_bf16")

PROBLEM = pc.Problem(
    id=10,
    slug="embedding_lookup",
    title="Lookup in an embedding table sharded by rows",
    category="vocab_parallel",
    parallelism=("vocabulary",),
    origin="Row-wise sharded embedding tables of recommendation models (DLRM in TorchRec) and of language models",
    summary=(
        "Rank q's local_shard (R, D) is rows q R to (q + 1) R - 1 of a table; R is the same on all ranks. indices (n,) are int64 ids of "
        "any rows; n may differ between ranks and be 0. Returns (n, D): bit copies of the rows of the rank's ids, sorted by owner. The "
        "rows of rank 0 come first, in the order of their ids in indices, then those of rank 1, and so on. Rows of repeated ids are "
        "repeated. Tables may change between calls."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    attainable=pc.Algorithm(
        "ids sorted by owner, rows read where they are", "every row is read once, by loads over links", _read_where_they_are
    ),
    bandwidth="production_llama3_70b_vocab",
    presets=(
        pc.preset(
            "small",
            "unequal and missing ids; all at one owner, or at the rank itself; one id; first and last rows; sorted ids; Zipf's law",
            _small("uniform_fp32", FP32, "uniform"),
            _small("uniform_bf16", BF16, "uniform"),
            _small("edges_bf16", BF16, "edges"),
            _small("ascending_bf16", BF16, "ascending"),
            _small("descending_bf16", BF16, "descending"),
            _small("zipf_bf16", BF16, "zipf", exponent=1.05, hashed=True),
            _small("wide_bf16", BF16, "zipf", exponent=1.0, width=130),
            _small("last_owner_bf16", BF16, "last_owner"),
            _small("same_id_bf16", BF16, "same"),
            _small("local_and_idle_bf16", BF16, "own"),
            _small("nothing_bf16", BF16, "uniform", counts=(0,) * 8),
        ),
        pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, ids="uniform", rows=1024, width=1024, count=1024)),
        pc.preset(
            "production_dlrm_criteo",
            "4 million rows of 128 on every rank, 65536 ids by Zipf's law (1.05), scattered over the table",
            pc.case("bf16", BF16, ids="zipf", exponent=1.05, hashed=True, rows=4_000_000, width=128, count=65536),
        ),
        pc.preset(
            "production_llama3_70b_vocab",
            "vocabulary 128256, hidden 8192, 8192 tokens by Zipf's law (1), small ids the frequent ones",
            pc.case("bf16", BF16, ids="zipf", exponent=1.0, vocab=128256, width=8192, count=8192),
        ),
        pc.preset(
            "production_narrow_fp32",
            "a million rows of 64 bytes on every rank, 262144 uniform ids",
            pc.case("fp32", FP32, ids="uniform", rows=1_000_000, width=16, count=262144),
        ),
    ),
    known_wrong_answers=(
        pc.wrong("no_communication", "every id looked up in the rank's own shard, modulo R", _no_communication, _REMOTE),
        pc.wrong("clamped", "foreign ids moved to the nearest row of the rank's own shard", _clamped, _REMOTE),
        pc.wrong("dealt_out", "rows taken to be dealt out to the ranks one by one", _dealt_out, _REMOTE),
        pc.wrong("input_order", "vectors in the order of the ids", lambda c: _lookup(c, c.args[0]), _MIXED),
        pc.wrong("sorted_ids", "vectors in ascending order of the ids", lambda c: _lookup(c, c.args[0].sort().values), _MIXED),
        pc.wrong("owners_reversed", "vectors of the last owner first", _owners_reversed, (*_MIXED, "small/ascending_bf16")),
        pc.wrong(
            "unstable",
            "sorted by owner, but backwards within",
            lambda c: _by_owner(c.case, c.inputs, c.rank, lambda ids: ids.flip(0)),
            (*_REMOTE, "small/local_and_idle_bf16"),
        ),
        pc.wrong("first_ids_again", "one row per owner", _first_ids_again, (*_REMOTE, "small/local_and_idle_bf16")),
    ),
    graph=False,
    graph_reason="the host must know how many rows the other ranks ask for, which depends on their ids",
    notes=(
        "Vectors come sorted by owner, as in the public benchmark. They are not put back into the order of the ids.",
        "The public benchmark draws ids uniformly, and equally many on every rank. Here some ranks have few ids or none. There are hot "
        "rows, hot owners and sorted ids.",
        "Ids out of range are not part of the interface, although the public benchmark clamps them.",
        "Costs count different rows, because a row that is wanted twice is fetched once. They are means over draws of the ids.",
    ),
    speed_note="The public one reads from the device six times or more; this one reads all counts at once.",
)
