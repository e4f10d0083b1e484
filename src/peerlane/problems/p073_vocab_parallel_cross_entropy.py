"""Problem 73: cross entropy of logits whose vocabulary is sharded across ranks, forward."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32, FP64, group_layout, group_members
from peerlane.problems.families.vocab import vocabulary

# Bytes of float64 logits that the oracle holds at a time; it needs about three times as much.
_CHUNK_BYTES = 2**29

# The least vocabulary in which a few logits of every token stand out, and how many.
_LONG, _RIVALS = 256, 3
_SIZE = "1, and a little more for tokens whose logits are far from 0"


def reference(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    shard = vocab_parallel_logits.shape[-1]
    maximum = vocab_parallel_logits.amax(-1)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    shifted = vocab_parallel_logits - maximum.to(torch.float32).unsqueeze(-1)

    local = target - dist.get_rank(group) * shard
    foreign = (local < 0) | (local >= shard)
    predicted = shifted.gather(-1, local.masked_fill(foreign, 0).unsqueeze(-1)).squeeze(-1).masked_fill_(foreign, 0.0)
    sums = torch.stack((shifted.exp_().sum(-1), predicted))
    dist.all_reduce(sums, group=group)
    total, predicted = sums.unbind()
    return (total.log() - predicted).to(vocab_parallel_logits.dtype)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Logits N(0, scale^2), moved by an amount per token that is small for most and beyond 88 (where exp overflows) for one in fifty.

    Targets are uniform, but for a few of -100 and a few beyond the vocabulary. In long vocabularies three logits anywhere, one of them
    every other token's target, add up to e^-2 to e^3 times the sum of the others' exponentials: neither a part of the vocabulary nor its
    largest logits tell the sum. ``case["padding"]`` logits at the vocabulary's end are -inf, and one target points there.
    ``case["pattern"]`` may make the rows hard:

    * ``peaked``: one logit stands out by more than 1000, and every other token's target is it: loss 0
    * ``equal``: all logits of every other token are equal
    * ``offset``: tokens are moved by +3e4 or -3e4
    * ``boundary``: targets are first and last entries of shards
    * ``special``: the first token's logits are all -inf, the second has a NaN on the last rank
    """
    members, (vocab, shard) = group_members(case, rank), vocabulary(case, rank)
    place, tokens = members.index(rank), math.prod(case["lead"])
    pattern, padding, shared = case.params.get("pattern"), case.params.get("padding", 0), draw.shared
    columns = torch.arange(place * shard, (place + 1) * shard, device=draw.device)
    if group_layout(case):
        # All ranks must return the same losses, so the groups share one vocabulary's logits.
        logits = shared.normal((tokens, vocab), FP32)[:, place * shard : (place + 1) * shard].clone()
    else:
        logits = draw.normal((tokens, shard), FP32)
    scale = case.params.get("scale", 3.0)
    logits *= scale
    target = shared.integers(0, vocab - padding, (tokens,))
    order, few = shared.permutation(tokens), max(2, tokens // 128)
    if pattern is None and vocab >= _LONG:
        rivals = shared.integers(0, vocab - padding, (tokens, _RIVALS))
        target = torch.where(order % 2 == 0, rivals[:, 0], target)
        height = shared.uniform((tokens, _RIVALS), FP32, low=-2.0, high=3.0)
        height.index_fill_(0, order[: 2 * few], -2.0)  # where the target is out of range, the loss must not be nearly zero
        height += math.log(vocab - padding) + scale**2 / 2 - math.log(_RIVALS)
        for local, value in zip(torch.split(rivals - place * shard, 1, 1), torch.split(height, 1, 1), strict=True):
            inside, column = (local >= 0) & (local < shard), local.clamp(0, shard - 1)
            logits.scatter_(1, column, torch.where(inside, value, logits.gather(1, column)))
    logits += shared.normal((tokens, 1), FP32) ** 3 * 8.0
    if pattern == "peaked":
        winner = shared.integers(0, vocab, (tokens,))
        logits.masked_fill_(columns == winner.unsqueeze(-1), 3000.0)
        target[::2] = winner[::2]
    elif pattern == "equal":
        logits[::2] = shared.normal((tokens, 1), FP32, scale=3.0)[::2]
    elif pattern == "offset":
        logits += shared.integers(0, 2, (tokens, 1), FP32) * 6e4 - 3e4
    elif pattern == "boundary":
        edge = shared.integers(0, 2 * len(members), (tokens,))
        target = edge // 2 * shard + edge % 2 * (shard - 1)
    elif pattern == "special":
        logits[0] = -math.inf
        if place == len(members) - 1:
            logits[1, 0] = math.nan
    if padding:
        logits.masked_fill_(columns >= vocab - padding, -math.inf)
        target[order[-1:]] = vocab - 1
    target.index_fill_(0, order[:few], -100)
    target.index_fill_(0, order[few : 2 * few], vocab + 3)
    lead = tuple(case["lead"])
    arguments = (logits.to(case.dtype).reshape(*lead, shard), target.reshape(lead))
    return (*arguments, *(pc.GroupRef(name) for name in group_layout(case)))


def _absolute(case: pc.Case, rank: int) -> float:
    """What the loss, measured in nats, may be off by beyond its own relative error; see :func:`tolerance`."""
    return 1e-5 if case.dtype == FP32 else (len(group_members(case, rank)) + 2) * pc.UNIT_ROUNDOFF[BF16]


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    members, (vocab, _) = group_members(case, rank), vocabulary(case, rank)
    shards = [inputs[q][0].flatten(0, -2) for q in members]
    target = inputs[rank][1].flatten()
    loss, magnitude = (torch.empty(target.shape, dtype=FP64, device=target.device) for _ in range(2))
    rows = max(1, _CHUNK_BYTES // (vocab * FP64.itemsize))
    for first in range(0, target.numel(), rows):
        part = slice(first, first + rows)
        logits = torch.cat([shard[part].to(FP64) for shard in shards], dim=-1)
        maximum = logits.amax(-1)
        inside = (target[part] >= 0) & (target[part] < vocab)
        predicted = logits.gather(-1, target[part].where(inside, 0).unsqueeze(-1)).squeeze(-1).where(inside, maximum)
        logits -= maximum.unsqueeze(-1)
        partition = logits.exp_().sum(-1).log()
        loss[part] = partition - (predicted - maximum)
        magnitude[part] = (partition + maximum).abs() + predicted.abs()
    # In units of the absolute tolerance: a log-sum-exp and its difference from a logit in float32 err in proportion to their sizes.
    magnitude = 1.0 + magnitude * (4 * pc.UNIT_ROUNDOFF[FP32] / _absolute(case, rank))
    lead = tuple(case["lead"])
    return pc.Expected("loss", loss.reshape(lead), case.dtype, magnitude=magnitude.reshape(lead))


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """The loss, in nats, has a natural scale of one: a relative error of the sum of exponentials is an absolute error of its logarithm.

    In bfloat16 every step may be rounded to it, as the public reference does. Of the loss itself 2 u: the logarithm and the target's
    shifted logit, whose sizes add up to the loss, and their difference; and as much in hand. Of the sum of exponentials (W + 2) u:
    exponentials and their arguments, which average out, a shard's sum, and W - 1 additions. Normwise this leaves 2.8e-3. In float32: 1e-5
    for the sum over the vocabulary, and what the oracle adds for large logits.
    """
    if case.dtype == FP32:
        return {"loss": pc.Tolerance(relative=2 * pc.UNIT_ROUNDOFF[FP32], magnitude=_absolute(case, 0), size=_SIZE)}
    normwise = 6e-3 if math.prod(case["lead"]) >= 64 else None
    return {"loss": pc.Tolerance(relative=4 * pc.UNIT_ROUNDOFF[BF16], magnitude=_absolute(case, 0), normwise=normwise, size=_SIZE)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Two float32 numbers per token (a shard's log-sum-exp and its target logit) go to one rank that combines them; the loss comes back."""
    tokens, ranks, (_, shard), size = math.prod(case["lead"]), len(group_members(case, rank)), vocabulary(case, rank), case.dtype.itemsize
    port = pc.traffic.all_to_all((8 + size) * tokens, ranks)
    return pc.Cost(hbm_bytes=tokens * (shard * size + 8 + size), egress_bytes=port, ingress_bytes=port, flops={"fp32": 4 * tokens * shard})


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"lead": (2, 7), "vocab_per_rank": 5, **params})


PRESETS = (
    pc.preset(
        "small",
        "odd sizes; targets out of range, at shards' edges and in padding; peaked, equal, far-off, NaN and -inf logits; strided groups",
        _small("scaled_fp32", FP32, scale=10.0),
        _small("scaled_bf16", BF16, scale=10.0),
        _small("peaked_fp32", FP32, scale=200.0, pattern="peaked"),
        _small("peaked_bf16", BF16, scale=200.0, pattern="peaked"),
        _small("equal_fp32", FP32, pattern="equal"),
        _small("equal_bf16", BF16, pattern="equal"),
        _small("offset_fp32", FP32, pattern="offset"),
        _small("offset_bf16", BF16, scale=300.0, pattern="offset"),
        _small("boundary_bf16", BF16, pattern="boundary"),
        _small("padding_fp32", FP32, padding=6),
        _small("padding_bf16", BF16, padding=6, scale=1.5),
        _small("special_fp32", FP32, pattern="special"),
        _small("special_bf16", BF16, pattern="special"),
        _small("wide_bf16", BF16, lead=(97,), vocab_per_rank=1003, scale=1.0),
        _small("wide_fp32", FP32, lead=(3, 1, 11), vocab_per_rank=1003),
        pc.case("strided_group_bf16", BF16, lead=(2, 7), vocab_per_rank=5, group="strided", world_sizes=(4, 8)),
    ),
    pc.preset("pkb", "the public benchmark's shape: a vocabulary of 512", pc.case("bf16", BF16, lead=(8, 1024), vocab=512)),
    pc.preset(
        "production_llama3_loss",
        "vocabulary 128256, 8192 tokens",
        pc.case("bf16", BF16, lead=(8192,), vocab=128256),
        pc.case("fp32", FP32, lead=(8192,), vocab=128256),
    ),
    pc.preset(
        "production_qwen3_loss",
        "4096 tokens, float32 logits, vocabulary 151936; and 152064, the last 128 of them padding",
        pc.case("fp32", FP32, lead=(4096,), vocab=151936),
        pc.case("padded_fp32", FP32, lead=(4096,), vocab=152064, padding=128),
    ),
    pc.preset(
        "production_gemma3_loss",
        "8192 tokens, vocabulary 262144; and 256000, that of Gemma 2",
        pc.case("bf16", BF16, lead=(8192,), vocab=262144),
        pc.case("gemma2_bf16", BF16, lead=(8192,), vocab=256000),
    ),
)


PROBLEM = pc.Problem(
    id=73,
    slug="vocab_parallel_cross_entropy",
    title="Vocabulary-parallel cross entropy, forward",
    category="vocab_parallel",
    parallelism=("vocabulary", "tensor"),
    origin="Megatron-LM: the loss of models whose output projection is sharded over the vocabulary",
    summary=(
        "vocab_parallel_logits (..., Vp) holds vocabulary entries [r Vp, (r+1) Vp); target (...) holds ids of the whole vocabulary, the "
        "same on all ranks of the group (the world if None). Every rank returns, per token and in the logits' dtype, "
        "log(sum of exp(l_v)) - l_t with l the logits less their maximum over the whole vocabulary, and log(sum of exp(l_v)) alone for a "
        "target outside [0, W Vp). The logits may be overwritten."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=pc.FromProof(__name__, "KNOWN_WRONG_ANSWERS"),
    alternative_solutions=pc.FromProof(__name__, "ALTERNATIVE_SOLUTIONS"),
    excused={"another_rank": "all ranks have the same answer"},
    process_groups=group_layout,
    replicated=True,
    mutates=frozenset({"vocab_parallel_logits"}),
    notes=(
        "The public reference leaves its logits shifted by the maximum. That is allowed, not required: no answer depends on it, and our "
        "reference leaves them alone.",
        "The public reference rounds every step to the logits' dtype. Here the answer is rounded once, with room for all those roundings. "
        "A sum of exponentials that was rounded on every rank and after every addition is right too.",
        "The public benchmark's targets follow a fixed pattern and are always in range. Here some are -100 or beyond the vocabulary.",
        "Of independent logits a sample of the vocabulary tells the sum within what bfloat16 allows. Here a few probable entries anywhere, "
        "as a trained model has them, are much of it.",
    ),
)
