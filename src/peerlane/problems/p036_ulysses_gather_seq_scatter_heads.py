"""Problem 36: the Ulysses exchange into attention: gather the sequence, scatter the heads, drop padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems._collective import BF16, FP32, group_layout, group_members, stale_tail
from peerlane.problems._draw import Draw
from peerlane.problems._spec import Case, Cost, Expected, NullAnswer, NullContext, Problem, case, exactly, preset
from peerlane.problems._tree import GroupRef


def reference(
    x: torch.Tensor,
    seq_dim: int,
    head_dim: int,
    group: dist.ProcessGroup | None = None,
    unpadded_dim_size: int = 0,
) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    head_blocks = torch.stack(x.chunk(ranks, dim=head_dim))
    received = torch.empty_like(head_blocks)
    dist.all_to_all_single(received, head_blocks, group=group)
    whole = torch.cat(received.unbind(), dim=seq_dim)
    # Padding exists to make the length a multiple of the group's size: a multiple is taken to have none.
    return whole.narrow(seq_dim, 0, unpadded_dim_size) if unpadded_dim_size % ranks else whole


def _shape(case: Case, ranks: int) -> tuple[int, ...]:
    """One rank's x. ``heads_per_rank``: the length of head_dim is multiplied by the group's size; ``whole_sequence``: seq_dim's divided."""
    shape = list(case["shape"])
    if case.params.get("heads_per_rank"):
        shape[case["head_dim"]] *= ranks
    if case.params.get("whole_sequence"):
        shape[case["seq_dim"]] //= ranks
    return tuple(shape)


def _unpadded(case: Case, ranks: int) -> int:
    """``unpadded`` = (a, b) stands for a * ranks + b."""
    per_rank, rest = case.params.get("unpadded", (0, 0))
    return int(per_rank * ranks + rest)


def kept_length(whole_length: int, unpadded_dim_size: int, ranks: int) -> int:
    """Positions of the gathered sequence that remain: a true length of 0 or a multiple of ``ranks`` cuts nothing."""
    return unpadded_dim_size if unpadded_dim_size % ranks else whole_length


def inputs(case: Case, rank: int, draw: Draw) -> tuple[Any, ...]:
    ranks = len(group_members(case, rank))
    shape = _shape(case, ranks)
    x = (
        draw.bits(shape[::-1], case.dtype).permute(*reversed(range(len(shape))))
        if case.params.get("permuted")
        else draw.bits(shape, case.dtype)
    )
    group = GroupRef(case["group"]) if "group" in case.params else None
    return (x, case["seq_dim"], case["head_dim"], group, _unpadded(case, ranks))


def _blocks(case: Case, inputs: Sequence[tuple[Any, ...]], rank: int) -> list[torch.Tensor]:
    """The rank's block of heads of every group member's x, in group order."""
    members = group_members(case, rank)
    heads = inputs[rank][0].size(case["head_dim"]) // len(members)
    return [inputs[source][0].narrow(case["head_dim"], members.index(rank) * heads, heads) for source in members]


def _trimmed(case: Case, rank: int, whole: torch.Tensor) -> torch.Tensor:
    ranks = len(group_members(case, rank))
    return whole.narrow(case["seq_dim"], 0, kept_length(whole.size(case["seq_dim"]), _unpadded(case, ranks), ranks))


def oracle(case: Case, inputs: Sequence[tuple[Any, ...]], rank: int) -> Expected:
    return exactly("gathered", _trimmed(case, rank, torch.cat(_blocks(case, inputs, rank), case["seq_dim"])))


def cost(case: Case, rank: int) -> Cost:
    """Positions that will be cut need not be read, sent or written; they are the last ones, so the last ranks have less to send."""
    members = group_members(case, rank)
    ranks, me = len(members), members.index(rank)
    shape = _shape(case, ranks)
    local = shape[case["seq_dim"]]
    position = torch.Size(shape).numel() // local * case.dtype.itemsize
    kept = kept_length(local * ranks, _unpadded(case, ranks), ranks)
    own = min(max(kept - me * local, 0), local)
    return Cost(
        hbm_bytes=own * position + kept * position / ranks,
        egress_bytes=(ranks - 1) / ranks * own * position,
        ingress_bytes=(kept - own) * position / ranks,
    )


def _no_communication(context: NullContext) -> torch.Tensor:
    members = group_members(context.case, context.rank)
    own = _blocks(context.case, context.inputs, context.rank)[members.index(context.rank)]
    return _trimmed(context.case, context.rank, torch.cat([own] * len(members), context.case["seq_dim"]))


def _strided_heads(context: NullContext) -> torch.Tensor:
    case, members = context.case, group_members(context.case, context.rank)
    parts = [context.inputs[source][0].transpose(0, case["head_dim"])[members.index(context.rank) :: len(members)] for source in members]
    return _trimmed(case, context.rank, torch.cat([part.transpose(0, case["head_dim"]) for part in parts], case["seq_dim"]))


def _sources_reversed(context: NullContext) -> torch.Tensor:
    blocks = _blocks(context.case, context.inputs, context.rank)
    return _trimmed(context.case, context.rank, torch.cat(blocks[::-1], context.case["seq_dim"]))


def _interleaved_sequence(context: NullContext) -> torch.Tensor:
    seq_dim = context.case["seq_dim"]
    blocks = _blocks(context.case, context.inputs, context.rank)
    return _trimmed(context.case, context.rank, torch.stack(blocks, seq_dim + 1).flatten(seq_dim, seq_dim + 1))


def _untrimmed(context: NullContext) -> torch.Tensor:
    return torch.cat(_blocks(context.case, context.inputs, context.rank), context.case["seq_dim"])


def _trimmed_in_front(context: NullContext) -> torch.Tensor:
    whole, kept, seq_dim = _untrimmed(context), context.answer.size(context.case["seq_dim"]), context.case["seq_dim"]
    return whole.narrow(seq_dim, whole.size(seq_dim) - kept, kept)


def _trimmed_although_multiple(context: NullContext) -> torch.Tensor:
    answer: torch.Tensor = context.answer
    return answer.narrow(context.case["seq_dim"], 0, context.args[4])


_PADDED = ("small/padded_bf16", "small/packed_padded_int32", "small/long_padding_fp32", "small/width_80_bf16")

PROBLEM = Problem(
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
        preset(
            "small",
            "every order of the axes, padding that is cut and padding that is not, permuted input, a group",
            case("plain_bf16", BF16, shape=(2, 3, 2, 5), seq_dim=1, head_dim=2, heads_per_rank=True),
            case("padded_bf16", BF16, shape=(2, 3, 2, 5), seq_dim=1, head_dim=2, heads_per_rank=True, unpadded=(3, -1)),
            case("multiple_bf16", BF16, shape=(2, 3, 2, 5), seq_dim=1, head_dim=2, heads_per_rank=True, unpadded=(2, 0)),
            case("packed_padded_int32", torch.int32, shape=(4, 2, 3), seq_dim=0, head_dim=1, heads_per_rank=True, unpadded=(4, -1)),
            case("heads_first_bf16", BF16, shape=(2, 3, 4), seq_dim=1, head_dim=0, heads_per_rank=True),
            case("heads_before_sequence_fp32", FP32, shape=(2, 2, 3, 5), seq_dim=2, head_dim=1, heads_per_rank=True),
            case("long_padding_fp32", FP32, shape=(2, 7, 2, 5), seq_dim=1, head_dim=2, heads_per_rank=True, unpadded=(7, -9)),
            case("width_80_bf16", BF16, shape=(1, 5, 2, 80), seq_dim=1, head_dim=2, heads_per_rank=True, unpadded=(5, -3)),
            case("permuted_bf16", BF16, shape=(2, 3, 2, 5), seq_dim=1, head_dim=2, heads_per_rank=True, permuted=True),
            case(
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
        preset("pkb", "the public benchmark's shape", case("bf16", BF16, shape=(16, 16, 8, 64), seq_dim=1, head_dim=2)),
        preset(
            "production_llama3_70b_queries",
            "32768 tokens, 5 of them padding, 64 heads of 128",
            case("bf16", BF16, shape=(1, 32768, 64, 128), seq_dim=1, head_dim=2, whole_sequence=True, unpadded=(0, 32763)),
        ),
        preset(
            "production_wan21_14b_720p",
            "75600 tokens, 5 of them padding, 40 heads of 128",
            case("bf16", BF16, shape=(1, 75600, 40, 128), seq_dim=1, head_dim=2, whole_sequence=True, unpadded=(0, 75595)),
        ),
        preset(
            "production_llama3_70b_keys",
            "131072 tokens, 8 key heads of 128",
            case("bf16", BF16, shape=(1, 131072, 8, 128), seq_dim=1, head_dim=2, whole_sequence=True),
        ),
    ),
    null_answers=(
        NullAnswer("no_communication", "the rank's own block of heads W times", _no_communication),
        NullAnswer("strided_heads", "heads r, r + W, r + 2 W ... instead of consecutive ones", _strided_heads),
        NullAnswer("sources_reversed", "the last rank's tokens first", _sources_reversed),
        NullAnswer("interleaved_sequence", "one token of every rank in turn", _interleaved_sequence),
        NullAnswer("trimming_forgotten", "padding still there", _untrimmed, cases=_PADDED),
        NullAnswer("trimmed_in_front", "as many tokens cut, but the first ones", _trimmed_in_front, cases=_PADDED),
        NullAnswer(
            "trimmed_although_multiple",
            "cut to a true length that is a multiple of W",
            _trimmed_although_multiple,
            cases=("small/multiple_bf16",),
        ),
        NullAnswer("stale_tail", "the last elements are those of the slot before", stale_tail),
    ),
    process_groups=group_layout,
    notes=(
        "The public benchmark never trims, has one order of axes and, on 8 ranks, one head per rank, which hides a wrong order of "
        "heads; here every small case has two heads per rank, and trimming, other orders of the axes, a permuted input and a group "
        "occur.",
        "That a true length which is a multiple of W trims nothing, even if it is shorter than the gathered sequence, is the public "
        "semantics and kept.",
        "Axes are counted from the front: negative ones are not part of the interface.",
    ),
)
