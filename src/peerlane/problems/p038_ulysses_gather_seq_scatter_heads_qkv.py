"""Problem 38: the Ulysses exchange of a fused query-key-value projection."""

from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import ulysses
from peerlane.problems.families.collective import BF16, FP32, group_layout, group_members


def reference(
    qkv_tensor: torch.Tensor,
    seq_dim: int,
    group: dist.ProcessGroup | None = None,
    unpadded_dim_size: int | None = None,
    restore_shape: bool = True,
) -> torch.Tensor:
    whole = ulysses.exchange(_blocks_of_three(qkv_tensor), -1, seq_dim, group)
    if restore_shape:
        whole = whole.flatten(-2)
    return ulysses.trimmed(whole, seq_dim, unpadded_dim_size or 0, dist.get_world_size(group))


def _blocks_of_three(qkv: torch.Tensor) -> torch.Tensor:
    """(..., P) as (..., 3, P / 3): queries, keys, values."""
    return qkv.view(*qkv.shape[:-1], 3, qkv.shape[-1] // 3)


def _shape(case: pc.Case, ranks: int) -> tuple[int, ...]:
    """One rank's qkv. ``per_rank``: P is multiplied by the group's size; ``whole_sequence``: seq_dim's length is divided by it."""
    return ulysses.local_shape(
        case["shape"],
        ranks,
        times=-1 if case.params.get("per_rank") else None,
        over=case["seq_dim"] if case.params.get("whole_sequence") else None,
    )


def _layout(case: pc.Case, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(-2) if case.params.get("restore", True) else tensor


_EXCHANGE = ulysses.Exchange(
    scattered="channels",
    gathered="sequence",
    axes=lambda case: (-1, case["seq_dim"]),
    tensor=lambda case, rank, args: _blocks_of_three(args[0]),
    layout=_layout,
    unpadded=ulysses.unpadded,
)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    qkv = draw.bits(_shape(case, len(group_members(case, rank))), case.dtype)
    unpadded = ulysses.unpadded(case, rank) if "unpadded" in case.params else None
    return (qkv, case["seq_dim"], ulysses.group_argument(case), unpadded, case.params.get("restore", True))


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return pc.exactly("gathered", _EXCHANGE.answer(case, inputs, rank))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    shape = _shape(case, len(group_members(case, rank)))
    return ulysses.gathering_cost(case, rank, shape, case["seq_dim"], ulysses.unpadded(case, rank))


def _whole_width_scattered(context: pc.AnswerContext) -> torch.Tensor:
    """The r-th part of all P channels, without regard to queries, keys and values."""
    parts = [context.inputs[source][0].chunk(len(context.members), -1)[context.place] for source in context.members]
    whole = torch.cat(parts, context.case["seq_dim"])
    return _EXCHANGE.finished(context.case, context.rank, _blocks_of_three(whole))


def _channel_major(context: pc.AnswerContext) -> torch.Tensor:
    """Query, key and value of one channel side by side, instead of all queries before all keys."""
    blocks = _EXCHANGE.blocks(context.case, context.inputs, context.rank)
    whole = torch.cat(blocks, context.case["seq_dim"]).transpose(-1, -2)
    return _EXCHANGE.finished(context.case, context.rank, whole.reshape(*whole.shape[:-2], 3, -1))


_PADDED = ("small/padded_bf16", "small/padded_split_bf16", "small/packed_padded_split_int32", "small/long_padding_fp32")

PROBLEM = pc.Problem(
    id=38,
    slug="ulysses_gather_seq_scatter_heads_qkv",
    title="Ulysses exchange of a fused query-key-value projection",
    category="sequence_parallel",
    parallelism=("sequence",),
    origin="VeOmni's sequence parallelism, after DeepSpeed-Ulysses: the exchange before attention, for fused projections",
    summary=(
        "The last axis (length P) of qkv_tensor is queries, keys and values, P/3 channels each. Rank r receives from every rank of the "
        "group (the world if None) the r-th of W equal parts of each of the three and concatenates them in rank order along seq_dim, which "
        "is not the last axis. The last axis of the result is [queries | keys | values] of length P/W, or, if restore_shape is False, two "
        "axes (3, P/(3 W)). If unpadded_dim_size is neither None, 0 nor a multiple of W, only the first unpadded_dim_size positions "
        "remain. A bit copy; the result may be a strided view."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    presets=(
        pc.preset(
            "small",
            "batched and packed, odd widths, both layouts of the result, padding that is cut and padding that is not, a group",
            pc.case("plain_bf16", BF16, shape=(2, 3, 12), seq_dim=1, per_rank=True),
            pc.case("padded_bf16", BF16, shape=(2, 3, 12), seq_dim=1, per_rank=True, unpadded=(3, -1)),
            pc.case("padded_split_bf16", BF16, shape=(2, 3, 12), seq_dim=1, per_rank=True, unpadded=(3, -1), restore=False),
            pc.case("multiple_bf16", BF16, shape=(2, 3, 12), seq_dim=1, per_rank=True, unpadded=(2, 0)),
            pc.case("packed_fp32", FP32, shape=(3, 12), seq_dim=0, per_rank=True),
            pc.case("packed_padded_split_int32", torch.int32, shape=(3, 12), seq_dim=0, per_rank=True, unpadded=(3, -1), restore=False),
            pc.case("odd_width_bf16", BF16, shape=(3, 2, 15), seq_dim=1, per_rank=True, unpadded=(0, 0)),
            pc.case("long_padding_fp32", FP32, shape=(2, 7, 6), seq_dim=1, per_rank=True, unpadded=(7, -9)),
            pc.case("sequence_first_bf16", BF16, shape=(3, 2, 12), seq_dim=0, per_rank=True),
            pc.case("strided_group_bf16", BF16, shape=(2, 3, 12), seq_dim=1, per_rank=True, group="strided", world_sizes=(4, 8)),
        ),
        pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, shape=(16, 16, 1536), seq_dim=1)),
        pc.preset(
            "production_llama2_7b_32k",
            "32768 tokens, 3 x 32 heads of 128",
            pc.case("bf16", BF16, shape=(1, 32768, 12288), seq_dim=1, whole_sequence=True),
        ),
        pc.preset(
            "production_wan21_14b_720p",
            "75600 tokens, 5 of them padding, 3 x 40 heads of 128",
            pc.case("bf16", BF16, shape=(1, 75600, 15360), seq_dim=1, whole_sequence=True, unpadded=(0, 75595)),
        ),
        pc.preset(
            "production_siglip_so400m",
            "packed, 65536 patches, 5 of them padding, 3 x 16 heads of 72",
            pc.case("bf16", BF16, shape=(65536, 3456), seq_dim=0, whole_sequence=True, unpadded=(0, 65531)),
        ),
    ),
    known_wrong_answers=(
        *_EXCHANGE.known_wrong_answers(),
        *_EXCHANGE.trimming_wrong_answers(_PADDED),
        pc.wrong("whole_width_scattered", "the r-th part of the whole last axis", _whole_width_scattered),
        pc.wrong("channel_major", "query, key and value of one channel side by side", _channel_major),
    ),
    process_groups=group_layout,
    notes=(
        "The public benchmark never trims, never leaves the last axis split and has no packed sequences. Here all of these occur, with odd "
        "numbers of channels per rank, too.",
        "That a true length which is a multiple of W trims nothing, even if it is shorter than the gathered sequence, is the public "
        "semantics and kept.",
        "Widths of queries, keys and values are equal: the interface has no grouped keys. The exchange knows nothing about heads, so that "
        "P/3 must be a multiple of W, but a head may be divided.",
        "Axes are counted from the front: negative ones are not part of the interface.",
    ),
)
