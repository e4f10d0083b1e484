"""Problem 104: attention over a sequence that is sharded across the ranks of several nodes, by a ring within every node and one between."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems import p054_ring_attention as one_ring
from peerlane.problems.families import attention, two_tiers
from peerlane.problems.families.attention import exchange, local_length, visible
from peerlane.problems.families.collective import BF16, FP32


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    node_group: dist.ProcessGroup,
    rail_group: dist.ProcessGroup,
) -> torch.Tensor:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    node, nodes = dist.get_rank(rail_group), dist.get_world_size(rail_group)
    place, places = dist.get_rank(node_group), dist.get_world_size(node_group)
    queries = q.transpose(1, 2).to(FP32)  # (B, h, S, D), as everything below
    output = queries.new_zeros(*queries.shape[:-1], v.shape[-1])
    maximum = queries.new_full((*queries.shape[:-1], 1), -math.inf)
    total = torch.zeros_like(maximum)
    future = queries.new_ones(q.shape[1], k.shape[1], dtype=torch.bool).triu_(1) if causal else None
    far = [k.contiguous(), v.contiguous()]
    for outer in range(nodes):
        if outer + 1 < nodes:  # blocks cross the network while those of one node go round in another
            arriving, crossing = exchange(far, rail_group)
        near = far
        for inner in range(places):
            if inner + 1 < places:
                incoming, requests = exchange(near, node_group)
            owner = (node - outer) % nodes * places + (place - inner) % places
            if not causal or owner <= node * places + place:
                shared = q.shape[2] // k.shape[2]
                keys, values = (block.transpose(1, 2).to(FP32).repeat_interleave(shared, dim=1) for block in near)
                scores = torch.matmul(queries, keys.transpose(-1, -2)).mul_(scale)
                if future is not None and owner == node * places + place:
                    scores.masked_fill_(future, -math.inf)
                # Online softmax: what has been summed so far is rescaled to the new maximum.
                new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
                scores.sub_(new_maximum).exp_()
                rescale = torch.exp(maximum - new_maximum)
                total = total * rescale + scores.sum(-1, keepdim=True)
                output = output * rescale + torch.matmul(scores, values)
                maximum = new_maximum
            if inner + 1 < places:
                for request in requests:
                    request.wait()
                near = incoming
        if outer + 1 < nodes:
            for request in crossing:
                request.wait()
            far = arriving
    return (output / total).to(q.dtype).transpose(1, 2).contiguous()


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Those of problem 54, whose ring is the world."""
    return (*one_ring.inputs(case, rank, draw)[:5], two_tiers.NODE, two_tiers.RAIL)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """A rank's block crosses the network once to every node that needs it, and there reaches the other ranks inside the node.

    Under a causal mask only later ranks need it: work and traffic differ by rank.
    """
    cluster, heads, size = case.cluster, case["heads"], case.dtype.itemsize
    node, place, places = cluster.node_of(rank), cluster.local_rank(rank), cluster.ranks_per_node
    local, depth, causal = local_length(case, case.world_size), case["depth"], case["causal"]
    tokens = case["batch"] * local
    block = tokens * 2 * case.params.get("kv_heads", heads) * depth * size
    sent_far, received_far = attention.ring_traffic(node, cluster.nodes, causal)
    sent, received = attention.ring_traffic(place, places, causal)
    forwarded = received_far * (places - 1)  # each block that has come over the own rail, to the other ranks of the node
    pairs = attention.visible_pairs(rank, case.world_size, local, causal)
    return pc.Cost(
        hbm_bytes=2 * tokens * heads * depth * size + (received_far * places + received + 1) * block,
        egress_bytes=(sent + forwarded) * block,
        ingress_bytes=(received + forwarded) * block,
        network_egress_bytes=sent_far * block,
        network_ingress_bytes=received_far * block,
        flops={"fp32" if case.dtype == FP32 else "bf16": 4 * case["batch"] * heads * depth * pairs},
    )


def _to(owners: Callable[[pc.AnswerContext], Sequence[int]]) -> Callable[[pc.AnswerContext], torch.Tensor]:
    """A wrong answer: attention to the keys of some ranks alone, as far as they are seen; to the own ones if none of them is."""

    def answer(context: pc.AnswerContext) -> torch.Tensor:
        case, rank = context.case, context.rank
        seen = [q for q in visible(rank, case.world_size, case["causal"]) if q in owners(context)] or [rank]
        return one_ring.dense(case, context.inputs, rank, seen)

    return answer


def _without_far_step(context: pc.AnswerContext) -> list[int]:
    """All ranks but those of the node whose blocks cross the network last."""
    cluster, node = context.case.cluster, context.case.cluster.node_of(context.rank)
    farthest = 0 if context.case["causal"] else (node + 1) % cluster.nodes
    return [q for q in context.ranks if cluster.node_of(q) != farthest or farthest == node]


def _nodes_averaged(context: pc.AnswerContext) -> torch.Tensor:
    """The attention to each node's keys averaged, without weights."""
    case, rank = context.case, context.rank
    seen = visible(rank, case.world_size, case["causal"])
    parts = [[q for q in members if q in seen] for members in case.cluster.node_groups]
    answers = [one_ring.dense(case, context.inputs, rank, part).to(FP32) for part in parts if part]
    return torch.stack(answers).mean(0).to(case.dtype)


def _values_of_next_node(context: pc.AnswerContext) -> torch.Tensor:
    """Scores with every rank's keys, but the values of the same place in the node before: transfers of K and V out of step."""
    shifted = [(*args[:2], context.inputs[q - context.case.cluster.ranks_per_node][2], *args[3:]) for q, args in enumerate(context.inputs)]
    return one_ring.dense(context.case, shifted, context.rank)


def _masked_by_place(context: pc.AnswerContext) -> torch.Tensor:
    """A causal mask by places of ranks within nodes, their nodes ignored."""
    case, rank = context.case, context.rank
    place = case.cluster.local_rank
    seen = [q for q in context.ranks if place(q) < place(rank)] + [rank]
    return one_ring.dense(case, context.inputs, rank, seen, causal=True)


def _small(label: str, dtype: torch.dtype = BF16, *, causal: bool, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"batch": 2, "local": 5, "heads": 3, "depth": 16, "causal": causal, **params})


PROBLEM = pc.Problem(
    id=104,
    slug="two_tier_ring_attention",
    title="Ring attention over several nodes, forward",
    category="internode",
    parallelism=("context", "sequence"),
    origin="LoongTrain's double ring attention: context-parallel training on sequences that are too long for one node",
    summary=(
        "q (B, S, h, D), k and v (B, S, h_kv, D) are the rank's part of a sequence sharded in rank order over all ranks. Returns "
        "softmax(scale q k^T) v over all keys, (B, S, h, D) in q's dtype, scores and sums in float32; scale is D^-0.5 if None; "
        "causal: key j counts for query i if j <= i in the whole sequence, and one of a later rank leaves no trace, not even NaN. h / "
        f"h_kv consecutive query heads share a key head. {two_tiers.GROUPS}"
    ),
    reference=reference,
    inputs=inputs,
    oracle=one_ring.oracle,
    tolerance=attention.softmax_tolerance,
    cost=cost,
    world_sizes=two_tiers.WORLD_SIZES,
    nodes=two_tiers.NODES,
    process_groups=pc.node_and_rail,
    presets=(
        pc.preset(
            "small",
            "odd lengths; causal and not; shared key heads; growing, shrinking, spiked and degenerate scores",
            _small("causal_bf16", causal=True),
            _small("full_bf16", causal=False),
            _small("scaled_full_fp32", FP32, causal=False, scale=0.3),
            _small("causal_fp32", FP32, causal=True),
            _small("shared_heads_bf16", causal=True, heads=4, kv_heads=2),
            _small("growing_bf16", causal=False, pattern="growing"),
            _small("shrinking_bf16", causal=False, pattern="shrinking"),
            _small("spike_last_bf16", causal=False, pattern="spike_last"),
            _small("spike_first_bf16", causal=True, pattern="spike_first"),
            _small("degenerate_bf16", causal=False, pattern="degenerate"),
            _small("nan_last_bf16", causal=True, pattern="nan_last"),
        ),
        pc.preset(
            "pkb",
            "1024 tokens over all ranks; the public benchmark has no such problem",
            pc.case("bf16", BF16, batch=1, length=1024, heads=8, kv_heads=2, depth=64, causal=True),
        ),
        pc.preset(
            "production_llama3_70b_128k",
            "16 query heads and 2 key heads (a slice of tensor parallelism), 131072 tokens, causal",
            pc.case("bf16", BF16, batch=1, length=131072, heads=16, kv_heads=2, depth=128, causal=True),
        ),
        pc.preset(
            "production_wan2_1_14b_720p",
            "video diffusion self-attention, 75648 tokens (75600, padded), 40 heads, not causal",
            pc.case("bf16", BF16, batch=1, length=75648, heads=40, depth=128, causal=False),
        ),
    ),
    known_wrong_answers=(
        pc.wrong("no_communication", "attention to the rank's own keys", _to(lambda c: [c.rank])),
        pc.wrong("node_only", "attention to the keys of the rank's own node", _to(lambda c: two_tiers.node_of(c.case, c.rank))),
        pc.wrong("rail_only", "attention to the keys of the rank's own rail", _to(lambda c: two_tiers.rail_of(c.case, c.rank))),
        pc.wrong("drop_last_far_step", "the node whose blocks cross the network last is left out", _to(_without_far_step)),
        pc.wrong("nodes_averaged", "nodes' outputs averaged, without their weights", _nodes_averaged),
        pc.wrong("values_one_node_late", "values one node out of step with the keys", _values_of_next_node),
        pc.wrong("mask_inverted", "a causal mask instead of none, or none instead of a causal mask", one_ring.mask_inverted),
        pc.wrong("masked_by_place", "a causal mask by places within nodes", _masked_by_place, lambda c: c["causal"]),
        pc.wrong("default_scale", "softmax_scale ignored", one_ring.default_scale, lambda c: "scale" in c.params),
    ),
    alternative_solutions=pc.alternatives(dense=one_ring.dense, flash=one_ring.flash),
    notes=(
        "The reference's outer ring takes whole blocks over the rails while the inner ring turns within the node. Each block crosses the "
        "network once to each other node, under a causal mask too, where the bound lets earlier nodes receive nothing from later ones.",
    ),
)
