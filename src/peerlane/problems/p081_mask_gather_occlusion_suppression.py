"""Problem 81: object masks of all ranks gathered, and those that lose their place to an overlapping object blanked."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP16, FP32, all_gather_single, group_layout, group_members, neighbours

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Pixels of a picture from which on some overlaps are those of the threshold, or one pixel less.
_LARGE = 2**16

# What suppressed masks are filled with: a logit that stands for "nowhere".
BLANK = -10.0


def reference(
    low_res_masks_local: torch.Tensor,
    obj_scores_local: torch.Tensor,
    num_obj_per_gpu: list[int],
    last_occluded: torch.Tensor,
    iou_threshold: float = 0.7,
    reverse: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Outputs:
    own = num_obj_per_gpu[dist.get_rank(group)]
    if low_res_masks_local.shape[0] != own or obj_scores_local.shape[0] != own:
        got = f"{low_res_masks_local.shape[0]} masks and {obj_scores_local.shape[0]} scores"
        raise ValueError(f"got {got}: expected {own} of each, as num_obj_per_gpu says")
    masks = gather_ragged(low_res_masks_local, num_obj_per_gpu, group).to(torch.float32)
    scores = gather_ragged(obj_scores_local, num_obj_per_gpu, group).to(torch.float32)

    foreground = (masks > 0).flatten(1).to(torch.float32)
    intersection = foreground @ foreground.t()  # below 2^24 pixels: exact
    area = foreground.sum(1)
    union = area.unsqueeze(1) + area - intersection
    overlaps = intersection / union.clamp_(min=1) >= iou_threshold
    mine, other = last_occluded.unsqueeze(1), last_occluded
    loses = mine < other if reverse else mine > other
    suppress = (overlaps & loses & (other > -1)).any(1)
    return masks.masked_fill_(suppress.view(-1, 1, 1), BLANK), scores, suppress


def gather_ragged(rows: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """The rows of all ranks of the group, in rank order; rank q has counts[q]."""
    longest, rest = max(counts), rows.shape[1:]
    padded = rows.new_empty((longest, *rest))
    padded[: rows.shape[0]] = rows
    gathered = rows.new_empty((len(counts) * longest, *rest))
    all_gather_single(gathered, padded, group=group)
    return torch.cat([block[:count] for block, count in zip(gathered.view(len(counts), longest, *rest), counts, strict=True)])


def object_counts(case: pc.Case, ranks: int) -> list[int]:
    """Objects of every rank of a group. ``case``: ``counts``, which repeat over the ranks, or ``eighths``, shared out in order."""
    if "counts" in case.params:
        return [case["counts"][place % len(case["counts"])] for place in range(ranks)]
    width = 8 // ranks
    return [sum(case["eighths"][place * width : (place + 1) * width]) for place in range(ranks)]


def certainly_kept(case: pc.Case, total: int) -> int:
    """Objects that no drawing of the inputs suppresses: half of them (see :func:`_occlusion_times`), one where a pattern decides."""
    return 1 if "pattern" in case.params else (total + 1) // 2


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Masks of ellipses that share a place with others, with noise, or of a pattern; all ranks draw all objects and keep their own.

    ``case["pattern"]`` (pixels are shuffled, and between the objects' pixels lie zeros, which are background):

    * ``exact``: one half of the objects covers 10 pixels, the other half 7 of them: an IoU of exactly 7 / 10
    * ``near``: one half of the objects covers 1000 pixels, the others by turns 700 and 699 of them
    * ``identical``: all objects cover the same pixels
    * ``chain``: IoU is 17 / 23 between neighbours in the order of their occlusion, less than 0.6 between others
    * ``void``: every other object covers nothing, the others the same pixels, some of which are NaN
    """
    members, shared = group_members(case, rank), draw.shared
    counts, place = object_counts(case, len(members)), members.index(rank)
    total = sum(counts)
    order = _drawn_order(counts, shared)
    masks = _patterned(case, order, shared) if "pattern" in case.params else _ellipses(case, order, shared)
    scores = shared.normal((total, *case.params.get("score_shape", ())), case.dtype, scale=3.0)
    own = slice(sum(counts[:place]), sum(counts[: place + 1]))
    group = next((pc.GroupRef(name) for name in group_layout(case)), None)
    times = _occlusion_times(case, order, shared)
    threshold, reverse = case.params.get("threshold", 0.7), case.params.get("reverse", False)
    return (masks[own].clone(), scores[own].clone(), counts, times, threshold, reverse, group)


def _drawn_order(counts: Sequence[int], shared: pc.Draw) -> torch.Tensor:
    """A permutation of all objects; the first two belong to different ranks, if more than one rank has any."""
    order = shared.permutation(sum(counts))
    if len(order) > 1:
        places = pc.constant([place for place, count in enumerate(counts) for _ in range(count)], order.device)
        owner = places[order]
        foreign = (owner != owner[0]).to(torch.uint8).argmax().clamp(min=1)
        order[torch.stack((torch.ones_like(foreign), foreign))] = order[torch.stack((foreign, torch.ones_like(foreign)))]
    return order


def _ellipses(case: pc.Case, order: torch.Tensor, shared: pc.Draw) -> torch.Tensor:
    """Logits (N, H, W) of ellipses, about three to a place, of which about half overlap by 0.7; the first two in order are the same.

    In large pictures see :func:`_plant_close_pairs` for the second and the last in order.
    """
    total, (height, width) = order.numel(), case["size"]
    where = shared.integers(0, max(1, total // 3), (total,))
    centre = shared.uniform((total, 2), FP32, low=0.25, high=0.75)[where]
    axes = shared.uniform((total, 2), FP32, low=0.15, high=0.25)[where]
    centre += axes * shared.normal((total, 2), FP32, scale=0.12)
    axes *= shared.normal((total, 2), FP32, scale=0.08).exp()
    if total > 1:
        centre[order[1:2]], axes[order[1:2]] = centre[order[:1]], axes[order[:1]]
    rows = (torch.arange(height, device=order.device) + 0.5) / height
    columns = (torch.arange(width, device=order.device) + 0.5) / width
    distance = ((rows - centre[:, :1]) / axes[:, :1]).square().unsqueeze(2) + ((columns - centre[:, 1:]) / axes[:, 1:]).square().unsqueeze(
        1
    )
    logits: torch.Tensor = (1 - distance).mul_(6.0).clamp_(min=-12.0)
    masks = logits.add_(shared.normal((total, height, width), FP32, scale=0.5)).to(case.dtype)
    if total > 1 and height * width >= _LARGE and "threshold" not in case.params:
        _plant_close_pairs(masks.view(total, -1), order, shared)
    return masks


def _plant_close_pairs(masks: torch.Tensor, order: torch.Tensor, shared: pc.Draw) -> None:
    """In place: of the first's 10 n pixels the second in order covers 7 n, and of four or more objects the last covers 7 n - 1.

    The first loses to nobody, and the other two to it if they overlap by 0.7: see :func:`_occlusion_times`.
    """
    first = masks[order[:1]]
    keys = torch.where(first > 0, shared.uniform(first.shape, FP32), 2.0)
    rank = torch.empty_like(keys, dtype=torch.int64)
    rank.scatter_(1, keys.argsort(1), torch.arange(keys.shape[1], device=keys.device).expand_as(keys))
    tenth = (first > 0).sum() // 10
    masks[order[:1]] = torch.where(rank < 10 * tenth, first, -first.abs())
    for place, missing in ((1, 0), (len(order) - 1, 1)) if len(order) > 3 else ((1, 0),):
        size = masks[order[place : place + 1]].abs().clamp_(min=0.1)
        masks[order[place : place + 1]] = torch.where(rank < 7 * tenth - missing, size, -size)


def _patterned(case: pc.Case, order: torch.Tensor, shared: pc.Draw) -> torch.Tensor:
    """Logits (N, H, W) of a pattern: positive on an object's pixels, elsewhere negative or zero."""
    total, (height, width) = order.numel(), case["size"]
    pixel = shared.permutation(height * width)
    index = torch.empty_like(order).scatter_(0, order, torch.arange(total, device=order.device)).unsqueeze(1)
    match case["pattern"]:
        case "exact":
            foreground = pixel < torch.where(index % 2 == 0, 10, 7)
        case "near":
            foreground = pixel < torch.where(index % 2 == 0, 1000, torch.where(index % 4 == 1, 700, 699))
        case "identical":
            foreground = (pixel < 20).expand(total, -1)
        case "chain":
            foreground = (pixel >= 3 * index) & (pixel < 3 * index + 20)
        case "void":
            foreground = (pixel < 20) & (index % 2 == 0)
        case other:
            raise ValueError(f"unknown pattern {other!r}")
    size = shared.normal((total, height * width), FP32).abs_().add_(0.1)
    zero = shared.uniform((total, height * width), FP32) < 0.3
    logits = torch.where(foreground, size, torch.where(zero, 0.0, -size))
    if case["pattern"] == "void":
        logits.masked_fill_(pixel % 10 == 3, float("nan"))
    return logits.view(total, height, width).to(case.dtype)


def _occlusion_times(case: pc.Case, order: torch.Tensor, shared: pc.Draw) -> torch.Tensor:
    """int64 (N,) in -1 ... 4. No object loses whose time is -1 or 0, or in reverse 4; the first in order has 0, or in reverse 4.

    Without a pattern, half of the objects have such times, and the second loses to the first. ``exact`` and ``near``: the largest objects
    have the first's time, the others one that loses to it. ``chain``: times rise in order. Else the first four are 0, -1, one that loses,
    and 0.
    """
    total, reverse = order.numel(), case.params.get("reverse", False)
    safe, exposed, first = ((4, 5), (-1, 4), 4) if reverse else ((-1, 1), (1, 5), 0)
    index = torch.arange(total, device=order.device)
    match case.params.get("pattern"):
        case None:
            kept = certainly_kept(case, total)
            is_safe = (index != 1) & (index < (kept if kept < 2 else kept + 1))
            times = torch.where(is_safe, shared.integers(*safe, (total,)), shared.integers(*exposed, (total,)))
            times[:1] = first
        case "exact" | "near":
            times = torch.where(index % 2 == 0, first, shared.integers(*exposed, (1,)))
        case "chain":
            times = index
        case _:
            times = shared.integers(-1, 5, (total,))
            times[:4] = torch.where(index[:4] == 2, shared.integers(1, 5, (1,)), -(index[:4] == 1).to(index.dtype))
    return torch.empty_like(order).scatter_(0, order, times)


def suppressed(
    masks: torch.Tensor,
    last_occluded: torch.Tensor,
    *,
    threshold: float,
    reverse: bool,
    overlap: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.ge,
    background_counts: bool = False,
    ties_lose: bool = False,
    never_counts: bool = False,
) -> torch.Tensor:
    """bool (N,): which objects lose to one that they overlap. The switches at the end make wrong rules."""
    foreground = ((masks >= 0) if background_counts else (masks > 0)).flatten(1)
    area = foreground.sum(1)
    intersection = torch.stack([(foreground & row).sum(1) for row in foreground]) if len(masks) else area.new_zeros((0, 0))
    union = (area.unsqueeze(1) + area - intersection).clamp_(min=1)
    overlaps = overlap(intersection.to(FP32) / union.to(FP32), torch.tensor(threshold, dtype=FP32, device=masks.device))
    overlaps.fill_diagonal_(False)
    mine, other = last_occluded.unsqueeze(1), last_occluded
    if reverse:
        mine, other = -mine, -other
    loses = mine >= other if ties_lose else mine > other
    return (overlaps & loses & (never_counts | (last_occluded > -1))).any(1)


def _gathered(inputs: pc.Inputs, members: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    masks, scores = (torch.cat([inputs[q][i] for q in members]).to(FP32) for i in (0, 1))
    return masks, scores


def _answer(masks: torch.Tensor, scores: torch.Tensor, suppress: torch.Tensor) -> Outputs:
    return masks.masked_fill(suppress.view(-1, 1, 1), BLANK), scores, suppress


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, ...]:
    """Pixels are counted by products of zeros and ones in float32, which are exact below 2^24 pixels."""
    masks, scores = _gathered(inputs, group_members(case, rank))
    _, _, _, times, threshold, reverse, _ = inputs[rank]
    foreground = (masks > 0).flatten(1).to(FP32)
    intersection = foreground @ foreground.t()
    area = intersection.diagonal()
    iou = intersection / (area.unsqueeze(1) + area - intersection).clamp_(min=1)
    winner = times.unsqueeze(1) < times if reverse else times.unsqueeze(1) > times
    suppress = ((iou >= torch.tensor(threshold, dtype=FP32, device=iou.device)) & winner & (times > -1)).any(1)
    return tuple(
        pc.exactly(name, value) for name, value in zip(("masks", "scores", "suppress"), _answer(masks, scores, suppress), strict=True)
    )


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """A suppressed mask need not be sent: one bit per pixel decides. As many as no drawing suppresses cross in full, on whichever ranks."""
    members = group_members(case, rank)
    counts, place = object_counts(case, len(members)), members.index(rank)
    total, own, size = sum(counts), counts[place], case.dtype.itemsize
    pixels = case["size"][0] * case["size"][1]
    score = math.prod(case.params.get("score_shape", ()))
    kept = certainly_kept(case, total)

    def traffic(objects: int, whole: int) -> float:
        return float(whole * pixels * size + (objects - whole) * pixels / 8 + objects * score * size)

    return pc.Cost(
        hbm_bytes=own * (pixels + score) * size + 4 * total * (pixels + score) + total * (8 + 1),
        egress_bytes=(len(members) - 1) * traffic(own, max(0, own - (total - kept))),
        ingress_bytes=traffic(total - own, max(0, kept - own)),
        flops={"fp32": total * total * pixels / 32},
    )


def _whole_masks(case: pc.Case, rank: int) -> pc.Steps:
    """Masks travel whole: what is suppressed is known after the overlaps of all pairs."""
    members, size = group_members(case, rank), case.dtype.itemsize
    counts, pixels, least = object_counts(case, len(members)), case["size"][0] * case["size"][1], cost(case, rank)
    total, own = sum(counts), counts[members.index(rank)]
    return (
        pc.step(
            "bits of the own masks, to all ranks", hbm=own * pixels * (size + 1 / 8), link=(len(members) - 1) * own * pixels / 8, barriers=1
        ),
        pc.step("overlaps of all pairs", hbm=total * pixels / 8, flops=least.flops),
        pc.step("masks to all ranks", hbm=least.hbm_bytes, link=(total - own) * pixels * size, barriers=1),
    )


def _by_counting(case: pc.Case, inputs: pc.Inputs, rank: int) -> Outputs:
    """Intersections counted in integers, pair by pair."""
    masks, scores = _gathered(inputs, group_members(case, rank))
    _, _, _, times, threshold, reverse, _ = inputs[rank]
    return _answer(masks, scores, suppressed(masks, times, threshold=threshold, reverse=reverse))


def _ruled(**changes: Any) -> Callable[[pc.AnswerContext], Outputs]:
    """The answer by a wrong rule: arguments of :func:`suppressed` that differ."""

    def answer(context: pc.AnswerContext) -> Outputs:
        masks, scores = _gathered(context.inputs, context.members)
        _, _, _, times, threshold, reverse, _ = context.args
        return _answer(masks, scores, suppressed(masks, times, **{"threshold": threshold, "reverse": reverse, **changes}))

    return answer


def _own_objects_only(context: pc.AnswerContext) -> Outputs:
    masks, scores = _gathered(context.inputs, context.members)
    _, _, counts, times, threshold, reverse, _ = context.args
    parts = zip(torch.split(masks, counts), torch.split(times, counts), strict=True)
    return _answer(masks, scores, torch.cat([suppressed(m, t, threshold=threshold, reverse=reverse) for m, t in parts]))


def _one_after_the_other(context: pc.AnswerContext) -> Outputs:
    """Objects that are suppressed already suppress no other: those that lose to nobody come first."""
    masks, scores = _gathered(context.inputs, context.members)
    _, _, _, times, threshold, reverse, _ = context.args
    order = times.argsort(descending=reverse, stable=True)
    gone = torch.zeros_like(times, dtype=torch.bool)
    for step in range(1, len(order) + 1):
        seen = order[:step]
        seen = seen[~gone[seen]]
        gone[seen] |= suppressed(masks[seen], times[seen], threshold=threshold, reverse=reverse)
    return _answer(masks, scores, gone)


def _nobody_suppressed(context: pc.AnswerContext) -> Outputs:
    masks, scores = _gathered(context.inputs, context.members)
    return masks, scores, torch.zeros_like(context.answer[2])


def _not_blanked(context: pc.AnswerContext) -> Outputs:
    masks, scores = _gathered(context.inputs, context.members)
    return masks, scores, context.answer[2]


def _blanked_to_zero(context: pc.AnswerContext) -> Outputs:
    masks, scores, suppress = context.answer
    return masks.masked_fill(suppress.view(-1, 1, 1), 0.0), scores, suppress


def _scores_blanked(context: pc.AnswerContext) -> Outputs:
    masks, scores, suppress = context.answer
    return masks, scores.masked_fill(suppress.view(-1, *[1] * (scores.dim() - 1)), BLANK), suppress


def _contiguous_group(context: pc.AnswerContext) -> Outputs:
    masks, scores = _gathered(context.inputs, neighbours(context))
    return masks, scores, context.answer[2]


def _small(label: str, dtype: torch.dtype = BF16, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"counts": (2, 3, 1, 0), "size": (24, 21), **params})


PRESETS = (
    pc.preset(
        "small",
        "ragged and missing objects, either order; IoU at the threshold, ties, chains, empty masks, NaN pixels, one object, a group",
        _small("ellipses_bf16"),
        _small("reverse_bf16", reverse=True, counts=(3, 2), score_shape=(1,)),
        _small("threshold_fp16", FP16, threshold=0.5, counts=(0, 5), score_shape=(2, 3)),
        _small("exact_fp32", FP32, pattern="exact", counts=(3, 2)),
        _small("exact_reverse_bf16", pattern="exact", counts=(2, 4), reverse=True),
        _small("identical_bf16", pattern="identical", counts=(5, 3)),
        _small("chain_fp32", FP32, pattern="chain", counts=(3, 4, 0, 2)),
        _small("void_fp32", FP32, pattern="void", counts=(6, 4)),
        _small("single_bf16", counts=(0, 1, 0, 0), score_shape=(7,)),
        _small("strided_group_bf16", counts=(3, 2), group="strided", world_sizes=(4, 8)),
        _small("near_bf16", pattern="near", counts=(3, 2), size=(40, 40)),
    ),
    pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, counts=(1, 2, 3), size=(256, 256))),
    pc.preset(
        "production_sam3_video", "64 objects of 288 x 288, as many on every rank", pc.case("bf16", BF16, eighths=(8,) * 8, size=(288, 288))
    ),
    pc.preset(
        "production_sam3_crowd",
        "200 objects of 288 x 288, unevenly",
        pc.case("bf16", BF16, eighths=(40, 35, 30, 25, 25, 20, 15, 10), size=(288, 288)),
    ),
    pc.preset(
        "production_high_resolution", "48 objects of 1024 x 1024 in float32", pc.case("fp32", FP32, eighths=(6,) * 8, size=(1024, 1024))
    ),
    *(
        pc.preset(f"sweep_{objects}", f"{objects} objects", pc.case("bf16", BF16, eighths=(objects // 8,) * 8, size=(256, 256)))
        for objects in (16, 32, 64, 128, 256, 512)
    ),
)

_SINGLE = "small/single_bf16"
_SEVERAL = tuple(f"{item.name}/{spec.label}" for item in PRESETS for spec in item.cases if f"{item.name}/{spec.label}" != _SINGLE)
_NOBODY = "a single object is never suppressed"
_FEW = "of a handful of objects the same ones may be suppressed twice in a row"
_FEW_OBJECTS = (*(f"small/{spec.label}" for spec in PRESETS[0].cases), "pkb/bf16")

PROBLEM = pc.Problem(
    id=81,
    slug="mask_gather_occlusion_suppression",
    title="Gather object masks of all ranks and suppress overlapping, recently occluded ones",
    category="other",
    parallelism=("data",),
    origin="SAM 3: video tracking with objects spread over GPUs, suppression by recent occlusion",
    summary=(
        "low_res_masks_local (n, H, W) and obj_scores_local (n, ...) belong to the rank's n objects; num_obj_per_gpu lists every rank's "
        "n, zeros allowed (ValueError if it does not fit). Returns masks (N, H, W) and scores (N, ...) of the group (the world if None) "
        "in rank order as float32, and suppress (N,), bool. With b_i = mask_i > 0, which NaN is not, and IoU in float32, i is suppressed "
        "if for some j with IoU(i, j) = |b_i & b_j| / max(|b_i | b_j|, 1) >= iou_threshold its last_occluded (N,) is larger (with reverse: "
        "smaller) than j's, and j's is not -1. All decisions are made on the masks as they came; suppressed masks are then -10 everywhere."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    attainable=pc.Algorithm("overlaps of bits, then whole masks", "one bit a pixel decides", _whole_masks),
    bandwidth="production_high_resolution",
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("nobody_suppressed", "a plain gather", _nobody_suppressed, _SEVERAL),
        pc.wrong("not_blanked", "suppressed masks left as they are", _not_blanked, _SEVERAL),
        pc.wrong("blanked_to_zero", "suppressed masks filled with zeros", _blanked_to_zero, _SEVERAL),
        pc.wrong("scores_blanked", "scores of suppressed objects overwritten too", _scores_blanked, _SEVERAL),
        pc.wrong("opposite_order", "reverse taken the wrong way round", lambda c: _ruled(reverse=not c.args[5])(c), _SEVERAL),
        pc.wrong("above_threshold", "IoU > threshold", _ruled(overlap=torch.gt), ("small/exact_fp32", "small/exact_reverse_bf16")),
        pc.wrong("lower_threshold", "IoU >= 0.68 instead of 0.7", _ruled(threshold=0.68), ("small/near_bf16",)),
        pc.wrong(
            "rounded_overlap",
            "IoU and threshold compared in bfloat16",
            _ruled(overlap=lambda iou, threshold: iou.to(BF16) >= threshold.to(BF16)),
            ("small/near_bf16",),
        ),
        pc.wrong("zero_is_foreground", "mask >= 0", _ruled(background_counts=True), ("small/exact_fp32",)),
        pc.wrong("ties_suppressed", "objects of the same time suppress each other", _ruled(ties_lose=True), ("small/identical_bf16",)),
        pc.wrong("never_occluded_wins", "a time of -1 counts", _ruled(never_counts=True), ("small/identical_bf16",)),
        pc.wrong("own_objects_only", "overlaps across ranks ignored", _own_objects_only, ("small/chain_fp32",)),
        pc.wrong("one_after_the_other", "suppressed objects suppress nobody", _one_after_the_other, ("small/chain_fp32",)),
        pc.wrong("contiguous_group", "neighbours taken for the group", _contiguous_group, ("small/strided_group_bf16",)),
    ),
    alternative_solutions=pc.alternatives(counted_in_integers=_by_counting),
    excused={
        **{f"previous/suppress@{name}": _FEW for name in _FEW_OBJECTS},
        "another_rank": "all ranks have the same answer",
        f"zeros/suppress@{_SINGLE}": _NOBODY,
        f"previous_mean/suppress@{_SINGLE}": _NOBODY,
    },
    process_groups=group_layout,
    replicated=True,
    notes=(
        "In the public benchmark no IoU reaches the threshold, so that nothing is ever suppressed. Here objects share places, and at least "
        "one is suppressed in every call with more than one object. In large pictures it overlaps by exactly the threshold, and another "
        "by a pixel less.",
        "The reference gathers masks in their own dtype and widens them afterwards. A mask that will be blanked need not be sent at all; "
        "the cost counts in full only the half of the objects that no drawing of the inputs suppresses.",
        "last_occluded is int64.",
    ),
)
