"""Problem 79: k nearest neighbours of every rank's queries among training features sharded across ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP16, FP32, FP64, all_gather_single, group_layout, group_members
from peerlane.problems.families.multisets import by_label, counterpart

# From how many neighbours on some queries have nearly all of theirs on one rank.
_MANY = 16

# Training rows that the oracle widens to float64 at a time.
_CHUNK_ROWS = 2**17


def reference(
    test_features_rank: torch.Tensor,
    train_features_rank_T: torch.Tensor,
    train_labels_rank: torch.Tensor,
    max_k: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if max_k > train_features_rank_T.shape[1]:
        raise ValueError(f"max_k is {max_k} but the shard has {train_features_rank_T.shape[1]} rows: expected no more than the shard has")
    ranks, (own, depth) = dist.get_world_size(group), test_features_rank.shape

    # Everyone's queries, padded to the largest count for the gather.
    counts = torch.empty(ranks, dtype=torch.int64, device=test_features_rank.device)
    all_gather_single(counts, counts.new_tensor([own]), group=group)
    sizes: list[int] = counts.tolist()
    padded = test_features_rank.new_zeros(max(sizes), depth)
    padded[:own] = test_features_rank
    gathered = padded.new_empty(ranks * max(sizes), depth)
    all_gather_single(gathered, padded, group=group)
    queries = torch.cat([block[:size] for block, size in zip(gathered.view(ranks, max(sizes), depth), sizes, strict=True)])

    # The best of this shard for every query, sent to the rank whose query it is.
    best = torch.topk(queries @ train_features_rank_T, max_k, dim=1)
    labels = train_labels_rank.flatten()[best.indices]
    found = best.values.new_empty(ranks * own, max_k)
    found_labels = labels.new_empty(ranks * own, max_k)
    dist.all_to_all_single(found, best.values, [own] * ranks, sizes, group=group)
    dist.all_to_all_single(found_labels, labels, [own] * ranks, sizes, group=group)

    # The best of all shards' best.
    candidates, candidate_labels = (
        block.view(ranks, own, max_k).transpose(0, 1).reshape(own, ranks * max_k) for block in (found, found_labels)
    )
    nearest = torch.topk(candidates, max_k, dim=1)
    return nearest.values, candidate_labels.gather(1, nearest.indices)


def _queries(case: pc.Case, rank: int) -> int:
    """Queries of one rank. ``case["queries"]``: one number, or numbers that repeat over the group's ranks."""
    count: int | Sequence[int] = case["queries"]
    return count if isinstance(count, int) else count[group_members(case, rank).index(rank) % len(count)]


def _rows(case: pc.Case, rank: int) -> int:
    """Training rows of one rank. ``case``: ``rows``, like ``queries``, or ``rows_total`` over all ranks."""
    members = group_members(case, rank)
    if "rows_total" in case.params:
        return int(case["rows_total"]) // len(members)
    count: int | Sequence[int] = case["rows"]
    return count if isinstance(count, int) else count[members.index(rank) % len(count)]


def _has_homes(case: pc.Case, rank: int) -> bool:
    """Whether some clusters lie on one rank each: where k is large, and shards much larger."""
    smallest = min(_rows(case, q) for q in group_members(case, rank))
    return "pattern" not in case.params and _MANY <= case["k"] <= smallest // 2


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Features of unit length in ``case["classes"]`` clusters: a centre and noise 0.3 to 1.2 times as long.

    A row's label is its cluster for three rows in four, and any class for the others. Without a pattern, if k is large, every rank of the
    group holds 5 k / 4 rows of a cluster that no other has, and a quarter of the queries belong to such clusters: nearly all of their
    neighbours are on one rank. ``case["pattern"]``:

    * ``sorted``: rank i of the group holds cluster i alone, and the queries of rank i belong to cluster i + 1: one foreign rank has all
      neighbours
    * ``duplicates``: all ranks draw their rows from the same few, several times and under different labels
    * ``self``: queries are rows of the next rank
    * ``negative``: rows lie opposite to the queries, so that every similarity is negative
    * ``zeros``: one query and every fifth row are zero
    """
    members, depth, classes = group_members(case, rank), case["depth"], case["classes"]
    place, ranks = members.index(rank), len(members)
    count, rows, pattern, shared = _queries(case, rank), _rows(case, rank), case.params.get("pattern"), draw.shared
    centres = torch.nn.functional.normalize(shared.normal((classes, depth), FP32), dim=1)

    def clustered(cluster: torch.Tensor, source: pc.Draw) -> torch.Tensor:
        features = source.normal((cluster.numel(), depth), FP32, scale=depth**-0.5)
        features *= source.uniform((cluster.numel(), 1), FP32, low=0.3, high=1.2)
        features += centres[cluster]
        return features

    def beside(features: torch.Tensor) -> torch.Tensor:
        """The features' parts orthogonal to the first centre, at length 0.9."""
        across = features - (features @ centres[0]).unsqueeze(1) * centres[0]
        return torch.nn.functional.normalize(across, dim=1).mul_(0.9)

    query_cluster, row_cluster = draw.integers(0, classes, (count,)), draw.integers(0, classes, (rows,))
    if pattern == "sorted":
        query_cluster.fill_((place + 1) % ranks)
        row_cluster.fill_(place)
    if _has_homes(case, rank):
        query_cluster, row_cluster = (draw.integers(ranks, classes, (size,)) for size in (count, rows))
        at_home = draw.permutation(count)[: -(-count // 4)]
        query_cluster[at_home] = draw.integers(0, ranks, (len(at_home),))
        row_cluster.index_fill_(0, draw.permutation(rows)[: case["k"] * 5 // 4], place)  # a plain assignment waits for the device
    queries, train = clustered(query_cluster, draw), clustered(row_cluster, draw)
    mislabelled = draw.uniform((rows,), FP32) < 0.25
    labels = torch.where(mislabelled, draw.integers(0, classes, (rows,)), row_cluster)
    if pattern == "duplicates":
        few = clustered(shared.integers(0, classes, (5 * ranks,)), shared)
        train = few[draw.integers(0, len(few), (rows,))]
        labels = draw.integers(0, classes, (rows,))
    elif pattern == "self":
        bank = clustered(shared.integers(0, classes, (ranks * count,)), shared).view(ranks, count, depth)
        train[:count] = bank[place]
        queries = bank[(place + 1) % ranks]
    elif pattern == "negative":
        # The products of the parts along the centre are -1, and of the others 0.81 at most.
        queries, train = beside(queries) + centres[0], beside(train) - centres[0]
    queries, train = (torch.nn.functional.normalize(x, dim=1).to(case.dtype) for x in (queries, train))
    if pattern == "zeros":
        queries[:1] = 0.0
        train[::5] = 0.0
    arguments = (queries, train.t().contiguous(), labels.unsqueeze(0), case["k"])
    return (*arguments, *(pc.GroupRef(name) for name in group_layout(case)))


@dataclass(kw_only=True)
class NearestLabels(pc.Expected):
    """The labels of the k nearest rows, with every row that rounding errors may put among them.

    Attributes:
        similarities: (Q, k) the k largest similarities, descending, float64.
        candidate_similarities: (Q, C) those of the rows that may be chosen, descending; -inf where a query has fewer than C.
        candidate_labels: (Q, C) their labels.
        required: (Q, C) rows that must be chosen: nearer than the k-th by more than errors can make up for.
        scale: (Q, 1) the query's length times the longest row's, a bound of the sum of absolute products behind any similarity.
    """

    similarities: torch.Tensor
    candidate_similarities: torch.Tensor
    candidate_labels: torch.Tensor
    required: torch.Tensor
    scale: torch.Tensor


def allowed_error(case: pc.Case, similarities: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Largest error of a similarity s: 2 u |s|, 2 u of the sum of absolute products, and 4 sqrt(D) float32 roundoffs of that sum.

    One u is the rounding to the features' dtype; the other is needed where two rounded similarities are compared to choose between rows.
    Matrix products in half precision may be split along D and add partial sums that are rounded to the features' dtype: PyTorch allows its
    libraries that. Each partial sum errs by u of itself, and together they are at most the sum of absolute products. The sum of D products
    in float32 errs by about sqrt(D) roundoffs in any order.
    """
    u = pc.UNIT_ROUNDOFF[case.dtype]
    sums: float = 4 * case["depth"] ** 0.5 * pc.UNIT_ROUNDOFF[FP32]
    partial = 2 * u if case.dtype != FP32 else 0.0
    return 2 * u * similarities.abs() + (partial + sums) * scale


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, NearestLabels]:
    queries, k = inputs[rank][0].to(FP64), case["k"]
    members = group_members(case, rank)
    labels = torch.cat([inputs[q][2].flatten() for q in members])
    similarities = queries.new_empty(queries.shape[0], labels.numel())
    longest, first = queries.new_zeros(()), 0
    for q in members:
        for block in torch.split(inputs[q][1], _CHUNK_ROWS, dim=1):
            rows = block.to(FP64)
            similarities[:, first : first + rows.shape[1]] = queries @ rows
            longest = torch.maximum(longest, rows.norm(dim=0).max())
            first += rows.shape[1]

    scale = queries.norm(dim=1, keepdim=True) * longest
    nearest = similarities.topk(k, dim=1)
    last = nearest.values[:, -1:]
    margin = allowed_error(case, last, scale)
    count = int((similarities >= last - margin).sum(1).max()) if queries.numel() else k
    candidates = similarities.topk(count, dim=1)
    values = candidates.values.masked_fill(candidates.values < last - margin, -math.inf)
    return (
        pc.Expected("similarities", nearest.values, case.dtype),
        NearestLabels(
            name="labels",
            value=labels[nearest.indices],
            dtype=torch.int64,
            similarities=nearest.values,
            candidate_similarities=values,
            candidate_labels=labels[candidates.indices],
            required=values > last + margin,
            scale=scale,
        ),
    )


def compare(
    case: pc.Case, got: tuple[torch.Tensor, torch.Tensor], expected: tuple[pc.Expected, NearestLabels], kind: str
) -> list[pc.Score]:
    """A similarity s may differ by 2 u (|s| + S), where S is the sum of the absolute values of its products.

    There u is the features' unit roundoff: 2^-8 in bfloat16, 2^-11 in float16. In float32 it is 2^-24, and 4 sqrt(D) u S are allowed.
    Similarities descend. Labels are those of different training rows with these similarities. Rows within the error of the k-th count as
    well.
    """
    want = expected[1]
    if want.similarities.shape[0] == 0:
        return [pc.Score("similarities", 0.0, "empty"), pc.Score("labels", 0.0, "empty")]
    similarities, labels = got[0].to(FP64), got[1]
    return [_similarity_score(case, similarities, want), _label_score(case, similarities, labels, want)]


def _similarity_score(case: pc.Case, got: torch.Tensor, want: NearestLabels) -> pc.Score:
    """Descending, and each within the allowed error of the oracle's of the same place."""
    error = (got - want.similarities).abs()
    allowed = allowed_error(case, want.similarities, want.scale)
    ratio = torch.where(error == 0, 0.0, error / allowed).nan_to_num(nan=math.inf, posinf=math.inf)
    index = _worst(ratio)
    detail = f"error {float(error[index]):.3g}, allowed {float(allowed[index]):.3g}"
    rises = torch.zeros_like(ratio, dtype=torch.bool)
    rises[:, 1:] = got[:, 1:] > got[:, :-1]
    if bool(rises.any()):
        index, detail = (
            _worst(rises),
            f"{int(rises.any(1).sum())} of {len(rises)} queries have similarities that are not in descending order",
        )
        ratio = ratio.masked_fill(rises, math.inf)
    return pc.Score("similarities", float(ratio[index]), detail, index, float(got[index]), float(want.similarities[index]))


def _label_score(case: pc.Case, similarities: torch.Tensor, labels: torch.Tensor, want: NearestLabels) -> pc.Score:
    """Every (similarity, label) stands for a row of its own, and every required row is there.

    For each query and label, the i-th largest similarity returned is held against the i-th largest candidate of that label: it must exist
    and not lie below the similarity returned by more than the allowed error, nor, if it is required, above. This is so if and only if
    the answers can be matched with different rows, all that is required among them. (The lower bound of the others is the k-th largest
    similarity, which the comparison of similarities ensures.)
    """
    order = similarities.argsort(dim=1, descending=True, stable=True)
    similarities, labels = by_label(similarities.gather(1, order), labels.gather(1, order))
    candidates, candidate_labels, required = by_label(want.candidate_similarities, want.candidate_labels, want.required)

    place, exists = counterpart(labels, candidate_labels)
    row = candidates.gather(1, place)
    unfounded = ~(exists & row.isfinite() & (similarities <= row + allowed_error(case, row, want.scale)))

    place, exists = counterpart(candidate_labels, labels)
    answer = similarities.gather(1, place)
    missing = required & ~(exists & (answer >= candidates - allowed_error(case, candidates, want.scale)))

    wrong, absent = int(unfounded.sum()), int(missing.sum())
    if not wrong and not absent:
        return pc.Score("labels", 0.0, "every label belongs to a neighbour of its own")
    detail = f"{wrong} of {labels.numel()} labels belong to no neighbour that is left, {absent} neighbours are missing"
    source, values = (unfounded, labels) if wrong else (missing, candidate_labels)
    query, column = _worst(source)
    label = float(values[query, column])
    return pc.Score("labels", math.inf, detail, (query,), label if wrong else None, None if wrong else label)


def _worst(ratio: torch.Tensor) -> tuple[int, int]:
    flat = int(ratio.to(FP64).argmax())
    return flat // ratio.shape[1], flat % ratio.shape[1]


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Queries go to every other rank; after an exchange of thresholds about k / W candidates per shard and query come back.

    A candidate is a similarity and a label of 4 bytes. A shard is read once for the queries of all ranks.
    """
    members, size, depth, k = group_members(case, rank), case.dtype.itemsize, case["depth"], case["k"]
    ranks, own, rows = len(members), _queries(case, rank), _rows(case, rank)
    total = sum(_queries(case, q) for q in members)
    candidate = k / ranks * (size + 4)
    return pc.Cost(
        hbm_bytes=(rows * depth + total * depth + own * k) * size + own * k * 8,
        egress_bytes=(ranks - 1) * own * depth * size + (total - own) * candidate,
        ingress_bytes=(total - own) * depth * size + (ranks - 1) * own * candidate,
        flops={{BF16: "bf16", FP16: "fp16", FP32: "fp32"}[case.dtype]: 2 * depth * rows * total},
    )


def _selected(case: pc.Case, rank: int) -> pc.Steps:
    """A pass of the selection takes 11 bits of the similarities."""
    members, size, depth, k = group_members(case, rank), case.dtype.itemsize, case["depth"], case["k"]
    ranks, own, rows, least = len(members), _queries(case, rank), _rows(case, rank), cost(case, rank)
    total = sum(_queries(case, q) for q in members)
    scores, candidates = rows * total * size, (ranks - 1) * k * (size + 4)
    return (
        pc.step("exchange of queries", link=(ranks - 1) * own * depth * size, barriers=1),
        pc.step("product", hbm=(rows + total) * depth * size + scores, flops=least.flops),
        pc.step("radix selection in the scores", hbm=-(-8 * size // 11) * scores),
        pc.step("exchange of k candidates a shard", link=max(own, total - own) * candidates, barriers=1),
        pc.step("merge", hbm=2 * own * (candidates + k * (size + 8))),
    )


def _nearest(case: pc.Case, inputs: pc.Inputs, rank: int, owners: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The k nearest rows of the owners' shards, chosen by float32 similarities."""
    train = torch.cat([inputs[q][1] for q in owners], dim=1).to(FP32)
    labels = torch.cat([inputs[q][2].flatten() for q in owners])
    best = (inputs[rank][0].to(FP32) @ train).topk(case["k"], dim=1)
    return best.values.to(case.dtype), labels[best.indices]


def _flat(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _nearest(case, inputs, rank, group_members(case, rank))


def _hierarchical(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Similarities rounded to the features' dtype, each shard's k best, and the k best of those, shards from last to first."""
    found = []
    for q in reversed(group_members(case, rank)):
        similarities = (inputs[rank][0].to(FP32) @ inputs[q][1].to(FP32)).to(case.dtype)
        best = similarities.topk(case["k"], dim=1)
        found.append((best.values, inputs[q][2].flatten()[best.indices]))
    values, labels = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    order = values.argsort(dim=1, descending=True)[:, : case["k"]]
    return values.gather(1, order), labels.gather(1, order)


def _split_depth(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Products summed in pieces of eight, the pieces in float32 from last to first."""
    members = group_members(case, rank)
    queries, train = inputs[rank][0].to(FP32), torch.cat([inputs[q][1] for q in members], dim=1).to(FP32)
    similarities = torch.zeros(queries.shape[0], train.shape[1], device=queries.device)
    for first in reversed(range(0, queries.shape[1], 8)):
        similarities += queries[:, first : first + 8] @ train[first : first + 8]
    labels = torch.cat([inputs[q][2].flatten() for q in members])
    best = similarities.topk(case["k"], dim=1)
    return best.values.to(case.dtype), labels[best.indices]


def _rounded_halves(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of the two halves of the depth, each rounded to the features' dtype, and their rounded sum."""
    members, half = group_members(case, rank), case["depth"] // 2
    queries, train = inputs[rank][0], torch.cat([inputs[q][1] for q in members], dim=1)
    parts = ((queries[:, :half], train[:half]), (queries[:, half:], train[half:]))
    first, second = ((a.to(FP32) @ b.to(FP32)).to(case.dtype) for a, b in parts)
    best = (first + second).topk(case["k"], dim=1)
    return best.values, torch.cat([inputs[q][2].flatten() for q in members])[best.indices]


def _half_per_shard(context: pc.AnswerContext) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every shard three quarters of k on two ranks, and half of k on more."""
    case, members, query = context.case, context.members, context.args[0].to(FP32)
    most = -(-case["k"] * 3 // 4) if len(members) == 2 else -(-case["k"] // 2)
    best = [(query @ context.inputs[q][1].to(FP32)).topk(most, dim=1) for q in members]
    labels = torch.cat([context.inputs[q][2].flatten()[each.indices] for q, each in zip(members, best, strict=True)], dim=1)
    nearest = torch.cat([each.values for each in best], dim=1).topk(case["k"], dim=1)
    return nearest.values.to(case.dtype), labels.gather(1, nearest.indices)


def _last_neighbour_repeated(context: pc.AnswerContext) -> pc.Tree:
    """The nearest row twice, at the expense of the k-th."""
    return tuple(torch.cat((x[:, :1], x[:, :-1]), dim=1) for x in context.answer)


def _row_indices(context: pc.AnswerContext) -> tuple[torch.Tensor, torch.Tensor]:
    """The right similarities, and numbers of rows instead of their labels."""
    train = torch.cat([context.inputs[q][1] for q in context.members], dim=1).to(FP32)
    return context.answer[0], (context.args[0].to(FP32) @ train).topk(context.case["k"], dim=1).indices


def _clipped(context: pc.AnswerContext) -> tuple[torch.Tensor, torch.Tensor]:
    """What a selection that starts from zeros makes of negative similarities."""
    return context.answer[0].clamp(min=0.0), context.answer[1]


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"queries": (3, 5, 2, 4), "rows": 20, "depth": 16, "k": 6, "classes": 9, **params})


PROBLEM = pc.Problem(
    id=79,
    slug="distributed_knn",
    title="Distributed k-nearest-neighbour search: sharded training features, queries on every rank",
    category="other",
    parallelism=("data",),
    origin="DINOv2: k-NN evaluation of frozen features",
    summary=(
        "test_features_rank (Q_r, D) are the rank's queries, as many as it likes; train_features_rank_T (D, n_r) its shard of the training "
        "features, transposed, and train_labels_rank (1, n_r) their int64 labels. Returns for the rank's own queries the max_k largest "
        "inner products with the training rows of all ranks of the group (the world if None), (Q_r, max_k) in descending order and in the "
        "features' dtype, accumulated in float32, and the labels of those rows, (Q_r, max_k) int64. The order among equal similarities is "
        "free. ValueError if max_k > n_r."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    compare=compare,
    cost=cost,
    attainable=pc.Algorithm(
        "product, radix selection, candidates of all shards", "passes as in Zhang et al., Parallel Top-K Algorithms on GPU, 2023", _selected
    ),
    presets=(
        pc.preset(
            "small",
            "uneven queries and shards; all neighbours on one rank; ties; k = n; rows as queries; negative and zero similarities",
            _small("clustered_fp32", FP32),
            _small("clustered_bf16", BF16),
            _small("clustered_fp16", FP16, queries=5),
            _small("sorted_fp32", FP32, pattern="sorted"),
            _small("sorted_bf16", BF16, pattern="sorted"),
            _small("duplicates_fp32", FP32, pattern="duplicates"),
            _small("duplicates_bf16", BF16, pattern="duplicates"),
            _small("k_is_n_fp32", FP32, k=20),
            _small("self_bf16", BF16, queries=4, pattern="self"),
            _small("negative_fp32", FP32, pattern="negative"),
            _small("negative_bf16", BF16, pattern="negative"),
            _small("zeros_fp32", FP32, pattern="zeros"),
            _small("ragged_shards_bf16", BF16, queries=(9, 0), rows=(20, 7, 13, 6)),
            _small("dense_bf16", BF16, queries=8, rows=400, k=50, depth=33, classes=20),
            _small("strided_group_fp32", FP32, group="strided", world_sizes=(4, 8)),
        ),
        pc.preset(
            "pkb",
            "the public benchmark's shape: 16384 rows over all ranks",
            pc.case("bf16", BF16, queries=32, rows_total=16384, depth=384, k=200, classes=1000),
            pc.case("fp32", FP32, queries=32, rows_total=16384, depth=384, k=200, classes=1000),
        ),
        pc.preset(
            "production_dinov2_vitl14_imagenet1k",
            "an eighth of ImageNet-1k per rank, D = 1024, batches of 256 queries",
            pc.case("fp16", FP16, queries=256, rows=160147, depth=1024, k=200, classes=1000),
            pc.case("bf16", BF16, queries=256, rows=160147, depth=1024, k=200, classes=1000),
        ),
        pc.preset(
            "production_dinov2_vitg14_imagenet1k",
            "an eighth of ImageNet-1k per rank, D = 1536, batches of 512 queries",
            pc.case("fp16", FP16, queries=512, rows=160147, depth=1536, k=200, classes=1000),
        ),
        pc.preset(
            "production_imagenet22k_bank",
            "1.77 million rows per rank, D = 1024, batches of 64 queries",
            pc.case("fp16", FP16, queries=64, rows=1_770_000, depth=1024, k=100, classes=21841),
        ),
    ),
    known_wrong_answers=(
        pc.wrong("own_shard", "neighbours from the rank's own shard", lambda c: _nearest(c.case, c.inputs, c.rank, [c.rank])),
        pc.wrong("half_per_shard", "a half or three quarters of k from every shard", _half_per_shard, ("small/dense_bf16", "pkb/bf16")),
        pc.wrong("next_query", "labels of another query", lambda c: (c.answer[0], c.answer[1].roll(1, 0))),
        pc.wrong(
            "one_label",
            "the nearest row's label in every place",
            lambda c: (c.answer[0], c.answer[1][:, :1].expand_as(c.answer[1]).contiguous()),
        ),
        pc.wrong("nearest_twice", "the nearest row counted twice", _last_neighbour_repeated),
        pc.wrong("row_numbers", "numbers of rows instead of labels", _row_indices),
        pc.wrong("clipped_at_zero", "a selection that starts from zeros", _clipped, ("small/negative_fp32", "small/negative_bf16")),
    ),
    alternative_solutions=pc.alternatives(
        flat_fp32=_flat, hierarchical_rounded=_hierarchical, split_depth_fp32=_split_depth, rounded_halves=_rounded_halves
    ),
    process_groups=group_layout,
    graph=False,
    graph_reason="ranks may have different numbers of queries, which the host must know for the exchange",
    notes=(
        "The public benchmark's random unit vectors have a few dozen different similarities in bfloat16 among the 200 nearest, so that its "
        "labels are decided by ties; labels are compared here as multisets within rounding error, and features are clustered. A quarter of "
        "the queries have nearly all neighbours on one rank.",
        "The public reference takes group ranks for global ranks. Here any group will do.",
        "Similarities have the features' dtype, whatever it is. Sums may be split along D into parts that are rounded to that dtype, as "
        "PyTorch allows its libraries to do.",
    ),
    speed_note=(
        "The public one serves one rank's queries after the other, each with four collectives, a product and a selection; this one takes "
        "all ranks' queries in one batch."
    ),
)
