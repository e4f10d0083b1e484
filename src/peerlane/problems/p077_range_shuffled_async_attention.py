"""Problem 77: attention over ranges of keys, its sequence sharded before and after and its heads in between, query range by query range."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families import attention
from peerlane.problems.families.attention import softmax_tolerance
from peerlane.problems.families.collective import BF16, FP32, group_layout, group_members, group_size


def reference(
    query: torch.Tensor,
    key_value: torch.Tensor,
    k_ranges: torch.Tensor,
    cp_shuffle_num: int,
    clip_token_nums: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    world, (tokens, _, depth) = dist.get_world_size(group), query.shape
    if tokens % cp_shuffle_num:
        raise ValueError(f"{tokens} tokens are no multiple of cp_shuffle_num = {cp_shuffle_num}")
    if key_value.shape[1] < world and world % key_value.shape[1] == 0:
        key_value = key_value.repeat_interleave(world // key_value.shape[1], dim=1)
    if key_value.shape[1] % world:
        raise ValueError(f"{key_value.shape[1]} key heads cannot be shared by {world} ranks")
    clip = clip_token_nums or world * tokens // cp_shuffle_num

    def by_head(x: torch.Tensor) -> torch.Tensor:
        """(s, h, d) to blocks of heads for the ranks, (W, s, h / W, d)."""
        return torch.stack(x.chunk(world, dim=1))

    def exchange(blocks: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        received = torch.empty_like(blocks)
        return received, dist.all_to_all_single(received, blocks, group=group, async_op=True)

    arriving = exchange(by_head(key_value))
    queries = [exchange(by_head(part)) for part in query.chunk(cp_shuffle_num)]
    # Where the ranges end decides which keys take part: the host has to wait for that.
    ranges = k_ranges.tolist()
    arriving[1].wait()
    # (W, R, spb, h, 2 D) to (h, R, W spb, 2 D): within a range the ranks' tokens follow each other.
    ranks_keys = arriving[0].view(world, cp_shuffle_num, tokens // cp_shuffle_num, -1, 2 * depth)
    keys, values = ranks_keys.permute(3, 1, 0, 2, 4).flatten(2, 3)[:, :, :clip].flatten(1, 2).chunk(2, dim=-1)
    outputs = []
    for (received, request), (first, last) in zip(queries, ranges, strict=True):
        request.wait()
        attended = F.scaled_dot_product_attention(
            received.flatten(0, 1).transpose(0, 1).unsqueeze(0),
            keys[:, first:last].unsqueeze(0),
            values[:, first:last].unsqueeze(0),
            enable_gqa=True,
        )
        by_rank = attended.squeeze(0).transpose(0, 1).reshape(received.shape).contiguous()
        outputs.append(exchange(by_rank))
    results = []
    for received, request in outputs:
        request.wait()
        results.append(torch.cat(received.unbind(), dim=1))
    return torch.cat(results)


def _sizes(case: pc.Case) -> tuple[int, int, int]:
    """R, tokens of a rank per range, and the keys of a range. ``case``: ``clip`` = (a, b) stands for a W + b keys, and rows to hold them.

    Without ``clip`` there is ``rows``, the tokens of a rank per range, and no padding.
    """
    ranks = group_size(case)
    if "clip" not in case.params:
        return case["ranges"], case["rows"], ranks * case["rows"]
    per_rank, rest = case["clip"]
    clip = per_rank * ranks + rest
    return case["ranges"], -(-clip // ranks), clip


def _heads(case: pc.Case) -> tuple[int, int]:
    """Query and key heads. ``case``: ``heads`` and ``kv_heads``, or these ``_per_rank``."""
    ranks = group_size(case)
    heads, kv_heads = (case[name] if name in case.params else case[f"{name}_per_rank"] * ranks for name in ("heads", "kv_heads"))
    return heads, kv_heads


def key_ranges(case: pc.Case) -> list[tuple[int, int]]:
    """[first, last) in the sequence of all keys, for the ranges of queries in some order (see :func:`inputs`). ``case["see"]``:

    * ``own``: the keys of the range itself
    * ``past``: and of all ranges before
    * ``two``: and of the range before
    * ``odd``: ranges that overlap, repeat and are cut anywhere; the first sees a single key
    """
    count, _, clip = _sizes(case)
    match case["see"]:
        case "own":
            return [(i * clip, (i + 1) * clip) for i in range(count)]
        case "past":
            return [(0, (i + 1) * clip) for i in range(count)]
        case "two":
            return [(max(i - 1, 0) * clip, (i + 1) * clip) for i in range(count)]
        case "odd":
            last = count * clip
            return [(last - 2, last - 1), *((clip // 2, last - 1 - i // 2) for i in range(count - 1))]
        case other:
            raise ValueError(f"unknown key ranges {other!r}: expected own, past, two or odd")


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Values are N(0, 1), queries and keys such that scores are N(0, spread^2), spread 4 unless the case says else.

    ``case["pattern"]`` ``nan_padding``: keys and values of padding tokens are NaN.
    ``case["no_clip"]``: what is passed where there is no padding, None or 0.

    Which range of queries has which of :func:`key_ranges` is drawn anew in every call, the same on all ranks.
    """
    (count, rows, clip), (heads, kv_heads), depth = _sizes(case), _heads(case), case["depth"]
    members = group_members(case, rank)
    query = draw.normal((count * rows, heads, depth), case.dtype, scale=case.params.get("spread", 4.0))
    key_value = draw.normal((count * rows, kv_heads, 2 * depth), case.dtype)
    if case.params.get("pattern") == "nan_padding":
        padding = max(rows - max(clip - members.index(rank) * rows, 0), 0)
        key_value.view(count, rows, -1)[:, rows - padding :] = math.nan
    ranges = pc.constant(key_ranges(case), draw.device, torch.int64)[draw.shared.permutation(count)]
    group = next((pc.GroupRef(name) for name in group_layout(case)), None)
    return query, key_value, ranges, count, clip if "clip" in case.params else case.params.get("no_clip"), group


def _ranges(args: Sequence[Any]) -> list[tuple[int, int]]:
    """k_ranges as they were passed."""
    return [(first, last) for first, last in args[2].tolist()]


def _assembled(case: pc.Case, inputs: pc.Inputs, members: Sequence[int], clip: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (1, R clip, Hkv, D) in global order."""
    count, rows, _ = _sizes(case)
    parts = torch.stack([inputs[q][1].unflatten(0, (count, rows)) for q in members], dim=1)
    keys, values = parts.flatten(1, 2)[:, :clip].flatten(0, 1).unsqueeze(0).chunk(2, dim=-1)
    return keys, values


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    keys, values = _assembled(case, inputs, group_members(case, rank), _sizes(case)[2])
    query = inputs[rank][0].chunk(case["ranges"])
    outputs = [
        attention.attention(part.unsqueeze(0), keys[:, first:last], values[:, first:last], scale=case["depth"] ** -0.5, causal=False)
        for part, (first, last) in zip(query, _ranges(inputs[rank]), strict=True)
    ]
    value, magnitude = (torch.cat(parts, dim=1).squeeze(0) for parts in zip(*outputs, strict=True))
    return pc.Expected("output", value, case.dtype, magnitude=magnitude)


def _used_keys(case: pc.Case) -> list[int]:
    """Keys of every rank that some range sees: neither padding nor outside of all ranges."""
    count, rows, clip = _sizes(case)
    borders = sorted({0, count * clip, *(border for pair in key_ranges(case) for border in pair)})
    seen = [
        (first, last) for first, last in itertools.pairwise(borders) if any(low <= first and last <= high for low, high in key_ranges(case))
    ]

    def overlap(low: int, high: int) -> int:
        return sum(max(min(high, last) - max(low, first), 0) for first, last in seen)

    return [
        sum(overlap(i * clip + min(place * rows, clip), i * clip + min((place + 1) * rows, clip)) for i in range(count))
        for place in range(group_size(case))
    ]


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Either queries and outputs travel to the ranks of their heads and back, with a key head to every rank that has queries for it, or all
    keys travel to all ranks, and queries stay. The smaller of the two bounds the port."""
    (count, rows, _), (heads, kv_heads), depth, size = _sizes(case), _heads(case), case["depth"], case.dtype.itemsize
    members, used = group_members(case, rank), _used_keys(case)
    ranks, own = len(members), used[members.index(rank)]
    foreign = sum(used) - own
    queries = pc.traffic.all_to_all(2 * count * rows * heads * depth, ranks)
    pair = 2 * depth
    by_head = max(kv_heads / ranks, 1) * pair
    pairs = heads * rows * sum(last - first for first, last in key_ranges(case))
    return pc.Cost(
        hbm_bytes=(2 * count * rows * heads * depth + own * kv_heads * pair) * size,
        egress_bytes=min(queries + (ranks - 1) * own * by_head, (ranks - 1) * own * kv_heads * pair) * size,
        ingress_bytes=min(queries + foreign * by_head, foreign * kv_heads * pair) * size,
        flops={"fp32" if case.dtype == FP32 else "bf16": 4 * depth * pairs},
    )


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    sizes = {"depth": 32, "heads_per_rank": 4, "spread": 2.0}
    return pc.case(label, dtype, **{**sizes, **params})


def _magi(
    *, see: str, clip: int, heads: int, ranges: int = 4, world_sizes: Sequence[int] | None = None, label: str = "bf16"
) -> pc.CaseSpec:
    """Depth 128, 8 key heads."""
    return pc.case(label, BF16, ranges=ranges, clip=(0, clip), heads=heads, kv_heads=8, depth=128, see=see, world_sizes=world_sizes)


PRESETS = (
    pc.preset(
        "small",
        "key heads fewer than, as many as and more than ranks; padding, also NaN; ranges disjoint, growing, overlapping, of one key",
        _small("own_fp32", FP32, ranges=4, rows=3, kv_heads_per_rank=1, see="own"),
        _small("past_bf16", BF16, ranges=4, rows=3, kv_heads_per_rank=1, see="past", no_clip=0),
        _small("one_range_fp32", FP32, ranges=1, clip=(5, -1), kv_heads_per_rank=2, see="own"),
        _small("one_key_head_bf16", BF16, ranges=2, rows=4, kv_heads=1, see="own"),
        _small("one_key_head_past_fp32", FP32, ranges=2, rows=4, kv_heads=1, see="past"),
        _small("padded_own_bf16", BF16, ranges=3, clip=(2, -1), kv_heads_per_rank=1, see="own"),
        _small("padded_past_fp32", FP32, ranges=3, clip=(2, -1), kv_heads_per_rank=1, see="past"),
        _small("odd_bf16", BF16, ranges=4, clip=(3, -1), kv_heads_per_rank=2, see="odd"),
        _small("large_scores_bf16", BF16, ranges=3, rows=4, kv_heads_per_rank=1, see="two", spread=50.0),
        _small("nan_padding_bf16", BF16, ranges=3, clip=(4, -1), kv_heads_per_rank=1, see="past", pattern="nan_padding"),
        _small("strided_group_bf16", BF16, ranges=3, rows=4, kv_heads_per_rank=1, see="past", group="strided", world_sizes=(4, 8)),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: four ranges that see their own keys",
        _magi(see="own", clip=12150, heads=24, world_sizes=(2, 4)),
        _magi(see="own", clip=21600, heads=48, world_sizes=(8,), label="bf16_w8"),
    ),
    pc.preset(
        "production_magi1_24b_720p",
        "MAGI-1 24B, four chunks of 21600 tokens, each sees all chunks before",
        _magi(see="past", clip=21600, heads=48, world_sizes=(4, 8)),
    ),
    pc.preset(
        "production_magi1_4_5b_720p",
        "MAGI-1 4.5B, four chunks of 12150 tokens, each sees the chunk before",
        _magi(see="two", clip=12150, heads=24),
    ),
    pc.preset("production_magi1_24b_short", "a single chunk of 5400 tokens: latency", _magi(see="own", clip=5400, heads=48, ranges=1)),
)


PROBLEM = pc.Problem(
    id=77,
    slug="range_shuffled_async_attention",
    title="Attention over key ranges with queries exchanged range by range",
    category="context_parallel",
    parallelism=("context", "sequence"),
    origin="SandAI MAGI-1 inference: context shuffle overlap, an all-to-all of heads and tokens for every range of queries",
    summary=(
        "query (T, Hq, D) and key_value (T, Hkv, 2 D: key, then value) are the rank's tokens in R = cp_shuffle_num equal ranges; in the "
        "global order a range has the first rank's tokens, then the second's, and so on. Of each range's keys the first clip_token_nums "
        "count (all W T / R if None or 0; the rest is padding), one range after the other. Queries of range i, those of padding too, "
        "attend to the keys [k_ranges[i, 0], k_ranges[i, 1]) of that sequence, with scale D^-0.5 and no mask; query head h uses key head "
        "h // (Hq / Hkv). Returns the output for the rank's own tokens, (T, Hq, D) in their order, in query's dtype. Hq must be a multiple "
        "of W, and so must Hkv unless it divides W; ranges are not empty. Probabilities may be rounded to the dtype; sums are in float32."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=softmax_tolerance,
    cost=cost,
    bandwidth="production_magi1_24b_short",
    presets=PRESETS,
    known_wrong_answers=pc.FromProof(__name__, "KNOWN_WRONG_ANSWERS"),
    alternative_solutions=pc.FromProof(__name__, "ALTERNATIVE_SOLUTIONS"),
    process_groups=group_layout,
    graph=False,
    graph_reason="k_ranges are on the device, and where they end decides how many keys a matrix product has: the host waits for them",
    notes=(
        "The public benchmark's ranges are disjoint, so that a range needs no keys but its own, and its scores are N(0, 1) over thousands "
        "of keys, so that outputs are hardly larger than its tolerance. Here scores have a standard deviation of 4, and other presets have "
        "MAGI-1's ranges: all chunks before, or the last two.",
        "Which range of queries sees which range of keys changes from call to call, unlike in MAGI-1, so that k_ranges must be read.",
        "The public reference sends the output of one range together with the queries of a later one, and reads k_ranges range by range; "
        "ours starts all exchanges of queries at once and reads k_ranges once.",
        "Values are not scaled by 10: no tolerance is absolute.",
        "NaN is in keys and values of padding, which must not count. It is not in queries: fused kernels differ in what they make of it.",
        "W = 8 has 48 heads and 21600 keys per range in pkb, fewer ranks 24 and 12150, as in the public benchmark.",
    ),
)
