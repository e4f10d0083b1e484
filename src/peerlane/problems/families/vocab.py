"""What the vocabulary-parallel problems share: shards of a vocabulary, logits with targets under top-k and top-p filtering, and the filter.

The filter, on one token's logits: top-k keeps those no smaller than the k-th largest, all that equal it included. Top-p then takes the
softmax of what was kept and keeps, in ascending order, the tokens whose inclusive cumulative probability exceeds 1 - top_p, and always the
last; equal logits are in the order of their ids.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32, FP64, all_gather_single, group_layout, group_members

# Bytes of a chunk of rows over the whole vocabulary: in float32 when inputs are drawn, in float64 in the oracle, which needs ten times it.
CHUNK_BYTES = 2**29

# Logits, from the largest down, among which targets that survive the filter are drawn; the filter may keep more.
_HEAD = 512

# How much smaller the logits are of tokens whose largest are all on one rank, so that the last of top_k still weighs something.
_CLOSE = 0.3

# The least and the most of :func:`cut_margin` where the filter is exact: room for a softmax of a few logits, and of a whole vocabulary.
_LEAST_MARGIN, _MOST_MARGIN = 2e-5, 1e-3


def vocabulary(case: pc.Case, rank: int) -> tuple[int, int]:
    """The whole vocabulary's size V, and a rank's share of it, Vp. ``case``: ``vocab`` = V, or ``vocab_per_rank`` = Vp."""
    ranks = len(group_members(case, rank))
    shard = case["vocab_per_rank"] if "vocab_per_rank" in case.params else case["vocab"] // ranks
    return ranks * shard, shard


def shape_of(case: pc.Case, rank: int) -> tuple[int, int]:
    """(B, S). ``case``: ``batch`` = B or ``batch_per_rank`` = B / W, and ``sequence`` = S or ``sequence_per_rank`` = S / W."""
    ranks = len(group_members(case, rank))

    def size(name: str) -> int:
        per_rank: int | None = case.params.get(f"{name}_per_rank")
        return int(case[name]) if per_rank is None else per_rank * ranks

    return size("batch"), size("sequence")


def chunk_of(case: pc.Case, rank: int) -> int:
    """Sequence positions per chunk. ``case``: ``chunk``, or ``chunk_per_rank`` for that many per rank of the group."""
    per_rank: int | None = case.params.get("chunk_per_rank")
    return int(case["chunk"]) if per_rank is None else per_rank * len(group_members(case, rank))


def filters(case: pc.Case, vocab: int) -> tuple[int | None, float | None]:
    """top_k at most V, and top_p; None where they filter nothing by definition."""
    top_k, top_p = case.params.get("top_k"), case.params.get("top_p", 1.0)
    return (min(top_k, vocab) if top_k is not None and top_k > 0 else None, top_p if top_p is not None and top_p < 1.0 else None)


def cut_margin(case: pc.Case, vocab: int) -> float:
    """Cumulative probability within which the top-p cut may fall to either side: room for rounding errors of sums.

    With n logits in the softmax, an exact filter adds up n numbers in float32: 8 n u. The variant ``pkb`` filters in the logits' dtype:
    probabilities, their sums up to the cut and the cut itself are rounded to it, n + 2 times, each by at most u of 1 - top_p.
    """
    top_k, top_p = filters(case, vocab)
    summed = vocab if top_k is None else top_k
    if case.variant == "pkb" and top_p is not None:
        return min(0.5, (summed + 2) * (1.0 - top_p) * pc.UNIT_ROUNDOFF[case.dtype])
    return min(_MOST_MARGIN, max(_LEAST_MARGIN, 8 * summed * pc.UNIT_ROUNDOFF[FP32]))


_SWEEP_TOKENS = (1024, 2048, 4096, 8192, 16384)


def token_sweep(**params: Any) -> tuple[pc.Preset, ...]:
    """The family ``sweep``: one sequence of growing length, a vocabulary of 32000, the 10 largest logits and a nucleus of 0.9."""
    return tuple(
        pc.preset(
            f"sweep_{tokens}",
            f"{tokens} tokens",
            pc.case("bf16", BF16, batch=1, sequence=tokens, vocab=32000, top_k=10, top_p=0.9, **params),
        )
        for tokens in _SWEEP_TOKENS
    )


def whole_rows(logits: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """From all tokens of a part of the vocabulary, (T, Vp), to a part of the tokens with the whole vocabulary, (T / W, V) in float32."""
    ranks, (tokens, shard) = dist.get_world_size(group), logits.shape
    received = torch.empty_like(logits, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, logits.contiguous(), group=group)
    return received.view(ranks, tokens // ranks, shard).transpose(0, 1).reshape(tokens // ranks, ranks * shard).to(torch.float32)


def filtered_rows(logits: torch.Tensor, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """Rows of the whole vocabulary, -inf where the filter drops. ``top_k`` None or <= 0, and ``top_p`` None or >= 1, filter nothing."""
    if top_k is not None and top_k > 0:
        threshold = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -math.inf)
    if top_p is not None and top_p < 1.0:
        ascending, order = logits.sort(dim=-1, stable=True)
        dropped = ascending.softmax(-1).cumsum(-1) <= 1.0 - top_p
        dropped[:, -1] = False
        logits = logits.masked_fill(torch.empty_like(dropped).scatter_(-1, order, dropped), -math.inf)
    return logits


def filtered_log_probability(
    logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup | None, top_k: int | None, top_p: float | None
) -> torch.Tensor:
    """The targets' log-probabilities (T,), on all ranks, from their logits (T, Vp); T is a multiple of the number of ranks."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    rows = filtered_rows(whole_rows(logits, group), top_k, top_p)
    own = target.view(ranks, -1)[rank].unsqueeze(-1)
    result = rows.log_softmax(-1).gather(-1, own).squeeze(-1)
    gathered = result.new_empty(target.shape)
    all_gather_single(gathered, result, group=group)
    return gathered


def check_chunks(target: torch.Tensor, chunk_size: int, ranks: int) -> int:
    """The tokens of a chunk, B max(chunk_size, 1). ValueError unless they and all tokens are multiples of the number of ranks."""
    tokens, chunk = target.numel(), target.shape[0] * max(chunk_size, 1)
    if tokens % ranks or chunk % ranks:
        raise ValueError(f"got {tokens} tokens in chunks of {chunk} on {ranks} ranks: expected multiples of the number of ranks")
    return chunk


def arguments(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """(logits, target, group, top_k, top_p). Logits are N(0, s^2) with s in [scale / 2, 3 scale / 2) per token; for targets see _targets.

    Without a pattern, and with a top_k that fits into a shard, a quarter of the tokens have all of their largest logits on one rank, and
    close to each other. For what top-p does to a sixth of the tokens see :func:`_straddle_the_cut`.

    All ranks draw the whole vocabulary and keep their part of it, for targets depend on all of it. The last ``case["padding"]`` logits are
    -inf. ``case["pattern"]``:

    * ``tied``: logits are whole numbers
    * ``equal``: all logits of about half the tokens are equal
    """
    (vocab, shard), (batch, sequence) = vocabulary(case, rank), shape_of(case, rank)
    place, tokens = group_members(case, rank).index(rank), batch * sequence
    logits = torch.empty((tokens, shard), dtype=case.dtype, device=draw.device)
    target = torch.empty(tokens, dtype=torch.int64, device=draw.device)
    rows = max(1, CHUNK_BYTES // (vocab * FP32.itemsize))
    for first in range(0, tokens, rows):
        part = slice(first, min(first + rows, tokens))
        drawn = _logits(case, part.stop - first, vocab, shard, draw.shared)
        target[part] = _targets(case, drawn.to(FP32), draw.shared)
        _straddle_the_cut(case, drawn, target[part], draw.shared)
        logits[part] = drawn[:, place * shard : (place + 1) * shard]
    group = next((pc.GroupRef(name) for name in group_layout(case)), None)
    return (
        logits.view(batch, sequence, shard),
        target.view(batch, sequence),
        group,
        case.params.get("top_k"),
        case.params.get("top_p", 1.0),
    )


def _logits(case: pc.Case, tokens: int, vocab: int, shard: int, shared: pc.Draw) -> torch.Tensor:
    logits = shared.normal((tokens, vocab), FP32)
    logits *= shared.uniform((tokens, 1), FP32, low=0.5, high=1.5) * case.params.get("scale", 3.0)
    ranks, (top_k, _) = vocab // shard, filters(case, vocab)
    if top_k is not None and top_k <= shard and "pattern" not in case.params:
        rows = shared.permutation(tokens)[: -(-tokens // 4)]
        owner = torch.arange(vocab, device=logits.device) // shard
        upper = owner == shared.integers(0, ranks, (len(rows), 1))
        logits[rows] = logits[rows].abs_().mul_(_CLOSE * (2 * upper.to(FP32) - 1))
    match case.params.get("pattern"):
        case "tied":
            logits.round_()
        case "equal":
            chosen = shared.integers(0, 2, (tokens, 1), torch.bool)
            logits = torch.where(chosen, shared.normal((tokens, 1), FP32), logits)
    if padding := case.params.get("padding"):
        logits[:, vocab - padding :] = -math.inf
    return logits.to(case.dtype)


def either_side(top_p: float, dtype: torch.dtype) -> tuple[float, float]:
    """Two probabilities, below and above 1 - top_p, that round to the same number in ``dtype``; they and 1 - top_p lie well inside its
    interval of rounding."""
    cut = 1.0 - top_p
    spacing = 2.0 ** math.floor(math.log2(cut)) * 2 * pc.UNIT_ROUNDOFF[dtype]
    room = spacing / 2 - abs(cut - round(cut / spacing) * spacing)
    return cut - 0.7 * room, cut + 0.7 * room


def straddles(case: pc.Case) -> bool:
    """Whether :func:`_straddle_the_cut` changes anything: the cut is sharper than the logits' dtype can find."""
    vocab, _ = vocabulary(case, 0)
    _, top_p = filters(case, vocab)
    if top_p is None or not 0.5 < top_p < 1.0 or case.dtype != BF16 or case.variant != "default" or "pattern" in case.params:
        return False
    _, above = either_side(top_p, case.dtype)
    return bool(case.params.get("scale", 3.0) <= 3.0 and 2 * cut_margin(case, vocab) < above - (1.0 - top_p))


def _straddle_the_cut(case: pc.Case, logits: torch.Tensor, target: torch.Tensor, shared: pc.Draw) -> None:
    """Gives a sixth of the tokens two logits that hold all the weight, the target being one of them.

    For half of these, top-p just keeps the smaller one, for half it just drops it; in the logits' dtype both have one probability. So a
    filter in that dtype is wrong for one kind or the other, wherever it rounds.
    """
    (tokens, vocab), (_, top_p) = logits.shape, filters(case, logits.shape[-1])
    if not straddles(case) or top_p is None:
        return
    rows = shared.permutation(tokens)[: 2 * max(1, tokens // 12)]
    ids = shared.uniform((len(rows), vocab - case.params.get("padding", 0)), FP32).topk(2, dim=-1).indices
    share = torch.tensor(either_side(top_p, case.dtype), dtype=FP64, device=logits.device).repeat(len(rows) // 2)
    distance = ((1.0 - share) / share).log()
    # A number near zero has the finest steps: there the smaller logit lies.
    larger = (distance * 32).ceil() / 32
    pair = torch.stack((larger, larger - distance), dim=-1).to(logits.dtype)
    logits[rows] = (-30.0 - logits[rows].abs()).scatter_(-1, ids, pair)
    target[rows] = ids.gather(-1, shared.integers(0, 2, (len(rows), 1))).squeeze(-1)


def _targets(case: pc.Case, logits: torch.Tensor, shared: pc.Draw) -> torch.Tensor:
    """Sampled from the filtered distribution (from its head, where it is long), but for two shares of the tokens:

    ``case["outside"]`` of them uniform over the vocabulary, most of which the filter drops, and ``case["edge"]`` of them the last that the
    filter keeps or the first that it drops.
    """
    tokens, vocab = logits.shape
    top_k, top_p = filters(case, vocab)
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


def whole_vocabulary(inputs: pc.Inputs, ranks: Sequence[int]) -> torch.Tensor:
    """The float32 logits (B, S, V) of the ranks' shards."""
    return torch.cat([inputs[q][0].to(FP32) for q in ranks], dim=-1)


def keep_largest(logits: torch.Tensor, top_k: int | None) -> torch.Tensor:
    if top_k is None:
        return logits
    return logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[..., -1:], -math.inf)


def keep_nucleus(logits: torch.Tensor, top_p: float | None) -> torch.Tensor:
    """From the largest logit down, while less than top_p has been kept; of equal logits the highest index first."""
    if top_p is None:
        return logits
    # A stable ascending order, read backwards.
    order = logits.argsort(dim=-1, stable=True).flip(-1)
    probabilities = logits.gather(-1, order).softmax(-1)
    kept = probabilities.cumsum(-1) - probabilities < top_p
    kept[..., 0] = True
    return logits.masked_fill(~torch.empty_like(kept).scatter_(-1, order, kept), -math.inf)


def direct_filter(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """The filtered logits (B, S, V), in float32 on the whole vocabulary, from the largest logit down."""
    logits = whole_vocabulary(inputs, group_members(case, rank))
    top_k, top_p = filters(case, logits.shape[-1])
    return keep_nucleus(keep_largest(logits, top_k), top_p)


def threshold_filter(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """The same without a sort: each shard's top k merged, then bisection for the logit at the top-p cut, by masses above a threshold."""
    members = group_members(case, rank)
    logits = whole_vocabulary(inputs, members)
    top_k, top_p = filters(case, logits.shape[-1])
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
    return logits


# What is answered from a rank's arguments and the filtered logits (B, S, V) of the whole vocabulary.
Answer = Callable[[pc.Case, int, tuple[Any, ...], torch.Tensor], torch.Tensor]


def filter_in_own_dtype(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """The filtered logits (B, S, V), in float32, of a filter in the dtype of the logits."""
    logits = torch.cat([inputs[q][0] for q in group_members(case, rank)], dim=-1)
    return filtered_rows(logits.flatten(0, -2), *filters(case, logits.shape[-1])).view(logits.shape).to(FP32)


def filter_variants(answer: Answer) -> tuple[pc.AlternativeSolution, ...]:
    """Honest ways to filter, each with ``answer`` made of the result. The last is the public benchmark's, in the variant of its name."""

    def published(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
        kept = filter_in_own_dtype if case.variant == "pkb" else direct_filter
        return answer(case, rank, inputs[rank], kept(case, inputs, rank))

    return pc.alternatives(
        direct_fp32=lambda case, inputs, rank: answer(case, rank, inputs[rank], direct_filter(case, inputs, rank)),
        by_threshold_fp32=lambda case, inputs, rank: answer(case, rank, inputs[rank], threshold_filter(case, inputs, rank)),
        published_filter=published,
    )


def own_filters(context: pc.AnswerContext) -> tuple[int | None, float | None]:
    """The case's filters on the whole vocabulary."""
    return filters(context.case, vocabulary(context.case, context.rank)[0])


def unfiltered(context: pc.AnswerContext) -> torch.Tensor:
    return whole_vocabulary(context.inputs, context.members)


def _without_top_k(context: pc.AnswerContext) -> torch.Tensor:
    return keep_nucleus(unfiltered(context), own_filters(context)[1])


def _without_top_p(context: pc.AnswerContext) -> torch.Tensor:
    return keep_largest(unfiltered(context), own_filters(context)[0])


def _nucleus_first(context: pc.AnswerContext) -> torch.Tensor:
    top_k, top_p = own_filters(context)
    return keep_largest(keep_nucleus(unfiltered(context), top_p), top_k)


def _exactly_k(context: pc.AnswerContext) -> torch.Tensor:
    """Of the logits that equal the k-th largest, only enough to make k."""
    logits, (top_k, top_p) = unfiltered(context), own_filters(context)
    if top_k is not None:
        best = logits.topk(top_k, dim=-1)
        logits = torch.full_like(logits, -math.inf).scatter_(-1, best.indices, best.values)
    return keep_nucleus(logits, top_p)


def _one_short(context: pc.AnswerContext) -> torch.Tensor:
    """Of every shard only the k - 1 largest logits."""
    top_k, top_p = own_filters(context)
    shards = [context.inputs[q][0].to(FP32) for q in context.members]
    most = None if top_k is None else min(top_k - 1, shards[0].shape[-1])
    return keep_nucleus(keep_largest(torch.cat([keep_largest(shard, most) for shard in shards], dim=-1), top_k), top_p)


def _whole_world(context: pc.AnswerContext) -> torch.Tensor:
    logits, (top_k, top_p) = whole_vocabulary(context.inputs, context.ranks), own_filters(context)
    return keep_nucleus(keep_largest(logits, top_k), top_p)


def labels(presets: Sequence[pc.Preset], *names: str, without: Sequence[str] = ()) -> tuple[str, ...]:
    """The cases that set all of the named filters, ``top_k`` and ``top_p``, but for those of some labels."""
    return tuple(
        f"{item.name}/{spec.label}"
        for item in presets
        for spec in item.cases
        if all(name in spec.params for name in names) and spec.label not in without and spec.variant == "default"
    )


def filter_wrong_answers(
    answer: Answer,
    presets: Sequence[pc.Preset],
    *,
    idle_top_k: Sequence[str],
    idle_top_p: Sequence[str],
    ties: Sequence[str],
) -> tuple[pc.KnownWrongAnswer, ...]:
    """Wrong filters, each with ``answer`` made of the result.

    ``idle_*``: labels of cases that set a filter without effect. ``ties``: cases with equal logits at the top-k threshold. In the case
    ``strided_group_bf16`` the group is smaller than the world. In ``wide_top_k_bf16`` some tokens have their k largest logits on one rank,
    and no top-p makes up for the loss of one of them.
    """

    def wrong(name: str, why: str, kept: Callable[[pc.AnswerContext], torch.Tensor], cases: Sequence[str]) -> pc.KnownWrongAnswer:
        return pc.wrong(name, why, lambda c: answer(c.case, c.rank, c.args, kept(c)), tuple(cases))

    straddling = [
        f"{item.name}/{spec.label}"
        for item in presets
        for spec in item.cases
        if straddles(pc.Case(0, item.name, spec.label, 8, spec.dtype, spec.variant, spec.params))
    ]
    return (
        wrong("no_top_k", "top_k ignored", _without_top_k, labels(presets, "top_k", without=idle_top_k)),
        wrong("no_top_p", "top_p ignored", _without_top_p, labels(presets, "top_p", without=idle_top_p)),
        wrong("nucleus_first", "top-p before top-k", _nucleus_first, labels(presets, "top_k", "top_p", without=idle_top_k)),
        wrong("exactly_k", "logits that equal the k-th largest left out", _exactly_k, ties),
        wrong("whole_world", "tp_group ignored", _whole_world, ("small/strided_group_bf16",)),
        wrong("one_short_per_rank", "the k - 1 largest logits of every shard alone", _one_short, ("small/wide_top_k_bf16",)),
        wrong(
            "filter_in_bfloat16", "top-p in the dtype of the logits", lambda c: filter_in_own_dtype(c.case, c.inputs, c.rank), straddling
        ),
    )


def stale_last_chunk(context: pc.AnswerContext) -> torch.Tensor:
    """The right answer but for its last chunk of tokens, which is left over from the slot before. The last argument is the chunk size."""
    result: torch.Tensor = context.answer.clone()
    batch, sequence = shape_of(context.case, context.rank)
    chunk = batch * max(1, context.args[-1])
    first = (batch * sequence - 1) // chunk * chunk
    result.flatten(0, 1)[first:] = context.previous.flatten(0, 1)[first:]
    return result
