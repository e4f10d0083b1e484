"""Problem 54: attention over a sequence that is sharded across ranks, keys and values passed around a ring."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems._draw import Draw
from peerlane.problems._spec import (
    UNIT_ROUNDOFF,
    Case,
    CaseSpec,
    Cost,
    Expected,
    GroupLayout,
    HonestVariant,
    NullAnswer,
    NullContext,
    Problem,
    Tolerance,
    case,
    preset,
)
from peerlane.problems._tree import GroupRef

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

# Bytes of scores that the oracle holds at a time; the softmax needs about three times as much.
_SCORE_BYTES = 2**29


@torch.no_grad()
def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    successor, predecessor = (rank + 1) % world, (rank - 1) % world
    if group is not None:
        successor, predecessor = dist.get_global_rank(group, successor), dist.get_global_rank(group, predecessor)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale

    queries = q.transpose(1, 2).to(torch.float32)  # (B, h, S, D), as everything below
    blocks = [k.contiguous(), v.contiguous()]
    output = queries.new_zeros(*queries.shape[:-1], v.shape[-1])
    maximum = queries.new_full((*queries.shape[:-1], 1), -math.inf)
    total = torch.zeros_like(maximum)
    future = queries.new_ones(q.shape[1], k.shape[1], dtype=torch.bool).triu_(1) if causal else None
    for step in range(world):
        if step + 1 < world:
            incoming = [torch.empty_like(block) for block in blocks]
            transfers = [dist.P2POp(dist.isend, block, successor, group) for block in blocks]
            transfers += [dist.P2POp(dist.irecv, block, predecessor, group) for block in incoming]
            requests = dist.batch_isend_irecv(transfers)
        owner = (rank - step) % world
        if not causal or owner <= rank:
            keys, values = (block.transpose(1, 2).to(torch.float32) for block in blocks)
            scores = torch.matmul(queries, keys.transpose(-1, -2)).mul_(scale)
            if future is not None and owner == rank:
                scores.masked_fill_(future, -math.inf)
            # Online softmax: what has been summed so far is rescaled to the new maximum.
            new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
            scores.sub_(new_maximum).exp_()
            rescale = torch.exp(maximum - new_maximum)
            total = total * rescale + scores.sum(-1, keepdim=True)
            output = output * rescale + torch.matmul(scores, values)
            maximum = new_maximum
        if step + 1 < world:
            for request in requests:
                request.wait()
            blocks = incoming
    return (output / total).to(q.dtype).transpose(1, 2).contiguous()


def process_groups(case: Case) -> GroupLayout:
    """A case with ``groups`` runs that many rings, interleaved: rank r belongs to ring r mod groups."""
    count = case.params.get("groups")
    return {} if count is None else {"context": [list(range(first, case.world_size, count)) for first in range(count)]}


def _ring(case: Case, rank: int) -> list[int]:
    """The ranks of the ring that ``rank`` belongs to, in order."""
    count = case.params.get("groups", 1)
    return list(range(rank % count, case.world_size, count))


def _local_length(case: Case) -> int:
    return int(case["local"] if "local" in case.params else case["length"] // len(_ring(case, 0)))


def inputs(case: Case, rank: int, draw: Draw) -> tuple[Any, ...]:
    """N(0, 1) entries, queries twice as large, so that scores have the spread of trained models. ``case["pattern"]`` may make them hard:

    * ``growing``, ``shrinking``: scores 4 times as large from each rank to the next, or a quarter;
    * ``spike_first``, ``spike_last``: one key of the first or last rank of the ring scores about 80 with all queries of head 0;
    * ``degenerate``: head 0 has zero queries, in head 1 all keys of all ranks are equal, head 2 has scores so large that one key wins;
    * ``nan_last``: the last rank's keys and values of head 0 are NaN, for causal cases, where no other rank may look at them.
    """
    ring, local, heads = _ring(case, rank), _local_length(case), case["heads"]
    batch, depth = case["batch"], case["depth"]
    kv_heads, value_depth = case.params.get("kv_heads", heads), case.params.get("value_depth", depth)
    q = draw.normal((batch, local, heads, depth), FP32, scale=2.0)
    k = draw.normal((batch, local, kv_heads, depth), FP32)
    v = draw.normal((batch, local, kv_heads, value_depth), FP32)
    pattern, place = case.params.get("pattern"), ring.index(rank)
    if pattern == "growing":
        k *= 4.0 ** (place + 1 - len(ring) / 2)
    elif pattern == "shrinking":
        k *= 4.0 ** (len(ring) / 2 - place)
    elif pattern in ("spike_first", "spike_last"):
        # Every query has its component along a common direction of length one set to 10, and the spike 8 / scale.
        direction = torch.nn.functional.normalize(draw.shared.normal((depth,), FP32), dim=0)
        q[:, :, 0] += (10.0 - q[:, :, 0] @ direction).unsqueeze(-1) * direction
        if place == (0 if pattern == "spike_first" else len(ring) - 1):
            # Under a causal mask all queries see the spike only in the first place.
            position = 0 if case["causal"] else int(draw.permutation(local)[0])
            k[:, position, 0] = direction * (8.0 / _scale(case))
    elif pattern == "degenerate":
        q[:, :, 0] = 0.0
        k[:, :, 1] = draw.shared.normal((depth,), FP32)
        q[:, :, 2] *= 32.0
    elif pattern == "nan_last" and place == len(ring) - 1:
        k[:, :, 0], v[:, :, 0] = math.nan, math.nan
    group = GroupRef("context") if "groups" in case.params else None
    q, k, v = (tensor.to(case.dtype) for tensor in (q, k, v))
    return q, k, v, case.params.get("scale"), case["causal"], group


def _scale(case: Case) -> float:
    scale: float | None = case.params.get("scale")
    return float(case["depth"] ** -0.5) if scale is None else scale


def _visible(case: Case, rank: int) -> list[int]:
    """The ranks whose keys the rank's queries see, in order; under a causal mask the last of them is the rank itself."""
    ring = _ring(case, rank)
    return ring[: ring.index(rank) + 1] if case["causal"] else ring


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    score_bytes: int = _SCORE_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of q (B, S_q, h, D) to k (B, S_k, h_kv, D) and v (B, S_k, h_kv, D_v), and to |v|: two of (B, S_q, h, D_v), float64.

    Under a causal mask the queries are the last S_q positions of the keys' sequence. Computed by head, in chunks of queries whose scores
    take no more than ``score_bytes``.
    """
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    output = torch.empty((batch, queries, heads, v.shape[-1]), dtype=FP64, device=q.device)
    magnitude = torch.empty_like(output)
    rows = max(1, score_bytes // (keys * FP64.itemsize))
    positions = torch.arange(keys, device=q.device)
    for b in range(batch):
        for head in range(heads):
            kv_head = head % k.shape[2]
            key, value = k[b, :, kv_head].to(FP64).t(), v[b, :, kv_head].to(FP64)
            for first in range(0, queries, rows):
                last = min(first + rows, queries)
                scores = (q[b, first:last, head].to(FP64) @ key).mul_(scale)
                if causal:
                    own = positions[keys - queries + first : keys - queries + last]
                    scores.masked_fill_(positions > own.unsqueeze(-1), -math.inf)
                probabilities = torch.softmax(scores, dim=-1)
                output[b, first:last, head] = probabilities @ value
                magnitude[b, first:last, head] = probabilities @ value.abs()
    return output, magnitude


def oracle(case: Case, inputs: Sequence[tuple[Any, ...]], rank: int) -> Expected:
    visible = _visible(case, rank)
    k, v = (torch.cat([inputs[q][i] for q in visible], dim=1) for i in (1, 2))
    value, magnitude = attention(inputs[rank][0], k, v, scale=_scale(case), causal=case["causal"])
    return Expected("output", value, case.dtype, magnitude=magnitude)


def tolerance(case: Case) -> Mapping[str, Tolerance]:
    """Magnitude is the sum of p_j |v_j|: one u of it for probabilities rounded to the dtype, one for blocks' outputs rounded to it.

    Normwise each of these roundings, and that of the output, costs 0.43 u on average (1.7e-3 in bfloat16), and hardly more than u in one
    token and head. In float32 the scores' own error decides: scores up to 100 err by 100 u, the relative error of their weights.
    """
    u = UNIT_ROUNDOFF[case.dtype]
    if case.dtype == FP32:
        return {"output": Tolerance(relative=2 * u, magnitude=128 * u)}
    return {"output": Tolerance(relative=2 * u, magnitude=2 * u, normwise=5e-3, rowwise=3 * u)}


def cost(case: Case, rank: int) -> Cost:
    """Under a causal mask a rank needs only earlier ranks' keys and values: work and traffic differ by rank."""
    ring, local, heads, size = _ring(case, rank), _local_length(case), case["heads"], case.dtype.itemsize
    depth = case["depth"]
    value_depth, kv_heads = case.params.get("value_depth", depth), case.params.get("kv_heads", heads)
    place, world, causal = ring.index(rank), len(ring), case["causal"]
    tokens = case["batch"] * local
    block_bytes = tokens * kv_heads * (depth + value_depth) * size
    pairs = place * local**2 + local * (local + 1) / 2 if causal else world * local**2
    received, sent = (place, world - 1 - place) if causal else (world - 1, world - 1)
    return Cost(
        hbm_bytes=tokens * heads * (depth + value_depth) * size + (received + 1) * block_bytes,
        egress_bytes=sent * block_bytes,
        ingress_bytes=received * block_bytes,
        flops={"fp32" if case.dtype == FP32 else "bf16": 2 * case["batch"] * heads * (depth + value_depth) * pairs},
    )


Arguments = Sequence[tuple[Any, ...]]


def _by_head(inputs: Arguments, answer: Callable[[Arguments], torch.Tensor]) -> torch.Tensor:
    """``answer`` for one head after the other, so that only one head's scores are held."""
    outputs = []
    for head in range(inputs[0][0].shape[2]):
        one = []
        for q, k, v, *_ in inputs:
            kv_head = head % k.shape[2]
            one.append((q[:, :, head : head + 1], k[:, :, kv_head : kv_head + 1], v[:, :, kv_head : kv_head + 1]))
        outputs.append(answer(one))
    return torch.cat(outputs, dim=2)


def _block_scores(inputs: Arguments, rank: int, owner: int, causal: bool, scale: float) -> torch.Tensor:
    """Float32 scores (B, h, S_l, S_l) of the rank's queries with the owner's keys, masked within the rank's own block if causal."""
    q, k = inputs[rank][0].transpose(1, 2).to(FP32), inputs[owner][1].transpose(1, 2).to(FP32)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if causal and owner == rank:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1), -math.inf)
    return scores


def _dense(
    case: Case,
    inputs: Sequence[tuple[Any, ...]],
    rank: int,
    owners: Sequence[int],
    *,
    causal: bool | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Dense float32 attention of the rank's queries to the owners' keys, one after the other."""
    masked = case["causal"] if causal is None else causal
    factor = _scale(case) if scale is None else scale

    def answer(one: Arguments) -> torch.Tensor:
        scores = torch.cat([_block_scores(one, rank, owner, masked, factor) for owner in owners], dim=-1)
        values = torch.cat([one[owner][2] for owner in owners], dim=1).transpose(1, 2).to(FP32)
        return torch.matmul(torch.softmax(scores, dim=-1), values).to(case.dtype).transpose(1, 2)

    return _by_head(inputs, answer)


def _flash(case: Case, inputs: Arguments, rank: int) -> torch.Tensor:
    """Blockwise, in ring order from the rank itself, with probabilities rounded to the inputs' dtype for their product with V."""
    ring = _ring(case, rank)
    order = [ring[(ring.index(rank) - step) % len(ring)] for step in range(len(ring))]
    visible = set(_visible(case, rank))

    def answer(one: Arguments) -> torch.Tensor:
        output = total = torch.zeros((), device=one[rank][0].device)
        maximum = torch.full_like(output, -math.inf)
        for owner in (q for q in order if q in visible):
            scores = _block_scores(one, rank, owner, case["causal"], _scale(case))
            new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
            weights, rescale = torch.exp(scores - new_maximum), torch.exp(maximum - new_maximum)
            values = one[owner][2].transpose(1, 2).to(FP32)
            output = output * rescale + torch.matmul(weights.to(case.dtype).to(FP32), values)
            total = total * rescale + weights.sum(-1, keepdim=True)
            maximum = new_maximum
        return (output / total).to(case.dtype).transpose(1, 2)

    return _by_head(inputs, answer)


def _local_only(context: NullContext) -> torch.Tensor:
    return _dense(context.case, context.inputs, context.rank, [context.rank])


def _drop_last_step(context: NullContext) -> torch.Tensor:
    """Without the block that travels farthest: the successor's, or the first rank's under a causal mask."""
    ring = _ring(context.case, context.rank)
    farthest = 0 if context.case["causal"] else (ring.index(context.rank) + 1) % len(ring)
    owners = [q for q in _visible(context.case, context.rank) if q != ring[farthest]]
    return _dense(context.case, context.inputs, context.rank, owners or [context.rank])


def _blocks_averaged(context: NullContext) -> torch.Tensor:
    blocks = [_dense(context.case, context.inputs, context.rank, [q]).to(FP32) for q in _visible(context.case, context.rank)]
    return torch.stack(blocks).mean(0).to(context.case.dtype)


def _mask_inverted(context: NullContext) -> torch.Tensor:
    """A causal mask where there should be none, and none where there should be one."""
    case, ring = context.case, _ring(context.case, context.rank)
    causal = not case["causal"]
    owners = ring[: ring.index(context.rank) + 1] if causal else ring
    return _dense(case, context.inputs, context.rank, owners, causal=causal)


def _own_block_unmasked(context: NullContext) -> torch.Tensor:
    return _dense(context.case, context.inputs, context.rank, _visible(context.case, context.rank), causal=False)


def _default_scale(context: NullContext) -> torch.Tensor:
    scale = context.case["depth"] ** -0.5
    return _dense(context.case, context.inputs, context.rank, _visible(context.case, context.rank), scale=scale)


def _values_rotated(context: NullContext) -> torch.Tensor:
    """Scores with every rank's keys, but its predecessor's values: blocks of K and V that got out of step."""
    ring = _ring(context.case, context.rank)
    shifted = list(context.inputs)
    for place, rank in enumerate(ring):
        shifted[rank] = (*context.inputs[rank][:2], context.inputs[ring[place - 1]][2], *context.inputs[rank][3:])
    return _dense(context.case, shifted, context.rank, _visible(context.case, context.rank))


def _whole_world(context: NullContext) -> torch.Tensor:
    world = range(context.rank + 1 if context.case["causal"] else context.case.world_size)
    return _dense(context.case, context.inputs, context.rank, world)


def _small(label: str, dtype: torch.dtype = BF16, *, causal: bool, world_sizes: Sequence[int] | None = None, **params: Any) -> CaseSpec:
    return case(label, dtype, batch=2, local=5, heads=3, depth=16, causal=causal, world_sizes=world_sizes, **params)


PRESETS = (
    preset(
        "small",
        "odd lengths; causal and not; one key head; growing, shrinking, spiked and degenerate scores; interleaved groups",
        _small("causal_bf16", causal=True),
        _small("full_bf16", causal=False),
        _small("scaled_causal_bf16", causal=True, scale=0.3),
        _small("scaled_full_fp32", FP32, causal=False, scale=0.3),
        _small("causal_fp32", FP32, causal=True),
        _small("one_kv_head_bf16", causal=True, kv_heads=1),
        _small("narrow_values_bf16", causal=False, value_depth=8),
        _small("growing_bf16", causal=False, pattern="growing"),
        _small("shrinking_bf16", causal=False, pattern="shrinking"),
        _small("growing_causal_bf16", causal=True, pattern="growing"),
        _small("spike_last_bf16", causal=False, pattern="spike_last"),
        _small("spike_first_bf16", causal=True, pattern="spike_first"),
        _small("degenerate_bf16", causal=False, pattern="degenerate"),
        _small("nan_last_bf16", causal=True, pattern="nan_last"),
        _small("interleaved_groups_bf16", causal=True, groups=2, world_sizes=(4, 8)),
    ),
    preset(
        "pkb",
        "the public benchmark's shape: 16 tokens over all ranks",
        case("bf16", BF16, batch=16, length=16, heads=8, depth=64, causal=True),
    ),
    preset(
        "production_llama2_7b_16k",
        "multi-head attention, 16384 tokens, causal",
        case("bf16", BF16, batch=1, length=16384, heads=32, depth=128, causal=True),
    ),
    preset(
        "production_llama3_70b_64k",
        "8 heads (the slice of 8-way tensor parallelism), 65536 tokens, causal",
        case("bf16", BF16, batch=1, length=65536, heads=8, depth=128, causal=True),
    ),
    preset(
        "production_wan2_1_14b_480p",
        "video diffusion self-attention, 32760 tokens, not causal",
        case("bf16", BF16, batch=1, length=32760, heads=40, depth=128, causal=False),
    ),
)


def _labels(*, where: str, value: bool = True) -> tuple[str, ...]:
    """The cases in which the parameter ``where`` is set (or, with ``value`` False, is not)."""
    return tuple(f"{item.name}/{spec.label}" for item in PRESETS for spec in item.cases if bool(spec.params.get(where)) == value)


PROBLEM = Problem(
    id=54,
    slug="ring_attention",
    title="Ring attention, forward",
    category="context_parallel",
    parallelism=("context", "sequence"),
    origin="zhuzilin/ring-flash-attention: ring attention with an online merge of blocks, for context-parallel training and inference",
    summary=(
        "q (B, S, h, D), k (B, S, h_kv, D) and v (B, S, h_kv, D_v) are the rank's part of a sequence sharded in rank order over the group "
        "(the world if None). Returns softmax(scale q k^T) v over all the group's keys, (B, S, h, D_v) in q's dtype, scores and sums in "
        "float32; scale is D^-0.5 if None; causal: key j counts for query i if j <= i in the whole sequence. h_kv is h or 1."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    null_answers=(
        NullAnswer("no_communication", "attention to the rank's own keys", _local_only),
        NullAnswer("drop_last_step", "the block that travels farthest is left out", _drop_last_step),
        NullAnswer("mask_inverted", "a causal mask instead of none, or none instead of a causal mask", _mask_inverted),
        NullAnswer("values_rotated", "values one rank out of step with the keys", _values_rotated),
        NullAnswer("blocks_averaged", "blocks' outputs averaged, without their weights", _blocks_averaged),
        NullAnswer("own_block_unmasked", "the rank's own block without its triangle", _own_block_unmasked, cases=_labels(where="causal")),
        NullAnswer("default_scale", "softmax_scale ignored", _default_scale, cases=_labels(where="scale")),
        NullAnswer("whole_world", "group ignored", _whole_world, cases=_labels(where="groups")),
    ),
    honest_variants=(
        HonestVariant("dense_fp32", lambda case, inputs, rank: _dense(case, inputs, rank, _visible(case, rank))),
        HonestVariant("flash_rounded_probabilities", _flash),
    ),
    process_groups=process_groups,
    notes=(
        "The public benchmark's rows see 16 keys at most, with scores of order one, so that rescaling is never put to the test; here "
        "scores grow and shrink along the ring, and single keys far away decide.",
        "NaN fills keys and values of one head on the last rank only, under a causal mask: its own rows are NaN, and no other rank's. NaN "
        "in part of a block is not tested: a dense product spreads it to rows that a tiled kernel leaves finite.",
        "No row is masked altogether: every query sees at least itself.",
        "Grouped keys with 1 < h_kv < h are outside the interface, as they are in the public benchmark.",
    ),
)
