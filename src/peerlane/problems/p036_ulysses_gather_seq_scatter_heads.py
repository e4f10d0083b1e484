"""Problem 36: the Ulysses exchange into attention: gather the sequence, scatter the heads, drop padding."""

from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import ulysses
from peerlane.problems.families.collective import BF16, FP32, group_layout, group_members


def reference(
    x: torch.Tensor, seq_dim: int, head_dim: int, group: dist.ProcessGroup | None = None, unpadded_dim_size: int = 0
) -> torch.Tensor:
    whole = ulysses.exchange(x, head_dim, seq_dim, group)
    # Padding exists to make the length a multiple of the group's size: a multiple is taken to have none.
    return ulysses.trimmed(whole, seq_dim, unpadded_dim_size, dist.get_world_size(group))


def _shape(case: pc.Case, ranks: int) -> tuple[int, ...]:
    """One rank's x. ``heads_per_rank``: the length of head_dim is multiplied by the group's size; ``whole_sequence``: seq_dim's divided."""
    return ulysses.local_shape(
        case["shape"],
        ranks,
        times=case["head_dim"] if case.params.get("heads_per_rank") else None,
        over=case["seq_dim"] if case.params.get("whole_sequence") else None,
    )


_EXCHANGE = ulysses.Exchange(
    scattered="heads", gathered="sequence", axes=lambda case: (case["head_dim"], case["seq_dim"]), unpadded=ulysses.unpadded
)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    x = ulysses.payload(case, draw, _shape(case, len(group_members(case, rank))))
    return (x, case["seq_dim"], case["head_dim"], ulysses.group_argument(case), ulysses.unpadded(case, rank))


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return pc.exactly("gathered", _EXCHANGE.answer(case, inputs, rank))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    shape = _shape(case, len(group_members(case, rank)))
    return ulysses.gathering_cost(case, rank, shape, case["seq_dim"], ulysses.unpadded(case, rank))


_PADDED = ("small/padded_bf16", "small/packed_padded_int32", "small/long_padding_fp32", "small/width_80_bf16")

PROBLEM = pc.Problem(
    id=36,
    slug="ulysses_gather_seq_scatter_heads",
    title="Ulysses exchange into attention: gather the sequence, scatter the heads, drop padding",
    category="sequence_parallel",
    parallelism=("sequence",),
    origin="VeOmni's sequence parallelism, after DeepSpeed-Ulysses: the exchange before attention",
    summary=(
        "Rank r receives from every rank of the group the r-th of W equal blocks of consecutive heads (axis head_dim) and concatenates "
        "them in rank order along seq_dim: head_dim shrinks to h/W, seq_dim grows to S W. If unpadded_dim_size is neither 0 nor a "
        "multiple of W, only the first unpadded_dim_size positions remain. A bit copy; the result may be a strided view."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    presets=(
        pc.preset(
            "small",
            "every order of the axes, padding that is cut and padding that is not, permuted input, a group",
            pc.case("plain_bf16", BF16, shape=(2, 3, 2, 5), seq_dim=1, head_dim=2, heads_per_rank=True),
            pc.case("padded_bf16", BF16, shape=(2, 3, 2, 5), seq_dim=1, head_dim=2, heads_per_rank=True, unpadded=(3, -1)),
            pc.case("multiple_bf16", BF16, shape=(2, 3, 2, 5), seq_dim=1, head_dim=2, heads_per_rank=True, unpadded=(2, 0)),
            pc.case("packed_padded_int32", torch.int32, shape=(4, 2, 3), seq_dim=0, head_dim=1, heads_per_rank=True, unpadded=(4, -1)),
            pc.case("heads_first_bf16", BF16, shape=(2, 3, 4), seq_dim=1, head_dim=0, heads_per_rank=True),
            pc.case("heads_before_sequence_fp32", FP32, shape=(2, 2, 3, 5), seq_dim=2, head_dim=1, heads_per_rank=True),
            pc.case("long_padding_fp32", FP32, shape=(2, 7, 2, 5), seq_dim=1, head_dim=2, heads_per_rank=True, unpadded=(7, -9)),
            pc.case("width_80_bf16", BF16, shape=(1, 5, 2, 80), seq_dim=1, head_dim=2, heads_per_rank=True, unpadded=(5, -3)),
            pc.case("permuted_bf16", BF16, shape=(2, 3, 2, 5), seq_dim=1, head_dim=2, heads_per_rank=True, permuted=True),
            pc.case(
                "strided_group_bf16",
                BF16,
                shape=(2, 3, 2, 5),
                seq_dim=1,
                head_dim=2,
                heads_per_rank=True,
                group="strided",
                world_sizes=(4, 8),
            ),
        ),
        pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, shape=(16, 16, 8, 64), seq_dim=1, head_dim=2)),
        pc.preset(
            "production_llama3_70b_queries",
            "32768 tokens, 5 of them padding, 64 heads of 128",
            pc.case("bf16", BF16, shape=(1, 32768, 64, 128), seq_dim=1, head_dim=2, whole_sequence=True, unpadded=(0, 32763)),
        ),
        pc.preset(
            "production_wan21_14b_720p",
            "75600 tokens, 5 of them padding, 40 heads of 128",
            pc.case("bf16", BF16, shape=(1, 75600, 40, 128), seq_dim=1, head_dim=2, whole_sequence=True, unpadded=(0, 75595)),
        ),
        pc.preset(
            "production_llama3_70b_keys",
            "131072 tokens, 8 key heads of 128",
            pc.case("bf16", BF16, shape=(1, 131072, 8, 128), seq_dim=1, head_dim=2, whole_sequence=True),
        ),
    ),
    known_wrong_answers=(
        *_EXCHANGE.known_wrong_answers(),
        *_EXCHANGE.trimming_wrong_answers(_PADDED),
    ),
    process_groups=group_layout,
    notes=(
        "The public benchmark never trims, has one order of axes and, on 8 ranks, one head per rank, which hides a wrong order of "
        "heads. Here every small case has two heads per rank, and trimming, other orders of the axes, a permuted input and a group "
        "occur.",
        "That a true length which is a multiple of W trims nothing, even if it is shorter than the gathered sequence, is the public "
        "semantics and kept.",
        "Axes are counted from the front: negative ones are not part of the interface.",
    ),
)
