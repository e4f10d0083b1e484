"""Wrong answers to problem 58 and other right ones. Evaluations do not import this module."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.contract.codes import eight_bit_floats, eight_bits
from peerlane.problems.families.collective import BF16, FP32, group_members
from peerlane.problems.p058_openclip_contrastive_loss import _from_moments, _signed_logits


def _block_loss(case: pc.Case, inputs: pc.Inputs, rank: int, owner: int) -> torch.Tensor:
    """The float32 sum of softplus over one block of signed logits, divided by B."""
    z = _signed_logits(case, inputs, rank, owner, FP32)
    return F.softplus(z).sum() / z.shape[0]


def _loss(case: pc.Case, inputs: pc.Inputs, rank: int, owners: Sequence[int]) -> torch.Tensor:
    return torch.stack([_block_loss(case, inputs, rank, owner) for owner in owners]).sum().to(case.dtype)


def _rounded_logits(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """The product and the biased logits rounded to the features' dtype, and blocks in the order of a bidirectional ring."""
    images, _, scale, bias, _ = inputs[rank]
    members = group_members(case, rank)
    place, ranks = members.index(rank), len(members)
    steps = sorted(range(ranks), key=lambda step: (min(step, ranks - step), step))
    total = torch.zeros((), device=images.device)
    for owner in (members[(place + step) % ranks] for step in steps):
        products = (images.to(FP32) @ inputs[owner][1].to(FP32).t() * scale).to(case.dtype)
        z = (products + bias).to(FP32)
        if owner == rank:
            z.diagonal().neg_()
        total = total + F.softplus(z).sum()
    return torch.div(total, images.shape[0]).to(case.dtype)


def _chosen(owners: Callable[[Sequence[int], int], Sequence[int]]) -> Callable[[pc.AnswerContext], torch.Tensor]:
    """A wrong answer: ``owners(members, place)`` names the ranks whose texts are used, ``members[place]`` being this rank."""

    def answer(context: pc.AnswerContext) -> torch.Tensor:
        return _loss(context.case, context.inputs, context.rank, owners(context.members, context.place))

    return answer


def _positives_everywhere(context: pc.AnswerContext) -> torch.Tensor:
    total = torch.zeros((), device=context.args[0].device)
    for owner in context.members:
        z = _signed_logits(context.case, context.inputs, context.rank, owner, FP32)
        if owner != context.rank:
            z.diagonal().neg_()
        total = total + F.softplus(z).sum() / z.shape[0]
    return total.to(context.case.dtype)


def _no_positives(context: pc.AnswerContext) -> torch.Tensor:
    z = _signed_logits(context.case, context.inputs, context.rank, context.rank, FP32).diagonal()
    correction = (F.softplus(-z) - F.softplus(z)).sum() / z.shape[0]
    return torch.add(context.answer, correction).to(context.case.dtype)


def _with_scalars(context: pc.AnswerContext, **scalars: float) -> torch.Tensor:
    """The loss with another scale or bias."""
    values = {"scale": context.args[2], "bias": context.args[3], **scalars}
    changed = [(images, texts, values["scale"], values["bias"], group) for images, texts, _, _, group in context.inputs]
    return _loss(context.case, changed, context.rank, context.members)


def _mean_over_ranks(context: pc.AnswerContext) -> torch.Tensor:
    return torch.stack([context.answers[q].to(FP32) for q in context.members]).mean().to(context.case.dtype)


def _overflowing(context: pc.AnswerContext) -> torch.Tensor:
    """log(1 + exp(z)) without care for large z."""
    blocks = [
        torch.log(1 + torch.exp(_signed_logits(context.case, context.inputs, context.rank, owner, FP32))) for owner in context.members
    ]
    return torch.div(torch.stack(blocks).sum(), context.args[0].shape[0]).to(context.case.dtype)


def _coded(context: pc.AnswerContext, code: Callable[[torch.Tensor], torch.Tensor], *, images: bool) -> torch.Tensor:
    """The loss of texts, and of images too, of which a code of few bits is left."""
    coded = [(code(args[0]) if images else args[0], code(args[1]), *args[2:]) for args in context.inputs]
    return _loss(context.case, coded, context.rank, context.members)


def _half_of_the_texts(context: pc.AnswerContext) -> torch.Tensor:
    """The first half of every rank's texts, their negatives counted twice."""
    total = torch.zeros((), device=context.args[0].device)
    for owner in context.members:
        z = _signed_logits(context.case, context.inputs, context.rank, owner, FP32)
        half = F.softplus(z)[:, : (z.shape[1] + 1) // 2].sum() * (z.shape[1] / ((z.shape[1] + 1) // 2))
        total = total + half / z.shape[0]
    return total.to(context.case.dtype)


# Small cases in bfloat16 have too few texts to be told from their clusters' moments.
_SUMMARISED = pc.where(lambda c: c.dtype == FP32 or "batch_total" in c.params or c["batch"] > 1000)

KNOWN_WRONG_ANSWERS = (
    pc.wrong("local_block_scaled", "the same times the number of ranks", _chosen(lambda members, place: [members[place]] * len(members))),
    pc.wrong(
        "opposite_dropped",
        "without the rank on the other side of the ring",
        _chosen(lambda members, place: [q for q in members if q != members[(place + len(members) // 2) % len(members)]]),
    ),
    pc.wrong(
        "neighbour_twice",
        "the right neighbour's texts in place of the left neighbour's",
        _chosen(lambda members, place: [members[(place + 1) % len(members)] if q == members[place - 1] else q for q in members]),
        lambda c: c.dtype == FP32 and c.world_size > 2,
    ),
    pc.wrong("positives_everywhere", "diagonals of other ranks' blocks as matching pairs", _positives_everywhere),
    pc.wrong("no_positives", "matching pairs as negatives", _no_positives),
    pc.wrong("mean_over_ranks", "the mean of all ranks' losses", _mean_over_ranks),
    pc.wrong("minus_bias", "the loss of matching pairs whose logit is the bias", lambda c: torch.full_like(c.answer, -c.args[3])),
    pc.wrong("no_bias", "the bias left out", lambda c: _with_scalars(c, bias=0.0), lambda c: c["bias"] != 0.0),
    pc.wrong("no_scale", "the scale left out", lambda c: _with_scalars(c, scale=1.0)),
    pc.wrong("overflow", "softplus that overflows", _overflowing, ("small/overflow_fp32",)),
    pc.wrong("half_of_the_texts", "an estimate from half of the texts", _half_of_the_texts, lambda c: c.dtype == FP32),
    pc.wrong(
        "eight_bit_texts",
        "texts in 8-bit floating point with a scale for each",
        lambda c: _coded(c, eight_bit_floats, images=False),
        lambda c: c.dtype == BF16 and c["depth"] > 48,
    ),
    pc.wrong(
        "eight_bit_features",
        "images and texts as 8-bit integers with a scale for every 32 neighbours",
        lambda c: _coded(c, eight_bits, images=True),
        lambda c: c.dtype == BF16,
    ),
    pc.wrong(
        "two_clusters",
        "means, variances and sizes of two clusters in place of the texts of other ranks",
        lambda c: _from_moments(c, 2, own=False),
        _SUMMARISED,
    ),
    pc.wrong("eight_clusters", "the same with eight clusters", lambda c: _from_moments(c, 8, own=False), _SUMMARISED),
    pc.wrong(
        "no_product",
        "two clusters in place of the rank's own texts too: nothing but pairs is multiplied",
        lambda c: _from_moments(c, 2, own=True),
        _SUMMARISED,
    ),
)

ALTERNATIVE_SOLUTIONS = pc.alternatives(
    fp32_by_block=lambda case, inputs, rank: _loss(case, inputs, rank, group_members(case, rank)), rounded_logits=_rounded_logits
)
