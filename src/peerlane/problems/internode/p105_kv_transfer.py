"""Problem 105: keys and values of prompts, sent from the nodes that computed them to the nodes that decode."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import two_tiers
from peerlane.problems.families.collective import BF16, FP32, INT32


def reference(
    cache: torch.Tensor, block_table: torch.Tensor, lengths: list[int], node_group: dist.ProcessGroup, rail_group: dist.ProcessGroup
) -> None:
    node, half = dist.get_rank(rail_group), dist.get_world_size(rail_group) // 2
    place, places = dist.get_rank(node_group), dist.get_world_size(node_group)
    slots = cache.view(-1, *cache.shape[2:])  # one for each token
    owned = [range(owner, len(lengths), places) for owner in range(places)]
    tokens = [sum(lengths[request] for request in requests) for requests in owned]
    if node < half:
        packed = slots[torch.cat([token_slots(cache, block_table, lengths, requests) for requests in owned])]
        dist.send(packed, group=rail_group, group_dst=node + half)
        return
    _, kinds, heads, depth = slots.shape
    packed = slots.new_empty((sum(tokens), kinds, heads // places, depth))
    dist.recv(packed, group=rail_group, group_src=node - half)
    mine = slots.new_empty((places * tokens[place], kinds, heads // places, depth))
    dist.all_to_all_single(mine, packed, [tokens[place]] * places, tokens, group=node_group)
    whole = mine.view(places, tokens[place], kinds, heads // places, depth).permute(1, 2, 0, 3, 4).flatten(2, 3)
    slots[token_slots(cache, block_table, lengths, owned[place])] = whole


def token_slots(cache: torch.Tensor, block_table: torch.Tensor, lengths: Sequence[int], requests: Sequence[int]) -> torch.Tensor:
    """Where the tokens of requests lie in a cache, counted over all pages, one request after the other."""
    size, found = cache.shape[1], [torch.zeros(0, dtype=torch.int64, device=cache.device)]
    for request in requests:
        pages = block_table[request, : -(-lengths[request] // size)].long()
        found.append((pages.unsqueeze(1) * size + torch.arange(size, device=cache.device)).flatten()[: lengths[request]])
    return torch.cat(found)


def _decodes(case: pc.Case, rank: int) -> bool:
    return case.cluster.node_of(rank) >= case.nodes // 2


def _owned(case: pc.Case, rank: int) -> range:
    """The requests that a decoding rank owns."""
    return range(case.cluster.local_rank(rank), len(case["lengths"]), case.cluster.ranks_per_node)


def _pages(case: pc.Case, requests: Sequence[int]) -> list[int]:
    return [-(-case["lengths"][request] // case["page"]) for request in requests]


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Caches of N(0, 1) entries, with ``case["spare"]`` pages more than are needed, and random pages for every request.

    ``case["payloads"]``: random bits instead, NaN with payloads among them.
    """
    requests, node = range(len(case["lengths"])), two_tiers.node_of(case, rank)
    mine = _owned(case, rank) if _decodes(case, rank) else requests
    held = [_owned(case, peer) for peer in node] if _decodes(case, rank) else [requests]
    count = max(sum(_pages(case, of_rank)) for of_rank in held) + case["spare"]
    heads = case["heads"] if _decodes(case, rank) else case["heads"] // len(node)
    shape = (count, case["page"], 2, heads, case["depth"])
    cache = draw.bits(shape, case.dtype) if case.params.get("payloads") else draw.normal(shape, case.dtype)
    table = torch.full((len(requests), max(_pages(case, requests))), -1, dtype=INT32, device=draw.device)
    free, first = draw.permutation(count).to(INT32), 0
    for request, pages in zip(mine, _pages(case, mine), strict=True):
        table[request, :pages] = free[first : first + pages]
        first += pages
    return cache, table, list(case["lengths"]), two_tiers.NODE, two_tiers.RAIL


def _shards(case: pc.Case, inputs: pc.Inputs, rank: int, request: int) -> list[torch.Tensor]:
    """A request's tokens (n, 2, h / L, D) as the ranks hold them that send to a decoding rank's node, place by place."""
    shards = []
    for source in case.cluster.node_groups[case.cluster.node_of(rank) - case.nodes // 2]:
        cache, table, lengths = inputs[source][:3]
        shards.append(cache.flatten(0, 1)[token_slots(cache, table, lengths, [request])])
    return shards


Content = Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]
"""What is written for a request: from what was there before, and the shards of its heads."""


def _whole(_: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(shards, dim=2)


def _filled(case: pc.Case, inputs: pc.Inputs, rank: int, content: Content = _whole, *, shift: int = 0) -> pc.Tree:
    """The answer of a rank if it writes ``content`` for each of its requests; ``shift``: that of a later request."""
    cache, table, lengths = inputs[rank][:3]
    cache = cache.clone()
    slots = cache.view(-1, *cache.shape[2:])
    for request in _owned(case, rank) if _decodes(case, rank) else ():
        where = token_slots(cache, table, lengths, [request])
        shards = _shards(case, inputs, rank, (request + shift) % len(lengths))
        value = content(slots[where], shards)
        slots[where[: len(value)]] = value[: len(where)]
    return None, {"cache": cache}


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Tree:
    returned, updated = _filled(case, inputs, rank)
    return returned, {"cache": pc.exactly("cache", updated["cache"])}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Every token crosses the network once, head by head over the rails; what another rank of the node owns goes on inside it."""
    places = case.cluster.ranks_per_node
    token = 2 * case["heads"] * case["depth"] * case.dtype.itemsize
    crossing = sum(case["lengths"]) * token / places
    if not _decodes(case, rank):
        return pc.Cost(hbm_bytes=crossing, egress_bytes=0, ingress_bytes=0, network_egress_bytes=crossing)
    own = sum(case["lengths"][request] for request in _owned(case, rank)) * token
    return pc.Cost(
        hbm_bytes=own, egress_bytes=crossing - own / places, ingress_bytes=own * (places - 1) / places, network_ingress_bytes=crossing
    )


def _wrong(content: Content, *, shift: int = 0) -> Callable[[pc.AnswerContext], pc.Tree]:
    return lambda c: _filled(c.case, c.inputs, c.rank, content, shift=shift)


def _keys_only(before: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([_whole(before, shards)[:, 0], before[:, 1]], dim=1)


def _first_shard_only(before: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
    heads = shards[0].shape[2]
    return torch.cat([shards[0], before[:, :, heads:]], dim=2)


def _pages_in_order(context: pc.AnswerContext) -> pc.Tree:
    """The decoding rank's block table ignored: its requests' pages from the first one on."""
    case, rank = context.case, context.rank
    cache, table, *rest = context.args
    table, first = table.clone(), 0
    mine = _owned(case, rank) if _decodes(case, rank) else range(0)
    for request, pages in zip(mine, _pages(case, mine), strict=True):
        table[request, :pages] = torch.arange(first, first + pages)
        first += pages
    return _filled(case, [*context.inputs[:rank], (cache, table, *rest), *context.inputs[rank + 1 :]], rank)


def _whole_pages(context: pc.AnswerContext) -> pc.Tree:
    """Pages copied whole, so that the slots behind a request's last token change too."""
    page = context.case["page"]
    longer = [-(-length // page) * page for length in context.case["lengths"]]
    return _filled(context.case, [(*args[:2], longer, *args[3:]) for args in context.inputs], context.rank)


def _ragged(case: pc.Case) -> bool:
    return any(length % case["page"] for length in case["lengths"])


def _small(label: str, dtype: torch.dtype = BF16, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"lengths": (21, 5, 16, 1, 9), "page": 8, "heads": 8, "depth": 4, "spare": 3, **params})


PROBLEM = pc.Problem(
    id=105,
    slug="kv_transfer",
    title="Transfer of keys and values from prefill to decode nodes",
    category="internode",
    parallelism=("tensor", "data"),
    origin="Disaggregated prefill and decoding: Mooncake's transfer engine, NIXL in Dynamo and vLLM's KV connectors",
    summary=(
        "cache (P, page, 2, heads, D) holds keys [:, :, 0] and values [:, :, 1] of a layer, page by page. Token t of request i lies "
        "in page block_table[i, t // page], at t mod page. Nodes 0 to N / 2 - 1 have computed lengths[i] tokens of every request i: "
        "the rank at place l holds the heads [l h / L, (l + 1) h / L). Node n >= N / 2 takes over from node n - N / 2: its rank at "
        "place i mod L owns request i and has all h heads. Every rank's cache is updated in place: those of decoding ranks get the "
        "tokens of their requests, and nothing else in them changes; all others stay. block_table is -1 where the rank has no page. "
        f"Page numbers differ between ranks. Returns None. {two_tiers.GROUPS}"
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    world_sizes=two_tiers.WORLD_SIZES,
    nodes=two_tiers.NODES,
    process_groups=pc.node_and_rail,
    updates=("cache",),
    presets=(
        pc.preset(
            "small",
            "ragged requests, whole pages, one request, requests without tokens, NaN payloads",
            _small("ragged_bf16"),
            _small("ragged_fp32", FP32),
            _small("whole_pages_bf16", lengths=(16, 8, 24, 8, 16, 8, 8, 8)),
            _small("one_request_bf16", lengths=(13,)),
            _small("empty_requests_bf16", lengths=(0, 11, 0, 7, 3)),
            _small("payloads_bf16", payloads=True),
        ),
        pc.preset(
            "pkb",
            "8 requests of 64 to 256 tokens; the public benchmark has no such problem",
            pc.case("bf16", BF16, lengths=(256, 64, 130, 200, 96, 256, 77, 128), page=16, heads=8, depth=128, spare=8),
        ),
        pc.preset(
            "production_llama3_70b_8k",
            "a layer of 16 prompts of 8192 tokens, and of 16 of unlike lengths",
            pc.case("bf16", BF16, lengths=(8192,) * 16, page=16, heads=8, depth=128, spare=64),
            pc.case(
                "ragged_bf16", BF16, lengths=(8191, 517, 12033, 4096, 9999, 130, 7777, 2048) * 2, page=16, heads=8, depth=128, spare=64
            ),
        ),
        pc.preset(
            "production_llama2_13b_4k",
            "multi-head attention: a layer of 16 prompts of 4096 tokens, 40 heads",
            pc.case("bf16", BF16, lengths=(4096,) * 16, page=16, heads=40, depth=128, spare=64),
        ),
    ),
    excused={
        "drop_last_rank": "the last rank only receives",
        "late_rank": "the last rank only receives",
        "neighbours_exchanged": "the last two ranks only receive",
    },
    known_wrong_answers=(
        pc.wrong("no_communication", "nothing is transferred", _wrong(lambda before, _: before)),
        pc.wrong("keys_only", "values are not transferred", _wrong(_keys_only)),
        pc.wrong("keys_and_values_swapped", "values in the place of keys", _wrong(lambda before, shards: _whole(before, shards).flip(1))),
        pc.wrong("first_shard_only", "the heads of the first rank alone", _wrong(_first_shard_only)),
        pc.wrong("shards_reversed", "the last rank's heads first", _wrong(lambda _, shards: torch.cat(shards[::-1], dim=2))),
        pc.wrong("last_token_missing", "every request without its last token", _wrong(lambda _, shards: torch.cat(shards, dim=2)[:-1])),
        pc.wrong("next_request", "the tokens of the request behind", _wrong(_whole, shift=1), lambda c: len(c["lengths"]) > 1),
        pc.wrong("pages_in_order", "block_table ignored where tokens are written", _pages_in_order),
        pc.wrong("whole_pages", "pages copied whole, past the last token", _whole_pages, _ragged),
    ),
    notes=(
        "The reference packs a rank's heads of all requests into one message over its rail. The ranks of the decoding node then exchange "
        "heads for requests, and each writes its own. Senders have nothing to do meanwhile.",
    ),
)
