"""Problem 64, neighbours sampled hop by hop: two questions to the device and three launches of the kit's exchange for each hop.

Sizes of all parts are known behind the questions, so nothing else waits but the search for new nodes, which is one stable sort. Bound by
those waits. ``device/collectives/counts.py`` and ``device/include/peerlane/collectives/exchange.cuh``."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist

from peerlane.device import communicator, group_of
from peerlane.device.collectives.counts import share_counts

Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def runs(first: torch.Tensor, count: torch.Tensor, total: int) -> torch.Tensor:
    """Returns first[0], first[0] + 1, ... (count[0] of them), first[1], ...: ``total`` in all."""
    begin = count.cumsum(0) - count
    return (first - begin).repeat_interleave(count, output_size=total) + torch.arange(total, device=first.device)


def new_nodes(nodes: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Returns the nodes of ``source`` that are not in ``nodes``, each once, in order of appearance."""
    known = torch.cat((nodes, source))
    ascending, order = known.sort(stable=True)
    fresh = torch.ones_like(known, dtype=torch.bool)
    fresh[order[1:]] = ascending[1:] != ascending[:-1]
    return source[fresh[nodes.numel() :]]


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

    nodes = frontier = seed_nodes.to(torch.int64)
    places = torch.arange(ranks.world_size + 1, device=nodes.device)
    sampled: list[tuple[torch.Tensor, ...]] = []
    for fanout in fanouts:
        owner, order = node_to_rank[frontier].to(torch.int64).sort(stable=True)
        asked, wanted = shared(torch.searchsorted(owner, places).diff())
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
        sampled.append((source, frontier.repeat_interleave(degree, output_size=total), runs(first_edge, degree, total)))
        frontier = new_nodes(nodes, source)
        nodes = torch.cat((nodes, frontier))

    source, destination, edge = (torch.cat(parts) for parts in zip(*sampled, strict=True)) if sampled else [nodes[:0]] * 3
    ascending, place = nodes.sort()
    return nodes, place[torch.searchsorted(ascending, source)], place[torch.searchsorted(ascending, destination)], edge
