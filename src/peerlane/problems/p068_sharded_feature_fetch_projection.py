"""Problem 68: fetch rows of a range-sharded feature table and project them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP16, FP32, INT32, INT64, group_layout, group_members
from peerlane.problems.families.graph import expected_distinct, per_rank, skewed
from peerlane.problems.families.matmul import FLOP_UNIT, FP64, add_product, gemm_tolerance, weights

# A prime above any number of rows: multiplication by it spreads neighbouring ids over the whole table.
_SPREAD = 2654435761

# Rows that the oracle widens to float64 at a time.
_CHUNK_ROWS = 2**17


def reference(
    local_embedding_shard: torch.Tensor,
    input_node_ids: torch.Tensor,
    proj_matrix: torch.Tensor,
    num_total_nodes: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    shard = -(-num_total_nodes // ranks)
    owner = input_node_ids.div(shard, rounding_mode="floor").clamp_(max=ranks - 1)
    order = owner.argsort()
    asked = torch.zeros(ranks, dtype=torch.int64, device=owner.device).index_add_(0, owner, torch.ones_like(owner, dtype=torch.int64))
    wanted = torch.empty_like(asked)
    dist.all_to_all_single(wanted, asked, group=group)
    asked_sizes, wanted_sizes = torch.stack((asked, wanted)).tolist()

    # Ids to the owners, rows back.
    requests = input_node_ids.new_empty(sum(wanted_sizes))
    dist.all_to_all_single(requests, input_node_ids[order], wanted_sizes, asked_sizes, group=group)
    rows = local_embedding_shard[requests - rank * shard]
    received = rows.new_empty((sum(asked_sizes), rows.shape[1]))
    dist.all_to_all_single(received, rows, asked_sizes, wanted_sizes, group=group)

    features = torch.empty_like(received)
    features[order] = received
    return features @ proj_matrix


def _nodes(case: pc.Case, ranks: int) -> int:
    """Rows of the whole table. ``case``: ``nodes``, or ``nodes_per_rank`` and ``extra`` more, over which shards are unequal."""
    return int(case["nodes"] if "nodes" in case.params else case["nodes_per_rank"] * ranks + case.params.get("extra", 0))


def _shard(case: pc.Case, ranks: int) -> int:
    """Rows of every shard but the last, which may have fewer."""
    return -(-_nodes(case, ranks) // ranks)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Ids are :func:`skewed` by ``case["skew"]``, popular ones spread over the whole table and shared by all ranks.

    ``case["ids"]``:

    * ``one_owner``: nine ids in ten belong to one rank
    * ``same``: a rank's ids are all equal, a row of the next rank
    * ``local``: a rank's own rows
    * ``boundary``: first and last rows of shards

    ``case["projection"]``: ``shared``: equal on all ranks; ``identity``.
    """
    members = group_members(case, rank)
    me, ranks = members.index(rank), len(members)
    nodes, shard, depth, width = _nodes(case, ranks), _shard(case, ranks), case["depth"], case["width"]
    count = per_rank(case["queries"], me)
    rows = min(shard, nodes - me * shard)
    ids = (skewed(draw, count, nodes, case.params.get("skew", 1.0)) * _SPREAD + draw.shared.integers(0, nodes, (1,))) % nodes
    match case.params.get("ids"):
        case "one_owner":
            ids = torch.where(draw.uniform((count,), FP32) < 0.9, shard + ids % min(shard, nodes - shard), ids)
        case "same":
            ids = ((me + 1) % ranks * shard + draw.integers(0, nodes - (ranks - 1) * shard, (1,))).repeat(count)
        case "local":
            ids = me * shard + ids % rows
        case "boundary":
            ids = (draw.integers(0, ranks + 1, (count,)) * shard - draw.integers(0, 2, (count,))).clamp_(0, nodes - 1)
    source = draw.shared if case.params.get("projection") == "shared" else draw
    if case.params.get("projection") == "identity":
        projection = torch.eye(depth, dtype=case.dtype, device=draw.device)
    else:
        projection = weights(case, source, (depth, width), depth)
    group = next((pc.GroupRef(name) for name in group_layout(case)), None)
    return (_table(case, draw, (rows, depth)), ids.to(case.params.get("index", INT64)), projection, nodes, group)


def _table(case: pc.Case, draw: pc.Draw, shape: tuple[int, int]) -> torch.Tensor:
    """Features: in bfloat16, drawn in place for the sake of large tables, of either sign and of sizes in [0.5, 2); else N(0, 1)."""
    if draw.integer:
        return draw.sparse_signs(shape, case.dtype, terms=case["depth"])
    if case.dtype != BF16:
        return draw.normal(shape, case.dtype)
    words = draw.bits(shape, torch.int16)
    # Sign, the lowest bit of the exponent and the mantissa stay random; the other bits are those of 0.5.
    return words.bitwise_and_(-0x7F01).bitwise_or_(0x3F00).view(BF16)


def _fetched(inputs: pc.Inputs, members: Sequence[int], ids: torch.Tensor, owner: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Row ``place`` of the shard of group rank ``owner`` for every id; places beyond a shard are cut to its last row."""
    rows: torch.Tensor = inputs[members[0]][0].new_zeros((ids.numel(), inputs[members[0]][0].shape[1]))
    for index, q in enumerate(members):
        mine = owner == index
        rows[mine] = inputs[q][0][place[mine].clamp(0, inputs[q][0].shape[0] - 1)]
    return rows


def _features(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """The rows that the rank's ids name."""
    members, ids = group_members(case, rank), inputs[rank][1].to(INT64)
    shard = _shard(case, len(members))
    return _fetched(inputs, members, ids, ids // shard, ids % shard)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    projection, features = inputs[rank][2], _features(case, inputs, rank)
    value = torch.zeros((features.shape[0], projection.shape[1]), dtype=FP64, device=features.device)
    magnitude = torch.zeros_like(value)
    for first in range(0, len(features), _CHUNK_ROWS):
        part = slice(first, first + _CHUNK_ROWS)
        add_product(value[part], magnitude[part], features[part], projection)
    return pc.Expected("projection", value, case.dtype, magnitude=magnitude)


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """The fetch is exact; the product is accumulated in float32 and rounded once."""
    queries = case["queries"]
    return {"projection": gemm_tolerance(case, case["width"] * (queries if isinstance(queries, int) else min(queries)))}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Every different row is read by its owner once, and sent once to every rank that wants it, in the shorter of its two forms.

    Ids need not travel, for peers could be read. Of how often drawn ids repeat, and whose they are, the mean is taken; where the ids follow
    a pattern, nothing is counted that the pattern may spare.
    """
    members = group_members(case, rank)
    me, ranks = members.index(rank), len(members)
    depth, width, size, skew = case["depth"], case["width"], case.dtype.itemsize, case.params.get("skew", 1.0)
    counts, nodes, known = [per_rank(case["queries"], q) for q in range(ranks)], _nodes(case, ranks), "ids" not in case.params
    distinct = [expected_distinct(count, nodes, skew) if known else 0.0 for count in counts]
    row = min(depth, width) * size
    return pc.Cost(
        hbm_bytes=size * (expected_distinct(sum(counts), nodes, skew) / ranks * depth * known + counts[me] * width + depth * width)
        + case.params.get("index", INT64).itemsize * counts[me],
        egress_bytes=row * (sum(distinct) - distinct[me]) / ranks,
        ingress_bytes=pc.traffic.all_to_all(row * distinct[me], ranks),
        flops={FLOP_UNIT[case.dtype]: 2 * depth * width * distinct[me]},
    )


def _projected(case: pc.Case, features: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    return torch.mm(features.to(FP32), projection.to(FP32)).to(case.dtype)


def _direct(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    return _projected(case, _features(case, inputs, rank), inputs[rank][2])


def _split_depth(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """The product in two halves of the depth, the second half first, in float32."""
    features, projection = _features(case, inputs, rank).to(FP32), inputs[rank][2].to(FP32)
    half = case["depth"] // 2
    product: torch.Tensor = features[:, half:] @ projection[half:] + features[:, :half] @ projection[:half]
    return product.to(case.dtype)


def _unique(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Every different row fetched and projected once."""
    ids, places = inputs[rank][1].unique(return_inverse=True)
    arguments = list(inputs)
    arguments[rank] = (inputs[rank][0], ids, *inputs[rank][2:])
    return _direct(case, arguments, rank)[places]


def _partitioned(
    context: pc.AnswerContext, owner_and_place: Callable[[torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """The projection of the rows that another partition of the table names: ``owner_and_place(ids, ranks, own rank)``."""
    ids = context.args[1].to(INT64)
    owner, place = owner_and_place(ids, len(context.members), context.place)
    return _projected(context.case, _fetched(context.inputs, context.members, ids, owner, place), context.args[2])


def _floor(context: pc.AnswerContext) -> torch.Tensor:
    shard = context.args[3] // len(context.members)
    return _partitioned(
        context, lambda ids, ranks, _: ((ids // shard).clamp(max=ranks - 1), ids - (ids // shard).clamp(max=ranks - 1) * shard)
    )


def _own_shard(context: pc.AnswerContext) -> torch.Tensor:
    return _partitioned(context, lambda ids, _, me: (torch.full_like(ids, me), ids % len(context.args[0])))


def _remote_missing(context: pc.AnswerContext) -> pc.Tree:
    remote = context.args[1].to(INT64) // _shard(context.case, len(context.members)) != context.place
    return context.answer.masked_fill(remote.unsqueeze(1), 0.0)


def _next_projection(context: pc.AnswerContext) -> torch.Tensor:
    other = context.members[(context.place + 1) % len(context.members)]
    return _projected(context.case, _features(context.case, context.inputs, context.rank), context.inputs[other][2])


_UNEVEN = ("small/uneven_bf16", "small/uneven_fp32", "small/boundary_bf16")
_RANDOM = (*_UNEVEN, "small/skewed_fp16", "small/one_owner_bf16", "small/int32_ids_bf16", "small/identity_bf16", "pkb/bf16")
_PRODUCTION = ("production_papers100m/bf16", "production_mag240m/bf16", "production_recommender/bf16")
_EVERYWHERE = (*_RANDOM, *_PRODUCTION)

PROBLEM = pc.Problem(
    id=68,
    slug="sharded_feature_fetch_projection",
    title="Fetch rows of a range-sharded feature table and project them",
    category="graph_parallel",
    parallelism=("graph", "data"),
    origin="GraphStorm and DGL: distributed embedding fetch, followed by the projection of node features",
    summary=(
        "A table of num_total_nodes rows of D features is sharded over the group (the world if None): with c = ceil(num_total_nodes / W), "
        "row i is row i - r c of local_embedding_shard on rank r = min(i // c, W - 1). Every rank returns (Q, D_out): the rows that its "
        "input_node_ids (Q,) name, times its own proj_matrix (D, D_out), accumulated in float32 and rounded once. Ids may repeat, and Q "
        "may differ between ranks and be 0."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    bandwidth="production_papers100m_part",
    presets=(
        pc.preset(
            "small",
            "an uneven last shard; ranks without ids; repeated, local, skewed ids, and those at shards' boundaries; identity; groups",
            pc.case("uneven_bf16", BF16, nodes_per_rank=10, extra=3, depth=8, width=6, queries=(23, 0, 17, 9)),
            pc.case("uneven_fp32", FP32, nodes_per_rank=10, extra=3, depth=8, width=6, queries=(19, 14)),
            pc.case("boundary_bf16", BF16, nodes_per_rank=10, extra=3, depth=8, width=6, queries=40, ids="boundary"),
            pc.case("skewed_fp16", FP16, nodes_per_rank=100, depth=8, width=10, queries=(30, 21), skew=6.0),
            pc.case("one_owner_bf16", BF16, nodes_per_rank=10, extra=1, depth=8, width=6, queries=200, ids="one_owner"),
            pc.case("same_fp32", FP32, nodes_per_rank=10, depth=8, width=6, queries=9, ids="same"),
            pc.case("local_bf16", BF16, nodes_per_rank=10, extra=1, depth=8, width=6, queries=9, ids="local"),
            pc.case("int32_ids_bf16", BF16, nodes_per_rank=20, depth=33, width=17, queries=16, index=INT32, projection="shared"),
            pc.case("identity_bf16", BF16, nodes_per_rank=10, extra=1, depth=8, width=8, queries=12, projection="identity"),
            pc.case(
                "strided_group_fp32", FP32, nodes_per_rank=10, extra=1, depth=8, width=6, queries=9, group="strided", world_sizes=(4, 8)
            ),
            pc.case("public_bf16", BF16, nodes_per_rank=20, depth=16, width=16, queries=24, variant="pkb"),
        ),
        pc.preset(
            "pkb",
            "the public benchmark's shape but for the table, of 2 million rows in place of 111 million",
            pc.case("bf16", BF16, nodes=2_000_000, depth=256, width=256, queries=20_000),
            pc.case("public_bf16", BF16, nodes=2_000_000, depth=256, width=256, queries=20_000, variant="pkb"),
        ),
        pc.preset(
            "production_papers100m",
            "ogbn-papers100M: 111 million x 128, 350 000 ids per rank, a power law, to 256",
            pc.case("bf16", BF16, nodes=111_059_956, depth=128, width=256, queries=350_000, skew=3.0, world_sizes=(4, 8)),
            pc.case("half_bf16", BF16, nodes=55_529_978, depth=128, width=256, queries=350_000, skew=3.0, world_sizes=(2,)),
        ),
        pc.preset(
            "production_mag240m",
            "MAG240M papers: an eighth of the 121.75 million x 768, 150 000 ids per rank, to 1024",
            pc.case("bf16", BF16, nodes=15_218_940, depth=768, width=1024, queries=150_000),
        ),
        pc.preset(
            "production_papers100m_part",
            "a fourteenth of ogbn-papers100M: 8 million x 128, 350 000 ids per rank, a power law, to 256",
            pc.case("bf16", BF16, nodes=8_000_000, depth=128, width=256, queries=350_000, skew=3.0),
        ),
        pc.preset(
            "production_recommender",
            "a recommender's id embedding: 40 million x 256, 65536 ids per rank, to 128, one projection for all ranks",
            pc.case("bf16", BF16, nodes=40_000_000, depth=256, width=128, queries=65536, skew=3.0, projection="shared"),
        ),
    ),
    excused={"tails_lost@small/public_bf16/w2": "nobody asks for the last row of a shard there"},
    known_wrong_answers=(
        pc.wrong("remote_missing", "zeros for rows of other ranks", _remote_missing, _EVERYWHERE),
        pc.wrong("own_shard", "every row taken from the rank's own shard", _own_shard, _EVERYWHERE),
        pc.wrong(
            "modulo_partition",
            "row i taken from rank i mod W",
            lambda c: _partitioned(c, lambda ids, ranks, _: (ids % ranks, ids // ranks)),
            (*_RANDOM, *_PRODUCTION, "small/local_bf16"),
        ),
        pc.wrong("floor_partition", "shards of floor(N / W) rows", _floor, _UNEVEN),
        pc.wrong(
            "owner_order",
            "rows in the order of their owners, as they come back",
            lambda c: c.answer[(c.args[1] // _shard(c.case, len(c.members))).argsort(stable=True)],
            (*_RANDOM, *_PRODUCTION),
        ),
        pc.wrong(
            "next_projection",
            "the next rank's projection",
            _next_projection,
            (*_UNEVEN, "small/skewed_fp16", "small/one_owner_bf16", "pkb/bf16", *_PRODUCTION[:2]),
        ),
    ),
    alternative_solutions=pc.alternatives(direct_fp32=_direct, split_depth_fp32=_split_depth, unique_fp32=_unique),
    process_groups=group_layout,
    integer_exact=True,
    graph=False,
    graph_reason="how many rows ranks want from each other depends on the ids, and the host must know it for the exchange",
    notes=(
        "The public benchmark's table has 111 million rows, of which its ids touch some 140 000 per shard, in ascending order and in turn "
        "from every owner. Here ids are random over the whole table, which has 2 million rows at that shape: 1 GB, twenty times the cache.",
        "The public benchmark's ids are int64, its features bfloat16, and its shards of one size. The variant pkb has no other cases.",
        "MAG240M's whole table, 187 GB, leaves no room for the oracle, which holds all shards. Here it is an eighth of it. On two ranks, "
        "ogbn-papers100M's is halved.",
        "Projections have variance 1 / D, so that outputs have about the size of features.",
    ),
)
