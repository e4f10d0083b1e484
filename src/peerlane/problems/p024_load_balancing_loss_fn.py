"""Problem 24: load-balancing loss of a mixture-of-experts router, averaged over ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32, FP64
from peerlane.problems.families.interval import Interval, comparison

# Bytes of float64 probabilities that the oracle holds at a time; it needs about eight times as much.
_CHUNK_BYTES = 2**28

# Relative error of a sum of float32 probabilities over tokens, and of a softmax in float32: 168 unit roundoffs.
_SUMS = 1e-5


def reference(
    gate_logits: torch.Tensor | tuple[torch.Tensor, ...], num_experts: int, top_k: int = 2, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    logits = gate_logits if isinstance(gate_logits, torch.Tensor) else torch.cat(list(gate_logits))
    probabilities = torch.softmax(logits, dim=-1)
    selected = probabilities.topk(top_k, dim=-1).indices
    weights = _row_weights(logits, attention_mask)
    total = weights.sum()

    chosen = weights.new_zeros(num_experts)
    chosen.scatter_add_(0, selected.flatten(), weights.unsqueeze(-1).expand(-1, top_k).flatten())
    mean_probability = (probabilities.to(torch.float32) * weights.unsqueeze(-1)).sum(0) / total
    loss = num_experts * (chosen / total * mean_probability).sum()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def _row_weights(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """(rows,) float32: the mask, repeated for every layer, or ones."""
    if mask is None:
        return logits.new_ones(logits.shape[0], dtype=torch.float32)
    return mask.reshape(-1).to(torch.float32).repeat(logits.shape[0] // mask.numel())


def _layers(case: pc.Case) -> int:
    return int(case.params.get("layers", 1))


def _tokens(case: pc.Case) -> int:
    """Tokens of a layer: ``tokens``, or batch times sequence of ``batch``."""
    return int(torch.Size(case["batch"]).numel() if "batch" in case.params else case["tokens"])


def _padding(case: pc.Case) -> list[int]:
    """Masked tokens at the end of every sequence: none in the first, and more in each, a share of ``case["padding"]`` in all."""
    batch, length = case.params.get("batch", (1, _tokens(case)))
    step = int(batch * length * case.params.get("padding", 0.0)) // max(1, batch * (batch - 1) // 2)
    return [step * sequence for sequence in range(batch)]


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Logits N(0, 1) plus a slope over the experts, in an order that is rotated from rank to rank.

    The slope is 20 or less from the most to the least popular expert: times a number for every rank, no two of which are close, and times
    one that all ranks share, by turns large and small. Ranks' losses lie between top_k and num_experts, and change from call to call.
    Padding tokens prefer the least popular experts.

    With ``case["uneven"]`` the slope is 8 or less, and tokens collapse on an unpopular expert, another one on every rank and the same in
    all its layers: in every layer a stretch of tokens but for every second, third or fourth, as periodic text would make them. Stretches'
    lengths are like slopes. Where they lie and with which token they begin is random, and the latter the same on all ranks in every other
    layer, so that no few tokens at regular distances have the popularity of all. ``case["data"]``:

    * ``ties``: logits are multiples of a quarter
    * ``collapsed``: on the last rank one expert takes nearly all tokens
    * ``disabled``: the logits of two experts are -inf
    * ``large``: all logits of a token are larger by 120, or smaller by that in every other token
    * ``nan``: one logit of the last rank is NaN
    * ``nothing_valid``: the last rank's mask is all zero
    """
    experts, tokens, layers, data = case["experts"], _tokens(case), _layers(case), case.params.get("data")
    uneven = case.params.get("uneven", False)
    last = rank == case.world_size - 1
    order = draw.shared.permutation(experts).roll(rank * experts // case.world_size)
    slope = torch.linspace(0.5, -0.5, experts, device=draw.device)[order]
    place = (draw.shared.permutation(case.world_size)[rank] + draw.uniform((1,), FP32, low=0.8)) / case.world_size
    strength = (8.0 if uneven else 20.0) * place.square() * torch.exp2(draw.shared.apart((1,), low=-3.0, high=0.0))
    if data == "collapsed" and last:
        strength = strength + 40.0
    bias = slope * strength

    mask = None
    if "batch" in case.params:
        mask = torch.ones(case["batch"], dtype=torch.int64, device=draw.device)
        for sequence, padding in zip(mask, _padding(case), strict=True):
            sequence[len(sequence) - padding :] = 0
    logits = [draw.normal((tokens, experts), FP32) for _ in range(layers)]
    for part in logits:
        part += bias if mask is None else torch.where(mask.view(-1, 1) == 1, bias, -bias)
    if uneven:
        stretch = tokens * (0.5 + 0.5 * place) * draw.shared.apart((1,), low=0.6, high=1.0)
        _collapse(logits, mask, slope.argsort()[draw.shared.integers(0, experts // 2, (1,))], stretch, draw)
    for part in logits:
        if data == "ties":
            part.mul_(4.0).round_().div_(4.0)
        elif data == "disabled":
            part[:, draw.shared.permutation(experts)[:2]] = -torch.inf
        elif data == "large":
            part[::2] += 120.0
            part[1::2] -= 120.0
    if data == "nan" and last:
        logits[0][tokens // 2, 0] = torch.nan
    if data == "nothing_valid" and last and mask is not None:
        mask.zero_()
    parts = tuple(part.to(case.dtype) for part in logits)
    return parts if case.params.get("as_tuple") else torch.cat(parts), experts, case["k"], mask


def _collapse(
    logits: Sequence[torch.Tensor], mask: torch.Tensor | None, expert: torch.Tensor, stretch: torch.Tensor, draw: pc.Draw
) -> None:
    """Gives ``expert`` a probability of about 0.95 in ``stretch`` tokens of every layer, which may go round its end, but for every second,
    third or fourth of them, and for padding."""
    tokens, experts = logits[0].shape
    index, chosen = torch.arange(tokens, device=draw.device), torch.arange(experts, device=draw.device) == expert
    turn, first = draw.shared.integers(0, 2, (1,)), draw.shared.integers(0, 12, (1,))
    for layer, part in enumerate(logits):
        distance = 1 + draw.integers(0, 4, (1,)).clamp_(min=1)  # 2, 2, 3 or 4
        left_out = (index + torch.where(turn == layer % 2, first, draw.integers(0, 12, (1,)))) % distance == 0
        within = ((index + draw.integers(0, tokens, (1,))) % tokens < stretch) & ~left_out
        if mask is not None:
            within &= mask.view(-1) == 1
        logit = part.logsumexp(-1, keepdim=True) + draw.uniform((tokens, 1), FP32, low=2.0, high=4.0)
        part.copy_(torch.where(within.unsqueeze(-1) & chosen, logit, part))


def _whole(args: tuple[Any, ...]) -> torch.Tensor:
    return args[0] if isinstance(args[0], torch.Tensor) else torch.cat(args[0])


def _chunks(logits: torch.Tensor) -> list[slice]:
    rows = max(1, _CHUNK_BYTES // (logits.shape[1] * FP64.itemsize))
    return [slice(first, first + rows) for first in range(0, logits.shape[0], rows)]


def mean_probabilities(logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(E,) float64: the weighted mean of softmax over rows."""
    total = torch.zeros(logits.shape[1], dtype=FP64, device=logits.device)
    for part in _chunks(logits):
        total += weights[part].to(FP64) @ torch.softmax(logits[part].to(FP64), dim=-1)
    return total / weights.to(FP64).sum()


def local_loss(logits: torch.Tensor, weights: torch.Tensor, top_k: int, margin: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's loss in float64, and the least and the largest that it may be.

    A row's loss is the sum of mean probabilities over its experts. Experts whose probability is within ``margin`` of the k-th largest,
    relatively, may change places; all that are above are chosen.
    """
    means = mean_probabilities(logits, weights)
    value, low, high = (torch.zeros((), dtype=FP64, device=logits.device) for _ in range(3))
    for part in _chunks(logits):
        probabilities, weight = torch.softmax(logits[part].to(FP64), dim=-1), weights[part].to(FP64)
        best = probabilities.topk(top_k, dim=-1)
        edge = best.values[:, -1:]
        certain = probabilities * (1.0 - margin) > edge
        open_ = ~certain & (probabilities >= edge * (1.0 - margin))
        left = top_k - certain.sum(-1, keepdim=True)
        chosen = torch.where(certain, means, 0.0).sum(-1)
        value += weight @ means[best.indices].sum(-1)
        for bound, largest in ((low, False), (high, True)):
            ordered = torch.where(open_, means, -torch.inf if largest else torch.inf).sort(-1, descending=largest).values
            sums = ordered.masked_fill_(ordered.isinf(), 0.0).cumsum_(-1)
            # With nothing left to choose there is no last place to read the sum at.
            extra = sums.gather(-1, (left - 1).clamp(min=0)).squeeze(-1)
            bound += weight @ (chosen + torch.where(left.squeeze(-1) > 0, extra, 0.0))
    factor = logits.shape[1] / weights.to(FP64).sum()
    return value * factor, low * factor, high * factor


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """The mean of local losses. In bfloat16 two probabilities may be rounded to the same number if they differ by 2 u, relatively."""
    margin = (2 * pc.UNIT_ROUNDOFF[case.dtype] if case.dtype != FP32 else 0.0) + _SUMS
    losses = []
    for args in inputs:
        logits = _whole(args)
        losses.append(torch.stack(local_loss(logits, _row_weights(logits, args[3]), case["k"], margin)))
    value, low, high = torch.stack(losses).mean(0)
    return Interval(name="loss", value=value, dtype=FP32, low=low, high=high)


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """One roundoff for mean probabilities in the logits' dtype, and that of sums.

    Roundings of single tokens' probabilities average out. Those of mean probabilities need not, where one expert makes most of the loss.
    """
    return {"loss": pc.Tolerance(relative=(pc.UNIT_ROUNDOFF[case.dtype] if case.dtype != FP32 else 0.0) + 2 * _SUMS)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """The logits of tokens that count are read once; one float32 is all-reduced."""
    rows, world = _layers(case) * (_tokens(case) - sum(_padding(case))), case.world_size
    port = pc.traffic.all_reduce(FP32.itemsize, world)
    return pc.Cost(
        hbm_bytes=rows * case["experts"] * case.dtype.itemsize,
        egress_bytes=port,
        ingress_bytes=port,
        flops={"fp32": 4 * rows * case["experts"]},
    )


def _one_pass(case: pc.Case, rank: int) -> pc.Steps:
    """Every token's probabilities, and its choices, each the largest of what is left."""
    least = cost(case, rank)
    mask = 8 * _tokens(case) * ("batch" in case.params)
    operations = least.flops["fp32"] + _layers(case) * _tokens(case) * case["k"] * case["experts"]
    return (
        pc.step("pass over logits and mask", hbm=least.hbm_bytes + mask, flops={"fp32": operations}),
        pc.step("exchange of the loss", link=least.egress_bytes, barriers=1),
    )


def _loss(logits: torch.Tensor, weights: torch.Tensor, top_k: int, probabilities: torch.Tensor | None = None) -> torch.Tensor:
    """A rank's loss in float32, with counts by one-hot vectors; ``probabilities`` are those of the logits unless given."""
    p = torch.softmax(logits.to(FP32), dim=-1) if probabilities is None else probabilities
    chosen = torch.zeros_like(p).scatter_(1, p.topk(top_k, dim=-1).indices, 1.0)
    total, weight = weights.sum(), weights.unsqueeze(-1)
    return logits.shape[1] * ((chosen * weight).sum(0) / total * ((p * weight).sum(0) / total)).sum()


def _mean(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(losses)).mean(0)


def _answer_of(args: tuple[Any, ...], top_k: int, masked: bool = True) -> torch.Tensor:
    logits = _whole(args)
    return _loss(logits, _row_weights(logits, args[3] if masked else None), top_k)


def _global_batch(context: pc.AnswerContext) -> torch.Tensor:
    logits = torch.cat([_whole(args) for args in context.inputs])
    weights = torch.cat([_row_weights(_whole(args), args[3]) for args in context.inputs])
    return _loss(logits, weights, context.case["k"])


def _every_kth(context: pc.AnswerContext, distance: int, turning: bool) -> torch.Tensor:
    """The loss of every k-th token of every layer: the first and so on, or ``turning``, one token later in every layer."""
    losses = []
    for gate, _, top_k, mask in context.inputs:
        layers = [gate] if isinstance(gate, torch.Tensor) else gate
        samples = [slice(layer % distance if turning else 0, None, distance) for layer in range(len(layers))]
        weights = layers[0].new_ones(len(layers[0]), dtype=FP32) if mask is None else mask.reshape(-1).to(FP32)
        logits = torch.cat([layer[sample] for layer, sample in zip(layers, samples, strict=True)])
        losses.append(_loss(logits, torch.cat([weights[sample] for sample in samples]), top_k))
    return _mean(losses)


def _probabilities_squared(context: pc.AnswerContext) -> torch.Tensor:
    """E times the sum of squared mean probabilities, times k: no choice is made."""
    means = [mean_probabilities(_whole(args), _row_weights(_whole(args), args[3])) for args in context.inputs]
    factor: int = context.case["k"] * context.case["experts"]
    return _mean([part.square().sum() for part in means]).to(FP32) * factor


def _no_maximum(context: pc.AnswerContext) -> torch.Tensor:
    losses = []
    for args in context.inputs:
        logits = _whole(args)
        powers = logits.to(FP32).exp()
        losses.append(_loss(logits, _row_weights(logits, args[3]), context.case["k"], powers / powers.sum(-1, keepdim=True)))
    return _mean(losses)


def _wide(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    return _mean([_answer_of(args, case["k"]) for args in inputs])


def _in_dtype(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Probabilities rounded to the logits' dtype before the choice, and their mean after it."""
    losses = []
    for args in inputs:
        logits = _whole(args)
        p, weights = torch.softmax(logits, dim=-1), _row_weights(logits, args[3])
        chosen = torch.zeros(p.shape, device=p.device).scatter_(1, p.topk(case["k"], dim=-1).indices, 1.0)
        total = weights.sum()
        means = ((p.to(FP32) * weights.unsqueeze(-1)).sum(0) / total).to(case.dtype)
        losses.append(case["experts"] * ((weights @ chosen) / total * means).sum())
    return _mean(losses)


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"tokens": 61, "experts": 5, "k": 2, **params})


_PADDED: Mapping[str, Any] = {"batch": (3, 20), "padding": 0.5, "layers": 2, "as_tuple": True}

PRESETS = (
    pc.preset(
        "small",
        "one and several layers, masks, 1 to 8 choices, odd numbers of experts, ties, collapsed routers and tokens, disabled experts, "
        "large logits, NaN",
        _small("plain_fp32", FP32),
        _small("plain_bf16", BF16),
        _small("seven_tokens_fp32", FP32, tokens=7),
        _small("three_layers_bf16", BF16, layers=3, as_tuple=True),
        _small("masked_fp32", FP32, **_PADDED),
        _small("masked_bf16", BF16, **_PADDED, experts=16, k=4),
        _small("top_1_fp32", FP32, k=1),
        _small("many_experts_bf16", BF16, tokens=97, experts=100, k=8),
        _small("ties_bf16", BF16, data="ties", experts=8),
        _small("collapsed_fp32", FP32, data="collapsed", experts=8, k=1),
        _small("disabled_experts_bf16", BF16, data="disabled", experts=9),
        _small("uneven_bf16", BF16, tokens=48, layers=24, as_tuple=True, experts=8, uneven=True),
        _small("uneven_fp32", FP32, layers=5, as_tuple=True, uneven=True),
        _small("nan_fp32", FP32, data="nan"),
        _small("nothing_valid_fp32", FP32, data="nothing_valid", **_PADDED),
        _small("large_logits_fp32", FP32, data="large", experts=8),
    ),
    pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, tokens=1024, experts=8, k=2)),
    pc.preset(
        "production_mixtral_8x7b",
        "32 layers x 4 sequences of 1024 tokens, a quarter of them padding",
        pc.case("bf16", BF16, batch=(4, 1024), padding=0.25, layers=32, as_tuple=True, experts=8, k=2, uneven=True),
    ),
    pc.preset(
        "production_qwen3_30b_a3b",
        "48 layers x 8192 tokens, 8 of 128 experts",
        pc.case("bf16", BF16, tokens=8192, layers=48, as_tuple=True, experts=128, k=8, uneven=True),
    ),
    pc.preset(
        "production_deepseek_v3",
        "58 layers x 4096 tokens, 8 of 256 experts",
        pc.case("fp32", FP32, tokens=4096, layers=58, as_tuple=True, experts=256, k=8, uneven=True),
    ),
)


_DEFINED = pc.where(lambda c: c.params.get("data") not in ("nan", "nothing_valid"))
# A small case in bfloat16 has so few layers that by chance a sample is fair, now and then.
_UNEVEN = pc.where(lambda c: _DEFINED(c) and c.params.get("uneven", False) and (c.preset, c.label) != ("small", "uneven_bf16"))
_FLOAT32 = pc.where(lambda c: _DEFINED(c) and c.label.endswith("fp32"))

PROBLEM = pc.Problem(
    id=24,
    slug="load_balancing_loss_fn",
    title="Router load-balancing loss, averaged over ranks",
    category="expert_parallel",
    parallelism=("expert", "data"),
    origin="Switch Transformer's auxiliary loss as in Hugging Face Transformers' Mixtral, with the data-parallel mean of VeOmni",
    summary=(
        "gate_logits is (T, E), or one such tensor per layer, concatenated. With P the softmax over experts: f_e is the fraction of tokens "
        "that have e among their top_k experts, g_e the mean of P over tokens, and a rank's loss is E times the sum of f_e g_e. An "
        "attention_mask (batch, sequence) of 0 and 1 weighs the tokens of every layer; all zero gives NaN. Every rank returns the mean "
        "of the ranks' losses, 0-d float32. Nearly equal probabilities may be chosen among in any way."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    compare=comparison(tolerance),
    cost=cost,
    attainable=pc.Algorithm("one pass, tokens in registers", "each logit is read once", _one_pass),
    bandwidth="production_deepseek_v3",
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("sum", "not divided by the world size", lambda c: c.answer * c.case.world_size, _DEFINED),
        pc.wrong("global_batch", "the loss of all ranks' tokens together", _global_batch, _DEFINED),
        pc.wrong("balanced", "the loss of a balanced router, top_k", lambda c: torch.full_like(c.answer, float(c.case["k"]))),
        pc.wrong("no_choice", "mean probabilities in place of choices: not far off, for bfloat16", _probabilities_squared, _FLOAT32),
        pc.wrong("no_maximum", "exponentials of the logits as they are", _no_maximum, ("small/large_logits_fp32",)),
        pc.wrong("every_other", "every second token only", lambda c: _every_kth(c, 2, turning=False), _UNEVEN),
        pc.wrong("every_fourth", "every fourth token only", lambda c: _every_kth(c, 4, turning=False), _UNEVEN),
        pc.wrong(
            "every_fourth_in_turn",
            "every fourth token only, of every layer one later than of the last",
            lambda c: _every_kth(c, 4, turning=True),
            _UNEVEN,
        ),
        pc.wrong(
            "sixteenth_in_turn",
            "every sixteenth token only, of every layer one later than of the last",
            lambda c: _every_kth(c, 16, turning=True),
            _UNEVEN,
        ),
        pc.wrong(
            "mask_ignored",
            "padding counted",
            lambda c: _mean([_answer_of(args, c.case["k"], masked=False) for args in c.inputs]),
            lambda c: _DEFINED(c) and "batch" in c.params,
        ),
        pc.wrong(
            "top_1",
            "only the best expert counted, times k: not far off, for bfloat16",
            lambda c: _mean([_answer_of(a, 1) for a in c.inputs]) * c.case["k"],
            lambda c: _FLOAT32(c) and c["k"] > 1,
        ),
    ),
    alternative_solutions=pc.alternatives(one_hot_fp32=_wide, probabilities_in_dtype=_in_dtype),
    excused={
        **pc.any_order("a mean does not depend on the order of its terms"),
        "another_rank": "all ranks have the same answer",
        **{
            f"{name}@small/{label}": "the loss is NaN in every call"
            for name in ("nan", "previous")
            for label in ("nan_fp32", "nothing_valid_fp32")
        },
    },
    replicated=True,
    notes=(
        "The mean of the ranks' losses is asked for, not the loss of the global batch: that is the public semantics.",
        "The public benchmark's logits have no preferred expert, so that the constant top_k passes without a look at them. Here experts "
        "are unequally popular, in another order and to another degree on every rank and in every call.",
        "In production presets experts' popularity hangs on tokens' places, so that the loss of every second, fourth or sixteenth token is "
        "far off. Of every fifth, or of those at irregular places, it need not be: the mean over so many errs like a rounding to bfloat16.",
        "Skew that were only rotated from rank to rank would give every rank the same loss, and hide whether ranks communicate.",
        "Of experts whose probabilities agree within bfloat16's rounding any may be chosen: the oracle gives the least and largest loss.",
    ),
)
