"""Problem 30: sum of three LoRA gradients that all experts share, over the ranks of expert parallelism."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.contract.codes import eight_bits
from peerlane.problems.families import collective
from peerlane.problems.families.collective import BF16, FP32

NAMES = ("grad_fc1_1_lora_A", "grad_fc1_2_lora_A", "grad_fc2_lora_B")


def reference(
    grad_fc1_1_lora_A: torch.Tensor, grad_fc1_2_lora_A: torch.Tensor, grad_fc2_lora_B: torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    for gradient in (grad_fc1_1_lora_A, grad_fc1_2_lora_A, grad_fc2_lora_B):
        dist.all_reduce(gradient, group=group)
    return grad_fc1_1_lora_A, grad_fc1_2_lora_A, grad_fc2_lora_B


def _shapes(case: pc.Case) -> Sequence[tuple[int, ...]]:
    """``shapes``; or both A gradients (r, in) and the B gradient (out, r) of ``lora`` = (r, in, out)."""
    if "shapes" in case.params:
        shapes: Sequence[tuple[int, ...]] = case["shapes"]
        return shapes
    r, inner, outer = case["lora"]
    return (r, inner), (r, inner), (outer, r)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """See :func:`summand`. ``case["data"]`` = ``idle``: every rank of a group but its last has gradients of zero.

    Columns differ in size by powers of two, the same on all ranks, unless the case is one of :func:`summand`'s patterns.

    All ranks must return the same bits, so several groups have the same gradients, whole numbers whose sums are exact in any order.
    """
    members = collective.group_members(case, rank)
    gradients = [collective.summand(case, members.index(rank), draw, shape) for shape in _shapes(case)]
    if not draw.integer and "data" not in case.params:
        for gradient in gradients:
            gradient *= draw.shared.octaves(gradient.shape[-1:])
    if collective.group_layout(case):
        whole = [draw.shared.integers(-16, 17, (len(members), *shape), case.dtype) for shape in _shapes(case)]
        gradients = [every[members.index(rank)].clone() for every in whole]
    if case.params.get("data") == "idle" and rank != members[-1]:
        gradients = [torch.zeros_like(gradient) for gradient in gradients]
    return (*gradients, next((pc.GroupRef(name) for name in collective.group_layout(case)), None))


def _terms(inputs: pc.Inputs, ranks: Sequence[int], index: int) -> list[torch.Tensor]:
    return [inputs[q][index] for q in ranks]


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, ...]:
    members = collective.group_members(case, rank)
    sums = (collective.sum_expected(_terms(inputs, members, index), case.dtype) for index in range(3))
    return tuple(dataclasses.replace(expected, name=name) for name, expected in zip(NAMES, sums, strict=True))


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    shapes = zip(NAMES, _shapes(case), strict=True)
    return {name: collective.sum_tolerance(case, torch.Size(shape).numel())["sum"] for name, shape in shapes}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    elements, ranks = sum(torch.Size(shape).numel() for shape in _shapes(case)), len(collective.group_members(case, rank))
    payload = elements * case.dtype.itemsize
    port = pc.traffic.all_reduce(payload, ranks)
    return pc.Cost(hbm_bytes=2 * payload, egress_bytes=port, ingress_bytes=port, flops={"fp32": (ranks - 1) / ranks * elements})


def _two_shots(case: pc.Case, rank: int) -> pc.Steps:
    least = cost(case, rank)
    return (
        pc.step("sums of parts", hbm=least.hbm_bytes, link=least.egress_bytes / 2, barriers=1, flops=least.flops),
        pc.step("sums to all ranks", hbm=least.hbm_bytes / 2, link=least.egress_bytes / 2, barriers=1),
    )


def _sums(inputs: pc.Inputs, ranks: Sequence[int], add: Callable[[Sequence[torch.Tensor]], torch.Tensor] = collective.wide_sum) -> pc.Tree:
    return tuple(add(_terms(inputs, ranks, index)) for index in range(3))


def _own(context: pc.AnswerContext) -> pc.Tree:
    return _sums(context.inputs, [context.rank])


def _mean(context: pc.AnswerContext) -> pc.Tree:
    return tuple(total / len(context.members) for total in context.answer)


_ODD = ((5, 9), (5, 11), (12, 5))

PROBLEM = pc.Problem(
    id=30,
    slug="moe_epgroupgemm_lora_backward",
    title="Sum of three shared LoRA gradients over expert-parallel ranks",
    category="expert_parallel",
    parallelism=("expert", "data"),
    origin="VeOmni: the backward pass of its expert-parallel grouped GEMM with LoRA; two A matrices and a B are shared by all experts",
    summary=(
        "Every rank returns, for each of the three gradients, the elementwise sum over the ranks of the group (the world if None), in its "
        "shape and dtype and with the same bits everywhere. The gradients may be overwritten, and may be what is returned. The order of "
        "the additions and the width of the accumulator are free."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    attainable=pc.Algorithm("all-reduce in two shots", "reduce-scatter and all-gather, each with a barrier", _two_shots),
    bandwidth="production_deepseek_v3",
    presets=(
        pc.preset(
            "small",
            "odd and unlike shapes, one empty, three axes, cancellation, idle ranks, NaN and infinities, a group",
            pc.case("odd_bf16", BF16, shapes=_ODD),
            pc.case("odd_fp32", FP32, shapes=_ODD),
            pc.case("empty_bf16", BF16, shapes=((9, 35), (0, 4), (31, 7))),
            pc.case("stacked_fp32", FP32, shapes=((2, 3, 5), (2, 3, 5), (2, 5, 3))),
            pc.case("cancelling_bf16", BF16, shapes=((9, 131), (9, 131), (67, 9)), data="cancelling"),
            pc.case("idle_bf16", BF16, shapes=_ODD, data="idle"),
            pc.case("special_fp32", FP32, shapes=_ODD, data="special"),
            pc.case("strided_group_bf16", BF16, shapes=_ODD, group="strided", world_sizes=(4, 8)),
        ),
        pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, lora=(8, 1024, 1024))),
        pc.preset("production_qwen3_30b_a3b", "rank 64, hidden 2048: 768 KiB", pc.case("bf16", BF16, lora=(64, 2048, 2048))),
        pc.preset("production_qwen3_235b", "rank 64, hidden 4096, float32: 3 MiB", pc.case("fp32", FP32, lora=(64, 4096, 4096))),
        pc.preset(
            "production_deepseek_v3",
            "adapters of rank 128 of 32 experts, stacked: 176 MB",
            pc.case("bf16", BF16, shapes=((4096, 7168), (4096, 7168), (7168, 4096))),
        ),
    ),
    known_wrong_answers=(
        pc.wrong("only_first_summed", "the second and third gradient left as they are", lambda c: (c.answer[0], *_own(c)[1:])),
        pc.wrong("mean", "divided by the number of ranks", _mean),
        pc.wrong(
            "eight_bits",
            "gradients are sent in 8-bit integers with a scale for every 32 neighbours",
            lambda c: _sums([tuple(eight_bits(gradient) for gradient in args[:3]) for args in c.inputs], c.members),
            ("pkb/bf16", "production_qwen3_30b_a3b/bf16", "production_qwen3_235b/fp32"),
        ),
    ),
    alternative_solutions=pc.alternatives(
        fp32_accumulation=lambda case, inputs, rank: _sums(inputs, collective.group_members(case, rank)),
        sequential_in_dtype=lambda case, inputs, rank: _sums(inputs, collective.group_members(case, rank), collective.sequential_sum),
    ),
    excused={
        **pc.any_order("a sum does not depend on the order of its terms"),
        "another_rank": "all ranks of a group have the same answer",
    },
    process_groups=collective.group_layout,
    replicated=True,
    integer_exact=True,
    mutates=frozenset(NAMES),
    notes=(
        "The public reference sums in place and returns its arguments. Here what is returned counts; whether it is the arguments, and what "
        "they hold afterwards, is free. Inputs are new in every call: the public benchmark sums the second and third again and again.",
        "The public reference is judged by itself, so that a float32 accumulator fails it. Here a float64 sum is the truth.",
        "Inputs are tensors of their own: views at odd offsets of one storage, which the public interface allows, do not occur.",
        "The title speaks of a grouped product's backward pass; only its communication is left.",
    ),
)
