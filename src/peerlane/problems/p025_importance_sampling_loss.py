"""Problem 25: policy-gradient loss with importance ratios, from hidden states and a language-model head, with metrics over all ranks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families.importance import Tokens, evaluate, extremes, global_mean
from peerlane.problems.families.matmul import BF16, FLOP_UNIT, FP32
from peerlane.problems.families.quant import student_t

# Entries of the vocabulary, for every token, that are about as probable as its label.
_RIVALS = 2


def reference(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = hidden_states.flatten(0, -2) @ weight.t()
    cross_entropy = F.cross_entropy(logits.to(torch.float32), labels.flatten(), ignore_index=ignore_index, reduction="none")
    cross_entropy = cross_entropy.view(labels.shape)
    valid = labels != ignore_index
    log_ratio = torch.where(valid, -cross_entropy - old_logprobs, 0.0).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    policy_gradient = torch.where(valid, -ratio * advantages, 0.0)

    terms = (policy_gradient, ratio, ratio - log_ratio - 1.0, cross_entropy, torch.ones_like(ratio))
    sums = torch.stack([torch.where(valid, term, 0.0).sum() for term in terms])
    dist.all_reduce(sums)
    extremes = torch.stack([torch.where(valid, sign * ratio, -math.inf).max() for sign in (-1.0, 1.0)])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    loss, mean_ratio, kl, entropy = (sums[:4] / sums[4].clamp(min=1.0)).unbind()
    metrics = torch.stack([mean_ratio, -extremes[0], extremes[1], kl, entropy])
    gradient_dtype = torch.promote_types(logits.dtype, torch.promote_types(old_logprobs.dtype, advantages.dtype))
    return loss, None, (-cross_entropy).to(logits.dtype), policy_gradient.to(gradient_dtype), metrics


def _tokens(case: pc.Case) -> int:
    return torch.Size(case["tokens"]).numel()


def _ignored(case: pc.Case, rank: int) -> int:
    """Ignored tokens: ``case["ignored"]`` of all, times 1/2, 1, 3/2, 1/2 ... by rank; with ``case["silent"]`` all, on one rank or every."""
    silent = case.params.get("silent")
    if silent == "every" or (silent == "last" and rank == case.world_size - 1):
        return _tokens(case)
    return int(_tokens(case) * case.params.get("ignored", 0.0) * (1 + rank % 3) / 2)


def _aux_dtype(case: pc.Case) -> torch.dtype:
    """The dtype of old log-probabilities and advantages."""
    dtype: torch.dtype = case.params.get("aux_dtype", case.dtype)
    return dtype


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Hidden states near the head's rows of their label and of two rivals, so that all three are as probable as sampled tokens.

    Rivals are anywhere in the vocabulary: the label's logit and a part of the others do not tell its probability. The other logits have a
    standard deviation of ``case["spread"]`` (2.5). Log-ratios are Student's t times ``case["noise"]`` (0.1) around a drift between -3 and
    3, new in every call, and about 0.8 more or less by rank: errors of bfloat16 are some percent of the metrics, and wrong answers must be
    far off. For the same reason advantages are N(3, 0.5^2) times a sign and a size between 2^-22 and 2^-12, new in every call, and a
    number for every rank. The head is the same on all ranks, unless ``case["own_heads"]``. Channels differ in size by powers of two, which
    cancel in the product. With ``case["shift"]`` all logits of a token are larger by that, or smaller by that in every other token.

    ``case["data"]``: ``clamped`` (a token in seven has a log-ratio of about -30, and one on the last rank 30), ``one_ratio`` (one token on
    the last rank has a log-ratio of about 18), ``last_label`` (labels are the vocabulary's last but for one in four).
    """
    count, depth, vocab, data = _tokens(case), case["hidden"], case["vocab"], case.params.get("data")
    spread, shared, ignore = case.params.get("spread", 2.5), draw.shared, case.params.get("ignore", -100)
    weight = (draw if case.params.get("own_heads") else shared).normal((vocab, depth), case.dtype, scale=spread * depth**-0.5)
    labels = draw.integers(0 if ignore < 0 else ignore + 1, vocab, (count,))
    if data == "last_label":
        labels = torch.where(draw.uniform((count,), FP32) < 0.75, vocab - 1, labels)

    shift = torch.full((count, 1), case.params.get("shift", 0.0), device=draw.device)
    shift[1::2].neg_()

    # The other logits add up to about V exp(spread^2 / 2) after exponentiation.
    rest = math.log(vocab) + spread**2 / 2
    entries = [labels, *(draw.integers(0, vocab, (count,)) for _ in range(_RIVALS))]
    wide = draw.normal((count, depth), FP32)
    for entry in entries:
        wide.addcmul_(weight[entry].to(FP32), (rest + draw.uniform((count, 1), FP32, low=-4.0, high=3.0)) / spread**2)
    if "shift" in case.params:
        weight[:, 0], wide[:, :1] = 1.0, shift
    hidden = wide.to(case.dtype)
    large = torch.stack([(hidden.to(FP32) * weight[entry].to(FP32)).sum(-1) for entry in entries])
    predicted = large[0] - torch.logaddexp(large.logsumexp(0), rest + shift[:, 0])
    drift = shared.apart((1,), low=-3.0, high=3.0) + draw.uniform((1,), FP32, low=0.6, high=1.0) * (-1) ** rank
    old = (predicted - drift - case.params.get("noise", 0.1) * student_t(draw, (count,))).clamp_(max=0.0)
    if data == "clamped":
        old[::7] += 30.0
    if data in ("clamped", "one_ratio") and rank == case.world_size - 1:
        old[count // 2] = predicted[count // 2] - (30.0 if data == "clamped" else 18.0)

    sign = shared.apart((1,), low=-1.0, high=1.0).sign()
    size = (
        sign
        * torch.exp2(shared.uniform((1,), FP32, low=-22.0, high=-12.0))
        * draw.uniform((1,), FP32, low=0.7, high=1.0)
        * (0.3 if rank % 2 else 1.5)
    )
    advantages = draw.normal((count,), FP32, scale=0.5, shift=3.0) * size
    dropped = draw.permutation(count)[: _ignored(case, rank)]
    if data in ("clamped", "one_ratio"):
        dropped = dropped[dropped != count // 2]
    labels.index_fill_(0, dropped, ignore)
    shape, aux = tuple(case["tokens"]), _aux_dtype(case)
    size_of_channels = shared.octaves((depth,), most=12).to(case.dtype)
    hidden, weight = hidden * size_of_channels, weight / size_of_channels
    return hidden.view(*shape, depth), weight, labels.view(shape), old.to(aux).view(shape), advantages.to(aux).view(shape), ignore


def _ignore_index(args: Sequence[Any]) -> int:
    index: int = args[5]
    return index


def _evaluated(args: Sequence[Any]) -> Tokens:
    labels, old, advantages = (tensor.flatten() for tensor in args[2:5])
    return evaluate(args[0].flatten(0, -2), args[1], labels, old, advantages, _ignore_index(args))


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, None, pc.Expected, pc.Expected, pc.Expected]:
    tokens, u = [_evaluated(args) for args in inputs], pc.UNIT_ROUNDOFF[case.dtype]
    count = torch.stack([part.valid.sum() for part in tokens]).sum().clamp(min=1)
    loss, loss_error = global_mean([t.policy_gradient for t in tokens], [t.policy_gradient * t.ratio_error for t in tokens], count, u)
    mean, mean_error = global_mean([t.ratio for t in tokens], [t.ratio * t.ratio_error for t in tokens], count, u)
    excess, excess_error = global_mean([t.excess for t in tokens], [t.excess_error for t in tokens], count, u)
    entropy, entropy_error = global_mean([-t.log_probability for t in tokens], [2 * t.error for t in tokens], count, u)
    curvature = torch.stack([t.curvature.sum() for t in tokens]).sum() / count
    (least, least_error), (largest, largest_error) = extremes(tokens)
    metrics = torch.stack([mean, least, largest, excess, entropy])
    allowed = torch.stack([mean_error + curvature, least_error, largest_error, excess_error + curvature, entropy_error])
    own, shape = tokens[rank], tuple(case["tokens"])
    gradient, gradient_error = own.policy_gradient.view(shape), (own.policy_gradient.abs() * own.ratio_error).view(shape)
    return (
        pc.Expected("loss", loss, FP32, magnitude=loss_error),
        None,
        pc.Expected("logprobs", own.log_probability.view(shape), case.dtype, magnitude=2 * own.error.view(shape)),
        pc.Expected("policy_gradient", gradient, torch.promote_types(case.dtype, _aux_dtype(case)), magnitude=gradient_error),
        pc.Expected("metrics", metrics, FP32, magnitude=allowed),
    )


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """The oracle derives every output's error from that of the log-probabilities, and gives it as magnitude."""
    u = pc.UNIT_ROUNDOFF[case.dtype]
    error = (
        f"e = {u:.2g} (|l| + (1 - p) |z| + sum of p |z| over the other tokens + 1 + log S), for the log-probability l, the token's logit z "
        "and probability p, and S, the sum of exp(logit - largest logit)"
    )
    ratio = "the ratio of a token may be off by the factor exp(e), e being the error of its log-probability"
    words = {
        "logprobs": f"|got - want| <= 2 e, where {error}",
        "policy_gradient": f"{ratio}, and so may its gradient",
        "loss": f"{ratio}; the loss may be off by the root of the sum of squares of what that does to its terms",
        "metrics": f"{ratio}; means may be off like the loss, the least and the largest ratio by that factor",
    }
    return {name: pc.Tolerance(magnitude=1.0, words=text) for name, text in words.items()}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Only valid tokens need a product. Five sums, a minimum and a maximum are all-reduced as one message of float32."""
    count, valid, world = _tokens(case), _tokens(case) - _ignored(case, rank), case.world_size
    depth, vocab, size, aux = case["hidden"], case["vocab"], case.dtype.itemsize, _aux_dtype(case).itemsize
    port = pc.traffic.all_reduce(7 * FP32.itemsize, world)
    head = vocab * depth * size if valid else 0
    return pc.Cost(
        hbm_bytes=head + valid * (depth * size + 2 * aux) + count * (8 + size + max(size, aux)),
        egress_bytes=port,
        ingress_bytes=port,
        flops={FLOP_UNIT[case.dtype]: 2 * valid * depth * vocab},
    )


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"tokens": (3, 128), "hidden": 16, "vocab": 23, "ignored": 0.4, **params})


PRESETS = (
    pc.preset(
        "small",
        "few and many tokens, ranks without valid tokens, clamped and single huge ratios, another ignore_index, wider log-probabilities, "
        "large logits",
        _small("plain_fp32", FP32),
        _small("plain_bf16", BF16),
        _small("six_tokens_fp32", FP32, tokens=(2, 3), hidden=8, vocab=11),
        _small("silent_rank_fp32", FP32, silent="last"),
        _small("silent_rank_bf16", BF16, tokens=(3, 256), silent="last"),
        _small("none_valid_fp32", FP32, silent="every"),
        _small("clamped_fp32", FP32, data="clamped"),
        _small("one_ratio_fp32", FP32, data="one_ratio"),
        _small("last_label_fp32", FP32, data="last_label", own_heads=True),
        _small("ignore_zero_bf16", BF16, ignore=0),
        _small("wide_logprobs_bf16", BF16, aux_dtype=FP32),
        _small("large_logits_fp32", FP32, shift=120.0),
    ),
    pc.preset(
        "pkb", "the public benchmark's shape", pc.case("bf16", BF16, tokens=(1024,), hidden=1024, vocab=32000, spread=2.0, ignored=0.2)
    ),
    pc.preset(
        "production_qwen2_5_7b_grpo",
        "4096 tokens, hidden 3584, vocabulary 152064, prompts ignored",
        pc.case("bf16", BF16, tokens=(4, 1024), hidden=3584, vocab=152064, noise=0.05, ignored=0.4),
    ),
    pc.preset(
        "production_qwen2_5_7b_micro_batch",
        "1024 tokens, hidden 3584, vocabulary 152064, prompts ignored",
        pc.case("bf16", BF16, tokens=(2, 512), hidden=3584, vocab=152064, noise=0.05, ignored=0.4),
    ),
    pc.preset(
        "production_llama3_8b_grpo",
        "8192 tokens, hidden 4096, vocabulary 128256, prompts ignored",
        pc.case("bf16", BF16, tokens=(8, 1024), hidden=4096, vocab=128256, noise=0.05, ignored=0.4),
    ),
    pc.preset(
        "production_qwen3_0_6b",
        "16384 tokens, hidden 1024, vocabulary 151936",
        pc.case("bf16", BF16, tokens=(16, 1024), hidden=1024, vocab=151936, noise=0.05, ignored=0.4),
    ),
)


PROBLEM = pc.Problem(
    id=25,
    slug="importance_sampling_loss",
    title="Importance-sampled policy-gradient loss from a language-model head",
    category="data_parallel",
    parallelism=("data",),
    origin="Policy-gradient training of language models (the importance-sampling loss of Tinker) on a trainer derived from VeOmni",
    summary=(
        "hidden_states (..., H), weight (V, H); labels (...) are in [0, V) or ignore_index, which makes a token ignored. Per valid token: "
        "lp is the label's log-probability under softmax(h W^T), d = lp - old_logprob clamped to [-20, 20], rho = exp(d), and pg = -rho "
        "advantage. Returns: the sum of pg over all ranks, divided by their number of valid tokens (at least 1), float32; None; lp in the "
        "logits' dtype; pg in the widest of the dtypes of logits, old_logprobs and advantages; and float32 (5,): mean, least and largest "
        "rho, mean of rho - d - 1, mean of -lp, over all ranks' valid tokens. Ignored tokens have lp and pg of 0; without any valid token "
        "the least rho is infinity and the largest -infinity."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    bandwidth="production_qwen2_5_7b_micro_batch",
    presets=PRESETS,
    known_wrong_answers=pc.FromProof(__name__, "KNOWN_WRONG_ANSWERS"),
    alternative_solutions=pc.FromProof(__name__, "ALTERNATIVE_SOLUTIONS"),
    excused={
        "neighbours_exchanged": "a sum does not depend on the order of its terms",
        "another_rank/loss": "all ranks have the same",
        "another_rank/metrics": "all ranks have the same",
        **{
            f"{name}@small/none_valid_fp32": "without valid tokens every output is known"
            for name in (
                "previous",
                "another_rank",
                *(f"{n}/{o}" for n in ("zeros", "previous_mean") for o in ("loss", "logprobs", "policy_gradient")),
            )
        },
    },
    replicated=("metrics",),
    notes=(
        "The public benchmark's logits have a standard deviation of 32, so that all log-ratios are clamped, and ratios, loss and gradients "
        "are constants; its heads differ between ranks. Here labels have the probabilities of sampled tokens, some of the others are as "
        "probable, old log-probabilities are near the new ones but for a drift, and the head is the same on all ranks but in one case.",
        "On a rank without valid tokens the public reference passes another dtype to a collective than the other ranks. Here such a rank "
        "counts as having none.",
        "The public reference's loss carries a gradient, by adding and taking away a sum over the rank's own tokens, whose rounding "
        "differs between ranks. Here the forward pass alone is asked for, and the loss need not have the same bits everywhere. Logits may "
        "be rounded to their dtype or be kept in float32.",
    ),
)
