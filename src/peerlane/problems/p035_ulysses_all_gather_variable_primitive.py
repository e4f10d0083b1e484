"""Problem 35: all-gather of tensors whose lengths along the gathered axis differ."""

from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import ulysses
from peerlane.problems.families.collective import BF16, all_gather_single, fitted, group_layout, group_members


def reference(x: torch.Tensor, gather_dim: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    members, me = dist.get_process_group_ranks(group or dist.group.WORLD), dist.get_rank(group)
    own = torch.full((1,), x.size(gather_dim), dtype=torch.int64, device=x.device)
    lengths = own.new_empty(len(members))
    all_gather_single(lengths, own, group=group)
    parts = [x.new_empty(ulysses.with_length(x.shape, gather_dim, length)) for length in lengths.tolist()]
    parts[me] = x.contiguous()
    transfers = []
    for place, peer in enumerate(members):
        if place != me and parts[me].numel():
            transfers.append(dist.P2POp(dist.isend, parts[me], peer, group))
        if place != me and parts[place].numel():
            transfers.append(dist.P2POp(dist.irecv, parts[place], peer, group))
    if transfers:
        for request in dist.batch_isend_irecv(transfers):
            request.wait()
    return torch.cat(parts, dim=gather_dim)


def _lengths(case: pc.Case, ranks: int) -> list[int]:
    """The lengths along gather_dim of a group's tensors, in no order.

    ``each``: one per rank, from the first. ``eighths``: those of eight ranks, neighbours merged where there are fewer.
    """
    if "each" in case.params:
        return list(case["each"][:ranks])
    eighths, merged = case["eighths"], 8 // ranks
    return [sum(eighths[first : first + merged]) for first in range(0, 8, merged)]


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Random bits; lengths change places from slot to slot."""
    members = group_members(case, rank)
    lengths = _lengths(case, len(members))
    draw.layout.shuffle(lengths)
    shape = ulysses.with_length(case["shape"], case["gather_dim"], lengths[members.index(rank)])
    return (ulysses.payload(case, draw, shape), case["gather_dim"], ulysses.group_argument(case))


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return pc.exactly("gathered", torch.cat(ulysses.members_tensors(case, inputs, rank), case["gather_dim"]))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """The busiest rank's, for every rank, since lengths change places between slots; it alone bounds the time.

    The shortest tensor's owner receives all the rest. Sending can be shared by forwarding, but no rank sends less than its own tensor,
    and together they send what all receive.
    """
    ranks = len(group_members(case, rank))
    lengths = _lengths(case, ranks)
    total, line = sum(lengths), torch.Size(ulysses.with_length(case["shape"], case["gather_dim"], 1)).numel() * case.dtype.itemsize
    return pc.Cost(
        hbm_bytes=(max(lengths) + total) * line,
        egress_bytes=max(max(lengths), pc.traffic.all_gather(total, ranks)) * line,
        ingress_bytes=(total - min(lengths)) * line,
    )


def _own_length_for_all(context: pc.AnswerContext) -> torch.Tensor:
    """Every tensor cut to the rank's own length, or repeated up to it."""
    axis, own = context.case["gather_dim"], context.args[0].size(context.case["gather_dim"])
    tensors = ulysses.members_tensors(context.case, context.inputs, context.rank)
    parts = [
        torch.cat([tensor] * -(-own // tensor.size(axis)), axis).narrow(axis, 0, own) for tensor in tensors if tensor.size(axis) and own
    ]
    return fitted(torch.cat([*parts, context.args[0]], axis), context.answer.size(axis), axis)


def _padding_left(context: pc.AnswerContext) -> torch.Tensor:
    """All tensors padded to the longest, and the end of the result cut off instead of the padding."""
    axis = context.case["gather_dim"]
    tensors = ulysses.members_tensors(context.case, context.inputs, context.rank)
    longest = max(tensor.size(axis) for tensor in tensors)
    parts = []
    for tensor in tensors:
        padding = tensor.new_zeros(ulysses.with_length(tensor.shape, axis, longest - tensor.size(axis)))
        parts.append(torch.cat((tensor, padding), axis))
    return fitted(torch.cat(parts, axis), context.answer.size(axis), axis)


def _gathered_flat(context: pc.AnswerContext) -> torch.Tensor:
    """The ranks' memory one after the other, whatever the axis."""
    tensors = ulysses.members_tensors(context.case, context.inputs, context.rank)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).view(context.answer.shape)


_UNEVEN = (3, 1, 6, 4, 2, 9, 5, 7)


def _small(
    label: str, dtype: torch.dtype, shape: tuple[int, ...], axis: int, each: tuple[int, ...] = _UNEVEN, **params: Any
) -> pc.CaseSpec:
    """``shape`` with 0 in place of the gathered axis."""
    return pc.case(label, dtype, shape=shape, gather_dim=axis, each=each, **params)


_SHARED = pc.small_cases(
    "uneven_bf16", "columns_bf16", "second_last_bf16", "vector_int64", "one_empty_bf16", "spike_bf16", "odd_uint8", "permuted_bf16"
)
_INNER = pc.small_cases("columns_bf16", "second_last_bf16")

PROBLEM = pc.Problem(
    id=35,
    slug="ulysses_all_gather_variable_primitive",
    title="All-gather of tensors whose lengths along the gathered axis differ",
    category="sequence_parallel",
    parallelism=("sequence",),
    origin="VeOmni's sequence parallelism: gathers of packed and of multimodal sequences",
    summary=(
        "Tensors of one dtype and number of axes, whose lengths agree but for that of axis gather_dim (which may be negative). No rank "
        "knows the others' lengths. Every rank returns the concatenation along gather_dim of all tensors of the group (the world if "
        "None), in the order of its ranks: a bit copy, contiguous. A length of 0 is legal, on some ranks or on all."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    presets=(
        pc.preset(
            "small",
            "lengths that differ, are zero on some ranks or on all, or on all but one; every axis; odd bytes; permuted input; a group",
            _small("uneven_bf16", BF16, (0, 3), 0),
            _small("columns_bf16", BF16, (3, 0), 1),
            _small("second_last_bf16", BF16, (2, 0, 3), -2),
            _small("vector_int64", torch.int64, (0,), -1),
            _small("one_empty_bf16", BF16, (0, 3), 0, (2, 5, 0, 3, 1, 4, 0, 6)),
            _small("one_holder_bf16", BF16, (0, 3), 0, (7, 0, 0, 0, 0, 0, 0, 0)),
            _small("nothing_bf16", BF16, (0, 3), 0, (0,) * 8),
            _small("spike_bf16", BF16, (0, 2), 0, (100, 1, 1, 1, 1, 1, 1, 1)),
            _small("odd_uint8", torch.uint8, (0, 7), 0, (5, 4, 3, 1, 2, 9, 6, 7)),
            _small("permuted_bf16", BF16, (0, 3), 0, permuted=True),
            _small("strided_group_bf16", BF16, (0, 3), 0, group="strided", world_sizes=(4, 8)),
        ),
        pc.preset(
            "pkb",
            "the public benchmark's shape, the same on all ranks, and one of as many bytes whose lengths differ",
            pc.case("bf16", BF16, shape=(0, 1024), gather_dim=0, each=(1024,) * 8),
            pc.case("jittered_bf16", BF16, shape=(0, 1024), gather_dim=0, each=tuple(1024 - 37 * rank for rank in range(8))),
        ),
        pc.preset(
            "production_llama3_70b_packed",
            "a packed batch, hidden 8192",
            pc.case("bf16", BF16, shape=(0, 8192), gather_dim=0, eighths=(4096, 1, 2500, 4095, 777, 3072, 4000, 128)),
        ),
        pc.preset(
            "production_qwen25_vl_vision",
            "image tokens, hidden 3584",
            pc.case("bf16", BF16, shape=(0, 3584), gather_dim=0, eighths=(0, 256, 1024, 4096, 64, 1369, 2048, 16)),
        ),
        pc.preset(
            "production_llama3_logits",
            "512 tokens, a vocabulary of 128256 in unequal parts, along the last axis",
            pc.case("bf16", BF16, shape=(512, 0), gather_dim=1, eighths=(15000, 17000, 16500, 15531, 16064, 15903, 16777, 15481)),
        ),
    ),
    known_wrong_answers=(
        pc.wrong(
            "own_length_for_all",
            "all tensors taken to be as long as the rank's own",
            _own_length_for_all,
            _SHARED,
        ),
        pc.wrong(
            "padding_left",
            "tensors padded to the longest, and the padding left between them",
            _padding_left,
            # On two ranks the longer tensor may come first, and the padding is then at the end.
            tuple(f"{name}/w{ranks}" for name in _SHARED for ranks in (4, 8)),
        ),
        pc.wrong("gathered_flat", "the axis ignored", _gathered_flat, _INNER),
    ),
    excused={"another_rank": "all ranks of a group have the same answer"},
    graph=False,
    graph_reason="the shape of the result depends on lengths that other ranks must tell the host first",
    process_groups=group_layout,
    notes=(
        "The public benchmark feeds one shape on all ranks, so that lengths need not be exchanged at all. Here they differ from rank to "
        "rank and change places from slot to slot.",
        "The lengths of production presets are those of eight ranks; on fewer, neighbours are merged, so that the total stays.",
        "The reference sends each tensor to every other rank directly: gloo gathers no tensors of unequal size.",
    ),
)
