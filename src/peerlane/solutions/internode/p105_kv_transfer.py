"""Problem 105, keys and values from prefill to decode nodes: a few large messages over each rail, heads joined by the kit inside the node.

Many tokens go in pieces of whole rounds of requests. The decoding node exchanges one piece and writes it to its pages while the next one
crosses the network, and senders pack the next piece meanwhile.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from peerlane.solutions.families.inside import exchange_rows
from peerlane.solutions.families.rails import start

LARGE_BYTES, PIECES = 8 << 20, 4


def solution(
    cache: torch.Tensor, block_table: torch.Tensor, lengths: list[int], node_group: dist.ProcessGroup, rail_group: dist.ProcessGroup
) -> None:
    node, half = dist.get_rank(rail_group), dist.get_world_size(rail_group) // 2
    place, places = dist.get_rank(node_group), dist.get_world_size(node_group)
    slots, decodes = cache.view(-1, *cache.shape[2:]), node >= half
    heads = cache.shape[3] // places if decodes else cache.shape[3]
    token = (2, heads, cache.shape[4])
    large = sum(lengths) * 2 * heads * cache.shape[4] * cache.element_size() >= LARGE_BYTES
    rounds = -(-len(lengths) // places)  # in each, every rank of the node gets one request
    each = -(-rounds // (PIECES if large else 1)) * places

    underway = []
    for first in range(0, len(lengths), each):
        by_owner = [range(first + owner, min(first + each, len(lengths)), places) for owner in range(places)]
        counts = [sum(lengths[request] for request in requests) for requests in by_owner]
        if decodes:
            packed = cache.new_empty((sum(counts), *token))
            transfers = start({}, {node - half: packed}, rail_group)
        else:
            packed = slots[_slots(cache, block_table, lengths, [request for requests in by_owner for request in requests])]
            transfers = start({node + half: packed}, {}, rail_group)
        underway.append((by_owner[place], counts, packed, transfers))
    for requests, counts, packed, transfers in underway:
        transfers.wait()
        if decodes:
            arrived = exchange_rows(packed.flatten(1), counts, [counts[place]] * places, node_group)
            whole = arrived.view(places, counts[place], *token).permute(1, 2, 0, 3, 4).flatten(2, 3)
            slots[_slots(cache, block_table, lengths, requests)] = whole


def _slots(cache: torch.Tensor, block_table: torch.Tensor, lengths: list[int], requests: Sequence[int]) -> torch.Tensor:
    """Returns where the requests' tokens lie, counted over all pages, one request after the other."""
    size, found = cache.shape[1], [torch.zeros(0, dtype=torch.int64, device=cache.device)]
    within = torch.arange(size, device=cache.device)
    for request in requests:
        pages = block_table[request, : -(-lengths[request] // size)].long()
        found.append((pages.unsqueeze(1) * size + within).flatten()[: lengths[request]])
    return torch.cat(found)
