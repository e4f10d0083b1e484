"""Problem 70: all-to-all redistribution of a keyed jagged tensor, from sample-sharded to feature-sharded."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import FP16, FP32, INT32, INT64, all_gather_single, fitted, group_layout, group_members
from peerlane.problems.families.graph import per_rank

# How far a feature's number of values on a rank lies from its mean at most.
_JITTER = 0.1


def reference(
    lengths: torch.Tensor,
    values: torch.Tensor,
    key_splits: list[int],
    batch_size: int,
    pg: dist.ProcessGroup | None = None,
    weights: torch.Tensor | None = None,
    stride_per_key: list[int] | None = None,
    stagger: int = 1,
) -> dict[str, torch.Tensor]:
    rank, ranks = dist.get_rank(pg), dist.get_world_size(pg)
    strides = stride_per_key or [batch_size] * sum(key_splits)

    # Everybody's batch size, and every feature's stride and number of values: the host needs them to cut the data.
    device, features = lengths.device, len(strides)
    counts = torch.stack([part.sum(dtype=torch.int64) for part in torch.split(lengths, strides)])
    own = torch.cat((torch.tensor([batch_size, *strides], device=device), counts))
    gathered = own.new_empty(ranks * own.numel())
    all_gather_single(gathered, own, group=pg)
    table = gathered.view(ranks, -1).tolist()
    stride_of = [row[1 : 1 + features] for row in table]
    count_of = [row[1 + features :] for row in table]

    first = sum(key_splits[:rank])
    owned = range(first, first + key_splits[rank])
    order = source_order(ranks, stagger)

    def exchanged(data: torch.Tensor, sizes: list[list[int]]) -> torch.Tensor:
        """Segments of the owned features, ``sizes[source][feature]`` long: feature by feature, sources in ``order``."""
        ends = list(itertools.accumulate(key_splits))
        sent = [sum(sizes[rank][end - split : end]) for end, split in zip(ends, key_splits, strict=True)]
        received = [sum(row[feature] for feature in owned) for row in sizes]
        buffer = data.new_empty(sum(received))
        dist.all_to_all_single(buffer, data, received, sent, group=pg)
        segments = torch.split(buffer, [row[feature] for row in sizes for feature in owned]) if owned else ()
        return torch.cat([buffer[:0], *(segments[source * len(owned) + place] for place in range(len(owned)) for source in order)])

    result = {"lengths": exchanged(lengths, stride_of), "values": exchanged(values, count_of)}
    if stride_per_key is None:
        batches = [row[0] for row in table]
        result |= {"stride": torch.tensor(sum(batches), device=device), "stride_per_rank": torch.tensor(batches, device=device)}
    else:
        strides_owned = [[stride_of[source][feature] for source in order] for feature in owned]
        result["stride_per_key_per_rank"] = torch.tensor(strides_owned, dtype=torch.int64, device=device).view(len(owned), ranks)
    if weights is not None:
        result["weights"] = exchanged(weights, count_of)
    return result


def source_order(ranks: int, stagger: int) -> list[int]:
    """Sources in the order of the output: x + g y for x below g = W / stagger (outer) and y below ``stagger``."""
    return [x + ranks // stagger * y for x in range(ranks // stagger) for y in range(stagger)]


def _key_splits(case: pc.Case, ranks: int) -> list[int]:
    """Features of every destination. ``case["keys"]``: numbers that repeat over ranks, or ``{W: numbers}``."""
    keys = case["keys"]
    return list(keys[ranks]) if isinstance(keys, dict) else [keys[rank % len(keys)] for rank in range(ranks)]


def _mean(case: pc.Case, feature: int) -> float:
    """Values per sample of a feature. ``case["mean"]``: a number, or numbers that repeat over features."""
    mean: float | Sequence[float] = case["mean"]
    return mean if isinstance(mean, (int, float)) else mean[feature % len(mean)]


def _shape(case: pc.Case, me: int, features: int, layout: random.Random) -> tuple[list[int], list[int]]:
    """Samples and values of every feature on rank ``me``.

    ``case["batch"]`` samples, a number or numbers that repeat over ranks, or, drawn for every feature, one of ``case["strides"]``.
    ``case["least"]`` values and about the mean per sample; with ``case["fixed"]`` exactly the mean; with ``case["heavy"]`` the second
    feature has nine times as many as all others.
    """
    strides = layout.choices(case["strides"], k=features) if "strides" in case.params else [per_rank(case["batch"], me)] * features
    means = [_mean(case, feature) for feature in range(features)]
    if case.params.get("fixed"):
        return strides, [stride * int(mean) for stride, mean in zip(strides, means, strict=True)]
    if case.params.get("heavy"):
        means[1] = 9 * (sum(means) - means[1])
    least = case.params.get("least", 0)
    counts = [s * least + round(s * mean * layout.uniform(1 - _JITTER, 1 + _JITTER)) for s, mean in zip(strides, means, strict=True)]
    return strides, counts


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """How many values a feature has is layout; to which sample each of them belongs is not.

    Every sample has ``case["least"]``. Each of the others is in sample floor(stride u^2), u uniform: some have many, and many have none.
    """
    members = group_members(case, rank)
    me, key_splits = members.index(rank), _key_splits(case, len(members))
    features = sum(key_splits)
    strides, counts = [_shape(case, q, features, draw.layout) for q in range(len(members))][me]
    total, samples, least, device = sum(counts), sum(strides), case.params.get("least", 0), draw.device
    stride, first, count = (pc.constant(x, device) for x in (strides, [0, *itertools.accumulate(strides)][:-1], counts))
    if case.params.get("fixed"):
        hot = pc.constant([int(_mean(case, feature)) for feature in range(features)], device)
        lengths = hot.repeat_interleave(stride, output_size=samples)
    else:
        free = total - least * samples
        feature = torch.arange(features, device=device).repeat_interleave(count - least * stride, output_size=free)
        sample = (draw.uniform((free,), FP32).to(torch.float64).square_() * stride[feature]).to(INT64)
        lengths = torch.full((samples,), least, device=device).index_add_(0, first[feature] + sample, torch.ones_like(sample))
    values = draw.integers(0, case.params.get("below", 1_000_000), (total,), case.dtype)
    weights = draw.normal((total,), case["weights"]) if "weights" in case.params else None
    group = next((pc.GroupRef(name) for name in group_layout(case)), None)
    per_key = strides if "strides" in case.params else None
    batch = per_rank(case.params.get("batch", 0), me)
    return (lengths.to(case.params.get("index", INT64)), values, key_splits, batch, group, weights, per_key, case.params.get("stagger", 1))


def _segments(args: tuple[Any, ...]) -> dict[str, Sequence[torch.Tensor]]:
    """For lengths, values and weights: one tensor per feature."""
    lengths, values, key_splits, batch, _, weights, per_key, _ = args
    strides = per_key or [batch] * sum(key_splits)
    parts = torch.split(lengths, strides)
    counts = torch.stack([part.sum(dtype=INT64) for part in parts]).tolist()
    found: dict[str, Sequence[torch.Tensor]] = {"lengths": parts, "values": torch.split(values, counts)}
    if weights is not None:
        found["weights"] = torch.split(weights, counts)
    return found


def _answer(
    case: pc.Case, inputs: pc.Inputs, members: Sequence[int], me: int, *, order: Sequence[int] | None = None, source_major: bool = False
) -> dict[str, torch.Tensor]:
    """The right answer of group rank ``me``; with another ``order`` of sources, or with features inside sources, a wrong one."""
    _, _, key_splits, _, _, _, per_key, stagger = inputs[members[me]]
    ranks, first = len(members), sum(key_splits[:me])
    right = source_order(ranks, stagger)
    order = right if order is None else order
    owned = range(first, first + key_splits[me])
    segments = [_segments(inputs[q]) for q in members]
    pairs = [(f, s) for s in order for f in owned] if source_major else [(f, s) for f in owned for s in order]
    joined = {name: torch.cat([part[0][:0], *(segments[s][name][f] for f, s in pairs)]) for name, part in segments[0].items()}
    device, batches = joined["lengths"].device, [inputs[q][3] for q in members]
    result = {name: joined[name] for name in ("lengths", "values")}
    if per_key is None:
        result |= {"stride": torch.tensor(sum(batches), device=device), "stride_per_rank": torch.tensor(batches, device=device)}
    else:
        table = torch.tensor([[inputs[members[s]][6][f] for s in right] for f in owned], dtype=INT64, device=device)
        result["stride_per_key_per_rank"] = table.view(len(owned), ranks)
    return result | {name: joined[name] for name in joined if name == "weights"}


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> dict[str, pc.Expected]:
    members = group_members(case, rank)
    answer = _answer(case, inputs, members, members.index(rank))
    return {name: pc.exactly(name, tensor) for name, tensor in answer.items()}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Every value is read and written once, and so is its weight; of lengths, which are small numbers, one byte each travels."""
    members = group_members(case, rank)
    me, ranks = members.index(rank), len(members)
    key_splits = _key_splits(case, ranks)
    ends = list(itertools.accumulate(key_splits))
    index, weight = case.params.get("index", INT64).itemsize, case["weights"].itemsize if "weights" in case.params else 0
    least, slack = case.params.get("least", 0), 0.0 if case.params.get("fixed") else _JITTER

    def size(source: int, target: int, per_length: float, per_value: float) -> float:
        stride: int = min(case["strides"]) if "strides" in case.params else per_rank(case["batch"], source)
        means = [_mean(case, feature) for feature in range(ends[target] - key_splits[target], ends[target])]
        values: float = sum(least + mean * (1 - slack) for mean in means)
        return stride * (per_length * len(means) + per_value * values)

    # A value, below a million, fits into 20 bits.
    wire, local = 2.5 + weight, case.dtype.itemsize + weight
    return pc.Cost(
        hbm_bytes=sum(size(me, q, index, local) + size(q, me, index, local) for q in range(ranks)),
        egress_bytes=sum(size(me, q, 1, wire) for q in range(ranks) if q != me),
        ingress_bytes=sum(size(q, me, 1, wire) for q in range(ranks) if q != me),
    )


def _uncompressed(case: pc.Case, rank: int) -> pc.Steps:
    """Lengths and values as they are; the host's wait for the sizes is left out."""
    least, weight = cost(case, rank), case["weights"].itemsize if "weights" in case.params else 0
    link = max(least.egress_bytes, least.ingress_bytes) * (case.dtype.itemsize + weight) / (2.5 + weight)
    return (
        pc.step("exchange of the lengths' sums", barriers=1),
        pc.step("exchange of values and weights", hbm=least.hbm_bytes, link=link, barriers=1),
    )


def _by_sorting(case: pc.Case, inputs: pc.Inputs, rank: int) -> dict[str, torch.Tensor]:
    """Everything from everybody, labelled by feature and place of its source, and one stable sort."""
    members = group_members(case, rank)
    me, ranks = members.index(rank), len(members)
    answer = _answer(case, inputs, members, me)
    key_splits, stagger = inputs[rank][2], inputs[rank][7]
    place = {source: at for at, source in enumerate(source_order(ranks, stagger))}
    for name in ("lengths", "values", "weights"):
        if name not in answer:
            continue
        parts = [_segments(inputs[q])[name] for q in members]
        labels = [
            torch.full(part.shape, feature * ranks + place[source], device=part.device)
            for source, features in enumerate(parts)
            for feature, part in enumerate(features)
        ]
        data, label = torch.cat([part for features in parts for part in features]), torch.cat(labels)
        first = sum(key_splits[:me])
        mine = (label >= first * ranks) & (label < (first + key_splits[me]) * ranks)
        answer[name] = data[mine][label[mine].argsort(stable=True)]
    return answer


Answer = dict[str, torch.Tensor]


def _spoilt(context: pc.AnswerContext, **options: Any) -> Answer:
    return _answer(context.case, context.inputs, context.members, context.place, **options)


def _no_communication(context: pc.AnswerContext) -> Answer:
    own = {"lengths": context.args[0], "values": context.args[1], "weights": context.args[5]}
    return {name: fitted(own[name], len(tensor)) if name in own else tensor.clone() for name, tensor in context.answer.items()}


def _strides_in_order(context: pc.AnswerContext) -> Answer:
    """Batch sizes in the order of sources in the data."""
    order = source_order(len(context.members), context.args[7])
    return {**context.answer, "stride_per_rank": context.answer["stride_per_rank"][order]}


def _weights_unpermuted(context: pc.AnswerContext) -> Answer:
    return {**context.answer, "weights": _spoilt(context, source_major=True)["weights"]}


# Features of the Criteo data set and how many values each has per sample in MLPerf's DLRM-DCNv2.
_CRITEO = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
_CRITEO_KEYS = {2: (13, 13), 4: (7, 6, 6, 7), 8: (4, 3, 3, 3, 3, 3, 3, 4)}
_SOME_ZERO = {2: (0, 3), 4: (1, 0, 2, 1), 8: (1, 0, 2, 1, 0, 1, 2, 1)}


def _small(label: str, **params: Any) -> pc.CaseSpec:
    return pc.case(label, params.pop("dtype", INT64), **{"keys": (2, 1, 3), "batch": 4, "mean": 2, **params})


PRESETS = (
    pc.preset(
        "small",
        "bags that are empty, all of them or all of a rank; unequal batches, strides per feature, ranks without features; stagger, groups",
        _small("equal_batches"),
        _small("unequal_batches", batch=(2, 5, 3, 1), weights=FP32),
        _small("no_samples_on_a_rank", batch=(0, 5, 3, 1), weights=FP16, below=50_000),
        _small("strides_per_feature", strides=(1, 2, 3, 4), weights=FP32),
        _small("no_features_on_a_rank", keys=_SOME_ZERO, batch=(2, 5, 3, 1)),
        _small("strides_no_features", keys=_SOME_ZERO, strides=(0, 2, 3, 4)),
        _small("empty_bags_only", mean=0, batch=3),
        _small("heavy_int32", heavy=True, index=INT32, dtype=INT32),
        _small("staggered", stagger=2, batch=(2, 5, 3, 1), weights=FP32),
        _small("staggered_strides", stagger=2, strides=(1, 2, 3, 4)),
        _small("strided_group", batch=(2, 5), group="strided", world_sizes=(4, 8)),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: 512 samples per rank and feature, 5 values and 7.5 more on average",
        pc.case("int64", INT64, keys=(1, 2, 3), batch=512, least=5, mean=7.5),
    ),
    pc.preset(
        "production_dlrm_dcnv2",
        "MLPerf DLRM-DCNv2: 26 features of 1 to 100 values, 8192 samples per rank; and bags of any length, with weights",
        pc.case("ragged", INT64, keys=_CRITEO_KEYS, batch=8192, mean=_CRITEO, weights=FP32),
        pc.case("fixed", INT64, keys=_CRITEO_KEYS, batch=8192, mean=_CRITEO, fixed=True),
    ),
    pc.preset(
        "production_dlrm_dcnv2_large_batch",
        "MLPerf DLRM-DCNv2 at 32768 samples per rank: bags of any length, with weights",
        pc.case("ragged", INT64, keys=_CRITEO_KEYS, batch=32768, mean=_CRITEO, weights=FP32),
    ),
    pc.preset(
        "production_variable_batch",
        "64 features of 512, 1024 or 4096 samples each, 20 values per sample",
        pc.case("int64", INT64, keys={2: (32,) * 2, 4: (16,) * 4, 8: (8,) * 8}, strides=(512, 1024, 4096), mean=20),
    ),
)

_FROM_LAYOUT = "strides are layout: the same in every block, on all ranks, and all alike where batches are"
_ALL_EMPTY = "all lengths are 0 in this case"
_FIXED = "all lengths are given by the features in this case"
_WEIGHTED = ("small/unequal_batches", "small/strides_per_feature", "small/staggered", "production_dlrm_dcnv2/ragged")
_REORDERED = (*_WEIGHTED, "small/equal_batches", "small/heavy_int32", "pkb/int64")

PROBLEM = pc.Problem(
    id=70,
    slug="keyed_jagged_all_to_all",
    title="All-to-all redistribution of a keyed jagged tensor",
    category="other",
    parallelism=("graph", "data", "tensor"),
    origin="TorchRec: input distribution of sharded embedding bags",
    summary=(
        "F = sum(key_splits) sparse features; destination d owns the next key_splits[d] of them. Every rank of pg (the world if None) has, "
        "feature by feature, the lengths of its samples' bags (batch_size of them, or stride_per_key[f] for feature f), and the bags' "
        "values and weights in the same order. It returns, feature by feature of those that it owns and in each source by source, that "
        "source's lengths, values and weights, bit copies. Sources are in the order x + g y, x < g = W / stagger outside and y < stagger "
        "inside. A dict: lengths, values; stride (the sum of batch sizes, 0-d) and stride_per_rank (W,) in the order of ranks, or, with "
        "stride_per_key, stride_per_key_per_rank (key_splits[r], W) in the order of sources, all int64; and weights, if given."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    attainable=pc.Algorithm(
        "all-to-all of lengths, then of values as they are",
        "TorchRec's KJTAllToAll; what the host waits for sizes is left out",
        _uncompressed,
    ),
    bandwidth="production_dlrm_dcnv2_large_batch",
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong(
            "no_communication", "the rank's own data, repeated or cut", _no_communication, (*_REORDERED, "small/no_features_on_a_rank")
        ),
        pc.wrong("source_major", "features inside sources, as they are received", lambda c: _spoilt(c, source_major=True), _REORDERED),
        pc.wrong(
            "not_staggered",
            "sources in the order of ranks",
            lambda c: _spoilt(c, order=c.ranks),
            ("small/staggered/w4", "small/staggered_strides/w4", "small/staggered/w8", "small/staggered_strides/w8"),
        ),
        pc.wrong(
            "strides_in_order", "stride_per_rank in the order of sources", _strides_in_order, ("small/staggered/w4", "small/staggered/w8")
        ),
        pc.wrong("weights_unpermuted", "weights as they are received", _weights_unpermuted, _WEIGHTED),
    ),
    alternative_solutions=pc.alternatives(by_sorting=_by_sorting),
    excused={
        **{
            f"{null}/{output}": _FROM_LAYOUT
            for null in ("previous", "previous_mean", "another_rank")
            for output in ("stride", "stride_per_rank", "stride_per_key_per_rank")
        },
        **{
            f"{null}/lengths@small/empty_bags_only": _ALL_EMPTY
            for null in ("zeros", "echo", "input_mean", "previous", "previous_mean", "another_rank")
        },
        "previous/lengths@production_dlrm_dcnv2/fixed": _FIXED,
    },
    process_groups=group_layout,
    graph=False,
    graph_reason="how many values a feature has is known from its lengths only, and the host must know it to cut and allocate",
    notes=(
        "The public benchmark's case is the simplest one: equal batches, no weights, no stagger, no empty bag. How many values a feature "
        "has is constant per slot here, so that slots keep their shapes; how they are distributed over samples is not.",
        "stride_per_rank is in the order of ranks also if stagger is not 1, unlike stride_per_key_per_rank, as in the public version.",
    ),
    speed_note=(
        "The public one reads sizes from the device one at a time, dozens of them; this one gathers all sizes in one table and reads it "
        "once."
    ),
)
