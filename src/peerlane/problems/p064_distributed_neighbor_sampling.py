"""Problem 64: multi-hop neighbour sampling on a graph whose adjacency is partitioned over ranks."""

from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import INT64, group_layout, group_members
from peerlane.problems.families.graph import expected_distinct
from peerlane.problems.families.neighbours import graph_arguments, mean_taken

Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    seed_nodes: torch.Tensor,
    fanouts: list[int],
    local_adj_row_ptr: torch.Tensor,
    local_adj_col: torch.Tensor,
    node_to_rank: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    replace: bool = False,
) -> Sample:
    ranks = dist.get_world_size(group)

    def exchanged(rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    nodes = frontier = seed_nodes.to(torch.int64)
    found: list[tuple[torch.Tensor, ...]] = []
    # A rank without a frontier goes on answering the others.
    for fanout in fanouts:
        # The frontier, sorted by owner, to the owners.
        owner = node_to_rank[frontier].to(torch.int64)
        order = owner.argsort(stable=True)
        asked = torch.zeros(ranks, dtype=torch.int64, device=owner.device).index_add_(0, owner, torch.ones_like(owner))
        wanted = torch.empty_like(asked)
        dist.all_to_all_single(wanted, asked, group=group)
        asked_sizes, wanted_sizes = torch.stack((asked, wanted)).tolist()
        requests = exchanged(frontier[order], wanted_sizes, asked_sizes)

        # Every requested node's first edge and number of sampled edges back, and then its neighbours.
        first = local_adj_row_ptr[requests]
        taken = local_adj_row_ptr[requests + 1] - first
        if fanout >= 0:
            taken.clamp_(max=fanout)
        replies = exchanged(torch.stack((first, taken), dim=1), asked_sizes, wanted_sizes)
        neighbours = local_adj_col[_positions(first, taken)]
        ranges = torch.empty_like(replies)
        ranges[order] = replies
        first_edge, degree = ranges.unbind(1)
        counts = (*torch.split(taken, wanted_sizes), *torch.split(replies[:, 1], asked_sizes))
        edges = torch.stack([part.sum() for part in counts]).tolist()
        received = exchanged(neighbours, edges[ranks:], edges[:ranks])

        # Neighbours come in the order of owners; into that of the frontier.
        begin = torch.empty_like(degree)
        begin[order] = replies[:, 1].cumsum(0) - replies[:, 1]
        source = received[_positions(begin, degree)]
        found.append((source, frontier.repeat_interleave(degree), _positions(first_edge, degree)))

        # Nodes that were never seen before, in the order of their first edges.
        known = torch.cat((nodes, source))
        _, group_of = torch.unique(known, return_inverse=True)
        first_seen = torch.full((known.numel(),), known.numel(), device=known.device).scatter_reduce_(
            0, group_of, torch.arange(known.numel(), device=known.device), "amin"
        )
        fresh = first_seen[group_of] == torch.arange(known.numel(), device=known.device)
        fresh[: nodes.numel()] = False
        frontier = known[fresh]
        nodes = torch.cat((nodes, frontier))

    source, destination, edge = (torch.cat(parts) for parts in zip(*found, strict=True)) if found else [nodes[:0]] * 3
    ascending, place = nodes.sort()
    return nodes, place[torch.searchsorted(ascending, source)], place[torch.searchsorted(ascending, destination)], edge


def _positions(first: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """first[0], first[0] + 1, ... (count[0] of them), first[1], ..."""
    begin = count.cumsum(0) - count
    offset = (first - begin).repeat_interleave(count)
    return offset + torch.arange(offset.numel(), device=offset.device)


def _nodes(case: pc.Case, ranks: int) -> int:
    return int(case["nodes"] if "nodes" in case.params else case["nodes_per_rank"] * ranks)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """A graph as ``_neighbours.Structure`` has it. Each rank stores the edges of its own nodes, and empty lists for all others.

    ``case["replicated"]``: every rank stores all edges.
    """
    members = group_members(case, rank)
    seeds, pointer, column, owner = graph_arguments(case, members.index(rank), len(members), draw)
    group = next((pc.GroupRef(name) for name in group_layout(case)), None)
    index = case.params.get("index", INT64)
    return (seeds.to(index), list(case["fanouts"]), pointer, column, owner.to(index), group, case.params.get("replace", False))


def _first_by_table(known: torch.Tensor, nodes: int) -> torch.Tensor:
    """Where each entry occurs for the first time, by a table of all nodes."""
    place = torch.arange(known.numel(), device=known.device)
    table = torch.full((nodes,), known.numel(), device=known.device).scatter_reduce_(0, known, place, "amin")
    return table[known]


def _first_by_sorting(known: torch.Tensor, nodes: int) -> torch.Tensor:
    """The same by a stable sort."""
    ascending, order = known.sort(stable=True)
    begins = torch.ones_like(ascending, dtype=torch.bool)
    begins[1:] = ascending[1:] != ascending[:-1]
    first = torch.empty_like(known)
    first[order] = order[begins][begins.cumsum(0) - 1]
    return first


def _sample(
    case: pc.Case,
    inputs: pc.Inputs,
    rank: int,
    *,
    first_of: Any = _first_by_table,
    by_owner: bool = False,
    ascending: bool = False,
    last: bool = False,
    local: bool = False,
) -> Sample:
    """The definition, from all ranks' adjacency. The flags make it wrong:

    ``by_owner``: a frontier is sorted by owners; ``ascending``: new nodes are; ``last``: of a node's neighbours the last are taken;
    ``local``: only the rank's own adjacency is read.
    """
    members, (seeds, fanouts, _, _, node_to_rank) = group_members(case, rank), inputs[rank][:5]
    nodes = frontier = seeds.to(INT64)
    found = [(nodes[:0],) * 3]
    for fanout in fanouts:
        if by_owner:
            frontier = frontier[node_to_rank[frontier].argsort(stable=True)]
        owner = node_to_rank[frontier]
        first, degree = torch.zeros_like(frontier), torch.zeros_like(frontier)
        for index, q in enumerate(members):
            if not local or q == rank:
                mine = owner == index
                first[mine] = inputs[q][2][frontier[mine]]
                degree[mine] = inputs[q][2][frontier[mine] + 1] - first[mine]
        taken = degree if fanout < 0 else degree.clamp(max=fanout)
        edge = _positions(first + degree - taken if last else first, taken)
        destination, owner_of_edge = frontier.repeat_interleave(taken), owner.repeat_interleave(taken)
        source = torch.empty_like(edge)
        for index, q in enumerate(members):
            mine = owner_of_edge == index
            if not local or q == rank:
                source[mine] = inputs[q][3][edge[mine]]
        found.append((source, destination, edge))
        known = torch.cat((nodes, source))
        is_new = first_of(known, node_to_rank.numel()) == torch.arange(known.numel(), device=known.device)
        is_new[: nodes.numel()] = False
        frontier = known[is_new].sort().values if ascending else known[is_new]
        nodes = torch.cat((nodes, frontier))
    sources, destinations, edges = (torch.cat(parts) for parts in zip(*found, strict=True))
    place = torch.empty(node_to_rank.numel(), dtype=INT64, device=nodes.device)
    place[nodes] = torch.arange(nodes.numel(), device=nodes.device)
    return nodes, place[sources], place[destinations], edges


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, ...]:
    names = ("node", "row", "col", "edge")
    return tuple(pc.exactly(name, tensor) for name, tensor in zip(names, _sample(case, inputs, rank), strict=True))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """A frontier node costs its owner two pointers, a sampled edge a neighbour; both travel in 4 bytes, edge ids follow from pointers.

    Samples are random, so the numbers are means, and low ones: of a hop's neighbours only those drawn from anywhere count as new nodes,
    nine tenths of the different ones among them. Nothing is counted for hubs and chosen seeds.
    """
    ranks, hops = len(group_members(case, rank)), _hops(case, len(group_members(case, rank)))
    served, edges, known = sum(hop[0] for hop in hops), sum(hop[1] for hop in hops), case["seeds"] + sum(hop[2] for hop in hops)
    remote = 0.0 if case.params.get("replicated") else pc.traffic.all_to_all(4 * served + 4 * edges, ranks)
    return pc.Cost(
        hbm_bytes=INT64.itemsize * (2 * served + edges + known + 3 * edges + case["seeds"]), egress_bytes=remote, ingress_bytes=remote
    )


def _hops(case: pc.Case, ranks: int) -> list[tuple[float, float, float]]:
    """Of every hop: nodes of the frontier, sampled edges, and new nodes."""
    params, nodes = case.params, _nodes(case, ranks)
    frontier, known, hops = float(case["seeds"]), float(case["seeds"]), []
    for fanout in () if params.get("hub") or params.get("seeds_of") or params.get("isolated") else case["fanouts"]:
        sampled = frontier * mean_taken(case, fanout)
        different = expected_distinct(int(sampled * (1 - params.get("near", 0.0))), nodes, params.get("skew", 1.0))
        hops.append((frontier, sampled, 0.9 * different * (1 - known / nodes)))
        frontier = hops[-1][2]
        known += frontier
    return hops


def _hop_by_hop(case: pc.Case, rank: int) -> pc.Steps:
    """Owners read two pointers of a node and the line of its neighbours; a node that comes back is looked for in a table once."""
    ranks, word = len(group_members(case, rank)), INT64.itemsize

    def of(number: int, frontier: float, edges: float, fresh: float) -> pc.Step:
        return pc.step(
            f"hop {number}",
            hbm=word * (2 * frontier + edges + fresh + 3 * edges + (2 * case["seeds"] if number == 1 else 0)),
            link=pc.traffic.all_to_all(4 * frontier + 4 * edges, ranks),
            barriers=3,  # questions, answers, and numbers of new nodes
            places={"read_words_gops": 3 * frontier, "swap_words_gops": edges},
        )

    return tuple(of(number, *hop) for number, hop in enumerate(_hops(case, ranks), 1))


def _own_positions(context: pc.AnswerContext) -> Sample:
    node, row, col, edge = context.answer
    theirs = torch.stack([context.inputs[q][2][:-1] for q in context.members])
    owner = context.args[4][node[col]].to(INT64)
    return node, row, col, edge - theirs[owner, node[col]] + context.args[2][node[col]]


def _places(context: pc.AnswerContext) -> Sample:
    node, row, col, edge = context.answer
    theirs = torch.stack([context.inputs[q][2][:-1] for q in context.members])
    return node, row, col, edge - theirs[context.args[4][node[col]].to(INT64), node[col]]


def _last_from(edge: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    return torch.cat((edge[:-1], previous[-1:]))


def _global_names(context: pc.AnswerContext) -> Sample:
    node, row, col, edge = context.answer
    return node, node[row], node[col], edge


def _small(label: str, **params: Any) -> pc.CaseSpec:
    return pc.case(label, INT64, **{"nodes": 60, "max_degree": 6, "seeds": 10, "fanouts": (3, 2), "parts": "random", **params})


PRESETS = (
    pc.preset(
        "small",
        "two and three hops, all neighbours, none, more than there are; hubs, isolated and remote seeds, partitions of all kinds, groups",
        _small("two_hops"),
        _small("all_neighbours", fanouts=(-1, 4, 2)),
        _small("no_neighbours_at_a_hop", fanouts=(3, 0, 2)),
        _small("more_than_there_are", fanouts=(100, 100), max_degree=3, near=0.5),
        _small("hub", hub=True, nodes=200, parts="blocks", near=0.5),
        _small("isolated_seeds", nodes=320, isolated=True, seeds_of="isolated", fanouts=(4, 3, 2)),
        _small("remote_seeds", nodes=200, seeds_of="remote", parts="modulo"),
        _small("int32_nodes", index=torch.int32, replace=True),
        _small("sparse", nodes=500, max_degree=1, fanouts=(2, 2, 2, 2)),
        _small("strided_group", nodes=120, group="strided", world_sizes=(4, 8)),
        _small("public_replicated", nodes=320, parts="modulo", replicated=True, variant="pkb"),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's sizes: 10 000 nodes of 16 neighbours, 512 seeds, fanouts 10 and 5; and with degrees from 0 to 32",
        pc.case("int64", INT64, nodes=10_000, degree=16, seeds=512, fanouts=(10, 5), parts="modulo", near=0.25),
        pc.case("varied_degrees", INT64, nodes=10_000, max_degree=32, seeds=512, fanouts=(10, 5), parts="modulo", near=0.25),
        pc.case(
            "public_replicated",
            INT64,
            nodes=10_000,
            degree=16,
            seeds=512,
            fanouts=(10, 5),
            parts="modulo",
            near=0.25,
            replicated=True,
            variant="pkb",
        ),
    ),
    pc.preset(
        "production_ogbn_products",
        "ogbn-products: 2.45 million nodes, 124 million edges, 1024 seeds per rank, fanouts 15, 10 and 5",
        pc.case("int64", INT64, nodes=2_449_032, power=51, seeds=1024, fanouts=(15, 10, 5), parts="blocks", near=0.5, skew=1.5),
    ),
    pc.preset(
        "production_igb_medium",
        "IGB-medium: 10 million nodes, 120 million edges, 2048 seeds per rank, two hops of 10",
        pc.case("int64", INT64, nodes=10_000_000, power=12.5, seeds=2048, fanouts=(10, 10), parts="random", skew=1.5),
    ),
    pc.preset(
        "production_igb_medium_large_batch",
        "IGB-medium: 10 million nodes, 120 million edges, 65536 seeds per rank, three hops of 15, 10 and 5",
        pc.case("int64", INT64, nodes=10_000_000, power=12.5, seeds=65536, fanouts=(15, 10, 5), parts="random", skew=1.5),
    ),
    pc.preset(
        "production_papers100m",
        "like ogbn-papers100M on 8 ranks: 13.9 million nodes and 400 million edges per rank, 1024 seeds, fanouts 15, 10 and 5",
        pc.case("int64", INT64, nodes_per_rank=13_875_000, power=29.3, seeds=1024, fanouts=(15, 10, 5), parts="random", skew=1.5),
    ),
)

_DEEP = ("small/two_hops", "small/all_neighbours", "small/int32_nodes", "small/isolated_seeds", "pkb/int64", "pkb/varied_degrees")
_PRODUCTION = tuple(f"{item.name}/int64" for item in PRESETS[2:])
_PARTITIONED = pc.where(lambda c: "replicated" not in c.params)

PROBLEM = pc.Problem(
    id=64,
    slug="distributed_neighbor_sampling",
    title="Multi-hop neighbour sampling on a partitioned graph",
    category="graph_parallel",
    parallelism=("graph", "data"),
    origin="PyTorch Geometric: its distributed neighbour sampler, made deterministic",
    summary=(
        "Rank node_to_rank[v] of the group (the world if None) stores the neighbours of node v, local_adj_col[p] for p from "
        "local_adj_row_ptr[v] to local_adj_row_ptr[v + 1]. Starting from distinct seed_nodes as frontier, for every fanout k and every v "
        "of the frontier in order, v's first min(k, degree) neighbours (all if k < 0) are sampled; those never seen before become, in "
        "order of appearance, the next frontier. Returns int64: node (n,), seeds and discovered nodes in order; and for all sampled edges "
        "in order row (e,) and col (e,), the places in node of neighbour and v, and edge (e,), the position p in the owner's arrays. "
        "replace is ignored. A rank whose frontier is empty must go on serving the others."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    attainable=pc.Algorithm("a hop after the other, nodes in a hash table", "what the host waits for sizes is left out", _hop_by_hop),
    bandwidth="production_igb_medium_large_batch",
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("own_adjacency", "only what the rank itself stores", lambda c: c.by(_sample, local=True), _PARTITIONED),
        pc.wrong("owner_order", "frontiers sorted by owner", lambda c: c.by(_sample, by_owner=True)),
        pc.wrong("ascending_nodes", "new nodes in ascending order", lambda c: c.by(_sample, ascending=True)),
        pc.wrong("last_neighbours", "a node's last neighbours", lambda c: c.by(_sample, last=True), (*_DEEP, *_PRODUCTION)),
        pc.wrong("own_positions", "edge ids counted in the rank's own arrays", _own_positions, _PARTITIONED),
        pc.wrong("places", "edge ids counted from each node's first", _places),
        pc.wrong("global_names", "row and col by name instead of place", _global_names),
        pc.wrong("directions_swapped", "row and col exchanged", lambda c: (c.answer[0], c.answer[2], c.answer[1], c.answer[3])),
        pc.wrong(
            "last_edge_stale",
            "the last edge id is that of the slot before",
            lambda c: (*c.answer[:3], _last_from(c.answer[3], c.previous[3])),
        ),
    ),
    alternative_solutions=pc.alternatives(by_sorting=lambda case, inputs, rank: _sample(case, inputs, rank, first_of=_first_by_sorting)),
    excused={
        "previous/col@pkb/int64": "every node has more neighbours than are sampled, so that col is the same for every graph",
        "previous/col@pkb/public_replicated": "every node has more neighbours than are sampled, so that col is the same for every graph",
        "previous/row@small/sparse": "so few edges may well lie as before",
        "previous/col@small/sparse": "so few edges may well lie as before",
    },
    process_groups=group_layout,
    graph=False,
    graph_reason="how many nodes and edges a hop finds depends on the graph, and the host must know it to exchange and allocate them",
    notes=(
        "The public benchmark replicates the whole graph on every rank and samples consecutive seeds on a ring, so that a solution that "
        "never communicates is right. Here ranks store their own nodes' edges alone, and names are a random permutation. The variant pkb "
        "replicates the graph.",
        "In the public reference a rank whose frontier is empty leaves, and the others hang. Here it must not. Seeds are distinct: the "
        "public version skips new nodes if they are not.",
        "The graph behind the names is constant per slot, so that samples keep their sizes; names and the order of seeds are new in every "
        "block. Degrees of the production graphs follow a power law with the named mean; fewer ranks than 8 have a share of "
        "ogbn-papers100M's nodes.",
    ),
    speed_note=(
        "The public one loops over nodes in Python and waits for the device several times for each; this one handles a whole frontier "
        "with tensor operations, though its hops find more nodes."
    ),
)
