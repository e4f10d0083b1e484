"""Problem 54: attention over a sequence that is sharded across ranks, keys and values passed around a ring."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import attention
from peerlane.problems.families.attention import Blocks, local_length, scale_of, visible
from peerlane.problems.families.collective import BF16, FP32


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return attention.ring_attention(q, k, v, scale, causal, group)


def process_groups(case: pc.Case) -> pc.GroupLayout:
    """A case with ``groups`` runs that many rings, interleaved: rank r belongs to ring r mod groups."""
    count = case.params.get("groups")
    return {} if count is None else {"context": [list(range(first, case.world_size, count)) for first in range(count)]}


def _ring(case: pc.Case, rank: int) -> list[int]:
    """The ranks of the ring that ``rank`` belongs to, in order."""
    count = case.params.get("groups", 1)
    return list(range(rank % count, case.world_size, count))


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """N(0, 1) entries, queries twice as large, so that scores have the spread of trained models. ``case["pattern"]`` may make them hard:

    * ``growing``, ``shrinking``: scores 4 times as large from each rank to the next, or a quarter;
    * ``spike_first``, ``spike_last``: one key of the first or last rank of the ring scores about 80 with all queries of head 0;
    * ``degenerate``: head 0 has zero queries, in head 1 all keys of all ranks are equal, head 2 has scores so large that one key wins;
    * ``nan_last``: the last rank's keys and values of head 0 are NaN, for causal cases, where no other rank may look at them.
    """
    ring, heads = _ring(case, rank), case["heads"]
    local = local_length(case, len(ring))
    batch, depth = case["batch"], case["depth"]
    kv_heads, value_depth = case.params.get("kv_heads", heads), case.params.get("value_depth", depth)
    pattern, place = case.params.get("pattern"), ring.index(rank)
    work = case.dtype if pattern is None else FP32  # patterns are made before anything is rounded
    q = draw.normal((batch, local, heads, depth), work, scale=2.0)
    k = draw.normal((batch, local, kv_heads, depth), work)
    v = draw.normal((batch, local, kv_heads, value_depth), work)
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
            k[:, position, 0] = direction * (8.0 / scale_of(case))
    elif pattern == "degenerate":
        q[:, :, 0] = 0.0
        k[:, :, 1] = draw.shared.normal((depth,), FP32)
        q[:, :, 2] *= 32.0
    elif pattern == "nan_last" and place == len(ring) - 1:
        k[:, :, 0], v[:, :, 0] = math.nan, math.nan
    group = pc.GroupRef("context") if "groups" in case.params else None
    q, k, v = (tensor.to(case.dtype) for tensor in (q, k, v))
    return q, k, v, case.params.get("scale"), case["causal"], group


def _blocks(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[Blocks, int]:
    """q, k and v of the ranks of the ring that ``rank`` belongs to, and its place there."""
    ring = _ring(case, rank)
    return [inputs[q][:3] for q in ring], ring.index(rank)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    blocks, place = _blocks(case, inputs, rank)
    seen = visible(place, len(blocks), case["causal"])
    k, v = (torch.cat([blocks[owner][i] for owner in seen], dim=1) for i in (1, 2))
    value, magnitude = attention.attention(inputs[rank][0], k, v, scale=scale_of(case), causal=case["causal"])
    return pc.Expected("output", value, case.dtype, magnitude=magnitude)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Under a causal mask later ranks have more pairs, but all can share them: work and traffic are an even share."""
    ring, heads, size = len(_ring(case, rank)), case["heads"], case.dtype.itemsize
    local = local_length(case, ring)
    depth = case["depth"]
    value_depth, kv_heads = case.params.get("value_depth", depth), case.params.get("kv_heads", heads)
    tokens, causal = case["batch"] * local, case["causal"]
    keys_values, queries_outputs = (float(tokens * count * (depth + value_depth) * size) for count in (kv_heads, heads))
    pairs = attention.visible_pairs((ring - 1) / 2, ring, local, causal)
    moved = attention.shared_traffic(ring, causal, keys_values, queries_outputs)
    return pc.Cost(
        hbm_bytes=queries_outputs + keys_values + moved,
        egress_bytes=moved,
        ingress_bytes=moved,
        flops={"fp32" if case.dtype == FP32 else "bf16": 2 * case["batch"] * heads * (depth + value_depth) * pairs},
    )


def dense(
    case: pc.Case,
    inputs: pc.Inputs,
    rank: int,
    owners: Sequence[int] | None = None,
    *,
    causal: bool | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Dense float32 attention to the keys at the owners' places in the ring; to all that the rank sees if None."""
    blocks, place = _blocks(case, inputs, rank)
    return attention.dense(
        blocks,
        place,
        visible(place, len(blocks), case["causal"]) if owners is None else owners,
        causal=case["causal"] if causal is None else causal,
        scale=scale_of(case) if scale is None else scale,
    )


def flash(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Attention with rounded probabilities, as flash kernels have it."""
    return attention.flash(*_blocks(case, inputs, rank), causal=case["causal"], scale=scale_of(case))


def _drop_last_step(context: pc.AnswerContext) -> torch.Tensor:
    """Without the block that travels farthest: the successor's, or the first rank's under a causal mask."""
    ring = _ring(context.case, context.rank)
    place = ring.index(context.rank)
    farthest = 0 if context.case["causal"] else (place + 1) % len(ring)
    owners = [owner for owner in visible(place, len(ring), context.case["causal"]) if owner != farthest]
    return dense(context.case, context.inputs, context.rank, owners or [place])


def _blocks_averaged(context: pc.AnswerContext) -> torch.Tensor:
    ring = _ring(context.case, context.rank)
    seen = visible(ring.index(context.rank), len(ring), context.case["causal"])
    answers = [dense(context.case, context.inputs, context.rank, [owner]).to(FP32) for owner in seen]
    return torch.stack(answers).mean(0).to(context.case.dtype)


def mask_inverted(context: pc.AnswerContext) -> torch.Tensor:
    """A wrong answer: a causal mask where there should be none, and none where there should be one."""
    blocks, place = _blocks(context.case, context.inputs, context.rank)
    return attention.mask_inverted(blocks, place, causal=context.case["causal"], scale=scale_of(context.case))


def default_scale(context: pc.AnswerContext) -> pc.Tree:
    """A wrong answer: softmax_scale ignored."""
    return context.by(dense, scale=context.case["depth"] ** -0.5)


def _values_rotated(context: pc.AnswerContext) -> torch.Tensor:
    """Scores with every rank's keys, but its predecessor's values: blocks of K and V that got out of step."""
    ring = _ring(context.case, context.rank)
    shifted = list(context.inputs)
    for place, rank in enumerate(ring):
        shifted[rank] = (*context.inputs[rank][:2], context.inputs[ring[place - 1]][2], *context.inputs[rank][3:])
    return dense(context.case, shifted, context.rank)


def _small(label: str, dtype: torch.dtype = BF16, *, causal: bool, world_sizes: Sequence[int] | None = None, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, batch=2, local=5, heads=3, depth=16, causal=causal, world_sizes=world_sizes, **params)


PRESETS = (
    pc.preset(
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
    pc.preset(
        "pkb",
        "the public benchmark's shape: 16 tokens over all ranks",
        pc.case("bf16", BF16, batch=16, length=16, heads=8, depth=64, causal=True),
    ),
    pc.preset(
        "production_llama2_7b_16k",
        "multi-head attention, 16384 tokens, causal",
        pc.case("bf16", BF16, batch=1, length=16384, heads=32, depth=128, causal=True),
    ),
    pc.preset(
        "production_llama3_70b_64k",
        "8 heads (the slice of 8-way tensor parallelism), 65536 tokens, causal",
        pc.case("bf16", BF16, batch=1, length=65536, heads=8, depth=128, causal=True),
    ),
    pc.preset(
        "production_wan2_1_14b_480p",
        "video diffusion self-attention, 32760 tokens, not causal",
        pc.case("bf16", BF16, batch=1, length=32760, heads=40, depth=128, causal=False),
    ),
)


PROBLEM = pc.Problem(
    id=54,
    slug="ring_attention",
    title="Ring attention, forward",
    category="context_parallel",
    parallelism=("context", "sequence"),
    origin="zhuzilin/ring-flash-attention: ring attention with an online merge of blocks, for context-parallel training and inference",
    summary=(
        "q (B, S, h, D), k (B, S, h_kv, D) and v (B, S, h_kv, D_v) are the rank's part of a sequence sharded in rank order over the group "
        "(the world if None). Returns softmax(scale q k^T) v over all the group's keys, (B, S, h, D_v) in q's dtype, scores and sums in "
        "float32; scale is D^-0.5 if None; causal: key j counts for query i if j <= i in the whole sequence, and one of a later rank "
        "leaves no trace, not even NaN. h_kv is h or 1."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=attention.softmax_tolerance,
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("drop_last_step", "the block that travels farthest is left out", _drop_last_step),
        pc.wrong("mask_inverted", "a causal mask instead of none, or none instead of a causal mask", mask_inverted),
        pc.wrong("values_rotated", "values one rank out of step with the keys", _values_rotated),
        pc.wrong("blocks_averaged", "blocks' outputs averaged, without their weights", _blocks_averaged),
        pc.wrong(
            "own_block_unmasked", "the rank's own block without its triangle", lambda c: c.by(dense, causal=False), lambda c: c["causal"]
        ),
        pc.wrong("default_scale", "softmax_scale ignored", default_scale, lambda c: "scale" in c.params),
    ),
    alternative_solutions=pc.alternatives(dense_fp32=dense, flash_rounded_probabilities=flash),
    process_groups=process_groups,
    notes=(
        "The public benchmark's rows see 16 keys at most, with scores of order one, so that rescaling is never put to the test. Here "
        "scores grow and shrink along the ring, and single keys far away decide.",
        "NaN fills keys and values of one head on the last rank only, under a causal mask: its own rows are NaN, and no other rank's. NaN "
        "in part of a block is not tested: a dense product spreads it to rows that a tiled kernel leaves finite.",
        "No row is masked altogether: every query sees at least itself.",
        "Grouped keys with 1 < h_kv < h are outside the interface, as they are in the public benchmark.",
    ),
)
