"""Problem 85: distributed sort of a one-dimensional array, with balanced output."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP16, FP32, FP64, all_gather_single, fitted, group_layout, group_members
from peerlane.problems.families.graph import fine_uniform

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Samples that every rank takes of its sorted shard, per rank of the group.
_OVERSAMPLING = 32


def reference(local_shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def gathered(row: torch.Tensor) -> torch.Tensor:
        result = row.new_empty(ranks * row.numel())
        all_gather_single(result, row.contiguous(), group=group)
        return result.view(ranks, -1)

    def exchanged(values: torch.Tensor, sizes: list[list[int]]) -> torch.Tensor:
        """``sizes[source][target]`` values from every rank to every rank."""
        received = [row[rank] for row in sizes]
        result = values.new_empty(sum(received))
        dist.all_to_all_single(result, values, received, sizes[rank], group=group)
        return result

    # Samples of every rank's sorted shard, each of which stands for a share of it, make the splitters.
    shard = local_shard.sort().values
    own = shard.numel()
    keys = sort_keys(shard)
    count = _OVERSAMPLING * ranks
    places = torch.arange(count, device=keys.device).mul_(own).div_(count, rounding_mode="floor").clamp_(max=max(own - 1, 0))
    samples = keys[places].to(torch.int64) if own else keys.new_zeros(count, dtype=torch.int64)
    table = gathered(torch.cat((samples, samples.new_tensor([own]))))
    candidates, order = table[:, :-1].flatten().sort()
    weight = table[:, -1:].expand(ranks, count).flatten()[order].cumsum(0)
    wanted = weight[-1] * torch.arange(1, ranks, device=weight.device) // ranks
    splitters = candidates[torch.searchsorted(weight, wanted).clamp_(max=candidates.numel() - 1)]

    # Everybody's part between two splitters to one rank.
    ends = torch.searchsorted(keys, splitters.to(keys.dtype), right=True)
    ends = torch.cat((ends.new_zeros(1), ends, ends.new_tensor([own])))
    sizes = gathered(ends.diff()).tolist()
    bucket = exchanged(shard, sizes).sort().values

    # From uneven buckets to even parts.
    filled = [sum(column) for column in zip(*sizes, strict=True)]
    return exchanged(bucket, _overlaps(filled, balanced(sum(filled), ranks)))


def sort_keys(values: torch.Tensor) -> torch.Tensor:
    """Integers of the same width in the order of the floats, NaN last; both zeros have one key."""
    words = (values + 0.0).view(_WORDS[values.itemsize])
    top = torch.iinfo(words.dtype).max
    return torch.where(words < 0, words ^ top, words).masked_fill_(values.isnan(), top)


def balanced(total: int, ranks: int) -> list[int]:
    """Parts of ``total`` that differ by one at most, larger ones first."""
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


def _overlaps(before: Sequence[int], after: Sequence[int]) -> list[list[int]]:
    """How much of the i-th of consecutive parts ``before`` lies in the j-th of the parts ``after``."""
    old, new = ([0, *itertools.accumulate(sizes)] for sizes in (before, after))
    return [[max(0, min(b, d) - max(a, c)) for c, d in itertools.pairwise(new)] for a, b in itertools.pairwise(old)]


def _sizes(case: pc.Case, ranks: int) -> list[int]:
    """Elements of every rank. ``case["count"]``: one number, or numbers that repeat over ranks; or ``total`` divided equally."""
    if "total" in case.params:
        return [case["total"] // ranks] * ranks
    count: int | Sequence[int] = case["count"]
    return [count if isinstance(count, int) else count[rank % len(count)] for rank in range(ranks)]


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """N(0, 1), or by ``case["data"]``:

    * ``uniform``: U[0, 1); ``log_normal``: exp(N(0, 1)), which in bfloat16 has many duplicates
    * ``sorted``, ``reversed``: the ranks' values ascend, or descend, also from rank to rank
    * ``few``: three different values; ``equal``: all values equal; ``hot``: half of the values are equal
    * ``offset``: whole numbers from -50 to 49, less rank times the shard's length: ranges of ranks that hardly overlap
    * ``special``: a NaN, infinities and zeros of both signs here and there
    """
    members = group_members(case, rank)
    me, ranks = members.index(rank), len(members)
    count = _sizes(case, ranks)[me]
    values, kind = draw.normal((count,), FP64 if case.dtype == FP64 else FP32), case.params.get("data")
    match kind:
        case "uniform":
            values = fine_uniform(draw, count)
        case "log_normal":
            values.exp_()
        case "sorted":
            values = values.sort().values + 8.0 * me
        case "reversed":
            values = values.sort(descending=True).values - 8.0 * me
        case "few":
            values = draw.shared.normal((3,), FP32)[draw.integers(0, 3, (count,))]
        case "equal":
            values = draw.shared.normal((1,), FP32).repeat(count)
        case "hot":
            values = torch.where(draw.uniform((count,), FP32) < 0.5, draw.shared.normal((1,), FP32), values)
        case "offset":
            values = draw.integers(-50, 50, (count,), FP32) - float(me * count)
        case "special":
            specials = pc.constant([math.nan, math.inf, -math.inf, 0.0, -0.0], draw.device)
            choice = draw.integers(0, 12, (count,))
            values = torch.where(choice < 5, specials[choice.clamp(max=4)], values)
    return (values.to(case.dtype).contiguous(), *(pc.GroupRef(name) for name in group_layout(case)))


def _canonical(values: torch.Tensor) -> torch.Tensor:
    """One zero and one NaN in place of all."""
    return torch.where(values.isnan(), math.nan, values + 0.0)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    members = group_members(case, rank)
    everything = torch.cat([inputs[q][0] for q in members]).sort().values
    return pc.exactly("sorted", torch.split(everything, balanced(everything.numel(), len(members)))[members.index(rank)].clone())


def compare(case: pc.Case, got: torch.Tensor, expected: pc.Expected, kind: str) -> list[pc.Score]:
    """Bit for bit, but for the signs of zeros and the bits of NaN."""
    return [pc.compare_exact("sorted", _canonical(got), _canonical(expected.value))]


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """The shard is read once, and the result written once; of elements in random places, all but every W-th change ranks.

    Where values follow an order or repeat, fewer elements may have to. One counts then: ranks have to hear of the order.
    """
    members = group_members(case, rank)
    ranks, sizes, size = len(members), _sizes(case, len(members)), case.dtype.itemsize
    me = members.index(rank)
    own, result = sizes[me], balanced(sum(sizes), ranks)[me]
    scattered = case.params.get("data") in (None, "uniform", "log_normal")
    return pc.Cost(
        hbm_bytes=size * (own + result),
        egress_bytes=size * max(own * (ranks - 1) / ranks * scattered, ranks > 1),
        ingress_bytes=size * max((result - own / ranks) * scattered, ranks > 1),
    )


def _sorted_runs(case: pc.Case, rank: int) -> pc.Steps:
    """A pass takes 8 bits of the key. A splitter's bits are found one after the other, each by counts of all ranks."""
    members, size, least = group_members(case, rank), case.dtype.itemsize, cost(case, rank)
    own = _sizes(case, len(members))[members.index(rank)] * size
    return (
        pc.step("radix sort of the shard", hbm=(2 * size + 1) * own),
        pc.step("search for the splitters", barriers=8 * size),
        pc.step("exchange", hbm=least.hbm_bytes, link=max(least.egress_bytes, least.ingress_bytes), barriers=1),
        pc.step("merge of the runs", hbm=2 * (least.hbm_bytes - own)),
    )


def _parts(values: torch.Tensor, case: pc.Case, rank: int) -> torch.Tensor:
    members = group_members(case, rank)
    return torch.split(values, balanced(values.numel(), len(members)))[members.index(rank)].clone()


def _by_keys(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """A stable sort of integer keys, shards from last to first."""
    values = torch.cat([inputs[q][0] for q in reversed(group_members(case, rank))])
    return _parts(values[sort_keys(values).argsort(stable=True)], case, rank)


def _by_merging(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Sorted shards merged one after the other: every element goes to its own place plus the number of smaller ones in the other list."""
    merged = inputs[group_members(case, rank)[0]][0].sort().values
    for q in group_members(case, rank)[1:]:
        other = inputs[q][0].sort().values
        keys, other_keys = sort_keys(merged), sort_keys(other)
        result = merged.new_empty(merged.numel() + other.numel())
        result[torch.arange(merged.numel(), device=keys.device) + torch.searchsorted(other_keys, keys)] = merged
        result[torch.arange(other.numel(), device=keys.device) + torch.searchsorted(keys, other_keys, right=True)] = other
        merged = result
    return _parts(merged, case, rank)


def _whole(context: pc.AnswerContext) -> torch.Tensor:
    return torch.cat([context.inputs[q][0] for q in context.members])


def _unbalanced(context: pc.AnswerContext) -> torch.Tensor:
    """What starts where the rank's share would start if it had as many as it was given."""
    first = sum(len(context.inputs[q][0]) for q in context.members[: context.place])
    return fitted(_whole(context).sort().values[first:], len(context.answer))


def _remainder_last(context: pc.AnswerContext) -> torch.Tensor:
    """The remainder's elements given to the last ranks: every part but the first starts too early."""
    whole = _whole(context).sort().values
    first = sum(balanced(len(whole), len(context.members))[::-1][: context.place])
    return fitted(whole[first:], len(context.answer))


def _without_duplicates(context: pc.AnswerContext) -> torch.Tensor:
    """Of equal values one each."""
    whole = _whole(context).sort().values
    differs = torch.ones(whole.shape, dtype=torch.bool, device=whole.device)
    differs[1:] = sort_keys(whole).diff() != 0
    return _parts(fitted(whole[differs], len(whole)), context.case, context.rank)


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"count": (9, 0, 17, 4), **params})


PRESETS = (
    pc.preset(
        "small",
        "uneven, empty and single shards, fewer elements than ranks; order, duplicates, NaN, infinities and zeros of both signs; groups",
        _small("uneven_fp32", FP32),
        _small("uneven_fp64", FP64, data="uniform"),
        _small("uneven_fp16", FP16, data="log_normal"),
        _small("sorted_fp32", FP32, count=(9, 7, 17, 4), data="sorted"),
        _small("reversed_bf16", BF16, count=(9, 7, 17, 4), data="reversed"),
        _small("few_values_bf16", BF16, count=(37, 20, 31, 44), data="few"),
        _small("hot_fp32", FP32, count=(37, 20, 31, 44), data="hot"),
        _small("equal_fp32", FP32, data="equal"),
        _small("special_fp32", FP32, count=(39, 0, 27, 14), data="special"),
        _small("fewer_than_ranks_fp32", FP32, count=(0, 1, 0, 0)),
        _small("empty_fp32", FP32, count=0),
        _small("strided_group_fp32", FP32, count=(9, 9, 18, 4), group="strided", world_sizes=(4, 8)),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: 1024 elements in all; its odd ranks are sometimes empty",
        pc.case("bf16", BF16, total=1024, data="offset"),
        pc.case("normal_bf16", BF16, total=1024),
        pc.case("odd_ranks_empty_bf16", BF16, count=(256, 0), data="offset"),
    ),
    pc.preset("production_normal", "2^27 elements per rank, N(0, 1)", pc.case("fp32", FP32, count=2**27)),
    pc.preset(
        "production_uniform", "2^25 elements per rank in double precision, U[0, 1)", pc.case("fp64", FP64, count=2**25, data="uniform")
    ),
    pc.preset(
        "production_log_normal",
        "2^26 scores per rank, log-normal, nearly all of them duplicates; and one rank with most of the data",
        pc.case("bf16", BF16, count=2**26, data="log_normal"),
        pc.case("skewed_bf16", BF16, count=(2**26, 2**19, 2**19, 2**19), data="log_normal"),
    ),
)

_UNEVEN = ("small/uneven_fp32", "small/uneven_fp64", "small/sorted_fp32", "small/special_fp32", "small/hot_fp32")
_VARIED = (
    *_UNEVEN,
    *pc.small_cases("uneven_fp16", "reversed_bf16", "few_values_bf16", "strided_group_fp32"),
    "pkb/bf16",
    "pkb/normal_bf16",
)
_EQUAL = "all elements are equal in this case, on all ranks"

PROBLEM = pc.Problem(
    id=85,
    slug="distributed_sample_sort",
    title="Distributed sort of a one-dimensional array with balanced output",
    category="other",
    parallelism=("data",),
    origin="cuPyNumeric (Legate): distributed sample sort",
    summary=(
        "With A the ascending sort of all ranks' shards together, N its length, and W the size of the group (the world if None), rank r "
        "returns N // W elements of A, one more if r < N % W, that follow those of rank r - 1. NaN comes last; signs of zeros and bits of "
        "NaN are free. Shards may differ in length and be empty; the result has their dtype."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    compare=compare,
    cost=cost,
    attainable=pc.Algorithm(
        "radix sort of the shard, exchange between exact splitters, merge", "passes as in Adinets and Merrill, Onesweep, 2022", _sorted_runs
    ),
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("unbalanced", "parts as long as the shards are", _unbalanced, _UNEVEN),
        pc.wrong("remainder_last", "the remainder with the last ranks", _remainder_last, tuple(f"{name}/w4" for name in _UNEVEN[:3])),
        pc.wrong(
            "unsorted",
            "shards one after the other",
            lambda c: _parts(_whole(c), c.case, c.rank),
            tuple(x for x in _VARIED if "sorted" not in x),
        ),
        pc.wrong("descending", "the largest first", lambda c: _parts(_whole(c).sort(descending=True).values, c.case, c.rank), _VARIED),
        pc.wrong("without_duplicates", "equal elements once", _without_duplicates, ("small/few_values_bf16", "small/hot_fp32", "pkb/bf16")),
    ),
    alternative_solutions=pc.alternatives(by_keys=_by_keys, by_merging=_by_merging),
    excused={
        **pc.any_order("a sorted sequence does not depend on the order of its parts"),
        "another_rank@small/equal_fp32": _EQUAL,
        "echo@small/equal_fp32": _EQUAL,
        "input_mean@small/equal_fp32": _EQUAL,
    },
    process_groups=group_layout,
    graph=False,
    graph_reason="how many elements go from which rank to which depends on their values, and the host must know it for the exchange",
    notes=(
        "In the public benchmark's input ranks have ranges that hardly overlap, in reverse order, so that a result is mostly one other "
        "rank's shard; the pkb preset has that shape, and a case in which every element may belong anywhere.",
        "Integers, which the public reference does not sort, are left out.",
    ),
    speed_note=(
        "The public one tells duplicates apart in Python and waits for the device dozens of times; this one finds splitters on the "
        "device, with four collectives and one read by the host."
    ),
)
