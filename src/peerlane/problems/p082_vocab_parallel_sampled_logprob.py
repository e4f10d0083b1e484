"""Problem 82: log-probabilities of given tokens under top-k and top-p filtering, vocabulary sharded across ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems._collective import all_gather_single, group_layout, group_members
from peerlane.problems._draw import Draw
from peerlane.problems._spec import Case, CaseSpec, Cost, Expected, HonestVariant, NullAnswer, NullContext, Problem, Score, case, preset
from peerlane.problems._tree import GroupRef

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

# Bytes of a chunk of rows over the whole vocabulary: in float32 when inputs are drawn, in float64 in the oracle, which needs ten times it.
_CHUNK_BYTES = 2**29

# Logits, from the largest down, among which targets that survive the filter are drawn; the filter may keep more.
_HEAD = 512

# Cumulative probability within which the top-p cut may fall to either side, and the error of a log-probability y (natural unit one): both
# leave room for sums over the vocabulary in float32.
CUT_MARGIN = 1e-3
ABSOLUTE, RELATIVE = 1e-3, 2e-3


@torch.no_grad()
def reference(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    tp_group: dist.ProcessGroup | None = None,
    top_k: int | None = None,
    top_p: float | None = 1.0,
) -> torch.Tensor:
    rank, ranks = dist.get_rank(tp_group), dist.get_world_size(tp_group)
    tokens, shard = target.numel(), vocab_parallel_logits.shape[-1]
    if tokens % ranks:
        raise ValueError(f"got {tokens} tokens on {ranks} ranks: expected a multiple of the number of ranks")

    # From all tokens of a part of the vocabulary to a part of the tokens with the whole vocabulary.
    sent = vocab_parallel_logits.reshape(tokens, shard).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=tp_group)
    logits = received.view(ranks, tokens // ranks, shard).transpose(0, 1).reshape(tokens // ranks, ranks * shard).to(torch.float32)

    if top_k is not None and top_k > 0:
        threshold = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -math.inf)
    if top_p is not None and top_p < 1.0:
        ascending, order = logits.sort(dim=-1, stable=True)
        dropped = ascending.softmax(-1).cumsum(-1) <= 1.0 - top_p
        dropped[:, -1] = False
        logits = logits.masked_fill(torch.empty_like(dropped).scatter_(-1, order, dropped), -math.inf)

    own = target.reshape(ranks, -1)[rank].unsqueeze(-1)
    result = logits.log_softmax(-1).gather(-1, own).squeeze(-1)
    gathered = result.new_empty(tokens)
    all_gather_single(gathered, result, group=tp_group)
    return gathered.view(target.shape)


def _vocabulary(case: Case, rank: int) -> tuple[int, int]:
    """The whole vocabulary's size V, and a rank's share of it, Vp. ``case``: ``vocab`` = V, or ``vocab_per_rank`` = Vp."""
    ranks = len(group_members(case, rank))
    shard = case["vocab_per_rank"] if "vocab_per_rank" in case.params else case["vocab"] // ranks
    return ranks * shard, shard


def _shape(case: Case, rank: int) -> tuple[int, int]:
    """(B, S). ``case``: ``batch``, and ``sequence`` = S or ``sequence_per_rank`` = S / W."""
    per_rank = case.params.get("sequence_per_rank")
    return case["batch"], case["sequence"] if per_rank is None else per_rank * len(group_members(case, rank))


def _filters(case: Case, vocab: int) -> tuple[int | None, float | None]:
    """top_k at most V, and top_p; None where they filter nothing by definition."""
    top_k, top_p = case.params.get("top_k"), case.params.get("top_p", 1.0)
    return (
        min(top_k, vocab) if top_k is not None and top_k > 0 else None,
        top_p if top_p is not None and top_p < 1.0 else None,
    )


def inputs(case: Case, rank: int, draw: Draw) -> tuple[Any, ...]:
    """Logits of N(0, s^2) with s in [scale / 2, 3 scale / 2) per token; see :func:`_targets` for the targets.

    All ranks draw the whole vocabulary and keep their part of it, for targets depend on all of it. The last ``case["padding"]`` logits are
    -inf. ``case["pattern"]``:

    * ``tied``: logits are whole numbers
    * ``equal``: all logits of about half the tokens are equal
    """
    (vocab, shard), (batch, sequence) = _vocabulary(case, rank), _shape(case, rank)
    place, tokens = group_members(case, rank).index(rank), batch * sequence
    logits = torch.empty((tokens, shard), dtype=case.dtype, device=draw.device)
    target = torch.empty(tokens, dtype=torch.int64, device=draw.device)
    rows = max(1, _CHUNK_BYTES // (vocab * FP32.itemsize))
    for first in range(0, tokens, rows):
        part = slice(first, min(first + rows, tokens))
        whole = _logits(case, part.stop - first, vocab, draw.shared)
        logits[part] = whole[:, place * shard : (place + 1) * shard]
        target[part] = _targets(case, whole.to(FP32), draw.shared)
    arguments = (logits.view(batch, sequence, shard), target.view(batch, sequence))
    group = next((GroupRef(name) for name in group_layout(case)), None)
    return (*arguments, group, case.params.get("top_k"), case.params.get("top_p", 1.0))


def _logits(case: Case, tokens: int, vocab: int, shared: Draw) -> torch.Tensor:
    logits = shared.normal((tokens, vocab), FP32)
    logits *= shared.uniform((tokens, 1), FP32, low=0.5, high=1.5) * case.params.get("scale", 3.0)
    match case.params.get("pattern"):
        case "tied":
            logits.round_()
        case "equal":
            chosen = shared.integers(0, 2, (tokens, 1), torch.bool)
            logits = torch.where(chosen, shared.normal((tokens, 1), FP32), logits)
    if padding := case.params.get("padding"):
        logits[:, vocab - padding :] = -math.inf
    return logits.to(case.dtype)


def _targets(case: Case, logits: torch.Tensor, shared: Draw) -> torch.Tensor:
    """Sampled from the filtered distribution (from its head, where it is long), but for two shares of the tokens:

    ``case["outside"]`` of them uniform over the vocabulary, most of which the filter drops, and ``case["edge"]`` of them the last that the
    filter keeps or the first that it drops.
    """
    tokens, vocab = logits.shape
    top_k, top_p = _filters(case, vocab)
    values, ids = logits.topk(min(vocab, max(_HEAD, top_k or 0)), dim=-1)
    candidates = torch.ones_like(values, dtype=torch.bool)
    if top_k is not None:
        threshold = values[:, top_k - 1 : top_k]
        candidates = values >= threshold
        logits = logits.masked_fill(logits < threshold, -math.inf)
    if top_p is not None:
        probabilities = torch.exp(values - logits.logsumexp(-1, keepdim=True))
        candidates &= probabilities.cumsum(-1) - probabilities < top_p
        candidates[:, 0] = True
    gumbel = -torch.log(-torch.log(shared.uniform(values.shape, FP32, low=1e-6, high=1 - 1e-6)))
    sampled = (values + gumbel).masked_fill_(~candidates, -math.inf).argmax(-1)
    edge = candidates.sum(-1) - 1 + shared.integers(0, 2, (tokens,))
    share = shared.permutation(tokens) / tokens
    outside, near = case.params.get("outside", 0.1), case.params.get("edge", 0.05)
    place = torch.where(share < outside + near, edge.clamp(max=values.shape[-1] - 1), sampled)
    inside = ids.gather(-1, place.unsqueeze(-1)).squeeze(-1)
    return torch.where(share < outside, shared.integers(0, vocab, (tokens,)), inside)


@dataclass(kw_only=True)
class FilteredLogProbability(Expected):
    """A log-probability whose token the filter may keep or drop, with all answers that are right before rounding errors.

    ``value`` follows the definition to the letter. -inf is right where ``may_drop``; a number in [``low``, ``high``] where ``may_keep``.
    """

    may_keep: torch.Tensor
    may_drop: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def oracle(case: Case, inputs: Sequence[tuple[Any, ...]], rank: int) -> FilteredLogProbability:
    """Ranks tokens by probability: one is kept if less than top_p lies above it, equal logits being ranked from the highest index down."""
    members, (vocab, _), shape = group_members(case, rank), _vocabulary(case, rank), _shape(case, rank)
    shards = [inputs[q][0].flatten(0, 1) for q in members]
    target = inputs[rank][1].flatten()
    chunk = max(1, _CHUNK_BYTES // (vocab * FP64.itemsize))
    parts = [slice(first, first + chunk) for first in range(0, target.numel(), chunk)]
    answers = [_log_probability(case, torch.cat([shard[part].to(FP64) for shard in shards], dim=-1), target[part]) for part in parts]
    value, may_keep, may_drop, low, high = (torch.cat(columns).view(shape) for columns in zip(*answers, strict=True))
    return FilteredLogProbability(name="log_probability", value=value, dtype=FP32, may_keep=may_keep, may_drop=may_drop, low=low, high=high)


def _log_probability(case: Case, logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(value, may_keep, may_drop, low, high) of every row, see :class:`FilteredLogProbability`."""
    vocab, column = logits.shape[-1], target.unsqueeze(-1)
    top_k, top_p = _filters(case, vocab)
    if top_k is not None:
        logits.masked_fill_(logits < logits.topk(top_k, dim=-1).values[:, -1:], -math.inf)
    logits -= logits.logsumexp(-1, keepdim=True)
    own = logits.gather(-1, column)
    plain, survives = own.squeeze(-1), own.squeeze(-1) > -math.inf
    if top_p is None:
        return plain, survives, ~survives, plain, plain

    probabilities = logits.exp()
    ranked = probabilities.sort(dim=-1, descending=True).values
    above = ranked.cumsum(-1) - ranked
    above[:, 0] = -math.inf  # the largest is always kept
    certain, kept, possible = ((ranked * (above < cut)).sum(-1).log() for cut in (top_p - CUT_MARGIN, top_p, top_p + CUT_MARGIN))

    # Mass above the target if it is the first, in its true place, or the last among the logits that equal it.
    equal = logits == own
    own_probability = own.squeeze(-1).exp()
    first = (probabilities * (logits > own)).sum(-1)
    ahead = (equal & (torch.arange(vocab, device=logits.device) > column)).sum(-1)
    last = first + (equal.sum(-1) - 1) * own_probability
    largest = logits.amax(-1) == plain
    keeps = survives & ((first + ahead * own_probability < top_p) | (largest & (ahead == 0)))
    may_keep = survives & ((first < top_p + CUT_MARGIN) | largest)
    may_drop = ~survives | ((last >= top_p - CUT_MARGIN) & ~(largest & (equal.sum(-1) == 1)))
    return (plain - kept).masked_fill(~keeps, -math.inf), may_keep, may_drop, plain - possible, plain - certain


def compare(case: Case, got: torch.Tensor, expected: FilteredLogProbability, kind: str) -> list[Score]:
    """-inf where the token may be dropped, else the distance from [low, high] in units of ABSOLUTE + RELATIVE |log-probability|."""
    got = got.to(FP64)
    nearest = torch.minimum(torch.maximum(got, expected.low), expected.high)
    ratio = (got - nearest).abs() / (ABSOLUTE + RELATIVE * nearest.abs())
    ratio = torch.where(expected.may_keep, ratio, math.inf)
    ratio = torch.where((got == -math.inf) & expected.may_drop, 0.0, ratio).nan_to_num(nan=math.inf, posinf=math.inf)
    flat = int(ratio.argmax())
    index = (flat // ratio.shape[1], flat % ratio.shape[1])
    accepted = " or ".join(
        [f"[{float(expected.low[index]):.6g}, {float(expected.high[index]):.6g}]"] * bool(expected.may_keep[index])
        + ["-inf"] * bool(expected.may_drop[index])
    )
    detail = f"{int((ratio > 1).sum())} of {ratio.numel()} log-probabilities wrong; accepted here: {accepted}"
    worst = float(ratio[index])
    return [Score("log_probability", worst, detail, index, float(got[index]), float(expected.value[index]))]


def cost(case: Case, rank: int) -> Cost:
    """Logits are read once, or twice where only top-p filters (its cut lies anywhere in the vocabulary).

    Per token the sum over the kept part of a shard and the target's logit (float32) go to one rank, and the result comes back: less than
    any known algorithm sends to find the threshold.
    """
    (batch, sequence), (vocab, shard), ranks = _shape(case, rank), _vocabulary(case, rank), len(group_members(case, rank))
    tokens, (top_k, top_p) = batch * sequence, _filters(case, vocab)
    reads = 2 if top_k is None and top_p is not None else 1
    port = 12 * tokens * (ranks - 1) / ranks
    return Cost(
        hbm_bytes=tokens * (reads * shard * case.dtype.itemsize + 8 + 4),
        egress_bytes=port,
        ingress_bytes=port,
        flops={"fp32": 4 * tokens * shard},
    )


def _whole(inputs: Sequence[tuple[Any, ...]], ranks: Sequence[int]) -> torch.Tensor:
    """The float32 logits (B, S, V) of the ranks' shards."""
    return torch.cat([inputs[q][0].to(FP32) for q in ranks], dim=-1)


def _keep_largest(logits: torch.Tensor, top_k: int | None) -> torch.Tensor:
    if top_k is None:
        return logits
    return logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[..., -1:], -math.inf)


def _keep_nucleus(logits: torch.Tensor, top_p: float | None) -> torch.Tensor:
    """From the largest logit down, while less than top_p has been kept; of equal logits the highest index first."""
    if top_p is None:
        return logits
    # A stable ascending order, read backwards.
    order = logits.argsort(dim=-1, stable=True).flip(-1)
    probabilities = logits.gather(-1, order).softmax(-1)
    kept = probabilities.cumsum(-1) - probabilities < top_p
    kept[..., 0] = True
    return logits.masked_fill(~torch.empty_like(kept).scatter_(-1, order, kept), -math.inf)


def _log_softmax_at(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def _direct(case: Case, inputs: Sequence[tuple[Any, ...]], rank: int) -> torch.Tensor:
    """In float32 on the whole vocabulary, from the largest logit down."""
    logits = _whole(inputs, group_members(case, rank))
    top_k, top_p = _filters(case, logits.shape[-1])
    return _log_softmax_at(_keep_nucleus(_keep_largest(logits, top_k), top_p), inputs[rank][1])


def _by_threshold(case: Case, inputs: Sequence[tuple[Any, ...]], rank: int) -> torch.Tensor:
    """Without a sort: each shard's top k merged, then bisection for the logit at the top-p cut, by masses above a threshold."""
    members, target = group_members(case, rank), inputs[rank][1]
    logits = _whole(inputs, members)
    top_k, top_p = _filters(case, logits.shape[-1])
    if top_k is not None:
        best = [inputs[q][0].to(FP32).topk(min(top_k, inputs[q][0].shape[-1]), dim=-1).values for q in members]
        threshold = torch.cat(best, dim=-1).topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -math.inf)
    if top_p is not None:
        probabilities = logits.softmax(-1)
        high = logits.amax(-1, keepdim=True)
        low = torch.where(logits > -math.inf, logits, high).amin(-1, keepdim=True) - 1.0
        for _ in range(64):
            middle = (low + high) / 2
            enough = (probabilities * (logits > middle)).sum(-1, keepdim=True) < top_p
            low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        cut = torch.where(logits > low, logits, math.inf).amin(-1, keepdim=True)
        equal = logits == cut
        missing = top_p - (probabilities * (logits > cut)).sum(-1, keepdim=True)
        share = (probabilities * equal).amax(-1, keepdim=True)
        wanted = (missing / share).ceil().clamp(min=1.0)
        # Counted from the highest index down.
        place = equal.flip(-1).cumsum(-1).flip(-1)
        logits = logits.masked_fill((logits < cut) | (equal & (place > wanted)), -math.inf)
    return _log_softmax_at(logits, target)


def _filtered(context: NullContext, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """What the filter gives with other parameters."""
    logits = _whole(context.inputs, group_members(context.case, context.rank))
    return _log_softmax_at(_keep_nucleus(_keep_largest(logits, top_k), top_p), context.args[1])


def _own_filters(context: NullContext) -> tuple[int | None, float | None]:
    return _filters(context.case, _vocabulary(context.case, context.rank)[0])


def _no_top_k(context: NullContext) -> torch.Tensor:
    return _filtered(context, None, _own_filters(context)[1])


def _no_top_p(context: NullContext) -> torch.Tensor:
    return _filtered(context, _own_filters(context)[0], None)


def _nucleus_first(context: NullContext) -> torch.Tensor:
    logits = _whole(context.inputs, group_members(context.case, context.rank))
    top_k, top_p = _own_filters(context)
    return _log_softmax_at(_keep_largest(_keep_nucleus(logits, top_p), top_k), context.args[1])


def _exactly_k(context: NullContext) -> torch.Tensor:
    """Of the logits that equal the k-th largest, only enough to make k."""
    logits = _whole(context.inputs, group_members(context.case, context.rank))
    top_k, top_p = _own_filters(context)
    if top_k is not None:
        best = logits.topk(top_k, dim=-1)
        logits = torch.full_like(logits, -math.inf).scatter_(-1, best.indices, best.values)
    return _log_softmax_at(_keep_nucleus(logits, top_p), context.args[1])


def _never_dropped(context: NullContext) -> torch.Tensor:
    """The right normaliser, and every target's logit."""
    logits, target = _whole(context.inputs, group_members(context.case, context.rank)), context.args[1]
    top_k, top_p = _own_filters(context)
    total = _keep_nucleus(_keep_largest(logits, top_k), top_p).logsumexp(-1)
    return logits.gather(-1, target.unsqueeze(-1)).squeeze(-1) - total


def _local(context: NullContext, normalised: bool) -> torch.Tensor:
    """-inf for targets on other ranks; for the rank's own the right answer, or, if ``normalised``, that over its shard alone."""
    logits, target = context.args[:2]
    _, shard = _vocabulary(context.case, context.rank)
    local = target - group_members(context.case, context.rank).index(context.rank) * shard
    own = (local >= 0) & (local < shard)
    top_k, top_p = _filters(context.case, shard)
    kept = _keep_nucleus(_keep_largest(logits.to(FP32), top_k), top_p)
    answer = _log_softmax_at(kept, local.where(own, 0)) if normalised else context.answer
    return torch.where(own, answer, -math.inf)


def _whole_world(context: NullContext) -> torch.Tensor:
    logits = _whole(context.inputs, range(context.case.world_size))
    top_k, top_p = _own_filters(context)
    return _log_softmax_at(_keep_nucleus(_keep_largest(logits, top_k), top_p), context.args[1])


def _small(label: str, dtype: torch.dtype, **params: Any) -> CaseSpec:
    return case(label, dtype, **{"batch": 2, "sequence_per_rank": 9, "vocab_per_rank": 8, "outside": 0.3, "edge": 0.3, **params})


PRESETS = (
    preset(
        "small",
        "all combinations of filters; ties at both thresholds; equal, one-hot and -inf logits; filters that keep one token or all; groups",
        _small("plain_fp32", FP32),
        _small("plain_bf16", BF16),
        _small("top_k_fp32", FP32, top_k=5),
        _small("top_k_bf16", BF16, top_k=5),
        _small("top_p_fp32", FP32, top_p=0.7),
        _small("top_p_bf16", BF16, top_p=0.7),
        _small("both_fp32", FP32, scale=2.0, top_k=6, top_p=0.8),
        _small("both_bf16", BF16, scale=2.0, top_k=6, top_p=0.8),
        _small("tied_top_k_fp32", FP32, pattern="tied", scale=1.0, top_k=5),
        _small("tied_both_bf16", BF16, pattern="tied", scale=1.5, top_k=4, top_p=0.8),
        _small("equal_fp32", FP32, pattern="equal"),
        _small("equal_both_bf16", BF16, pattern="equal", scale=1.5, top_k=6, top_p=0.7),
        _small("one_hot_fp32", FP32, scale=200.0),
        _small("one_hot_both_bf16", BF16, scale=200.0, top_k=6, top_p=0.8),
        _small("tiny_top_p_fp32", FP32, top_p=1e-4),
        _small("top_1_bf16", BF16, top_k=1),
        _small("top_k_beyond_vocabulary_fp32", FP32, top_k=1000, top_p=0.7),
        _small("disabled_bf16", BF16, top_k=0, top_p=None),
        _small("padding_fp32", FP32, padding=9, top_p=0.9),
        _small("padding_top_k_bf16", BF16, padding=9, top_k=12),
        _small("wide_bf16", BF16, vocab_per_rank=1003, top_p=0.95),
        _small("strided_group_bf16", BF16, sequence_per_rank=8, scale=2.0, top_k=6, top_p=0.8, group="strided", world_sizes=(4, 8)),
    ),
    preset("pkb", "the public benchmark's shape", case("bf16", BF16, batch=2, sequence=8, vocab=256, top_k=10, top_p=0.9)),
    preset(
        "production_llama3_rl",
        "8192 tokens, vocabulary 128256, nucleus of 0.95",
        case("bf16", BF16, batch=8, sequence=1024, vocab=128256, top_p=0.95),
    ),
    preset(
        "production_qwen3_rl",
        "4096 tokens, vocabulary 151936, the recommended top 20 and nucleus of 0.8",
        case("bf16", BF16, batch=4, sequence=1024, vocab=151936, top_k=20, top_p=0.8),
    ),
    preset(
        "production_deepseek_v3_rl",
        "4096 tokens, vocabulary 129280, top 50, float32",
        case("fp32", FP32, batch=4, sequence=1024, vocab=129280, top_k=50),
    ),
)


# Top-k set, but without effect: disabled, no smaller than the vocabulary or the logits that are not -inf, or followed by a stricter top-p.
_IDLE_TOP_K = ("disabled_bf16", "top_k_beyond_vocabulary_fp32", "padding_top_k_bf16", "one_hot_both_bf16")


def _labels(*filters: str, without: Sequence[str] = ()) -> tuple[str, ...]:
    """The cases that set all of the named filters, ``top_k`` and ``top_p``, but for those of some labels."""
    return tuple(
        f"{item.name}/{spec.label}"
        for item in PRESETS
        for spec in item.cases
        if all(name in spec.params for name in filters) and spec.label not in without
    )


PROBLEM = Problem(
    id=82,
    slug="vocab_parallel_sampled_logprob",
    title="Token log-probabilities under top-k/top-p filtering with vocabulary-parallel logits",
    category="vocab_parallel",
    parallelism=("vocabulary", "tensor"),
    origin="NVIDIA NeMo-RL: log-probabilities of sampled tokens under the filter that they were sampled with",
    summary=(
        "vocab_parallel_logits (B, S, Vp) holds vocabulary entries [r Vp, (r+1) Vp); target (B, S) holds ids in [0, W Vp), the same on all "
        "ranks of tp_group (the world if None). Top-k (off if None or <= 0) keeps logits no smaller than the k-th largest, all that equal "
        "it included. Top-p (off if None or >= 1) then takes the softmax of what was kept and keeps, in ascending order, the tokens whose "
        "inclusive cumulative probability exceeds 1 - top_p, and always the last; equal logits are in the order of their ids. Every rank "
        "returns in float32 (B, S) the target's log-probability among the tokens kept, or -inf if it is not one of them. "
        "B S must be a multiple of W."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    compare=compare,
    cost=cost,
    presets=PRESETS,
    null_answers=(
        NullAnswer("all_dropped", "-inf everywhere", lambda c: torch.full_like(c.answer, -math.inf)),
        NullAnswer("local_vocabulary", "filter and softmax over the rank's own shard", lambda c: _local(c, True)),
        NullAnswer("foreign_target_dropped", "-inf where another rank holds the target", lambda c: _local(c, False)),
        NullAnswer("no_top_k", "top_k ignored", _no_top_k, cases=_labels("top_k", without=_IDLE_TOP_K)),
        NullAnswer("no_top_p", "top_p ignored", _no_top_p, cases=_labels("top_p", without=("disabled_bf16",))),
        NullAnswer(
            "never_dropped",
            "a finite answer for targets that the filter drops",
            _never_dropped,
            cases=(*_labels("top_k", without=_IDLE_TOP_K), *_labels("top_p", without=("disabled_bf16",))),
        ),
        NullAnswer("nucleus_first", "top-p before top-k", _nucleus_first, cases=_labels("top_k", "top_p", without=_IDLE_TOP_K)),
        NullAnswer(
            "exactly_k",
            "logits that equal the k-th largest left out",
            _exactly_k,
            cases=("small/tied_top_k_fp32", "small/tied_both_bf16", "small/equal_both_bf16"),
        ),
        NullAnswer("whole_world", "tp_group ignored", _whole_world, cases=("small/strided_group_bf16",)),
    ),
    honest_variants=(HonestVariant("direct_fp32", _direct), HonestVariant("by_threshold_fp32", _by_threshold)),
    excused={"another_rank": "all ranks have the same answer"},
    process_groups=group_layout,
    replicated=True,
    notes=(
        "The public reference filters in the logits' dtype: in bfloat16 its cumulative sum, and with it the number of tokens kept, is off. "
        "Here the filter is exact; a token within 0.001 of cumulative probability of the cut may fall to either side, and so may tokens "
        "whose equal logits the cut divides.",
        "The public benchmark raises the target's logit by 8, so that nearly every answer is exactly 0 and no target is ever dropped; here "
        "targets are sampled from the filtered distribution, with some at its edge and some outside.",
    ),
)
