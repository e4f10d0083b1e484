"""Problem 58: the sigmoid contrastive loss of every rank's images against the texts of all ranks."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32, FP64, all_gather_single, group_layout, group_members


def reference(
    image_features: torch.Tensor,
    text_features: torch.Tensor,
    logit_scale: float,
    logit_bias: float = 0.0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    batch, rank = image_features.shape[0], dist.get_rank(group)
    texts = text_features.new_empty(dist.get_world_size(group) * batch, text_features.shape[1])
    all_gather_single(texts, text_features.contiguous(), group=group)
    logits = (image_features @ texts.t()).to(torch.float32).mul_(logit_scale).add_(logit_bias)
    logits[:, rank * batch : (rank + 1) * batch].diagonal().neg_()
    return (F.softplus(logits).sum() / batch).to(image_features.dtype)


def _batch(case: pc.Case, rank: int) -> int:
    """B. ``case``: ``batch`` = B, or ``batch_total`` = W B."""
    return int(case["batch"] if "batch" in case.params else case["batch_total"] // len(group_members(case, rank)))


def _subjects(batch: int) -> int:
    """Twice as many subjects as these directions: twelve of a rank's pairs for each."""
    return max(1, batch // 24)


def _unevenly(batch: int, draw: pc.Draw) -> torch.Tensor:
    """The places of ``range(batch)`` in a random order. Neighbours, and those a few apart, have like places: no regular sample is fair."""
    index = torch.arange(batch, device=draw.device)
    key = draw.uniform((batch,), FP32)
    for weight, classes, count in ((2.0, index * 4 // batch, 4), (1.0, index % 4, 4), (1.0, index % 3, 3), (1.0, index % 5, 5)):
        key = key + draw.uniform((count,), FP32, high=weight)[classes]
    return key.argsort().argsort()


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Unit vectors. Images and texts of a pair share noise, so that their cosine is about ``case["pair_cosine"]``.

    Some pairs ("hard" ones) are also near a subject. Subjects are B / 12 random directions that all ranks have in common, half of them
    opposite to the others: no mean of many texts tells of them. An image and a text near the same subject, of whatever ranks and pairs,
    have a logit of about ``case["hard_logit"]`` or a little less, and make most of the loss, so that nothing but the texts themselves tells
    it. Every rank likes other subjects. On every other rank about 85 % of the images are hard, on the rest 35 %, and nearly as many texts;
    ranks change sides from call to call: no rank's loss and no block of logits can stand for another, nor can the call before. With
    ``gap`` g, images and texts lie apart, as in trained models: all cosines are lower by g.

    In bfloat16 channels differ in size by powers of two (see :meth:`Draw.octaves`): images' are multiplied by them and texts' divided, so
    that products are those of unit vectors.

    ``case["pattern"]``: ``duplicate``: all ranks have the same hard texts; ``nan``: an image of the first rank has a NaN.
    """
    batch, depth, scale, bias = _batch(case, rank), case["depth"], case["scale"], case["bias"]
    gap, pair = case.params.get("gap", 0.0), case["pair_cosine"]
    directions = F.normalize(draw.shared.normal((_subjects(batch), depth), FP32))
    apart = F.normalize(draw.shared.normal((depth,), FP32), dim=0)
    place = group_members(case, rank).index(rank)
    side = draw.shared.apart((1,), low=-1.0, high=1.0).sign() * (-1) ** place
    strength = ((case["hard_logit"] + draw.shared.uniform((), FP32, low=-0.5, high=0.5) - bias) / scale + gap).sqrt()
    same = case.params.get("pattern") == "duplicate"
    source = draw.shared if same else draw
    subjects = torch.cat([directions, -directions])[source.permutation(2 * len(directions))]
    liked = (source.uniform((batch,), FP32).pow(1.5) * len(subjects)).long()
    near, turn = subjects[liked.clamp(max=len(subjects) - 1)], _unevenly(batch, source)
    share = 0.6 + 0.25 * side + draw.uniform((), FP32, low=-0.05, high=0.05)
    image_hard = (turn < share * batch) * strength * draw.uniform((batch,), FP32, low=0.9)
    share = 0.6 + 0.25 * side * (not same) + source.uniform((), FP32, low=-0.1, high=0.05)
    text_hard = (turn < share * batch) * strength * source.uniform((batch,), FP32, low=0.9)
    noise, other = (draw.normal((batch, depth), FP32, scale=depth**-0.5) for _ in range(2))
    image_rest = math.sqrt(1 - gap) * noise + math.sqrt(gap) * apart
    text_rest = math.sqrt(1 - gap) * (pair * noise + math.sqrt(1 - pair**2) * other) - math.sqrt(gap) * apart
    images, texts = _towards(near, image_hard, image_rest), _towards(near, text_hard, text_rest)
    if case.params.get("pattern") == "nan" and place == 0:
        images[batch // 2, depth // 3] = math.nan
    images, texts = images.to(case.dtype), texts.to(case.dtype)
    if case.dtype == BF16:
        sizes = draw.shared.octaves((depth,), most=16).to(BF16)
        images, texts = images * sizes, texts / sizes
    group = next((pc.GroupRef(name) for name in group_layout(case)), None)
    return images, texts, scale, bias, group


def _towards(near: torch.Tensor, cosine: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Unit vectors whose cosine with those of ``near`` is about ``cosine``, a number for each, and whose other part is ``rest``."""
    cosine = cosine.unsqueeze(-1)
    return F.normalize(cosine * near + (1 - cosine.square()).sqrt() * rest)


def _signed_logits(case: pc.Case, inputs: pc.Inputs, rank: int, owner: int, work: torch.dtype = FP64) -> torch.Tensor:
    """z of the rank's images and the owner's texts, those of matching pairs negated: the loss is the sum of softplus over them all."""
    images, _, scale, bias, _ = inputs[rank]
    z = torch.mm(images.to(work), inputs[owner][1].to(work).t()).mul_(scale).add_(bias)
    if owner == rank:
        z.diagonal().neg_()
    return z


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """The magnitude is the standard deviation of the loss, over u, if logits and their part without the bias err by u each."""
    bias, batch = inputs[rank][3], inputs[rank][0].shape[0]
    total = torch.zeros((), dtype=FP64, device=inputs[rank][0].device)
    variance = torch.zeros_like(total)
    for owner in group_members(case, rank):
        z = _signed_logits(case, inputs, rank, owner)
        slope = torch.sigmoid(z)
        variance += (slope * (z.abs() + (z.abs() + abs(bias)))).square().sum()
        total += F.softplus(z, threshold=700.0).sum()
    return pc.Expected("loss", total / batch, case.dtype, magnitude=variance.sqrt() / batch)


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """The loss is a sum of positive terms, rounded once: a relative error.

    In bfloat16 logits may be rounded, before and after the bias is added. These errors are independent, with a root mean square of 0.41 u
    each. So 3 u times the magnitude are seven standard deviations of their sum. In float32 a sum in any order errs by less than 1e-5.
    """
    u = pc.UNIT_ROUNDOFF[case.dtype]
    size = "the standard deviation of the loss if all logits had a relative error of 1"
    return {"loss": pc.Tolerance(relative=1e-5 if case.dtype == FP32 else 2 * u, magnitude=3 * u, size=size)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Every text crosses the link to every other rank; logits never need to be stored."""
    batch, ranks, depth, size = _batch(case, rank), len(group_members(case, rank)), case["depth"], case.dtype.itemsize
    port = (ranks - 1) * batch * depth * size
    return pc.Cost(
        hbm_bytes=2 * batch * depth * size + size,
        egress_bytes=port,
        ingress_bytes=port,
        flops={"fp32" if case.dtype == FP32 else "bf16": 2 * batch**2 * depth * ranks},
    )


def _moments(texts: torch.Tensor, count: int) -> torch.Tensor:
    """(count, D + 2) float32: means, variances of one element and sizes of clusters of texts, found by ten rounds of k-means."""
    texts = texts.to(FP32)
    centres = texts[:1]
    while len(centres) < count:  # the text that is farthest from all
        centres = torch.cat([centres, texts[(texts @ centres.t()).amax(1).argmin()].unsqueeze(0)])
    for _ in range(10):
        members = F.one_hot((texts @ centres.t()).argmax(1), count).to(FP32)
        centres = F.normalize(members.t() @ texts)
    members = F.one_hot((texts @ centres.t()).argmax(1), count).to(FP32)
    sizes = members.sum(0)
    means = members.t() @ texts / sizes.clamp(min=1.0).unsqueeze(1)
    squares = members.t() @ (texts - members @ means).square().mean(1) / sizes.clamp(min=1.0)
    return torch.cat([means, squares.unsqueeze(1), sizes.unsqueeze(1)], 1)


def _channels(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """(D,) powers of two that make texts' channels as large as images' when these are divided by them: what was drawn, nearly always."""
    ratio = images.norm(dim=0) / texts.norm(dim=0)
    return torch.exp2((ratio.log2() / 2).round())


def _from_moments(context: pc.AnswerContext, count: int, own: bool) -> torch.Tensor:
    """The loss if all that is known of the texts of other ranks are clusters' moments, and of the rank's own too if ``own``.

    Logits of a cluster are taken to be normal, and softplus is integrated over them by a Gauss-Hermite rule of six points.
    """
    rank, (images, texts, scale, bias, _) = context.rank, context.args
    images = images.to(FP32)
    channels = _channels(images, texts.to(FP32))
    images, texts = images / channels, texts * channels
    nodes = images.new_tensor([-3.3242574336, -1.8891758778, -0.6167065901, 0.6167065901, 1.8891758778, 3.3242574336])
    weights = images.new_tensor([0.0025557844, 0.0886157460, 0.4088284696, 0.4088284696, 0.0886157460, 0.0025557844])
    total = torch.zeros((), device=images.device)
    for owner in group_members(context.case, rank):
        if owner == rank and not own:
            total = total + F.softplus(_signed_logits(context.case, context.inputs, rank, rank, FP32)).sum()
            continue
        for row in _moments(context.inputs[owner][1] * channels, count):
            mean, spread = images @ row[:-2], row[-2].sqrt() * images.norm(dim=1)
            z = scale * (mean.unsqueeze(1) + spread.unsqueeze(1) * nodes) + bias
            total = total + row[-1] * (F.softplus(z) @ weights).sum()
    if own:
        pairs = scale * (images * texts.to(FP32)).sum(1) + bias
        total = total + (F.softplus(-pairs) - F.softplus(pairs)).sum()
    return torch.div(total, images.shape[0]).to(context.case.dtype)


def _small(label: str, dtype: torch.dtype = FP32, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"batch": 9, "depth": 48, "scale": 10.0, "bias": -4.0, "hard_logit": 0.0, "pair_cosine": 0.8, **params})


_PUBLIC: dict[str, Any] = {"batch_total": 1024, "depth": 1024, "scale": 10.0, "bias": -10.0, "hard_logit": -0.6, "pair_cosine": 0.9}
_SO400M: dict[str, Any] = {"batch": 4096, "depth": 1152, "scale": 112.0, "bias": -16.5, "hard_logit": -4.5, "pair_cosine": 0.17}
_B16: dict[str, Any] = {"batch": 4096, "depth": 768, "scale": 117.0, "bias": -13.0, "hard_logit": -4.5, "gap": 0.05, "pair_cosine": 0.2}
_FINE_TUNING: dict[str, Any] = {"batch": 512, "depth": 1024, "scale": 10.0, "bias": -10.0, "hard_logit": -1.5, "pair_cosine": 0.8}

PRESETS = (
    pc.preset(
        "small",
        "odd sizes, public and trained scalars, logits near 200, texts that all ranks share, a NaN on one rank, strided groups",
        _small("fp32"),
        _small("bf16", BF16, batch=24),
        _small("no_bias_fp32", bias=0.0, hard_logit=2.0),
        _small("wide_bf16", BF16, batch=33, depth=70, pair_cosine=0.95),
        _small("trained_fp32", batch=16, depth=384, scale=60.0, bias=-12.0, hard_logit=0.0, pair_cosine=0.3),
        _small("trained_bf16", BF16, batch=40, depth=384, scale=60.0, bias=-12.0, hard_logit=1.0, pair_cosine=0.3),
        _small("overflow_fp32", scale=250.0, bias=-20.0, hard_logit=180.0, pair_cosine=0.9),
        _small("duplicate_fp32", pattern="duplicate"),
        _small("nan_fp32", pattern="nan"),
        _small("strided_group_bf16", BF16, batch=24, group="strided", world_sizes=(4, 8)),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape, scale and bias, with learnt structure; and the same in float32",
        pc.case("bf16", BF16, **_PUBLIC),
        pc.case("fp32", FP32, **_PUBLIC),
    ),
    pc.preset(
        "production_siglip_so400m",
        "SigLIP SO400M/14 training, 4096 pairs per GPU",
        pc.case("bf16", BF16, **_SO400M),
        pc.case("fp32", FP32, **_SO400M),
    ),
    pc.preset(
        "production_siglip_b16", "SigLIP B/16 training, 4096 pairs per GPU", pc.case("bf16", BF16, **_B16), pc.case("fp32", FP32, **_B16)
    ),
    pc.preset(
        "production_fine_tuning", "512 pairs per GPU, float32 features, near-duplicate negatives", pc.case("fp32", FP32, **_FINE_TUNING)
    ),
)


PROBLEM = pc.Problem(
    id=58,
    slug="openclip_contrastive_loss",
    title="Sigmoid contrastive loss of images and texts over all ranks",
    category="other",
    parallelism=("data",),
    origin="OpenCLIP's SigLipLoss: texts exchanged between neighbours, logits never gathered",
    summary=(
        "image_features and text_features (B, D) are the rank's pairs. z = logit_scale I T^T + logit_bias, against the texts of every "
        "rank of the group (the world if None). Every rank returns its own loss, a scalar in the features' dtype: 1/B times the sum of "
        "softplus(z) over all images and texts. The rank's own pairs (its own diagonal) count with softplus(-z). softplus(t) = log(1 + "
        "e^t). There is no reduction over ranks. Logits may be rounded to the features' dtype; the sum is accumulated in float32."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    excused={"neighbours_exchanged": "other ranks' texts are negatives, in any order"},
    known_wrong_answers=pc.FromProof(__name__, "KNOWN_WRONG_ANSWERS"),
    alternative_solutions=pc.FromProof(__name__, "ALTERNATIVE_SOLUTIONS"),
    process_groups=group_layout,
    notes=(
        "The public benchmark's features are uncorrelated, of scale 10 and bias -10. So the loss is 10 on every rank and in every call, "
        "whatever the texts of other ranks are. Here pairs match, and some images and texts are near one of many subjects. Their numbers "
        "differ from rank to rank. So every rank's texts count, and moments of a few clusters do not replace them.",
        "The public reference rounds every step to bfloat16, the sum over blocks too. Here softplus and the sums are in float32; rounded "
        "logits are accepted. Float32 cases of the same shapes give the scalar the resolution that bfloat16 lacks.",
        "In bfloat16 channels differ in size by powers of two, images' one way and texts' the other. Logits are those of unit vectors, but "
        "features do not fit codes of 8 bits.",
        "The public reference exchanges texts with both neighbours in turn. This one gathers them: the same bytes in one collective.",
    ),
    speed_note=(
        "The public one swaps texts with neighbours round by round, with a product and a loss for each rank's texts. This one gathers "
        "all texts at once and computes one product."
    ),
)
