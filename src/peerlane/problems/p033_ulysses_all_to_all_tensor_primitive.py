"""Problem 33: tensor all-to-all that scatters one axis and gathers another."""

from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import ulysses
from peerlane.problems.families.collective import BF16, FP32, group_layout, group_members


def reference(x: torch.Tensor, scatter_dim: int, gather_dim: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    return ulysses.exchange(x, scatter_dim, gather_dim, group)


def _shape(case: pc.Case, ranks: int) -> tuple[int, ...]:
    """One rank's x. ``per_rank``: scatter_dim's length is multiplied by the group's size; ``whole``: gather_dim's is divided by it."""
    return ulysses.local_shape(
        case["shape"],
        ranks,
        times=case["scatter_dim"] if case.params.get("per_rank") else None,
        over=case["gather_dim"] if case.params.get("whole") else None,
    )


_EXCHANGE = ulysses.Exchange(scattered="pieces", gathered="sources", axes=lambda case: (case["scatter_dim"], case["gather_dim"]))


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    x = ulysses.payload(case, draw, _shape(case, len(group_members(case, rank))))
    return (x, case["scatter_dim"], case["gather_dim"], ulysses.group_argument(case))


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return pc.exactly("exchanged", _EXCHANGE.answer(case, inputs, rank))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    ranks = len(group_members(case, rank))
    payload = torch.Size(_shape(case, ranks)).numel() * case.dtype.itemsize
    port = pc.traffic.all_to_all(payload, ranks)
    return pc.Cost(hbm_bytes=2 * payload, egress_bytes=port, ingress_bytes=port)


def _flat(context: pc.AnswerContext) -> torch.Tensor:
    parts = [context.inputs[source][0].contiguous().view(-1).chunk(len(context.members))[context.place] for source in context.members]
    return torch.cat(parts).view(context.answer.shape)


_INTERLEAVED = pc.small_cases(
    "scatter_first_bf16",
    "scatter_third_bf16",
    "scatter_second_bf16",
    "same_axis_bf16",
    "scatter_last_fp32",
    "permuted_bf16",
    "negative_int32",
    "strided_group_bf16",
)

PROBLEM = pc.Problem(
    id=33,
    slug="ulysses_all_to_all_tensor_primitive",
    title="Tensor all-to-all that scatters one axis and gathers another",
    category="sequence_parallel",
    parallelism=("sequence",),
    origin="DeepSpeed-Ulysses' all-to-all, as VeOmni's sequence parallelism carries it",
    summary=(
        "x is cut into W equal consecutive pieces along scatter_dim, W being the size of the group (the world if None). Rank r returns "
        "the r-th piece of every rank, concatenated in rank order along gather_dim: a bit copy, contiguous. The two axes may be equal "
        "and may be negative; scatter_dim's length is a multiple of W, and x need not be contiguous."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    presets=(
        pc.preset(
            "small",
            "every order of the axes, equal and negative ones, odd and tiny runs, permuted input, a group",
            pc.case("scatter_first_bf16", BF16, shape=(2, 3), scatter_dim=0, gather_dim=1, per_rank=True),
            pc.case("scatter_third_bf16", BF16, shape=(1, 3, 2, 5), scatter_dim=2, gather_dim=1, per_rank=True),
            pc.case("scatter_second_bf16", BF16, shape=(1, 2, 3, 5), scatter_dim=1, gather_dim=2, per_rank=True),
            pc.case("same_axis_bf16", BF16, shape=(2, 5), scatter_dim=0, gather_dim=0, per_rank=True),
            pc.case("scatter_last_fp32", FP32, shape=(3, 1), scatter_dim=1, gather_dim=0, per_rank=True),
            pc.case("permuted_bf16", BF16, shape=(4, 3), scatter_dim=0, gather_dim=1, per_rank=True, permuted=True),
            pc.case("negative_int32", torch.int32, shape=(2, 3, 2, 5), scatter_dim=-2, gather_dim=-3, per_rank=True),
            pc.case("vector_int64", torch.int64, shape=(3,), scatter_dim=0, gather_dim=-1, per_rank=True),
            pc.case(
                "strided_group_bf16", BF16, shape=(2, 3, 5), scatter_dim=0, gather_dim=1, per_rank=True, group="strided", world_sizes=(4, 8)
            ),
        ),
        pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, shape=(1024, 1024), scatter_dim=0, gather_dim=1)),
        pc.preset(
            "production_llama3_70b_32k",
            "activations of 32768 tokens x 8192, from tokens to channels",
            pc.case("bf16", BF16, shape=(32768, 8192), scatter_dim=1, gather_dim=0, whole=True),
        ),
        pc.preset(
            "production_wan21_14b_720p",
            "75600 video tokens, 40 heads of 128",
            pc.case("bf16", BF16, shape=(1, 75600, 40, 128), scatter_dim=2, gather_dim=1, whole=True),
        ),
        pc.preset(
            "production_decode_reshuffle",
            "64 tokens x 8192 on every rank: latency",
            pc.case("bf16", BF16, shape=(64, 8192), scatter_dim=1, gather_dim=0),
        ),
    ),
    known_wrong_answers=(
        *_EXCHANGE.known_wrong_answers(
            # In the remaining case a piece is one element long along scatter_dim.
            strided=tuple(label for label in (*_INTERLEAVED, "small/vector_int64") if label != "small/scatter_last_fp32"),
            interleaved=(*_INTERLEAVED, "small/vector_int64"),
        ),
        pc.wrong(
            "flat",
            "x's memory exchanged in equal parts, without regard to the axes",
            _flat,
            tuple(label for label in _INTERLEAVED if label != "small/same_axis_bf16"),
        ),
    ),
    process_groups=group_layout,
    notes=(
        "The public benchmark has one square matrix and one pair of axes. Here axes come in every order, equal and negative, on up to four "
        "axes, x may be a permuted view, and some runs are a few bytes long. Bits are random, NaN payloads and signed zeros included.",
        "Production sizes are those of the whole model, divided by the world size.",
    ),
)
