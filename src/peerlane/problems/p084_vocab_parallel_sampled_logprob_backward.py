"""Problem 84: gradient of problem 83's log-probabilities with respect to the vocabulary-parallel logits."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import vocab
from peerlane.problems.families.collective import BF16, FP32, FP64, group_layout, group_members
from peerlane.problems.families.vocab import cut_margin

# Relative error of a probability: that of a sum over the vocabulary, and of exponents of size up to 1000, in float32. What lies below its
# smallest normal number may be flushed to zero.
RELATIVE, UNDERFLOW = 1e-3, 2.0**-126


def reference(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    grad_output: torch.Tensor,
    tp_group: dist.ProcessGroup | None = None,
    top_k: int | None = None,
    top_p: float | None = 1.0,
    chunk_size: int = 1,
) -> torch.Tensor:
    rank, ranks = dist.get_rank(tp_group), dist.get_world_size(tp_group)
    chunk = vocab.check_chunks(target, chunk_size, ranks)
    logits = vocab_parallel_logits.flatten(0, -2)
    gradient = torch.empty_like(logits, dtype=torch.float32)
    for first in range(0, logits.shape[0], chunk):
        part = slice(first, min(first + chunk, logits.shape[0]))
        rows = vocab.filtered_rows(vocab.whole_rows(logits[part], tp_group), top_k, top_p)
        own, weight = (x.flatten()[part].view(ranks, -1)[rank].unsqueeze(-1) for x in (target, grad_output))
        kept = (rows.gather(-1, own) > -math.inf).to(torch.float32)
        rows = rows.softmax(-1).neg_().scatter_add_(-1, own, kept).mul_(weight)

        # Back from a part of the tokens to a part of the vocabulary.
        sent = rows.view(-1, ranks, logits.shape[-1]).transpose(0, 1).contiguous()
        dist.all_to_all_single(gradient[part], sent.view(gradient[part].shape), group=tp_group)
    return gradient.view(vocab_parallel_logits.shape)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Gradients of the log-probabilities N(0, 1) in ``case["grad_dtype"]``, which is the logits' if absent, the same on all ranks.

    ``case["grad_pattern"]``: ``spread`` for sizes from 0 to 3e4.
    """
    logits, target, *settings = vocab.arguments(case, rank, draw)
    gradient = draw.shared.normal(target.shape, FP32)
    if case.params.get("grad_pattern") == "spread":
        gradient *= 10.0 ** draw.shared.integers(-3, 5, target.shape, FP32)
        gradient.view(-1)[::5] = 0.0
    return (logits, target, gradient.to(case.params.get("grad_dtype", case.dtype)), *settings, vocab.chunk_of(case, rank))


@dataclass(kw_only=True)
class FilteredGradient(pc.Expected):
    """A gradient whose entries the filter may keep or drop, with all answers that are right before rounding errors.

    ``value`` follows the definition to the letter. Zero is right where ``may_drop``; a number in [``low``, ``high``] where ``may_keep``,
    each of them up to ``error``. All in float32.
    """

    may_keep: torch.Tensor
    may_drop: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    error: torch.Tensor


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> FilteredGradient:
    """In float64, some tokens at a time, of which only the rank's part of the vocabulary is held, in float32."""
    members, (width, shard), shape = group_members(case, rank), vocab.vocabulary(case, rank), vocab.shape_of(case, rank)
    own = slice(members.index(rank) * shard, (members.index(rank) + 1) * shard)
    shards = [inputs[q][0].flatten(0, 1) for q in members]
    target, weight = inputs[rank][1].flatten(), inputs[rank][2].flatten().to(FP64)
    tokens = target.numel()
    result = [torch.empty((tokens, shard), dtype=dtype, device=target.device) for dtype in (FP32, torch.bool, torch.bool, FP32, FP32, FP32)]
    chunk = max(1, vocab.CHUNK_BYTES // (width * FP64.itemsize))
    for first in range(0, tokens, chunk):
        part = slice(first, first + chunk)
        logits = torch.cat([x[part].to(FP64) for x in shards], dim=-1)
        for whole, rows in zip(result, _gradient(case, logits, target[part], weight[part], own), strict=True):
            whole[part] = rows
    value, may_keep, may_drop, low, high, error = (x.view(*shape, shard) for x in result)
    return FilteredGradient(name="gradient", value=value, dtype=FP32, may_keep=may_keep, may_drop=may_drop, low=low, high=high, error=error)


def _gradient(case: pc.Case, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, own: slice) -> tuple[torch.Tensor, ...]:
    """(value, may_keep, may_drop, low, high, error) of the entries ``own`` of every row, see :class:`FilteredGradient`.

    A token is kept if less than top_p lies above it, equal logits being ranked from the highest index down.
    """
    width = logits.shape[-1]
    top_k, top_p = vocab.filters(case, width)
    if top_k is not None:
        logits.masked_fill_(logits < logits.topk(top_k, dim=-1).values[:, -1:], -math.inf)
    logits -= logits.logsumexp(-1, keepdim=True)
    entries = logits[:, own].contiguous()
    survives = entries > -math.inf
    if top_p is None:
        certain = kept = possible = torch.ones_like(weight).unsqueeze(-1)
        keeps, may_keep, may_drop = survives, survives, ~survives
    else:
        margin = cut_margin(case, width)
        ranked, order = logits.flip(-1).sort(dim=-1, descending=True, stable=True)
        probabilities = ranked.exp()
        above = probabilities.cumsum(-1) - probabilities
        is_kept = above < top_p
        is_kept[:, 0] = True
        keeps = torch.empty_like(is_kept).scatter_(-1, width - 1 - order, is_kept)[:, own] & survives
        certain, kept, possible = (
            (probabilities * (above < cut)).sum(-1, keepdim=True).clamp(min=probabilities[:, :1])
            for cut in (top_p - margin, top_p, top_p + margin)
        )
        # Mass above an entry if it is the first, or the last, among the logits that equal it.
        first = torch.searchsorted(-ranked, -entries)
        last = torch.searchsorted(-ranked, -entries, right=True) - 1
        largest, alone = first == 0, first == last
        may_keep = survives & ((above.gather(-1, first.clamp(max=width - 1)) < top_p + margin) | largest)
        may_drop = ~survives | ((above.gather(-1, last.clamp(max=width - 1)) >= top_p - margin) & ~(largest & alone))
    column = torch.arange(own.start, own.stop, device=logits.device)
    hit = (column == target.unsqueeze(-1)).to(FP64)
    share, weight = entries.exp(), weight.unsqueeze(-1)
    value = weight * (hit - share / kept) * keeps
    ends = weight * (hit - share / certain), weight * (hit - share / possible)
    error = weight.abs() * (RELATIVE * share / certain + 4 * pc.UNIT_ROUNDOFF[FP32] * hit + UNDERFLOW) + UNDERFLOW
    return value, may_keep, may_drop, torch.minimum(*ends), torch.maximum(*ends), error


def compare(case: pc.Case, got: torch.Tensor, expected: FilteredGradient, kind: str) -> list[pc.Score]:
    """An entry may differ by |g| (0.001 q + 2.4e-7) at the target and by 0.001 |g| q elsewhere.

    There g is the upstream gradient of the token and q the entry's probability. It must be zero where top-k or top-p drops the entry. Where
    rounding of the logits may decide at a threshold, whatever either decision gives is right. Values below 2^-126 may be flushed to zero.
    """
    if got.numel() == 0:
        return [pc.Score("gradient", 0.0, "empty")]
    distance = (got - torch.minimum(torch.maximum(got, expected.low), expected.high)).abs()
    ratio = distance / expected.error
    ratio = torch.where(expected.may_keep, ratio, math.inf)
    ratio = torch.where((got == 0) & expected.may_drop, 0.0, ratio).nan_to_num_(nan=math.inf, posinf=math.inf)
    flat = int(ratio.argmax())
    _, sequence, shard = ratio.shape
    index = (flat // (sequence * shard), flat // shard % sequence, flat % shard)
    accepted = " or ".join(
        [f"[{float(expected.low[index]):.6g}, {float(expected.high[index]):.6g}]"] * bool(expected.may_keep[index])
        + ["0"] * bool(expected.may_drop[index])
    )
    detail = f"{int((ratio > 1).sum())} of {ratio.numel()} entries wrong; accepted here: {accepted}"
    return [pc.Score("gradient", float(ratio[index]), detail, index, float(got[index]), float(expected.value[index]))]


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Logits are read and gradients written once: while the ranks agree on a token's cut and sum, its logits can stay on chip.

    Per token the float32 sum over the kept part of a shard goes to one rank, and the sum over all shards comes back.
    """
    (batch, sequence), (_, shard), ranks = vocab.shape_of(case, rank), vocab.vocabulary(case, rank), len(group_members(case, rank))
    tokens, upstream = batch * sequence, case.params.get("grad_dtype", case.dtype)
    port = pc.traffic.all_to_all(8 * tokens, ranks)
    return pc.Cost(
        hbm_bytes=tokens * (shard * (case.dtype.itemsize + FP32.itemsize) + 8 + upstream.itemsize),
        egress_bytes=port,
        ingress_bytes=port,
        flops={"fp32": 2 * tokens * shard},
    )


def _own(case: pc.Case, rank: int) -> slice:
    """The rank's part of the vocabulary."""
    place, (_, shard) = group_members(case, rank).index(rank), vocab.vocabulary(case, rank)
    return slice(place * shard, (place + 1) * shard)


def _assembled(
    case: pc.Case, rank: int, args: tuple[Any, ...], probabilities: torch.Tensor, target_kept: torch.Tensor | bool
) -> torch.Tensor:
    """g (1 at the target if ``target_kept`` (B, S), less q): the rank's part, from q (B, S, V)."""
    own = _own(case, rank)
    column = torch.arange(own.start, own.stop, device=probabilities.device)
    kept = torch.as_tensor(target_kept, device=column.device).expand(args[1].shape)
    hit = (column == args[1].unsqueeze(-1)) & kept.unsqueeze(-1)
    gradient: torch.Tensor = (hit.to(FP32) - probabilities[..., own]) * args[2].to(FP32).unsqueeze(-1)
    return gradient


def _survives(kept: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Whether the target (B, S) is not filtered out of the logits (B, S, V)."""
    return kept.gather(-1, target.unsqueeze(-1)).squeeze(-1) > -math.inf


def gradient_answer(case: pc.Case, rank: int, args: tuple[Any, ...], kept: torch.Tensor) -> torch.Tensor:
    """The rank's part of the gradient, from the filtered logits of the whole vocabulary."""
    return _assembled(case, rank, args, kept.softmax(-1), _survives(kept, args[1]))


def _kept(context: pc.AnswerContext) -> torch.Tensor:
    return vocab.direct_filter(context.case, context.inputs, context.rank)


def _target_always_kept(context: pc.AnswerContext) -> torch.Tensor:
    return _assembled(context.case, context.rank, context.args, _kept(context).softmax(-1), True)


def _target_only(context: pc.AnswerContext) -> torch.Tensor:
    kept = _kept(context)
    return _assembled(context.case, context.rank, context.args, torch.zeros_like(kept), _survives(kept, context.args[1]))


def _not_renormalised(context: pc.AnswerContext) -> torch.Tensor:
    """Probabilities among all tokens, and 0 for those that the filter drops."""
    kept = _kept(context)
    probabilities = vocab.unfiltered(context).softmax(-1).masked_fill(kept == -math.inf, 0.0)
    return _assembled(context.case, context.rank, context.args, probabilities, _survives(kept, context.args[1]))


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    defaults = {"batch": 2, "sequence_per_rank": 4, "vocab_per_rank": 8, "outside": 0.3, "edge": 0.3, "chunk_per_rank": 1}
    return pc.case(label, dtype, **{**defaults, **params})


PRESETS = (
    pc.preset(
        "small",
        "all combinations of filters; ties at both thresholds, one-hot and -inf logits; gradients of all sizes; uneven chunks; groups",
        _small("plain_fp32", FP32),
        _small("top_k_bf16", BF16, top_k=5),
        _small("top_p_fp32", FP32, top_p=0.7, grad_pattern="spread"),
        _small("both_bf16", BF16, scale=2.0, top_k=6, top_p=0.8, grad_dtype=FP32),
        _small("both_fp32", FP32, scale=2.0, top_k=6, top_p=0.8, grad_dtype=BF16),
        _small("partial_chunk_fp32", FP32, sequence_per_rank=3, chunk_per_rank=2, top_k=5),
        _small("one_chunk_bf16", BF16, batch=3, sequence_per_rank=2, chunk=1000, top_p=0.7),
        _small("tied_top_k_fp32", FP32, pattern="tied", scale=1.0, top_k=5),
        _small("tied_both_bf16", BF16, pattern="tied", scale=1.5, top_k=4, top_p=0.8),
        _small("one_hot_fp32", FP32, scale=200.0, grad_pattern="spread"),
        _small("padding_bf16", BF16, padding=9, top_p=0.9),
        _small("strided_group_bf16", BF16, sequence_per_rank=8, scale=2.0, top_k=6, top_p=0.8, group="strided", world_sizes=(4, 8)),
        _small("wide_top_k_bf16", BF16, vocab_per_rank=130, top_k=4, outside=0.1),
        _small("disabled_fp32", FP32, top_k=0, top_p=None),
        _small("public_both_bf16", BF16, scale=2.0, top_k=6, top_p=0.8, variant="pkb"),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape, 4, 2 or 1 chunks on 2, 4 or 8 ranks",
        pc.case("bf16", BF16, batch=2, sequence=8, vocab=256, top_k=10, top_p=0.9, chunk_per_rank=1),
        pc.case("public_bf16", BF16, batch=2, sequence=8, vocab=256, top_k=10, top_p=0.9, chunk_per_rank=1, variant="pkb"),
    ),
    pc.preset(
        "production_llama3_rl",
        "4096 tokens in chunks of 1024, vocabulary 128256, nucleus of 0.95",
        pc.case("bf16", BF16, batch=1, sequence=4096, vocab=128256, top_p=0.95, chunk=1024, grad_dtype=FP32),
    ),
    pc.preset(
        "production_qwen3_rl",
        "8192 tokens in chunks of 512, vocabulary 151936, the recommended top 20 and nucleus of 0.8",
        pc.case("bf16", BF16, batch=1, sequence=8192, vocab=151936, top_k=20, top_p=0.8, chunk=512, grad_dtype=FP32),
    ),
    pc.preset(
        "production_deepseek_v3_rl",
        "4096 tokens in chunks of 1024, vocabulary 129280, no filter: a plain log-probability's gradient",
        pc.case("bf16", BF16, batch=1, sequence=4096, vocab=129280, chunk=1024, grad_dtype=FP32),
    ),
    *vocab.token_sweep(chunk=1024),
)

_IDLE = ("disabled_fp32",)
_FILTERED = tuple(dict.fromkeys((*vocab.labels(PRESETS, "top_k", without=_IDLE), *vocab.labels(PRESETS, "top_p", without=_IDLE))))

PROBLEM = pc.Problem(
    id=84,
    slug="vocab_parallel_sampled_logprob_backward",
    title="Gradient of the filtered log-probability with respect to vocabulary-parallel logits",
    category="vocab_parallel",
    parallelism=("vocabulary", "tensor"),
    origin="NVIDIA NeMo-RL: backward of the chunked log-probabilities of sampled tokens",
    summary=(
        "The vector-Jacobian product of problem 83: vocab_parallel_logits (B, S, Vp) holds vocabulary entries [r Vp, (r+1) Vp); target and "
        "grad_output g (B, S; any float dtype) are the same on all ranks of tp_group (the world if None). With q the softmax over the "
        "logits that the filter of problem 82 keeps, every rank returns in float32 (B, S, Vp) its part of g (1 at the target - q), and 0 "
        "for what the filter drops; where it drops the target, the kept entries get -g q. chunk_size bounds temporary memory as in "
        "problem 83. B S and B chunk_size must be multiples of W."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    compare=compare,
    cost=cost,
    presets=PRESETS,
    excused={
        "eight_bits@small/public_both_bf16": "misses by 9 times only: the case has few tokens, of bfloat16 logits",
        "tails_lost@small/public_both_bf16": "the filter drops those logits anyway",
        "neighbours_exchanged@small/public_both_bf16": "the filter drops what both ranks hold",
    },
    known_wrong_answers=(
        pc.wrong("target_missing", "-g q alone", lambda c: _assembled(c.case, c.rank, c.args, _kept(c).softmax(-1), False)),
        pc.wrong("target_only", "g at the target alone", _target_only),
        pc.wrong("target_always_kept", "g at targets that the filter drops", _target_always_kept, _FILTERED),
        pc.wrong("not_renormalised", "probabilities among all tokens, masked", _not_renormalised, _FILTERED),
        pc.wrong(
            "unscaled",
            "the upstream gradient taken for one",
            lambda c: torch.where(c.args[2].unsqueeze(-1) == 0, 0, c.answer / c.args[2].to(FP32).unsqueeze(-1)),
        ),
        pc.wrong("summed_over_ranks", "the upstream gradient added up over ranks", lambda c: c.answer * len(c.members)),
        pc.wrong("last_chunk_missing", "the last chunk is that of the slot before", vocab.stale_last_chunk),
        *vocab.filter_wrong_answers(
            gradient_answer,
            PRESETS,
            idle_top_k=_IDLE,
            idle_top_p=_IDLE,
            ties=("small/tied_top_k_fp32", "small/tied_both_bf16"),
        ),
    ),
    alternative_solutions=vocab.filter_variants(gradient_answer),
    process_groups=group_layout,
    notes=(
        "The public reference filters in the logits' dtype. Here the filter is exact, with the room at its cut that problem 82 gives. "
        "The variant pkb takes both.",
        "The public benchmark raises the target's logit by 8, so that nearly all gradients are exactly 0. Here targets are sampled from "
        "the filtered distribution, with some at its edge and some outside, and upstream gradients are normal instead of a ramp.",
    ),
)
