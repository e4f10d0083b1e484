"""Problem 69: the rank of every positive edge's score among its negatives', gathered over ranks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP16, FP32, FP64, INT64, all_gather_single, fitted, group_layout, group_members
from peerlane.problems.families.graph import per_rank
from peerlane.problems.families.interval import Interval

# Bytes of float64 scores that the oracle holds at a time; it needs about six times as much.
_CHUNK_BYTES = 2**29

# Results below this, twice float32's smallest normal number, may be flushed to zero.
_TINY = 2.0**-125


def reference(local_pos_scores: torch.Tensor, local_neg_scores: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    ranks, own = dist.get_world_size(group), local_pos_scores.shape[0]
    positive, negative = local_pos_scores.sigmoid().unsqueeze(1), local_neg_scores.sigmoid()
    # Equal scores are never above one another, even where a vectorised sigmoid rounds one of them another way.
    higher = (negative > positive) & (local_neg_scores > local_pos_scores.unsqueeze(1))
    above = higher | (negative.isnan() & ~positive.isnan())
    ranking = 1 + above.sum(1)

    # Everybody's, padded to the largest number for the gather.
    counts = ranking.new_empty(ranks)
    all_gather_single(counts, ranking.new_tensor([own]), group=group)
    sizes = counts.tolist()
    padded = ranking.new_zeros(max(sizes))
    padded[:own] = ranking
    gathered = ranking.new_empty(ranks * max(sizes))
    all_gather_single(gathered, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(gathered.view(ranks, max(sizes)), sizes, strict=True)])


def _positives(case: pc.Case, ranks: int) -> list[int]:
    """Positive edges of every rank. ``case``: ``positives``, a number or numbers that repeat, or ``positives_total`` / W + rank mod 3."""
    if "positives_total" in case.params:
        return [case["positives_total"] // ranks + rank % 3 for rank in range(ranks)]
    return [per_rank(case["positives"], rank) for rank in range(ranks)]


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    members = group_members(case, rank)
    me, counts = members.index(rank), _positives(case, len(members))
    if not group_layout(case):
        return _scores(case, counts[me], draw)
    # All ranks must return the same, so that groups have the same scores, drawn for one of their members after the other.
    scores = [_scores(case, count, draw.shared) for count in counts]
    return (*scores[me], *(pc.GroupRef(name) for name in group_layout(case)))


def _scores(case: pc.Case, count: int, draw: pc.Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores N(0, 1), those of positives around 1. ``case["pattern"]``:

    * ``tied``: one positive in three has negatives that all equal it, and the others share half of theirs
    * ``saturated``: scores of +50 and -50 (in float32 -120), whose sigmoids are 1 and about 0, some larger still

    In float32 positives of both have sigmoids of exactly 0, 1/2 or 1: others a vectorised sigmoid may round in two ways, and tell apart
    what is equal.
    * ``masked``: one negative in four is -inf
    * ``special``: some positives and negatives are NaN or infinite
    * ``extremes``: every other positive lies above all its negatives or below them
    """
    positive, negative = draw.normal((count,), FP32, shift=1.0), draw.normal((count, case["negatives"]), FP32)
    row = torch.arange(count, device=draw.device)
    match case.params.get("pattern"):
        case "tied":
            if case.dtype == FP32:
                certain = pc.constant([0.0, 0.0, 40.0, -120.0], draw.device)
                positive = certain[draw.integers(0, 4, positive.shape)]
            equal = (draw.uniform(negative.shape, FP32) < 0.5) | (row % 3 == 0).unsqueeze(1)
            negative = torch.where(equal, positive.unsqueeze(1), negative)
        case "saturated":
            least = -120.0 if case.dtype == FP32 else -50.0
            positive, negative = (torch.where(x > 0.5, 50.0, least) + 10 * x * (x > 1.0) for x in (positive, negative))
        case "masked":
            negative.masked_fill_(draw.uniform(negative.shape, FP32) < 0.25, -math.inf)
        case "special":
            specials = pc.constant([math.nan, math.inf, -math.inf, 0.0], draw.device)
            choice = draw.integers(0, 24, negative.shape)
            negative = torch.where(choice < 4, specials[choice.clamp(max=3)], negative)
            choice = draw.integers(0, 8, positive.shape)
            positive = torch.where(choice < 4, specials[choice.clamp(max=3)], positive)
        case "extremes":
            positive = torch.where(row % 4 == 0, 8.0, torch.where(row % 4 == 2, -8.0, positive))
    return positive.to(case.dtype), negative.to(case.dtype)


def sigmoid_range(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The least value that a good float32 sigmoid may have, the right one, and the largest: rounded to the scores' dtype, in float64.

    1 / (1 + exp(-x)): exp errs by 4 roundoffs, and by as many more as its argument's rounding brings, 2 |x|; this counts for a share of
    1 - sigmoid(x). Sum and quotient add 4 more. Where exp(-x) vanishes beside 1, the result is 1, and that of 0 is 1/2.
    """
    wide = scores.to(FP64)
    exact = wide.sigmoid()
    size = wide.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs_()
    error = (4 + (4 + 2 * size) * (1 - exact)) * pc.UNIT_ROUNDOFF[FP32]
    error.masked_fill_((exact > 1 - pc.UNIT_ROUNDOFF[FP32] / 4) | (wide == 0), 0.0)
    low, middle, high = ((exact * factor).clamp_(max=1.0).to(scores.dtype).to(FP64) for factor in (1 - error, 1.0, 1 + error))
    return low.masked_fill(exact < _TINY, 0.0), middle, high


def _bounds(case: pc.Case, positive: torch.Tensor, negative: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(value, low, high) of some rows. A negative with the positive's very score is never above it, unless ties are open.

    On a CPU it may be where their sigmoid is not exact, for the end of a tensor is not computed as the rest is.
    """
    positive = positive.unsqueeze(1)
    (p_low, p, p_high), (n_low, n, n_high) = sigmoid_range(positive), sigmoid_range(negative)
    nan_above = negative.isnan() & ~positive.isnan()
    certain, value = (n_low > p_high) | nan_above, (n > p) | nan_above
    possible = (n_high > p_low) | nan_above
    if positive.device.type != "cpu":
        possible &= negative != positive
    if case.variant == "pkb":
        possible |= (n_high >= p_low) | (negative.isnan() & positive.isnan())
    low, value, high = (1 + mask.sum(1) for mask in (certain, value, possible))
    return value, low, high


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> Interval:
    """The place of a correctly rounded sigmoid, with the first and the last that rounding errors of the sigmoid allow."""
    parts = []
    rows = max(1, _CHUNK_BYTES // (case["negatives"] * FP64.itemsize))
    for q in group_members(case, rank):
        positive, negative = inputs[q][:2]
        for first in range(0, len(positive), rows):
            parts.append(_bounds(case, positive[first : first + rows], negative[first : first + rows]))
    value, low, high = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return Interval(name="ranking", value=value, dtype=INT64, low=low, high=high)


def compare(case: pc.Case, got: torch.Tensor, expected: Interval, kind: str) -> list[pc.Score]:
    """Every rank must lie between those that the sigmoid's rounding errors in float32 allow, before it is rounded to the scores' dtype.

    Nearly everywhere these are one number. In the public variant ties with the positive may count for either side.
    """
    if got.numel() == 0:
        return [pc.Score("ranking", 0.0, "empty")]
    wrong = (got < expected.low) | (got > expected.high)
    if not bool(wrong.any()):
        return [pc.Score("ranking", 0.0, "every place is right")]
    worst = int(wrong.to(torch.uint8).argmax())
    low, high = int(expected.low[worst]), int(expected.high[worst])
    accepted = f"place {low}" if low == high else f"places {low} to {high}"
    detail = f"{int(wrong.sum())} of {wrong.numel()} positives have the wrong place; accepted here: {accepted}"
    return [pc.Score("ranking", math.inf, detail, (worst,), float(got[worst]), float(expected.value[worst]))]


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Scores are read once; a rank travels in the fewest whole bytes that hold it."""
    members = group_members(case, rank)
    counts = _positives(case, len(members))
    own, total, width = counts[members.index(rank)], sum(counts), case["negatives"]
    size = -(-(width + 1).bit_length() // 8)
    return pc.Cost(
        hbm_bytes=(width + 1) * case.dtype.itemsize * own + INT64.itemsize * total,
        egress_bytes=size * own * (len(members) - 1),
        ingress_bytes=size * (total - own),
        flops={"fp32": own * width},
    )


def _counting(case: pc.Case, rank: int) -> pc.Steps:
    least = cost(case, rank)
    return (
        pc.step("pass over the scores", hbm=least.hbm_bytes, flops=least.flops),
        pc.step("all-gather of the ranks", link=max(least.egress_bytes, least.ingress_bytes), barriers=1),
    )


def _above(positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """Negatives above the positive; NaN is above every number."""
    return (negative > positive.unsqueeze(1)) | (negative.isnan() & ~positive.isnan().unsqueeze(1))


def _gathered(inputs: pc.Inputs, members: Sequence[int], ranking: Any) -> torch.Tensor:
    return torch.cat([ranking(*inputs[q][:2]) for q in members])


def _by_counting(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Sigmoids in float64, rounded once."""

    def ranking(positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        positive, negative = (x.to(FP64).sigmoid().to(case.dtype) for x in (positive, negative))
        return 1 + _above(positive, negative).sum(1)

    return _gathered(inputs, group_members(case, rank), ranking)


def _by_sorting(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """A stable descending sort of the positive, first, and its negatives; sigmoids by exp, in float32."""

    def ranking(positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        scores = torch.cat((positive.unsqueeze(1), negative), dim=1).to(FP32)
        values = (1 / (1 + torch.exp(-scores))).to(case.dtype)
        order = values.argsort(dim=1, descending=True, stable=True)
        return 1 + (order == 0).to(torch.uint8).argmax(1)

    return _gathered(inputs, group_members(case, rank), ranking)


def _other(context: pc.AnswerContext, ranking: Any, members: Sequence[int] | None = None) -> torch.Tensor:
    """What another rule gives, of sigmoids in the scores' dtype."""
    chosen = context.members if members is None else members
    inputs = [tuple(x.to(FP32).sigmoid().to(context.case.dtype) for x in args[:2]) for args in context.inputs]
    return fitted(_gathered(inputs, chosen, ranking), len(context.answer))


def _standard(positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    return 1 + _above(positive, negative).sum(1)


def _no_sigmoid(context: pc.AnswerContext) -> torch.Tensor:
    return _gathered(context.inputs, context.members, _standard)


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"positives": (5, 3, 8, 0), "negatives": 40, **params})


PRESETS = (
    pc.preset(
        "small",
        "ragged and missing positives; ties, saturated and masked scores, NaN and infinities, first and last places; groups",
        _small("ragged_fp32", FP32),
        _small("ragged_bf16", BF16, negatives=301),
        _small("ragged_fp16", FP16),
        _small("tied_fp32", FP32, pattern="tied"),
        _small("tied_bf16", BF16, pattern="tied"),
        _small("saturated_fp32", FP32, pattern="saturated", positives=(17, 9), negatives=1001),
        _small("saturated_bf16", BF16, pattern="saturated", positives=(17, 9)),
        _small("masked_bf16", BF16, pattern="masked"),
        _small("special_fp32", FP32, pattern="special"),
        _small("extremes_fp32", FP32, pattern="extremes"),
        _small("strided_group_bf16", BF16, group="strided", world_sizes=(4, 8)),
        _small("open_ties_bf16", BF16, pattern="tied", positives=(29, 17, 30, 0), variant="pkb"),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: about 1024 positives with 1000 negatives each, and the same in float32",
        pc.case("bf16", BF16, positives_total=1024, negatives=1000),
        pc.case("fp32", FP32, positives_total=1024, negatives=1000),
        pc.case("open_ties_bf16", BF16, positives_total=1024, negatives=1000, variant="pkb"),
    ),
    pc.preset("production_ogbl_wikikg2", "16384 positives per rank, 500 negatives", pc.case("fp32", FP32, positives=16384, negatives=500)),
    pc.preset(
        "production_wikidata5m_full",
        "a slice of a full ranking: 256 positives per rank, a million negatives",
        pc.case("bf16", BF16, positives=256, negatives=1_000_000),
    ),
    pc.preset(
        "production_ogbl_citation2", "10822 positives per rank, 1000 negatives", pc.case("fp32", FP32, positives=10822, negatives=1000)
    ),
)

_TIES = ("small/ragged_bf16", "small/tied_fp32", "small/tied_bf16", "small/saturated_fp32", "small/saturated_bf16", "pkb/bf16")
_ROUNDED = ("small/saturated_fp32", "small/saturated_bf16", "pkb/bf16", "production_wikidata5m_full/bf16")
# The public variant takes any place among ties, which with few positives may be one too low everywhere.
_STRICT = pc.where(lambda c: c.variant == "default")

PROBLEM = pc.Problem(
    id=69,
    slug="negative_score_ranking",
    title="Rank of each positive edge among its negatives, gathered over ranks",
    category="graph_parallel",
    parallelism=("graph", "data"),
    origin="GraphStorm: evaluation of link prediction, mean reciprocal rank",
    summary=(
        "Rank r has scores of n_r positive edges, which may be none, and K negatives for each. With s = sigmoid of a score, rounded to the "
        "scores' dtype, a positive's rank is 1 + the number of its negatives with a larger s: the positive comes before those that "
        "equal it, and NaN is larger than every number. All ranks of the group (the world if None) return all ranks in int64 "
        "(n_0 + n_1 + ...,), in the order of the group's ranks."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    compare=compare,
    cost=cost,
    attainable=pc.Algorithm(
        "larger scores counted in one pass", "each score is read once; what the host waits for sizes is left out", _counting
    ),
    bandwidth="production_wikidata5m_full",
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("no_sigmoid", "raw scores compared, so that scores with one sigmoid are told apart", _no_sigmoid, _ROUNDED),
        pc.wrong(
            "ties_lose",
            "negatives that equal the positive before it",
            lambda c: _other(c, lambda p, n: 1 + _above(p, n).sum(1) + (n == p.unsqueeze(1)).sum(1)),
            _TIES,
        ),
        pc.wrong("from_zero", "the number of negatives above, counted from 0", lambda c: c.answer - 1, _STRICT),
        pc.wrong("ascending", "the place from below", lambda c: _other(c, lambda p, n: 1 + (n < p.unsqueeze(1)).sum(1)), _STRICT),
        pc.wrong(
            "nan_below",
            "NaN below every number",
            lambda c: _other(c, lambda p, n: 1 + (n > p.unsqueeze(1)).sum(1)),
            ("small/special_fp32",),
        ),
        pc.wrong("whole_world", "group ignored", lambda c: _other(c, _standard, c.ranks), ("small/strided_group_bf16",)),
    ),
    alternative_solutions=pc.alternatives(by_counting=_by_counting, by_sorting=_by_sorting),
    excused={
        "another_rank": "all ranks have the same answer",
        "eight_bits@small/open_ties_bf16/w8": "the tied scores keep their order in eight bits",
    },
    process_groups=group_layout,
    replicated=True,
    graph=False,
    graph_reason="ranks may have different numbers of positives, which the host must know for the gather",
    notes=(
        "The public reference sorts, without stability, so that the place of a positive among negatives with the same sigmoid is "
        "undefined. Here it comes first. Cases of the pkb variant take any place among them.",
        "In bfloat16 several negatives tie with a positive by the sigmoid's rounding; that rounding is part of the definition. Where a "
        "float32 sigmoid may round to either side, both answers are right; on CPU ranks also where it may round equal scores differently.",
    ),
    speed_note=(
        "The public one sends all negatives to all ranks, each of which sorts every row; this one compares scores locally and sends the "
        "resulting places alone."
    ),
)
