"""Problem 64, neighbours sampled hop by hop: two questions to the device and three launches of the kit's exchange for each hop.

Sizes of all parts are known behind the questions, so nothing else waits but the search for new nodes: a table of all nodes' places takes
the earliest turn in which each is met. Bound by those waits.
``device/collectives/counts.py`` and ``peerlane/collectives/exchange.cuh``."""

from itertools import accumulate

import torch
import torch.distributed as dist

from peerlane.device import communicator, group_of
from peerlane.device.collectives.counts import share_counts

UNSEEN = torch.iinfo(torch.int32).max
Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def runs(first: torch.Tensor, count: torch.Tensor, total: int) -> torch.Tensor:
    """Returns first[0], first[0] + 1, ... (count[0] of them), first[1], ...: ``total`` in all."""
    begin = count.cumsum(0) - count
    return (first - begin).repeat_interleave(count, output_size=total) + torch.arange(total, device=first.device)


def new_nodes(places: torch.Tensor, source: torch.Tensor, known: int) -> torch.Tensor:
    """Returns the nodes of ``source`` that are new, each once, in order of appearance, and enters their places, from ``known`` on.

    ``places``: of every node of the graph, int32, below ``known``, or UNSEEN."""
    turns = torch.arange(known, known + source.numel(), dtype=places.dtype, device=source.device)
    places.scatter_reduce_(0, source, turns, "amin")
    fresh = source[places[source] == turns]
    places[fresh] = turns[: fresh.numel()]
    return fresh


def solution(
    seed_nodes: torch.Tensor,
    fanouts: list[int],
    local_adj_row_ptr: torch.Tensor,
    local_adj_col: torch.Tensor,
    node_to_rank: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    replace: bool = False,
) -> Sample:
    ranks, kit = group_of(group), communicator(group)

    def shared(counts: torch.Tensor) -> tuple[list[int], list[int]]:
        """Returns what goes to each rank, and what comes from each."""
        table = share_counts(ranks, counts)
        return table[ranks.rank], [row[ranks.rank] for row in table]

    def exchanged(rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        kit.all_to_all_single(result, rows, received, sent)
        return result

    frontier = seed_nodes.to(torch.int64)
    found, known = [frontier], frontier.numel()
    places = torch.full((node_to_rank.numel(),), UNSEEN, dtype=torch.int32, device=frontier.device)
    places[frontier] = torch.arange(known, dtype=torch.int32, device=frontier.device)
    owners = torch.arange(ranks.world_size + 1, dtype=torch.uint8, device=frontier.device)
    sampled: list[tuple[torch.Tensor, ...]] = []
    for fanout in fanouts:
        owner, order = node_to_rank[frontier].to(torch.uint8).sort(stable=True)
        asked, wanted = shared(torch.searchsorted(owner, owners).diff())
        requests = exchanged(frontier[order], wanted, asked)
        first = local_adj_row_ptr[requests]
        taken = local_adj_row_ptr[requests + 1] - first
        if fanout >= 0:
            taken.clamp_(max=fanout)
        replies = exchanged(torch.stack((first, taken), 1), asked, wanted)
        edges = torch.nn.functional.pad(taken.cumsum(0), (1, 0))
        sent, received = shared(edges[torch.tensor(list(accumulate(wanted, initial=0)), device=edges.device)].diff())
        neighbours = exchanged(local_adj_col[runs(first, taken, sum(sent))], received, sent)

        # From the order of owners into that of the frontier.
        begin = replies[:, 1].cumsum(0) - replies[:, 1]
        ranges = torch.empty((frontier.numel(), 3), dtype=begin.dtype, device=begin.device)
        ranges[order] = torch.cat((replies, begin.unsqueeze(1)), 1)
        first_edge, degree, begin = ranges.unbind(1)
        total = sum(received)
        source = neighbours[runs(begin, degree, total)].to(torch.int64)
        first_place = known - frontier.numel()
        targets = torch.arange(first_place, known, device=frontier.device).repeat_interleave(degree, output_size=total)
        frontier = new_nodes(places, source, known)
        known += frontier.numel()
        found.append(frontier)
        sampled.append((places[source].to(torch.int64), targets, runs(first_edge, degree, total)))

    nodes = torch.cat(found)
    row, col, edge = (torch.cat(parts) for parts in zip(*sampled, strict=True)) if sampled else [nodes[:0]] * 3
    return nodes, row, col, edge
