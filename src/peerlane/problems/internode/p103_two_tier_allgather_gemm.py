"""Problem 103: all-gather of row shards over the ranks of several nodes, then a matrix product."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import matmul, two_tiers
from peerlane.problems.families.collective import all_gather_single
from peerlane.problems.families.matmul import BF16, FLOP_UNIT, FP32, FP64


def reference(A_local: torch.Tensor, B: torch.Tensor, node_group: dist.ProcessGroup, rail_group: dist.ProcessGroup) -> torch.Tensor:
    rows, depth = A_local.shape
    nodes, places = dist.get_world_size(rail_group), dist.get_world_size(node_group)
    column = A_local.new_empty((nodes * rows, depth))
    all_gather_single(column, A_local.contiguous(), group=rail_group)
    gathered = A_local.new_empty((places * nodes * rows, depth))
    all_gather_single(gathered, column, group=node_group)
    in_order = gathered.view(places, nodes, rows, depth).transpose(0, 1).reshape(-1, depth)
    return in_order @ B


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    m, k = case["m"], case["k"]
    a = matmul.activations(case, rank, draw, (m, k), k)
    return a, matmul.weights(case, draw, (k, matmul.columns(case)), k), two_tiers.NODE, two_tiers.RAIL


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    b = inputs[rank][1]
    values, magnitudes = [], []
    for args in inputs:
        value = torch.zeros((args[0].shape[0], b.shape[1]), dtype=FP64, device=b.device)
        magnitude = torch.zeros_like(value)
        matmul.add_product(value, magnitude, args[0], b)
        values.append(value)
        magnitudes.append(magnitude)
    return pc.Expected("product", torch.cat(values), case.dtype, magnitude=torch.cat(magnitudes))


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """One product accumulated in float32 and rounded once: 2 u of the result, and the random walk of its additions."""
    return {"product": matmul.gemm_tolerance(case, case.world_size * case["m"] * matmul.columns(case))}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Every shard crosses the network once to every other node, and from there reaches the other ranks of the node inside it."""
    m, k, n, size, world = case["m"], case["k"], matmul.columns(case), case.dtype.itemsize, case.world_size
    shard, nodes = m * k * size, case.cluster.nodes
    inside = (case.cluster.ranks_per_node - 1) * nodes * shard
    between = (nodes - 1) * shard
    return pc.Cost(
        hbm_bytes=(world * m * k + k * n + world * m * n) * size,
        egress_bytes=inside,
        ingress_bytes=inside,
        network_egress_bytes=between,
        network_ingress_bytes=between,
        flops={FLOP_UNIT[case.dtype]: 2 * world * m * k * n},
    )


def _wide(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """One product in float32 over the gathered rows, rounded once."""
    a = torch.cat([args[0] for args in inputs])
    return torch.mm(a.to(FP32), inputs[rank][1].to(FP32)).to(case.dtype)


def _shardwise(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """One product for each shard, in the working dtype."""
    return torch.cat([args[0] @ inputs[rank][1] for args in inputs])


Order = Callable[[pc.AnswerContext], Sequence[int | None]]


def _in_order(order: Order) -> Callable[[pc.AnswerContext], torch.Tensor]:
    """A wrong answer: ``order`` names the rank whose shard goes to each place of A; None leaves zeros there."""

    def answer(context: pc.AnswerContext) -> torch.Tensor:
        own, b = context.args[:2]
        a = torch.cat([torch.zeros_like(own) if q is None else context.inputs[q][0] for q in order(context)])
        return torch.mm(a.to(FP32), b.to(FP32)).to(context.case.dtype)

    return answer


def _kept(members: Callable[[pc.AnswerContext], Sequence[int]]) -> Order:
    return lambda c: [q if q in members(c) else None for q in c.ranks]


def _by_rail(context: pc.AnswerContext) -> list[int]:
    """All nodes' shards of a rail, rail by rail: what the two gathers give before they are put in order."""
    return [q for rail in context.case.cluster.rail_groups for q in rail]


def _nodes_reversed(context: pc.AnswerContext) -> list[int]:
    return [q for members in context.case.cluster.node_groups[::-1] for q in members]


def _own_node_first(context: pc.AnswerContext) -> list[int]:
    """The shards of the rank's own node in the place of the first node's, and so on."""
    groups, mine = context.case.cluster.node_groups, context.case.cluster.node_of(context.rank)
    return [q for members in (*groups[mine:], *groups[:mine]) for q in members]


def _stale_network(context: pc.AnswerContext) -> torch.Tensor:
    """The rows of other nodes are those of the slot before."""
    answer: torch.Tensor = context.previous.clone()
    rows = context.case["m"] * context.case.cluster.ranks_per_node
    mine = slice(context.case.cluster.node_of(context.rank) * rows, (context.case.cluster.node_of(context.rank) + 1) * rows)
    answer[mine] = context.answer[mine]
    return answer


PROBLEM = pc.Problem(
    id=103,
    slug="two_tier_allgather_gemm",
    title="All-gather of row shards over several nodes and matrix product",
    category="internode",
    parallelism=("tensor", "sequence", "fsdp"),
    origin="All-gather + GEMM between nodes of Triton-distributed and Flux: sequence-parallel activations of tensor parallelism over nodes",
    summary=(
        "A_local (m, K) holds rows [r m, (r+1) m) of A (W m, K). Every rank returns A @ B (W m, N) with its own B (K, N), accumulated "
        f"in float32 in any order and rounded once. B differs from rank to rank. {two_tiers.GROUPS}"
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    world_sizes=two_tiers.WORLD_SIZES,
    nodes=two_tiers.NODES,
    process_groups=pc.node_and_rail,
    presets=(
        pc.preset(
            "small",
            "ragged tiles, shards of unlike scale, a zero shard, NaN and infinities",
            pc.case("tile_bf16", BF16, m=17, k=40, n=65),
            pc.case("ragged_bf16", BF16, m=5, k=13, n=7),
            pc.case("ragged_fp32", FP32, m=5, k=13, n=7),
            pc.case("one_row_bf16", BF16, m=1, k=64, n=33),
            pc.case("rank_scale_bf16", BF16, m=17, k=40, n=65, pattern="rank_scale"),
            pc.case("zero_shard_bf16", BF16, m=17, k=40, n=65, pattern="zero_shard"),
            pc.case("special_bf16", BF16, m=17, k=40, n=65, pattern="special"),
        ),
        pc.preset(
            "pkb", "256 rows a rank, 512 x 256; the public benchmark has no such problem", pc.case("bf16", BF16, m=256, k=512, n=256)
        ),
        pc.preset(
            "production_llama3_405b_qkv",
            "query, key and value projections of 1024 tokens a rank, hidden 16384",
            pc.case("bf16", BF16, m=1024, k=16384, n_total=(128 + 2 * 8) * 128),
        ),
        pc.preset(
            "production_llama3_70b_gate_up",
            "gate and up projections of 1024 tokens a rank, and of 1021",
            pc.case("bf16", BF16, m=1024, k=8192, n_total=2 * 28672),
            pc.case("ragged_bf16", BF16, m=1021, k=8192, n_total=2 * 28672),
        ),
    ),
    known_wrong_answers=(
        pc.wrong("no_communication", "the rank's own rows of A only", _in_order(_kept(lambda c: [c.rank]))),
        pc.wrong("node_only", "the rows of the rank's own node only", _in_order(_kept(lambda c: two_tiers.node_of(c.case, c.rank)))),
        pc.wrong("rail_only", "the rows of the rank's own rail only", _in_order(_kept(lambda c: two_tiers.rail_of(c.case, c.rank)))),
        pc.wrong("drop_last_rank", "A without the last rank's rows", _in_order(_kept(lambda c: c.ranks[:-1]))),
        pc.wrong("by_rail", "shards in the order of rails", _in_order(_by_rail)),
        pc.wrong("nodes_reversed", "the last node's shards first", _in_order(_nodes_reversed)),
        pc.wrong("own_node_first", "shards in ring order of nodes, from the rank's own", _in_order(_own_node_first)),
        pc.wrong("stale_network", "the rows of other nodes are those of the slot before", _stale_network),
    ),
    alternative_solutions=pc.alternatives(fp32_accumulation=_wide, shardwise=_shardwise),
    integer_exact=True,
    notes=(
        "The reference gathers over rails first. So each shard crosses the network once to each node, as the bound says. What is left is "
        "to multiply the rows of the own node while the others arrive.",
    ),
)
