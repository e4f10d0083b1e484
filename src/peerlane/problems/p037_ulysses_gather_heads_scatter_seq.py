"""Problem 37: the Ulysses exchange out of attention: pad and scatter the sequence, gather the heads."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import ulysses
from peerlane.problems.families.collective import BF16, group_layout, group_members


def reference(x: torch.Tensor, seq_dim: int, head_dim: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    return ulysses.exchange(_padded(x, seq_dim, dist.get_world_size(group)), seq_dim, head_dim, group)


def _padded(x: torch.Tensor, seq_dim: int, ranks: int) -> torch.Tensor:
    """x with zeros behind it that make its length along seq_dim a multiple of ``ranks``; x itself if it is one."""
    missing = -x.size(seq_dim) % ranks
    if not missing:
        return x
    return torch.cat((x, x.new_zeros(ulysses.with_length(x.shape, seq_dim, missing))), dim=seq_dim)


def _shape(case: pc.Case, ranks: int) -> tuple[int, ...]:
    """One rank's x. ``length`` = (a, b): a * ranks + b positions; ``whole_heads``: head_dim's length is divided by the group's size."""
    shape = ulysses.local_shape(case["shape"], ranks, over=case["head_dim"] if case.params.get("whole_heads") else None)
    if "length" in case.params:
        shape = ulysses.with_length(shape, case["seq_dim"], ulysses.per_ranks(case["length"], ranks))
    return shape


_EXCHANGE = ulysses.Exchange(
    scattered="tokens",
    gathered="heads",
    axes=lambda case: (case["seq_dim"], case["head_dim"]),
    tensor=lambda case, rank, args: _padded(args[0], case["seq_dim"], len(group_members(case, rank))),
)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Random bits. ``case["nan_end"]``: the last position is NaN, which must not reach the padding."""
    x = ulysses.payload(case, draw, _shape(case, len(group_members(case, rank))))
    if case.params.get("nan_end"):
        x.select(case["seq_dim"], -1).fill_(float("nan"))
    return (x, case["seq_dim"], case["head_dim"], ulysses.group_argument(case))


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return pc.exactly("scattered", _EXCHANGE.answer(case, inputs, rank))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Padding is written, but neither read nor sent; it is at the end, so the last ranks receive less."""
    members = group_members(case, rank)
    ranks, me = len(members), members.index(rank)
    shape = _shape(case, ranks)
    length = shape[case["seq_dim"]]
    block = -(-length // ranks)
    own = min(max(length - me * block, 0), block)
    position = torch.Size(shape).numel() // length * case.dtype.itemsize
    return pc.Cost(
        hbm_bytes=(length + block * ranks) * position, egress_bytes=(length - own) * position, ingress_bytes=(ranks - 1) * own * position
    )


def _with_ends(context: pc.AnswerContext, ends: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """The exchange of tensors that ``ends(x, ranks)`` brings to a multiple of the group's size."""
    seq_dim, ranks = context.case["seq_dim"], len(context.members)
    parts = [ends(context.inputs[source][0], ranks).chunk(ranks, seq_dim)[context.place] for source in context.members]
    return torch.cat(parts, context.case["head_dim"])


def _padded_in_front(context: pc.AnswerContext) -> torch.Tensor:
    seq_dim = context.case["seq_dim"]

    def ends(x: torch.Tensor, ranks: int) -> torch.Tensor:
        return _padded(x.flip(seq_dim), seq_dim, ranks).flip(seq_dim)

    return _with_ends(context, ends)


def _last_token_in_padding(context: pc.AnswerContext, factor: float) -> torch.Tensor:
    """Padding that is the last token times ``factor``: with 0, NaN stays NaN and negative numbers give -0."""
    seq_dim = context.case["seq_dim"]

    def ends(x: torch.Tensor, ranks: int) -> torch.Tensor:
        missing = -x.size(seq_dim) % ranks
        last = x.narrow(seq_dim, -1, 1)
        last = last if factor == 1.0 else last * factor
        return torch.cat([x, *[last.to(x.dtype)] * missing], dim=seq_dim)

    return _with_ends(context, ends)


def _padding_spread(context: pc.AnswerContext) -> torch.Tensor:
    """Blocks as equal as can be without padding, each of them padded for itself."""
    seq_dim = context.case["seq_dim"]
    length = context.answer.size(seq_dim)
    parts = []
    for source in context.members:
        part = context.inputs[source][0].tensor_split(len(context.members), seq_dim)[context.place]
        parts.append(torch.cat((part, part.new_zeros(ulysses.with_length(part.shape, seq_dim, length - part.size(seq_dim)))), dim=seq_dim))
    return torch.cat(parts, context.case["head_dim"])


_PADDED = pc.small_cases(
    "padded_bf16", "packed_padded_bf16", "heads_first_int32", "short_bf16", "nan_end_bf16", "permuted_bf16", "single_token_bf16"
)
_SEVERAL_TOKENS = pc.small_cases(
    "plain_bf16", "padded_bf16", "packed_padded_bf16", "heads_first_int32", "nan_end_bf16", "permuted_bf16", "strided_group_bf16"
)
# Padding at the end leaves other blocks than the most equal ones.
_UNEVEN = tuple(f"small/{label}/w{ranks}" for label in ("padded_bf16", "heads_first_int32", "permuted_bf16") for ranks in (4, 8))

PROBLEM = pc.Problem(
    id=37,
    slug="ulysses_gather_heads_scatter_seq",
    title="Ulysses exchange out of attention: pad and scatter the sequence, gather the heads",
    category="sequence_parallel",
    parallelism=("sequence",),
    origin="VeOmni's sequence parallelism, after DeepSpeed-Ulysses: the exchange behind attention",
    summary=(
        "x holds the whole sequence (S positions on axis seq_dim) of the rank's heads (axis head_dim). +0 is appended to seq_dim until "
        "its length is a multiple of W, the size of the group (the world if None). Rank r returns the r-th of W equal blocks of positions "
        "of every rank, concatenated in rank order along head_dim: S shrinks to ceil(S/W), the heads grow W-fold. A bit copy, contiguous. "
        "Axes are counted from the front."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    presets=(
        pc.preset(
            "small",
            "every order of the axes, padding of part of a block and of whole ranks, NaN beside the padding, permuted input, a group",
            pc.case("plain_bf16", BF16, shape=(2, 0, 2, 5), length=(3, 0), seq_dim=1, head_dim=2),
            pc.case("padded_bf16", BF16, shape=(2, 0, 2, 3), length=(2, 1), seq_dim=1, head_dim=2),
            pc.case("packed_padded_bf16", BF16, shape=(0, 3, 4), length=(2, -1), seq_dim=0, head_dim=1),
            pc.case("heads_first_int32", torch.int32, shape=(3, 0, 5), length=(2, 1), seq_dim=1, head_dim=0),
            pc.case("single_token_bf16", BF16, shape=(1, 1, 2, 4), seq_dim=1, head_dim=2),
            pc.case("short_bf16", BF16, shape=(1, 0, 2, 4), length=(1, -1), seq_dim=1, head_dim=2),
            pc.case("nan_end_bf16", BF16, shape=(2, 0, 2, 3), length=(3, -1), seq_dim=1, head_dim=2, nan_end=True),
            pc.case("permuted_bf16", BF16, shape=(2, 0, 2, 80), length=(2, 1), seq_dim=1, head_dim=2, permuted=True),
            pc.case(
                "strided_group_bf16", BF16, shape=(2, 0, 2, 3), length=(2, 1), seq_dim=1, head_dim=2, group="strided", world_sizes=(4, 8)
            ),
        ),
        pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, shape=(16, 16, 8, 64), seq_dim=1, head_dim=2)),
        pc.preset(
            "production_llama3_70b_output",
            "32763 tokens, 64 heads of 128",
            pc.case("bf16", BF16, shape=(1, 32763, 64, 128), seq_dim=1, head_dim=2, whole_heads=True),
        ),
        pc.preset(
            "production_wan21_14b_720p",
            "75595 tokens, 40 heads of 128",
            pc.case("bf16", BF16, shape=(1, 75595, 40, 128), seq_dim=1, head_dim=2, whole_heads=True),
        ),
        pc.preset(
            "production_qwen25_vl_vision",
            "16381 patches, 16 heads of 80",
            pc.case("bf16", BF16, shape=(1, 16381, 16, 80), seq_dim=1, head_dim=2, whole_heads=True),
        ),
    ),
    known_wrong_answers=(
        *_EXCHANGE.known_wrong_answers(strided=_SEVERAL_TOKENS),
        pc.wrong("padded_in_front", "zeros before the sequence instead of behind it", _padded_in_front, _PADDED),
        pc.wrong("padding_repeats", "the last token in place of padding", lambda c: _last_token_in_padding(c, 1.0), _PADDED),
        pc.wrong(
            "padding_multiplied", "the last token times 0 as padding", lambda c: _last_token_in_padding(c, 0.0), ("small/nan_end_bf16",)
        ),
        pc.wrong("padding_spread", "blocks of unequal length, each padded for itself", _padding_spread, _UNEVEN),
    ),
    process_groups=group_layout,
    notes=(
        "The public benchmark never pads, although padding is all the logic there is, and has one order of the axes. Here padding is part "
        "of a block, whole ranks, and next to NaN, and other orders of the axes, a permuted input and a group occur.",
        "The public benchmark gives every rank 8 heads, so its output has 8 W; production sizes are those of the whole model.",
        "Axes are counted from the front: negative ones are not part of the interface.",
    ),
)
