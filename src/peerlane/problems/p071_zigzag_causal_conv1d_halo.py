"""Problem 71: causal depthwise convolution along a sequence in zigzag layout, with borders exchanged between neighbours."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import group_layout, group_members
from peerlane.problems.families.conv import exchange_with_neighbours, from_zigzag, full_float32, zigzag_chunks, zigzag_shard
from peerlane.problems.families.matmul import BF16, FLOP_UNIT, FP32, FP64

# Bytes of float64 samples that the oracle converts at a time.
_CHUNK_BYTES = 2**29


def reference(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    channels, history = x.shape[1], weight.shape[-1] - 1
    first, second = x.chunk(2, -1)
    first_tail, second_tail = (chunk[..., chunk.shape[-1] - history :].contiguous() for chunk in (first, second))
    # The next chunk of the sequence is the next rank's first, and the previous rank's second; the last rank's two are neighbours.
    first_halo, second_halo = exchange_with_neighbours(second_tail, first_tail, group)
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        second_halo = first_tail
    # As a batch of 2 B sequences, each with the samples before it.
    padded = torch.cat([torch.cat([first_halo, first], -1), torch.cat([second_halo, second], -1)])
    with full_float32():
        result = F.conv1d(padded, weight, groups=channels)
    return torch.cat(result.chunk(2), -1)


def _chunk_length(case: pc.Case, rank: int) -> int:
    """``chunk`` samples in each of a rank's two chunks, or ``length`` in the whole sequence."""
    return int(case["chunk"] if "chunk" in case.params else case["length"] // (2 * len(group_members(case, rank))))


def _place(case: pc.Case, rank: int) -> tuple[int, int]:
    """The rank's place in its group, and the group's size."""
    members = group_members(case, rank)
    return members.index(rank), len(members)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """x of N(0, 1) and a replicated weight of N(0, 1 / k). ``case["pattern"]`` may make them hard:

    * ``impulse``: only the last sample of every chunk is not zero
    * ``offset``: x of N(1000, 16^2), and every channel's taps add up to about zero
    * ``nan``: the last sample of the first rank's first chunk is NaN, in one channel of one sequence
    """
    pattern, taps, length = case.params.get("pattern"), case["taps"], _chunk_length(case, rank)
    scale, shift = (16.0, 1000.0) if pattern == "offset" else (1.0, 0.0)
    x = draw.normal((case["batch"], case["channels"], 2 * length), FP32, scale=scale, shift=shift)
    weight = draw.shared.normal((case["channels"], 1, taps), FP32, scale=taps**-0.5)
    if pattern == "impulse":
        inside = torch.arange(2 * length, device=x.device) % length < length - 1
        x.masked_fill_(inside, 0.0)
    elif pattern == "offset":
        weight -= weight.mean(-1, keepdim=True)
    elif pattern == "nan" and _place(case, rank)[0] == 0:
        x[0, 1, length - 1] = float("nan")
    group = pc.GroupRef(case["group"]) if "group" in case.params else None
    return (x.to(case.dtype), weight.to(case.dtype), group)


def _history(case: pc.Case, inputs: pc.Inputs, rank: int) -> list[torch.Tensor]:
    """The k - 1 samples before each of the rank's chunks, zeros before the sequence."""
    members = group_members(case, rank)
    place, world = members.index(rank), len(members)
    count = case["taps"] - 1
    halos = []
    for chunk in zigzag_chunks(place, world):
        if chunk == 0:
            x = inputs[rank][0]
            halos.append(x.new_zeros((*x.shape[:2], count)))
            continue
        owner = chunk - 1 if chunk <= world else 2 * world - chunk
        source = inputs[members[owner]][0].chunk(2, -1)[0 if chunk <= world else 1]
        halos.append(source[..., source.shape[-1] - count :])
    return halos


def _convolve(x: torch.Tensor, weight: torch.Tensor, halos: Sequence[torch.Tensor], work: torch.dtype) -> torch.Tensor:
    """Both chunks of x with their halos in front, convolved tap by tap in ``work``."""
    results = []
    for chunk, halo in zip(x.chunk(2, -1), halos, strict=True):
        samples, length = torch.cat([halo, chunk], -1).to(work), chunk.shape[-1]
        result = torch.zeros_like(samples[..., :length])
        for tap in range(weight.shape[-1]):
            result.addcmul_(samples[..., tap : tap + length], weight[:, :, tap].to(work))
        results.append(result)
    return torch.cat(results, -1)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    x, weight, _ = inputs[rank]
    halos = _history(case, inputs, rank)
    value = torch.empty(x.shape, dtype=FP64, device=x.device)
    magnitude = torch.empty_like(value)
    step = max(1, _CHUNK_BYTES // (x.shape[0] * x.shape[2] * FP64.itemsize))
    for first in range(0, x.shape[1], step):
        part = slice(first, first + step)
        samples, taps, before = x[:, part], weight[part], [halo[:, part] for halo in halos]
        value[:, part] = _convolve(samples, taps, before, FP64)
        magnitude[:, part] = _convolve(samples.abs(), taps.abs(), [halo.abs() for halo in before], FP64)
    return pc.Expected("convolved", value, case.dtype, magnitude=magnitude)


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """k products summed in float32 in any order err by no more than k 2^-24 of the sum of their magnitudes; one rounding of the result.

    A correct rounding errs by u relatively and leaves 0.43 u normwise (1.7e-3 in bfloat16); the bounds are 2u and about u.
    """
    cancels = case.params.get("pattern") in ("offset", "impulse") or case.preset == "small"
    return {
        "convolved": pc.Tolerance(
            relative=2 * pc.UNIT_ROUNDOFF[case.dtype],
            magnitude=(case["taps"] + 1) * pc.UNIT_ROUNDOFF[FP32],
            normwise=4e-3 if case.dtype == BF16 and not cancels else None,
        )
    }


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """x is read and the result written once; every chunk but the sequence's last hands k - 1 samples on, one pair within a rank."""
    place, world = _place(case, rank)
    samples = case["batch"] * case["channels"] * 2 * _chunk_length(case, rank)
    neighbours = (place > 0) + (place < world - 1)
    port = neighbours * case["batch"] * case["channels"] * (case["taps"] - 1) * case.dtype.itemsize
    return pc.Cost(
        hbm_bytes=(2 * samples + case["channels"] * case["taps"]) * case.dtype.itemsize,
        egress_bytes=port,
        ingress_bytes=port,
        flops={FLOP_UNIT[case.dtype]: 2 * case["taps"] * samples},
    )


def _fp32(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """From the rank's own chunks and halos, tap by tap in float32, rounded once."""
    x, weight, _ = inputs[rank]
    return _convolve(x, weight, _history(case, inputs, rank), FP32).to(case.dtype)


def _whole_sequence(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """From the assembled sequence, all taps of a position at once."""
    place, world = _place(case, rank)
    whole = from_zigzag([inputs[q][0] for q in group_members(case, rank)], -1).to(FP32)
    windows = F.pad(whole, (case["taps"] - 1, 0)).unfold(-1, case["taps"], 1)
    result: torch.Tensor = (windows * inputs[rank][1].to(FP32)).sum(-1)
    return zigzag_shard(result, place, world, -1).to(case.dtype)


def _with_halos(context: pc.AnswerContext, halos: Sequence[torch.Tensor]) -> torch.Tensor:
    x, weight, _ = context.args
    return _convolve(x, weight, halos, FP32).to(context.case.dtype)


def _tail(context: pc.AnswerContext, place: int, chunk: int) -> torch.Tensor:
    """The last k - 1 samples of a chunk (0 or 1) of the rank at a place of the group, counted around the ring."""
    x: torch.Tensor = context.inputs[context.members[place % len(context.members)]][0].chunk(2, -1)[chunk]
    return x[..., x.shape[-1] - context.case["taps"] + 1 :]


def _contiguous_layout(context: pc.AnswerContext) -> torch.Tensor:
    place, _ = _place(context.case, context.rank)
    before = _tail(context, place - 1, 1)
    return _with_halos(context, [before if place else torch.zeros_like(before), _tail(context, place, 0)])


def _same_direction(context: pc.AnswerContext) -> torch.Tensor:
    place, _ = _place(context.case, context.rank)
    first, _ = _history(context.case, context.inputs, context.rank)
    return _with_halos(context, [first, _tail(context, place - 1, 1)])


def _wraps_around(context: pc.AnswerContext) -> torch.Tensor:
    place, _ = _place(context.case, context.rank)
    return _with_halos(context, [_tail(context, place - 1, 0), _tail(context, place + 1, 1)])


def _halos_exchanged(context: pc.AnswerContext) -> torch.Tensor:
    return _with_halos(context, _history(context.case, context.inputs, context.rank)[::-1])


def _taps_reversed(context: pc.AnswerContext) -> torch.Tensor:
    x, weight, _ = context.args
    return _convolve(x, weight.flip(-1), _history(context.case, context.inputs, context.rank), FP32).to(context.case.dtype)


def _narrow_accumulator(context: pc.AnswerContext) -> torch.Tensor:
    x, weight, _ = context.args
    return _convolve(x, weight, _history(context.case, context.inputs, context.rank), context.case.dtype)


def _small(label: str, dtype: torch.dtype, taps: int, chunk: int, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, batch=2, channels=3, taps=taps, chunk=chunk, **params)


PRESETS = (
    pc.preset(
        "small",
        "odd and even tap counts, one tap, chunks as long as the history, impulses, an offset, NaN in a halo, groups",
        _small("four_taps_bf16", BF16, 4, 8),
        _small("one_tap_bf16", BF16, 1, 8),
        _small("whole_chunk_bf16", BF16, 7, 6),
        _small("whole_chunk_fp32", FP32, 7, 6),
        _small("three_taps_fp32", FP32, 3, 5),
        _small("impulse_bf16", BF16, 4, 8, pattern="impulse"),
        _small("offset_bf16", BF16, 7, 9, pattern="offset"),
        _small("offset_fp32", FP32, 7, 9, pattern="offset"),
        _small("nan_bf16", BF16, 4, 8, pattern="nan"),
        _small("strided_group_bf16", BF16, 4, 8, group="strided", world_sizes=(4, 8)),
    ),
    pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, batch=1, channels=1024, taps=7, chunk=1024)),
    pc.preset(
        "production_evo2_7b_projection",
        "the short filter behind the projections to 3 x 4096 channels, 131072 samples",
        pc.case("bf16", BF16, batch=1, channels=12288, taps=3, length=131072),
    ),
    pc.preset(
        "production_evo2_7b_se",
        "a short explicit filter over 4096 channels, 131072 samples per rank: a sequence of a million on 8 ranks, of half a million on 4",
        pc.case("bf16", BF16, batch=1, channels=4096, taps=7, chunk=65536),
    ),
    pc.preset(
        "production_evo2_40b_mr",
        "a medium regularised filter of 128 taps over 8192 channels, 131072 samples",
        pc.case("bf16", BF16, batch=1, channels=8192, taps=128, length=131072),
    ),
)

_HALO = pc.where(lambda c: c["taps"] > 1)

PROBLEM = pc.Problem(
    id=71,
    slug="zigzag_causal_conv1d_halo",
    title="Causal depthwise convolution in zigzag layout with halo exchange",
    category="context_parallel",
    parallelism=("context", "sequence"),
    origin="Hyena and Evo 2 in NVIDIA NeMo / BioNeMo and savanna: context parallelism by exchange of overlapping regions",
    summary=(
        "A sequence of 2 W chunks of length L: rank r of the group (the world if None) holds chunks r and 2 W - 1 - r back to back in x "
        "(B, C, 2 L). weight (C, 1, k), the same on all ranks, k - 1 <= L. Y[t] = sum over j < k of weight[c, 0, j] X[t - (k - 1) + j], X "
        "being zero before the sequence; the sum in float32, rounded once. Returns the rank's two chunks of Y, in x's layout and dtype."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("contiguous_layout", "history as if every rank held one contiguous stretch", _contiguous_layout, _HALO),
        pc.wrong("same_direction", "both chunks' history from the previous rank", _same_direction, _HALO),
        pc.wrong("wraps_around", "the neighbours of the first and the last rank taken around the ring", _wraps_around, _HALO),
        pc.wrong("halos_exchanged", "each chunk with the other's history", _halos_exchanged, _HALO),
        pc.wrong("taps_reversed", "the first tap multiplies the current sample", _taps_reversed, _HALO),
        pc.wrong("narrow_accumulator", "taps summed in bfloat16", _narrow_accumulator, ("small/offset_bf16",)),
    ),
    alternative_solutions=pc.alternatives(tap_by_tap_fp32=_fp32, whole_sequence_fp32=_whole_sequence),
    process_groups=group_layout,
    notes=(
        "The public benchmark draws another weight on every rank, which no model has. Here it is replicated, so that a rank may compute "
        "its neighbour's first outputs itself.",
        "On one rank the public reference fails. Here it is the plain causal convolution.",
        "The million samples of the short explicit filter are 131072 per rank on 8 ranks; on 4 ranks the sequence is half as long.",
    ),
)
