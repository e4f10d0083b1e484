"""Problem 72: a gated convolution as long as the sequence, whose sequence is sharded, by exchange of sequence for channels."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import group_layout, group_members, local_length
from peerlane.problems.families.conv import from_zigzag, zigzag_chunks, zigzag_shard
from peerlane.problems.families.matmul import BF16, FLOP_UNIT, FP32, FP64

# Bytes of one float64 spectrum that the oracle holds at a time; it needs about eight times as much.
_SPECTRUM_BYTES = 2**29

# Elementwise error of a convolution by float32 Fourier transforms, relative to |h| |z|: the rms is 1e-7, the largest of millions 6e-7.
_TRANSFORM = 3e-6


def reference(
    x1_seq: torch.Tensor,
    x2_seq: torch.Tensor,
    v_seq: torch.Tensor,
    h: torch.Tensor,
    conv_bias: torch.Tensor,
    num_groups: int,
    group_dim: int,
    group: dist.ProcessGroup | None = None,
    with_zigzag_splitting: bool = True,
) -> torch.Tensor:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    batch, channels, local = v_seq.shape
    block, groups = channels // world, num_groups // world

    # The gates act position by position, so that only their product with the values travels: all positions of a block of channels.
    gated = x2_seq * v_seq
    by_channels = gated.view(batch, world, block, local).transpose(0, 1).contiguous()
    received = torch.empty_like(by_channels)
    dist.all_to_all_single(received, by_channels, group=group)
    z = from_zigzag(received.unbind(), -1) if with_zigzag_splitting else torch.cat(received.unbind(), -1)

    length = z.shape[-1]
    z = z.to(torch.float32).view(batch, groups, group_dim, length)
    filters = torch.fft.rfft(h[rank * groups : (rank + 1) * groups].to(torch.float32), n=2 * length)
    y = torch.fft.irfft(torch.fft.rfft(z, n=2 * length) * filters.unsqueeze(1), n=2 * length)[..., :length]
    bias = conv_bias[rank * block : (rank + 1) * block].to(torch.float32)
    y = (y + z * bias.view(groups, group_dim, 1)).to(v_seq.dtype).view(batch, block, length)

    shards = [zigzag_shard(y, q, world, -1) for q in range(world)] if with_zigzag_splitting else y.chunk(world, -1)
    by_positions = torch.stack(list(shards))
    dist.all_to_all_single(received, by_positions, group=group)
    return (x1_seq * received.transpose(0, 1).reshape(batch, channels, local)).transpose(1, 2).contiguous()


def _groups(case: pc.Case, rank: int) -> int:
    """``groups`` filters, or ``groups_per_rank``."""
    return int(case["groups"] if "groups" in case.params else case["groups_per_rank"] * len(group_members(case, rank)))


def _taps(case: pc.Case, rank: int) -> int:
    """``taps`` in each filter, or ``taps_per_rank`` times the group's size."""
    return int(case["taps"] if "taps" in case.params else case["taps_per_rank"] * len(group_members(case, rank)))


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Gates, values and bias of N(0, 1); decaying noise as filters, of unit norm, with time constants from 2 taps to half the filter.

    ``case["pattern"]`` may make them hard:

    * ``impulse``: values are zero but for the last sample of every chunk
    * ``delay``: every filter has one tap, its last
    * ``slow``: values of N(1, 1), and filters that decay by e over their length and never change their sign
    * ``closed``: the outer gate is zero on the second half of the rank's positions
    """
    pattern, local, groups, taps = case.params.get("pattern"), local_length(case, rank), _groups(case, rank), _taps(case, rank)
    shape = (case["batch"], groups * case["group_dim"], local)
    x1, x2 = draw.normal(shape, case.dtype), draw.normal(shape, case.dtype)
    v = draw.normal(shape, case.dtype, shift=1.0 if pattern == "slow" else 0.0)
    h = draw.shared.normal((groups, taps), FP32)
    if pattern == "slow":
        x2.abs_()
        h.abs_()
        decay = h.new_full((groups, 1), 1.0 / taps)
    else:
        decay = torch.exp(draw.shared.uniform((groups, 1), FP32, low=math.log(min(0.5, 2.0 / taps)), high=math.log(0.5)))
    h *= torch.exp(-decay * torch.arange(taps, device=h.device)) * torch.sqrt(-torch.expm1(-2.0 * decay))
    if pattern == "impulse":
        chunk = local // 2 if case["zigzag"] else local
        v.masked_fill_(torch.arange(local, device=v.device) % chunk < chunk - 1, 0.0)
    elif pattern == "delay":
        h[:, : taps - 1] = 0.0
        h[:, -1] = draw.shared.normal((groups,), FP32)
    elif pattern == "closed":
        x1[..., local // 2 :] = 0.0
    bias = draw.shared.normal((shape[1],), case.dtype)
    group = pc.GroupRef(case["group"]) if "group" in case.params else None
    return (x1, x2, v, h.to(case.dtype), bias, groups, case["group_dim"], group, case["zigzag"])


def _assembled(shards: Sequence[torch.Tensor], zigzag: bool) -> torch.Tensor:
    return from_zigzag(shards, -1) if zigzag else torch.cat(list(shards), -1)


def _part(whole: torch.Tensor, place: int, world: int, zigzag: bool) -> torch.Tensor:
    return zigzag_shard(whole, place, world, -1) if zigzag else whole.chunk(world, -1)[place]


def _convolve(z: torch.Tensor, h: torch.Tensor, size: int) -> torch.Tensor:
    """z (B, g, d, S) with filters h (g, taps) by Fourier transforms of ``size`` points in their dtype."""
    spectrum = torch.fft.rfft(z, n=size).mul_(torch.fft.rfft(h, n=size).unsqueeze(1))
    result: torch.Tensor = torch.fft.irfft(spectrum, n=size)
    return result[..., : z.shape[-1]]


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """From z as rounded to the inputs' dtype, in float64 by Fourier transforms, some filters at a time.

    The magnitude is the standard deviation of rounding errors: |x1| (sqrt(h^2 * z^2) + |bias z|), * being the convolution, with |h| |z| of
    the whole row times the ratio of the transform's error to that of a rounding.
    """
    members = group_members(case, rank)
    place, world, width, zigzag = members.index(rank), len(members), case["group_dim"], case["zigzag"]
    x1, _, _, h, bias, groups, *_ = inputs[rank]
    batch, channels, local = x1.shape
    length, weight = world * local, _TRANSFORM / _spread(case)
    value = torch.empty((batch, channels, local), dtype=FP64, device=x1.device)
    magnitude = torch.empty_like(value)
    step = max(1, _SPECTRUM_BYTES // (batch * width * 2 * length * FP64.itemsize))
    for first in range(0, groups, step):
        filters = h[first : first + step].to(FP64)
        part = slice(first * width, (first + filters.shape[0]) * width)
        z = _assembled([inputs[q][1][:, part] * inputs[q][2][:, part] for q in members], zigzag).to(FP64)
        z = z.view(batch, -1, width, length)
        direct = z * bias[part].to(FP64).view(-1, width, 1)
        y = _convolve(z, filters, 2 * length).add_(direct)
        spread = _convolve(z.square(), filters.square(), 2 * length).clamp_(min=0.0).sqrt_().add_(direct.abs_())
        spread.add_(weight * z.norm(dim=-1, keepdim=True) * filters.norm(dim=-1).view(-1, 1, 1))
        gate = x1[:, part].to(FP64)
        value[:, part] = _part(y.view(batch, -1, length), place, world, zigzag) * gate
        magnitude[:, part] = _part(spread.view(batch, -1, length), place, world, zigzag) * gate.abs()
    return pc.Expected("gated", value.transpose(1, 2), case.dtype, magnitude=magnitude.transpose(1, 2))


def _spread(case: pc.Case) -> float:
    return 6 * pc.UNIT_ROUNDOFF[case.dtype]


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """Roundings of y and of the result, by u of them each, with as much to spare.

    z may be left unrounded, which changes y by errors with a standard deviation of 0.43 u sqrt(h^2 * z^2): the bound is 14 of them.
    Normwise each of these three roundings leaves 0.43 u (1.7e-3 in bfloat16), and bfloat16 has 6e-3.
    """
    normwise = 6e-3 if case.dtype == BF16 and case.preset != "small" else None
    size = "|x1| (sqrt(h^2 * z^2) + |bias z|), where * is the convolution"
    return {"gated": pc.Tolerance(relative=4 * pc.UNIT_ROUNDOFF[case.dtype], magnitude=_spread(case), normwise=normwise, size=size)}


def _foreign_history(case: pc.Case, reader: int, owner: int, world: int, local: int, taps: int) -> int:
    """How many positions of the owner lie within taps - 1 before a chunk of the reader (places in the group)."""
    length, parts = (local // 2, zigzag_chunks) if case["zigzag"] else (local, lambda place, _: (place,))
    read = [(max(0, part * length - taps + 1), part * length) for part in parts(reader, world)]
    if len(read) == 2:  # the second stretch of history may begin in the first
        read[1] = (max(read[1][0], read[0][1]), read[1][1])
    owned = [(part * length, (part + 1) * length) for part in parts(owner, world)]
    return sum(max(0, min(high, last) - max(low, first)) for low, high in read for first, last in owned)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """x1, x2 and v are read, the result written; filters are read by the rank that has their channels.

    Either z travels to the ranks of its channels and y back, or z, or what it adds to y, to the ranks of later positions within reach; per
    direction, the least of all. The transforms of z and y take 10 log2(2 S) operations a sample, a direct sum two a tap.
    """
    members = group_members(case, rank)
    place, world, local, taps = members.index(rank), len(members), local_length(case, rank), _taps(case, rank)
    position = case["batch"] * _groups(case, rank) * case["group_dim"] * case.dtype.itemsize
    exchanged = pc.traffic.all_to_all(2 * position * local, world)
    peers = [peer for peer in range(world) if peer != place]

    def crossing(reader: int, owner: int) -> int:
        """Positions of z, or of what it adds to y: zigzag shards are the same backwards, where readers and owners change places."""
        pairs = ((reader, owner), (owner, reader)) if case["zigzag"] else ((reader, owner),)
        return min(_foreign_history(case, *pair, world, local, taps) for pair in pairs)

    sent = position * sum(crossing(peer, place) for peer in peers)
    received = position * sum(crossing(place, peer) for peer in peers)
    samples = position // case.dtype.itemsize * local
    return pc.Cost(
        hbm_bytes=4 * position * local + _groups(case, rank) / world * taps * case.dtype.itemsize,
        egress_bytes=min(exchanged, sent),
        ingress_bytes=min(exchanged, received),
        flops={FLOP_UNIT[case.dtype]: samples * min(2 * taps, 10 * math.log2(2 * world * local))},
    )


def _four_step(case: pc.Case, rank: int) -> pc.Steps:
    """Real transforms of 2 S points in float32, 8 S bytes of spectrum a channel, in two passes each way; products are part of a pass."""
    world, local, size = len(group_members(case, rank)), local_length(case, rank), case.dtype.itemsize
    length, groups = world * local, _groups(case, rank) / world
    channels, spectrum = case["batch"] * groups * case["group_dim"], 8 * length
    moved = channels * length * size
    operations = 2.5 * 2 * length * math.log2(2 * length)
    return (
        pc.step("z, to the ranks of its channels", hbm=4 * moved, link=pc.traffic.all_to_all(moved, world), barriers=1),
        pc.step("transforms of filters", hbm=groups * (_taps(case, rank) * size + 3 * spectrum), flops={"fp32": groups * operations}),
        pc.step("transforms there and back", hbm=2 * moved + (4 * channels + groups) * spectrum, flops={"fp32": 2 * channels * operations}),
        pc.step("y, to the ranks of its positions", hbm=4 * moved, link=pc.traffic.all_to_all(moved, world), barriers=1),
    )


def _fp32(
    case: pc.Case,
    inputs: pc.Inputs,
    rank: int,
    *,
    round_between: bool = True,
    assemble: Callable[[list[torch.Tensor]], list[torch.Tensor]] = lambda shards: shards,
    zigzag: bool | None = None,
    filters: Callable[[torch.Tensor], torch.Tensor] = lambda h: h,
    circular: bool = False,
    inner_gate: bool = True,
    outer_gate: bool = True,
    use_bias: bool = True,
) -> torch.Tensor:
    """By float32 transforms over the whole sequence, with a mistake if asked for; ``round_between`` rounds z and y to the inputs' dtype."""
    members, zigzag = group_members(case, rank), case["zigzag"] if zigzag is None else zigzag
    x1, _, _, h, bias, groups, width, *_ = inputs[rank]
    batch, channels, _ = x1.shape

    def between(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(case.dtype).to(FP32) if round_between else tensor

    gated = [between(inputs[q][2].to(FP32) * (inputs[q][1].to(FP32) if inner_gate else 1.0)) for q in members]
    z = _assembled(assemble(gated), zigzag).view(batch, groups, width, -1)
    h, length = filters(h.to(FP32)), z.shape[-1]
    if h.shape[0] != groups:  # one filter per channel
        z = z.view(batch, channels, 1, length)
    y = _convolve(z, h, length if circular else length + max(h.shape[-1], length)).reshape(batch, channels, length)
    if use_bias:
        y = y + z.view(batch, channels, length) * bias.to(FP32).unsqueeze(-1)
    y = _part(between(y), members.index(rank), len(members), zigzag)
    return ((x1.to(FP32) * y) if outer_gate else y).to(case.dtype).transpose(1, 2)


def _keeping(context: pc.AnswerContext, kept: Callable[[int, int], bool]) -> pc.Tree:
    """With zeros for the shards of ranks whose place in the group is not kept; ``kept`` has that place, and the rank's own."""
    own = context.place
    return context.by(_fp32, assemble=lambda shards: [s if kept(place, own) else torch.zeros_like(s) for place, s in enumerate(shards)])


def _local_filter(context: pc.AnswerContext) -> pc.Tree:
    """Filters cut to the length of a shard, as far as they are longer than that."""
    local = context.args[0].shape[-1]
    return context.by(_fp32, filters=lambda h: torch.cat([h[:, :local], torch.zeros_like(h[:, local:])], -1))


def _interleaved_channels(context: pc.AnswerContext) -> pc.Tree:
    return context.by(_fp32, filters=lambda h: h.repeat(context.case["group_dim"], 1))


def _small(label: str, dtype: torch.dtype, group_dim: int, local: int, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"batch": 2, "groups_per_rank": 3, "group_dim": group_dim, "local": local, "zigzag": True, **params})


PRESETS = (
    pc.preset(
        "small",
        "zigzag and contiguous shards, shared filters, short filters, an odd length, impulses, delays, slow decay, a closed gate, groups",
        _small("long_bf16", BF16, 1, 8, taps_per_rank=8),
        _small("long_fp32", FP32, 1, 8, taps_per_rank=8),
        _small("short_bf16", BF16, 2, 6, taps=5),
        _small("shared_fp32", FP32, 2, 6, taps_per_rank=6),
        _small("contiguous_odd_bf16", BF16, 2, 7, taps_per_rank=7, zigzag=False),
        _small("contiguous_short_fp32", FP32, 1, 6, taps=4, zigzag=False),
        _small("impulse_fp32", FP32, 2, 8, taps_per_rank=8, pattern="impulse"),
        _small("delay_bf16", BF16, 2, 6, taps_per_rank=3, pattern="delay"),
        _small("slow_bf16", BF16, 2, 32, taps_per_rank=32, pattern="slow"),
        _small("closed_bf16", BF16, 1, 8, taps_per_rank=8, pattern="closed"),
        _small("strided_group_bf16", BF16, 2, 6, taps_per_rank=6, group="strided", world_sizes=(4, 8)),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: 2048 positions per rank, 1024 filters of 4096 taps",
        pc.case("bf16", BF16, batch=1, groups=1024, group_dim=1, local=2048, taps=4096, zigzag=True),
    ),
    pc.preset(
        "production_evo2_7b_li",
        "a long implicit filter: 131072 positions, 4096 channels in 256 groups, filters as long as the sequence",
        pc.case("bf16", BF16, batch=1, groups=256, group_dim=16, length=131072, taps=131072, zigzag=True),
    ),
    pc.preset(
        "production_evo2_7b_mr",
        "a medium regularised filter: the same with 128 taps",
        pc.case("bf16", BF16, batch=1, groups=256, group_dim=16, length=131072, taps=128, zigzag=True),
    ),
    pc.preset(
        "production_hyenadna_32k",
        "8 sequences of 32768 positions, 256 channels with a filter each, as long as the sequence",
        pc.case("bf16", BF16, batch=8, groups=256, group_dim=1, length=32768, taps=32768, zigzag=True),
    ),
    *(
        pc.preset(
            f"sweep_{local}",
            f"{local} positions per rank, 1024 filters of 1024 taps per rank",
            pc.case("bf16", BF16, batch=1, groups=1024, group_dim=1, local=local, taps_per_rank=1024, zigzag=True),
        )
        for local in (1024, 2048, 8192, 16384)
    ),
)


PROBLEM = pc.Problem(
    id=72,
    slug="hyena_long_conv_context_parallel",
    title="Hyena's gated long convolution, sequence sharded in zigzag layout",
    category="context_parallel",
    parallelism=("context", "sequence"),
    origin="Hyena and Evo 2 in NVIDIA NeMo / BioNeMo and savanna: exchange of sequence for channels around a convolution by FFT",
    summary=(
        "x1, x2 and v (B, C, L) are the rank's part of a sequence of S = W L positions: chunks r and 2 W - 1 - r of 2 W back to back, or "
        "the r-th of W equal parts if with_zigzag_splitting is False. C = num_groups group_dim; num_groups is a multiple of W; h "
        "(num_groups, taps <= S) and conv_bias (C,) are the same on all ranks. z = x2 v, rounded; y[c, t] = sum over tau <= t of "
        "h[c // group_dim, tau] z[c, t - tau] + conv_bias[c] z[c, t] in float32, rounded; the result x1 y, rounded, is returned for the "
        "rank's positions as (B, L, C). Roundings to the inputs' dtype."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    attainable=pc.Algorithm("four-step transforms, z and y exchanged", "Bailey, FFTs in External or Hierarchical Memory, 1990", _four_step),
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("drop_first_rank", "zeros at the first rank's positions", lambda c: _keeping(c, lambda place, own: place > 0)),
        pc.wrong(
            "layout_mistaken",
            "zigzag shards taken as contiguous, or the reverse",
            lambda c: c.by(_fp32, zigzag=not c.case["zigzag"]),
            lambda c: c.params.get("local", 2) % 2 == 0,
        ),
        pc.wrong(
            "circular", "a transform of S points: the end of the sequence runs into its beginning", lambda c: c.by(_fp32, circular=True)
        ),
        pc.wrong(
            "filter_of_a_shard",
            "filters cut to the length of a shard",
            _local_filter,
            lambda c: "taps_per_rank" in c.params and c.params.get("pattern") not in ("delay", "closed"),
        ),
        pc.wrong("bias_ignored", "without conv_bias", lambda c: c.by(_fp32, use_bias=False)),
        pc.wrong("inner_gate_ignored", "v convolved instead of x2 v", lambda c: c.by(_fp32, inner_gate=False)),
        pc.wrong("outer_gate_ignored", "not multiplied by x1", lambda c: c.by(_fp32, outer_gate=False)),
        pc.wrong("interleaved_channels", "filter c mod num_groups for channel c", _interleaved_channels, lambda c: c["group_dim"] > 1),
    ),
    alternative_solutions=pc.alternatives(
        rounded_between=_fp32, fp32_throughout=lambda case, inputs, rank: _fp32(case, inputs, rank, round_between=False)
    ),
    process_groups=group_layout,
    notes=(
        "The public benchmark's filters are constants up to 1023 that never decay: the convolution is a running sum, and even an exact "
        "evaluation misses some elements. Here filters are decaying noise of unit norm, with time constants of all lengths.",
        "Filters longer than the sequence, which wrap around in the public reference, are outside the interface.",
        "The public reference exchanges x1, x2 and v. Here only x2 v is, for the gates act on the positions that a rank has anyway.",
        "z and y need not be rounded: the error model covers both.",
    ),
    speed_note=(
        "The public one exchanges both gates, the values and the result, in four all-to-alls; this one applies gates where they are and "
        "needs two."
    ),
)
