"""Problem 85, a sort over all ranks: small shards are gathered and sorted by every rank; of large ones every element moves once.

Large shards: ranks sort, and agree on the exact borders of their parts, eight bits of a key at a time, by counting what lies below 256
candidates. So parts are even at once, where the reference moves buckets and evens them out in a second exchange. Bound by two local
sorts, which pass HBM several times, and one trip over the links; small ones by one question to the device, as shapes follow from it."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist

from peerlane.device import Group, communicator, group_of
from peerlane.device.collectives.counts import share_counts

GATHERED = 1 << 18
"""Elements of all ranks that every rank sorts for itself."""
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def sort_keys(values: torch.Tensor) -> torch.Tensor:
    """Integers of the same width in the order of the floats, NaN last; both zeros have one key."""
    words = (values + 0.0).view(WORDS[values.itemsize])
    top = torch.iinfo(words.dtype).max
    return torch.where(words < 0, words ^ top, words).masked_fill_(values.isnan(), top)


def part_ends(group: Group, keys: torch.Tensor, borders: list[int]) -> torch.Tensor:
    """Returns where to cut the own sorted keys so that ``borders`` elements of all ranks lie before each cut; equal keys in rank order."""
    bits, everyone = 8 * keys.itemsize, communicator(group).all_gather
    wanted = torch.tensor(borders, device=keys.device)
    step = torch.arange(256, device=keys.device)
    found = torch.full_like(wanted, torch.iinfo(keys.dtype).min)  # the largest key known to have no more than `wanted` keys below it
    for shift in range(bits - 8, -1, -8):
        candidates = found.unsqueeze(1) + (step << shift)
        below = everyone(torch.searchsorted(keys, candidates.to(keys.dtype))).sum(0)
        found = candidates.gather(1, (below <= wanted.unsqueeze(1)).sum(1, keepdim=True) - 1).squeeze(1)
    at = found.to(keys.dtype)
    low, high = torch.searchsorted(keys, at), torch.searchsorted(keys, at, right=True)
    table = everyone(torch.stack((low, high - low)))
    missing = wanted - table[:, 0].sum(0)  # of the keys that equal it
    before = table[: group.rank, 1].sum(0)
    return low + torch.minimum((missing - before).clamp(min=0), high - low)


def solution(local_shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    ranks, size = group_of(group), local_shard.itemsize
    counts = [count for (count,) in share_counts(ranks, [local_shard.numel()])]
    total, parts = sum(counts), ranks.world_size
    ends = list(accumulate((total // parts + (rank < total % parts) for rank in range(parts)), initial=0))
    exchange = communicator(ranks).exchange
    if total <= GATHERED:
        whole, places = local_shard.new_empty(total), list(accumulate(counts, initial=0))
        if total:
            sends = [(0, local_shard.nbytes)] * parts
            exchange(whole, local_shard.contiguous(), sends, [(at * size, count * size) for at, count in zip(places, counts, strict=False)])
        return whole.sort().values[ends[ranks.rank] : ends[ranks.rank + 1]]

    shard = local_shard.sort().values
    cuts = part_ends(ranks, sort_keys(shard), ends[1:-1])
    table = share_counts(ranks, torch.cat((cuts.new_zeros(1), cuts, cuts.new_tensor([shard.numel()]))).diff())
    sent, received = table[ranks.rank], [row[ranks.rank] for row in table]
    result = shard.new_empty(sum(received))
    communicator(ranks).all_to_all_single(result, shard, received, sent)
    return result.sort().values
