"""Problem 21: clipping of gradients, in place, by their norm over all ranks' shards."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import clipping
from peerlane.problems.families.clipping import (
    Entry,
    Gradients,
    coefficient,
    device_of,
    every_other,
    narrow_norm,
    order_of,
    scaled,
    tensors,
)
from peerlane.problems.families.collective import BF16, FP32, group_layout, group_members

Answer = tuple[torch.Tensor, dict[str, Gradients]]


def reference(
    grad_tensors: list[torch.Tensor], max_norm: float, norm_type: float = 2.0, fsdp_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    gradients = clipping.present(grad_tensors)
    total = clipping.power_sum(gradients, norm_type)
    if fsdp_group is not None:
        dist.all_reduce(total, group=fsdp_group)
    norm = total.pow(1.0 / norm_type)
    clipping.clip(gradients, norm, max_norm)
    return norm


def _llama3_2_1b() -> tuple[Entry, ...]:
    """146 parameters: embedding (shared with the output), 16 layers, final norm."""
    layer = ((2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192), (2048,), (2048,))
    return tensors(BF16, (128256, 2048), *(layer * 16), (2048,))


def _qwen3_0p6b() -> tuple[Entry, ...]:
    """310 parameters: embedding (shared with the output), 28 layers, final norm."""
    attention = ((2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048), (128,), (128,))
    layer = (*attention, (3072, 1024), (3072, 1024), (1024, 3072), (1024,), (1024,))
    return tensors(FP32, (151936, 1024), *(layer * 28), (1024,))


_MODELS: Mapping[str, Callable[[], tuple[Entry, ...]]] = {
    "llama3.2-1b": _llama3_2_1b,
    "qwen3-0.6b": _qwen3_0p6b,
    "quarter of llama3-8b, flat": lambda: tensors(FP32, (8_030_261_248 // 4,)),
}


def entries(case: pc.Case, rank: int) -> tuple[Entry, ...]:
    """The rank's part of ``case["model"]``, or ``case["tensors_by_rank"]`` (repeated as often as the world needs)."""
    if "model" in case.params:
        return clipping.shard(_MODELS[case["model"]](), case.world_size, rank)
    by_rank = case["tensors_by_rank"]
    chosen: tuple[Entry, ...] = by_rank[rank % len(by_rank)]
    return chosen


def _members(case: pc.Case, rank: int) -> Sequence[int]:
    """The ranks whose gradients make up the norm: without a group, the rank alone."""
    return group_members(case, rank) if group_layout(case) else [rank]


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Gradients of :func:`_clipping.draw_gradients`, whose norm is that of the group. ``case``:

    * ``near``: all gradients are scaled such that the norm is ``1 + near x U[0.5, 2)`` times max_norm
    * ``poison``: this value stands in a gradient of rank 0
    """
    p, lists = order_of(case), {q: entries(case, q) for q in _members(case, rank)}
    split = clipping.draw_split(draw.shared, [lists], case["level"], p)
    if "near" in case.params:
        # Every rank draws all ranks' gradients, for their norm decides the scale.
        drawn = {q: clipping.draw_gradients(draw.shared, lists[q], split, p, rank=q) for q in lists}
        sums = [clipping.wide_power_sum(gradients, p) for gradients in drawn.values()]
        target = case["max_norm"] * (1.0 + case["near"] * draw.shared.apart((), low=0.5, high=2.0))
        gradients = scaled(drawn[rank], target / clipping.norm_of(sums, p, draw.device))
    else:
        gradients = clipping.draw_gradients(draw, lists[rank], split, p, rank=rank)
    if "poison" in case.params and rank == 0:
        clipping.poison(gradients, case["poison"])
    group = next((pc.GroupRef(name) for name in group_layout(case)), None)
    return gradients, case["max_norm"], p, group


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, dict[str, list[Any]]]:
    device = device_of(inputs)
    sums = [clipping.wide_power_sum(inputs[q][0], order_of(case)) for q in _members(case, rank)]
    norm = clipping.norm_of(sums, order_of(case), device)
    gradients = clipping.clipped("gradient", inputs[rank][0], norm, case["max_norm"])
    return pc.Expected("norm", norm, FP32), {"grad_tensors": gradients}


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    lists = [entries(case, rank) for rank in range(case.world_size)]
    error = clipping.norm_error(lists)
    return {"norm": pc.Tolerance(relative=error), **clipping.tolerances("gradient", lists, error)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """One float32 number is all-reduced; a direct exchange with every peer would send W / 2 times as much, and is quicker."""
    hbm_bytes, operations = clipping.traffic(entries(case, rank), clips=case["clips"])
    ranks = len(_members(case, rank))
    port = pc.traffic.all_reduce(FP32.itemsize, ranks)
    return pc.Cost(hbm_bytes=hbm_bytes, egress_bytes=port, ingress_bytes=port, flops={"fp32": operations})


def _answer(context: pc.AnswerContext, norm: torch.Tensor, factor: torch.Tensor | float) -> Answer:
    """A norm, and gradients times a factor."""
    return norm, {"grad_tensors": scaled(context.args[0], factor)}


def _with_norm_of(context: pc.AnswerContext, ranks: Sequence[int], *, norm_type: float | None = None, factor: float = 1.0) -> Answer:
    """Everything follows from the norm of some ranks' gradients, times a factor."""
    p = norm_type or order_of(context.case)
    norm = narrow_norm([context.inputs[q][0] for q in ranks], p, device_of(context.inputs)) * factor
    return _answer(context, norm, coefficient(norm, context.case["max_norm"]))


def _local_times_root(context: pc.AnswerContext) -> Answer:
    return _with_norm_of(context, [context.rank], factor=len(_members(context.case, context.rank)) ** (1 / order_of(context.case)))


def _every_other_element(context: pc.AnswerContext) -> Answer:
    p = order_of(context.case)
    norm = narrow_norm([every_other(context.inputs[q][0]) for q in _members_of(context)], p, device_of(context.inputs)) * 2 ** (1 / p)
    return _answer(context, norm, coefficient(norm, context.case["max_norm"]))


def _clipped_by_local_norm(context: pc.AnswerContext) -> Answer:
    return context.answer[0], _with_norm_of(context, [context.rank])[1]


def _clipped_norm(context: pc.AnswerContext) -> Answer:
    return context.answer[0].clamp(max=context.case["max_norm"]), context.answer[1]


def _last_tensor_forgotten(context: pc.AnswerContext) -> Answer:
    right, original = context.answer[1]["grad_tensors"], context.args[0]
    last = max(index for index, gradient in enumerate(original) if gradient is not None and gradient.numel())
    return context.answer[0], {"grad_tensors": [*right[:last], original[last].clone(), *right[last + 1 :]]}


def _always_scaled(context: pc.AnswerContext) -> Answer:
    return _answer(context, context.answer[0], context.case["max_norm"] / context.answer[0])


def _usual_epsilon(context: pc.AnswerContext) -> Answer:
    return _answer(context, context.answer[0], context.case["max_norm"] / (context.answer[0] + 1e-6))


def _sum_of_norms(context: pc.AnswerContext) -> Answer:
    norms = [narrow_norm([context.inputs[q][0]], order_of(context.case), device_of(context.inputs)) for q in _members_of(context)]
    norm = torch.stack(norms).sum()
    return _answer(context, norm, coefficient(norm, context.case["max_norm"]))


def _not_rooted(context: pc.AnswerContext) -> Answer:
    total = context.answer[0].pow(order_of(context.case))
    return _answer(context, total, coefficient(total, context.case["max_norm"]))


def _members_of(context: pc.AnswerContext) -> Sequence[int]:
    return _members(context.case, context.rank)


def _float32(case: pc.Case, inputs: pc.Inputs, rank: int, *, coarse: bool = False) -> Answer:
    """Norm and product in float32; ``coarse``: with the coefficient rounded to each gradient's dtype."""
    norm = narrow_norm([inputs[q][0] for q in _members(case, rank)], order_of(case), device_of(inputs))
    return norm, {"grad_tensors": scaled(inputs[rank][0], coefficient(norm, case["max_norm"]), coarse=coarse)}


_RAGGED = (*tensors(BF16, (37, 5), (3, 7), (0,), None, (128,)), *tensors(FP32, (1,), (3, 3, 3)))
_OTHER = (*tensors(BF16, (36, 5), None, (2, 9), (11,), (127,)), *tensors(FP32, None, (3, 3, 3)))
_SINGLE = tensors(FP32, (37, 5), (1,), (0,), None, (128,), (3, 3, 3))
_IDLE = tensors(BF16, None, (0,), None)

_WORLD: dict[str, Any] = {"group": "world", "max_norm": 1.0, "level": 1.0, "clips": True}

PRESETS = (
    pc.preset(
        "small",
        "lists that differ between ranks, with missing and empty entries; norms 1, 2 and 3; above, below and near the bound; groups; NaN, "
        "infinity and overflow",
        pc.case("ragged", BF16, tensors_by_rank=(_RAGGED, _OTHER), **_WORLD),
        pc.case("below", BF16, tensors_by_rank=(_RAGGED, _OTHER), **{**_WORLD, "max_norm": 1e6, "clips": False}),
        pc.case("norm_1", BF16, tensors_by_rank=(_RAGGED,), norm_type=1.0, **_WORLD),
        pc.case("norm_3", FP32, tensors_by_rank=(_SINGLE,), norm_type=3.0, **_WORLD),
        pc.case("no_group", BF16, tensors_by_rank=(_RAGGED, _OTHER), **{**_WORLD, "group": None}),
        pc.case("strided_group", BF16, tensors_by_rank=(_RAGGED,), world_sizes=(4, 8), **{**_WORLD, "group": "strided"}),
        pc.case("idle_rank", BF16, tensors_by_rank=(_RAGGED, _IDLE), **_WORLD),
        pc.case("just_above", FP32, tensors_by_rank=(_SINGLE,), near=1e-3, **_WORLD),
        pc.case("just_below", FP32, tensors_by_rank=(_SINGLE,), near=-1e-3, **{**_WORLD, "clips": False}),
        pc.case("tiny", FP32, tensors_by_rank=(_SINGLE,), **{**_WORLD, "level": 1e-6, "max_norm": 1e-6}),
        pc.case("nan", BF16, tensors_by_rank=(_RAGGED,), poison=float("nan"), **{**_WORLD, "clips": False}),
        pc.case("infinite", BF16, tensors_by_rank=(_RAGGED,), poison=float("inf"), **_WORLD),
        pc.case("overflow", FP32, tensors_by_rank=(_SINGLE,), **{**_WORLD, "level": 1e22}),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: three tensors of 1024 x 1024",
        pc.case("bf16", BF16, tensors_by_rank=(tensors(BF16, *[(1024, 1024)] * 3),), **{**_WORLD, "level": 1e-2}),
    ),
    pc.preset(
        "production_llama3_2_1b_fsdp",
        "all 146 parameters, sharded along axis 0",
        pc.case("bf16", BF16, model="llama3.2-1b", **{**_WORLD, "level": 1e-3}),
    ),
    pc.preset(
        "production_qwen3_0p6b_fsdp",
        "all 310 parameters, sharded along axis 0, gradients in float32",
        pc.case("fp32", FP32, model="qwen3-0.6b", **{**_WORLD, "level": 1e-3}),
    ),
    pc.preset(
        "production_llama3_8b_flat",
        "one flat float32 shard of a quarter of the model",
        pc.case("fp32", FP32, model="quarter of llama3-8b, flat", **{**_WORLD, "level": 1e-3}),
    ),
)

_CLIPPING = ("ragged", "norm_1", "norm_3", "no_group", "strided_group", "idle_rank", "just_above", "tiny", "infinite", "overflow")
_SHARED = ("ragged", "norm_1", "norm_3", "strided_group", "tiny")
_FINITE = (*_SHARED, "idle_rank")
_BELOW = ("small/below", "small/just_below")
_SEVERAL = (*(f"small/{label}" for label in (*_FINITE, "below")), "pkb/bf16")


def _everywhere(*labels: str) -> tuple[str, ...]:
    """These small cases, and all cases of the other presets, which clip."""
    return (*(f"small/{label}" for label in labels), *(f"{p.name}/{spec.label}" for p in PRESETS[1:] for spec in p.cases))


def _excused() -> dict[str, str]:
    found = {"another_rank/norm": "all ranks of the world have one norm"}
    for label in ("small/below", "small/just_below", "small/nan"):
        found[f"echo/gradient_0@{label}"] = "what is not clipped stays as it is"
    found["nan/norm@small/nan"] = "the norm is NaN"
    found["previous/norm@small/nan"] = "the norm is always NaN"
    for label in ("small/infinite", "small/overflow"):
        found[f"previous/norm@{label}"] = "the norm is always infinite"
        for index in range(len(_RAGGED)):
            for null in ("zeros", "previous", "previous_mean", "another_rank"):
                found[f"{null}/gradient_{index}@{label}"] = "an infinite norm makes all finite gradients zero"
    return found


PROBLEM = pc.Problem(
    id=21,
    slug="clip_grad_norm_no_ep",
    title="Clipping of sharded gradients by their global norm, in place",
    category="fsdp_zero",
    parallelism=("fsdp", "data"),
    origin="VeOmni: gradient clipping under FSDP2, for parameters that are not expert-parallel",
    summary=(
        "n = (sum of |g|^p over all elements of grad_tensors on all ranks of fsdp_group)^(1/p) with p = norm_type, in float32, beyond "
        "whose range the sum is infinite; without a group the sum is the rank's own. Every rank returns n, a float32 scalar. If n > "
        "max_norm, every gradient is multiplied in place by max_norm / n, without an epsilon; otherwise (also if n is NaN) gradients keep "
        "their bits. Entries may be None or empty, or all of them, and count as zero; lists may differ from rank to rank."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("local_times_root", "the rank's own norm times W^(1/p)", _local_times_root, _SEVERAL),
        pc.wrong("sum_of_norms", "the sum of the ranks' norms", _sum_of_norms, _everywhere("ragged", "norm_3", "strided_group", "tiny")),
        pc.wrong(
            "every_other_element",
            "the norm of every second element times 2^(1/p)",
            _every_other_element,
            _everywhere("ragged", "norm_1", "norm_3", "strided_group", "tiny"),
        ),
        pc.wrong("not_rooted", "the sum of powers returned as the norm", _not_rooted, _everywhere("ragged", "norm_3", "no_group")),
        pc.wrong(
            "euclidean", "norm_type ignored", lambda c: _with_norm_of(c, _members_of(c), norm_type=2.0), ("small/norm_1", "small/norm_3")
        ),
        pc.wrong(
            "whole_world",
            "the group, or that there is none, ignored",
            lambda c: _with_norm_of(c, c.ranks),
            ("small/no_group", "small/strided_group"),
        ),
        pc.wrong(
            "gradients_kept", "the right norm, and gradients as they were", lambda c: _answer(c, c.answer[0], 1.0), _everywhere(*_CLIPPING)
        ),
        pc.wrong("clipped_norm", "the norm after clipping", _clipped_norm, _everywhere(*_FINITE, "no_group", "just_above")),
        pc.wrong(
            "clipped_by_local_norm", "the right norm, gradients scaled by the rank's own", _clipped_by_local_norm, _everywhere(*_SHARED)
        ),
        pc.wrong(
            "last_tensor_forgotten",
            "all gradients clipped but the last",
            _last_tensor_forgotten,
            _everywhere("ragged", "norm_1", "norm_3", "no_group", "strided_group", "tiny"),
        ),
        pc.wrong("always_scaled", "gradients scaled to max_norm although they are below it", _always_scaled, _BELOW),
        pc.wrong("usual_epsilon", "max_norm / (n + 1e-6)", _usual_epsilon, ("small/tiny",)),
    ),
    alternative_solutions=pc.alternatives(rounded_once=_float32, coefficient_rounded=partial(_float32, coarse=True)),
    excused=_excused(),
    process_groups=group_layout,
    updates=("grad_tensors",),
    notes=(
        "The public benchmark compares the norm alone, which concentrates so much that a constant passes, and never looks at the clipped "
        "gradients. Here both are compared, scales differ by parameter, rank and call, and gradients are fresh in every call.",
        "One element, anywhere, makes up more than half of the sum of powers; most of the rest is on another rank; and the norm changes by "
        "a quarter or more from call to call: neither half of the elements, nor one rank's norm, nor an earlier norm tells the whole.",
        "A coefficient rounded to the gradients' dtype, as a product with a GPU scalar takes it, is right as well as a float32 one.",
        "The public reference creates the sum of an empty list on GPU 0 and returns 1 for norm_type = inf. Here empty lists are legal "
        "everywhere, and norm_type is finite.",
        "The flat shard of Llama 3 8B is a quarter of the model, to bound memory.",
    ),
)
