"""Problem 22: clipping of expert-parallel and other gradients, in place, by one norm over different groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import clipping
from peerlane.problems.families.clipping import Entry, device_of, order_of, tensors
from peerlane.problems.families.collective import BF16, FP32
from peerlane.problems.families.moe_gradients import MODELS


def reference(
    non_ep_grad_tensors: list[torch.Tensor],
    ep_grad_tensors: list[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    ep_size: int = 1,
    fsdp_group: dist.ProcessGroup | None = None,
    ep_fsdp_group: dist.ProcessGroup | None = None,
    ep_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    non_ep, ep = clipping.present(non_ep_grad_tensors), clipping.present(ep_grad_tensors)
    if ep_size > 1 and ep:
        torch._foreach_mul_(ep, 1.0 / ep_size)
    total, ep_total = clipping.power_sum(non_ep, norm_type), clipping.power_sum(ep, norm_type)
    if fsdp_group is not None:
        dist.all_reduce(total, group=fsdp_group)
    if ep_fsdp_group is not None:
        dist.all_reduce(ep_total, group=ep_fsdp_group)
    if ep_group is not None:
        dist.all_reduce(ep_total, group=ep_group)
    norm = (total + ep_total).pow(1.0 / norm_type)
    clipping.clip(non_ep + ep, norm, max_norm)
    return norm


def _ep_ranks(case: pc.Case) -> int:
    """Ranks in an expert-parallel group: ``case["ep_ranks"]``, or 1/``case["replicas"]`` of the world, but at least one."""
    if "ep_ranks" in case.params:
        return int(case["ep_ranks"])
    return max(1, case.world_size // int(case["replicas"]))


def _divisor(case: pc.Case) -> int:
    """The argument ep_size: the size of an expert-parallel group, or ``case["divisor"]``."""
    return int(case.params.get("divisor", _ep_ranks(case)))


def process_groups(case: pc.Case) -> pc.GroupLayout:
    """Rank b E + e, with E ranks per expert-parallel group, is number e of the contiguous group b; equal e share the same experts."""
    size, world = _ep_ranks(case), range(case.world_size)
    return {
        "world": [world],
        "ep": [world[first : first + size] for first in range(0, case.world_size, size)],
        "ep_fsdp": [world[first::size] for first in range(size)],
    }


def _stages(case: pc.Case) -> tuple[str | None, str | None, str | None]:
    """The names of fsdp_group, ep_fsdp_group and ep_group, None where a stage is skipped; ``case["groups"]``: see :func:`inputs`."""
    match case.params.get("groups", "grid"):
        case "grid" if _ep_ranks(case) > 1:
            return "world", "ep_fsdp", "ep"
        case "grid":
            return "world", "world", None
        case "ep_fsdp_only":
            return "world", "ep_fsdp", None
        case "ep_only":
            return None, None, "ep"
        case "hybrid":
            return "ep_fsdp", "ep_fsdp", "ep"
        case other:
            raise ValueError(f"unknown groups {other!r}")


def entries(case: pc.Case, rank: int) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """Both lists of one rank: ``case["non_ep"]`` and ``case["ep"]``, or the rank's part of ``case["model"]``.

    Of a model, other parameters are sharded along axis 0 over the world, experts along axis 1 over the ranks that share them.
    """
    if "model" not in case.params:
        return case["non_ep"], case["ep"]
    size = _ep_ranks(case)
    non_ep, ep = MODELS[case["model"]](size)
    return (clipping.shard(non_ep, case.world_size, rank), clipping.shard(ep, case.world_size // size, rank // size, axis=1))


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Gradients of :func:`_clipping.draw_gradients`, whose norm is that of the world after the division by ep_size.

    ``case["groups"]``: ``grid`` (if absent) reduces over the world, and over both sides of the grid; ``ep_fsdp_only`` leaves out the
    expert-parallel group; ``ep_only`` leaves out all but that; ``hybrid`` reduces the other gradients over the ranks that share experts, as
    where parameters are sharded over them and replicated elsewhere. ``case["ep_level"]``: experts' gradients are multiplied by it, and not
    by ep_size as they would be else. ``case["poison"]``: this value stands in an expert's gradient on rank 0.
    """
    p = order_of(case)
    non_ep, ep = ({q: both[i] for q, both in enumerate(entries(case, q) for q in range(case.world_size))} for i in (0, 1))
    split = clipping.draw_split(draw.shared, [non_ep, ep], case["level"], p)
    gradients = clipping.draw_gradients(draw, non_ep[rank], split, p, rank=rank)
    factor = case.params.get("ep_level", _divisor(case))
    expert_gradients = clipping.draw_gradients(draw, ep[rank], split, p, rank=rank, which=1, stacked=True, factor=factor)
    if "poison" in case.params and rank == 0:
        clipping.poison(expert_gradients, case["poison"])
    groups = [None if name is None else pc.GroupRef(name) for name in _stages(case)]
    return gradients, expert_gradients, case["max_norm"], p, _divisor(case), *groups


def _reduced(case: pc.Case, sums: Sequence[torch.Tensor], stages: Sequence[str | None]) -> list[torch.Tensor]:
    """Every rank's sum after all-reduces over the groups of these names, one after the other."""
    layout, values = process_groups(case), list(sums)
    for name in stages:
        if name is not None:
            members = [next(group for group in layout[name] if rank in group) for rank in range(case.world_size)]
            values = [torch.stack([values[q] for q in group]).sum(0) for group in members]
    return values


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, dict[str, list[Any]]]:
    device, p, divisor = device_of(inputs), order_of(case), _divisor(case)
    fsdp, ep_fsdp, ep = _stages(case)
    sums = [clipping.wide_power_sum(args[0], p).to(device) for args in inputs]
    expert_sums = [clipping.wide_power_sum(args[1], p).to(device) / divisor**p for args in inputs]
    own = [_reduced(case, sums, [fsdp])[rank], _reduced(case, expert_sums, [ep_fsdp, ep])[rank]]
    norm = clipping.norm_of(own, p, device)
    return pc.Expected("norm", norm, FP32), {
        "non_ep_grad_tensors": clipping.clipped("gradient", inputs[rank][0], norm, case["max_norm"]),
        "ep_grad_tensors": clipping.clipped("expert_gradient", inputs[rank][1], norm, case["max_norm"], divisor),
    }


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """An expert's gradient is divided by a power of two, which is exact, or in float32, where the norm's error leaves room for it."""
    non_ep, ep = zip(*(entries(case, rank) for rank in range(case.world_size)), strict=True)
    error = clipping.norm_error(non_ep, ep)
    return {
        "norm": pc.Tolerance(relative=error),
        **clipping.tolerances("gradient", non_ep, error),
        **clipping.tolerances("expert_gradient", ep, error),
    }


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Two float32 numbers are all-reduced over the world, which serves all groups."""
    non_ep, ep = entries(case, rank)
    always = ep if _divisor(case) > 1 else ()
    hbm_bytes, operations = clipping.traffic(non_ep if always else (*non_ep, *ep), clips=case["clips"], always_written=always)
    port = pc.traffic.all_reduce(2 * FP32.itemsize, case.world_size) if case.params.get("groups", "grid") == "grid" else 0
    return pc.Cost(hbm_bytes=hbm_bytes, egress_bytes=port, ingress_bytes=port, flops={"fp32": operations})


_NON_EP = (*tensors(BF16, (37, 5), (0,), None, (128,)), *tensors(FP32, (1,), (3, 3, 3)))
_EP = (*tensors(BF16, (2, 5, 7), None, (2, 0, 3)), *tensors(FP32, (2, 9), (2, 3, 3)))
_SINGLE = tensors(FP32, (37, 5), None, (3, 3, 3))

_RAGGED: dict[str, Any] = {"non_ep": _NON_EP, "ep": _EP, "max_norm": 1.0, "level": 1.0, "clips": True}
_LARGE: dict[str, Any] = {"max_norm": 1.0, "level": 1e-3, "clips": True}

PRESETS = (
    pc.preset(
        "small",
        "missing and empty entries, empty lists; one, two and all ranks per expert-parallel group; skipped and partial reductions; norms 1 "
        "and 2; above and below the bound; a NaN",
        pc.case("grid", BF16, replicas=2, **_RAGGED),
        pc.case("below", BF16, ep_ranks=2, **{**_RAGGED, "max_norm": 1e7, "clips": False}),
        pc.case("all_ranks", BF16, replicas=1, **_RAGGED),
        pc.case("no_non_ep", BF16, ep_ranks=2, **{**_RAGGED, "non_ep": ()}),
        pc.case("no_ep", BF16, ep_ranks=2, **{**_RAGGED, "ep": ()}),
        pc.case("norm_1", BF16, ep_ranks=2, norm_type=1.0, **_RAGGED),
        pc.case("divisor_3", FP32, ep_ranks=2, divisor=3, **{**_RAGGED, "non_ep": _SINGLE, "ep": _SINGLE}),
        pc.case("large_experts", BF16, ep_ranks=2, ep_level=1000.0, **_RAGGED),
        pc.case("ep_fsdp_only", BF16, ep_ranks=2, groups="ep_fsdp_only", world_sizes=(4, 8), **_RAGGED),
        pc.case("ep_only", BF16, ep_ranks=2, groups="ep_only", **_RAGGED),
        pc.case("nan", BF16, ep_ranks=2, poison=float("nan"), **{**_RAGGED, "clips": False}),
        pc.case("hybrid", BF16, ep_ranks=2, groups="hybrid", world_sizes=(4, 8), **_RAGGED),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: a list of one 1024 x 1024 tensor each; W/2 ranks per expert-parallel group",
        pc.case(
            "bf16", BF16, replicas=2, **{**_RAGGED, "non_ep": tensors(BF16, (1024, 1024)), "ep": tensors(BF16, (1024, 1024)), "level": 1e-2}
        ),
    ),
    pc.preset(
        "production_qwen3_30b_a3b",
        "4 layers, W/2 ranks per expert-parallel group",
        pc.case("bf16", BF16, model="qwen3-30b-a3b", replicas=2, **_LARGE),
    ),
    pc.preset(
        "production_deepseek_v3",
        "one layer with a quarter of its experts, all ranks in one expert-parallel group",
        pc.case("bf16", BF16, model="deepseek-v3", replicas=1, **_LARGE),
    ),
    pc.preset(
        "production_mixtral_8x7b",
        "2 layers, 2 ranks per expert-parallel group",
        pc.case("bf16", BF16, model="mixtral-8x7b", ep_ranks=2, **_LARGE),
    ),
)


PROBLEM = pc.Problem(
    id=22,
    slug="clip_grad_norm_ep",
    title="Clipping of expert-parallel and other sharded gradients by their global norm, in place",
    category="expert_parallel",
    parallelism=("expert", "fsdp"),
    origin="VeOmni: gradient clipping under FSDP2 with expert parallelism",
    summary=(
        "First, if ep_size > 1, every gradient of ep_grad_tensors is divided by ep_size in place. A is the sum of |g|^p (p = norm_type) "
        "over non_ep_grad_tensors on all ranks of fsdp_group. E is that sum over the divided ep_grad_tensors, first over ep_fsdp_group, "
        "then over ep_group. A group that is None skips its sum. Every rank returns n = (A + E)^(1/p), a float32 scalar. Sums are float32, "
        "infinite beyond its range. If n > max_norm, every gradient of both lists is multiplied in place by max_norm / n, without an "
        "epsilon. Otherwise, also if n is NaN, gradients that were not divided keep their bits. Entries may be None or empty, lists empty. "
        "ep_size is a divisor, and need not be the size of a group."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=pc.FromProof(__name__, "KNOWN_WRONG_ANSWERS"),
    alternative_solutions=pc.FromProof(__name__, "ALTERNATIVE_SOLUTIONS"),
    excused={
        "neighbours_exchanged": "a sum does not depend on the order of its terms",
        "another_rank/norm": "all ranks of the world have one norm, but where groups are smaller or left out",
        "echo/gradient_0@small/below": "what is not clipped stays as it is",
        "echo/gradient_0@small/nan": "what is not clipped stays as it is",
        "nan/norm@small/nan": "the norm is NaN",
        "previous/norm@small/nan": "the norm is always NaN",
    },
    process_groups=process_groups,
    updates=("non_ep_grad_tensors", "ep_grad_tensors"),
    notes=(
        "The public benchmark compares the norm alone. Its repeated calls divide the same experts' gradients until they are zero. Here "
        "divided and clipped gradients are compared as well, and gradients are fresh in every call.",
        "One element makes up two thirds of the sum of powers, and the list without it 30 % or more. The norm changes by a quarter or more "
        "from call to call. So half of the elements, one list, or an earlier norm do not give the answer.",
        "Experts' gradients are ep_size times as large as they count in the norm, for they are divided first.",
        "A coefficient in float32 is right. So is one rounded to the gradients' dtype, as a product with a GPU scalar takes it.",
        "The DeepSeek V3 preset has one layer with 64 of its 256 experts, to bound memory. Experts of a layer are stacked into one tensor "
        "per weight.",
    ),
)
