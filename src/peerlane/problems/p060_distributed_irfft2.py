"""Problem 60: two-dimensional inverse real Fourier transform of a half spectrum whose rows are sharded across ranks."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import fft
from peerlane.problems.families.collective import FP32, group_layout, group_members
from peerlane.problems.families.fft import COMPLEX64, COMPLEX128


def reference(
    x: torch.Tensor, s: Sequence[int] | None, dim: Sequence[int], norm: str = "ortho", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    d0, d1 = (axis % x.dim() for axis in dim)
    n0, n1 = (x.shape[d0] * ranks, 2 * (x.shape[d1] - 1)) if s is None else s
    # The bins left out are conjugates, and the field is real: they count by doubling those that stand for them.
    rows = torch.fft.ifft(x * bin_weights(n1, x.device), n=n1, dim=d1, norm=norm)
    received = fft.exchange(torch.stack(rows.chunk(ranks, dim=d1)), group)
    field = torch.fft.ifft(torch.cat(received.unbind(), dim=d0), n=n0, dim=d0, norm=norm)
    result: torch.Tensor = field.real
    return result.contiguous()


def legacy_reference(
    x: torch.Tensor, s: Sequence[int] | None, dim: Sequence[int], norm: str = "ortho", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The public semantics: with s = None the field has as many rows as a rank's shard, and is made of the first shard's rows."""
    if s is not None:
        return reference(x, s, dim, norm, group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    d0, d1 = (axis % x.dim() for axis in dim)
    spectrum = torch.cat(fft.exchange(torch.stack([x] * ranks), group).unbind(), dim=d0)
    rows = extended(spectrum, d0, d1, 2 * (x.shape[d1] - 1)).narrow(d0, 0, x.shape[d0])
    field: torch.Tensor = torch.fft.ifft2(rows, dim=(d0, d1), norm=norm).real
    return field.chunk(ranks, dim=d1)[rank].contiguous()


def extended(spectrum: torch.Tensor, d0: int, d1: int, columns: int) -> torch.Tensor:
    """All n1 bins: G[k0, k1] = conj(S[(n0 - k0) mod n0, n1 - k1]) for those that are missing."""
    mirrored = spectrum.narrow(d1, 1, (columns - 1) // 2).flip(d0, d1).roll(1, d0).conj()
    return torch.cat((spectrum, mirrored), dim=d1)


def bin_weights(columns: int, device: torch.device) -> torch.Tensor:
    """(n1 // 2 + 1,): how many of the n1 bins of a real transform each bin of the half spectrum stands for."""
    weights = torch.full((columns // 2 + 1,), 2.0, device=device)
    weights[:1].fill_(1.0)  # an assignment would copy from the host, which a capture forbids
    if columns % 2 == 0:
        weights[-1:].fill_(1.0)
    return weights


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Independent N(0, 1) real and imaginary parts, each slice with a scale of its own: no symmetry anywhere. ``case["spectrum"]``:

    * ``steep``: parts fall with the third power of the wave number, to no less than 1e-3
    * ``single``: one bin of the first rank is not zero; its mirror image is the last rank's. It is odd, so that ranks' columns differ
    * ``constant_columns``: only the bins that stand for themselves, 0 and n1 / 2, are not zero, and have imaginary parts
    """
    members = group_members(case, rank)
    place, ranks, (d0, d1) = members.index(rank), len(members), fft.axes(case)
    n0, n1 = fft.sizes(case, ranks)
    local, bins, shared = n0 // ranks, n1 // 2 + 1, draw.shared
    row = torch.arange(place * local, (place + 1) * local, device=draw.device)
    column = torch.arange(bins, device=draw.device)
    match case.params.get("spectrum"):
        case None:
            factor = torch.ones((), device=draw.device)
        case "steep":
            number = torch.hypot(torch.minimum(row, n0 - row).to(FP32).unsqueeze(1), column.to(FP32))
            factor = (1.0 + number).pow(-3.0).clamp_(min=1e-3)
        case "single":
            at = shared.integers(1, local, (1,)), 2 * shared.integers(0, (bins - 1) // 2, (1,)) + 1
            factor = ((row == at[0]).unsqueeze(1) & (column == at[1])).to(FP32)
        case "constant_columns":
            factor = ((column == 0) | (2 * column == n1)).to(FP32)
        case other:
            raise ValueError(f"unknown spectrum {other!r}")
    factor = factor.expand(*case["lead"], local, bins).movedim((-2, -1), (d0, d1)) * fft.slice_scales(case, draw)
    x = torch.complex(*(draw.normal(fft.full_shape(case, local, bins), FP32) * factor for _ in range(2)))
    group = next((pc.GroupRef(name) for name in group_layout(case)), None)
    s = None if case.params.get("sizes_from_x") else (n0, n1)
    return (x, s, tuple(case["dim"]), case.params.get("norm", "ortho"), group)


def is_cropped(case: pc.Case) -> bool:
    """Whether the field is that of :func:`legacy_reference` without sizes."""
    return case.variant == "pkb" and bool(case.params.get("sizes_from_x"))


def inverse(spectrum: torch.Tensor, case: pc.Case, ranks: int, norm: str) -> torch.Tensor:
    """The whole real field of a whole half spectrum (n0 rows), in its precision: the real part of a sum over weighted bins.

    Spelt out, since torch.fft.irfft2 on a GPU need not ignore the imaginary parts that belong to no real field.
    """
    (d0, d1), (n0, n1) = fft.axes(case), fft.sizes(case, ranks)
    if is_cropped(case):
        field: torch.Tensor = torch.fft.ifft2(extended(spectrum, d0, d1, n1).narrow(d0, 0, n0 // ranks), dim=(d0, d1), norm=norm).real
    else:
        rows = torch.fft.ifft(spectrum * bin_weights(n1, spectrum.device), n=n1, dim=d1, norm=norm)
        field = torch.fft.ifft(rows, n=n0, dim=d0, norm=norm).real
    return field


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    (d0, d1), members = fft.axes(case), group_members(case, rank)
    field = inverse(fft.gathered(inputs, members, d0, COMPLEX128), case, len(members), inputs[rank][3])
    return fft.expected("field", case, field, d1, rank, FP32)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """What is received must determine the rank's columns of the field, and what is sent the rank's rows of the spectrum.

    Both are fewer bytes than known schedules move: a transpose after the pass along d1 sends twice as much, or, if it leaves out one row of
    every conjugate pair, a third more.
    """
    ranks, slices = len(group_members(case, rank)), math.prod(case["lead"])
    n0, n1 = fft.sizes(case, ranks)
    if is_cropped(case):  # some ranks' rows are needed by nobody
        return pc.Cost(hbm_bytes=slices * 4 * (n0 // ranks) * (n1 // ranks), egress_bytes=0.0, ingress_bytes=0.0)
    bins, points = n0 // ranks * (n1 // 2 + 1), n0 * n1 // ranks
    return pc.Cost(
        hbm_bytes=slices * (8 * bins + 4 * points),
        egress_bytes=slices * min(8 * bins, 4 * points * (ranks - 1)),
        ingress_bytes=slices * min(4 * points, 8 * bins * (ranks - 1)),
        flops={"fp32": fft.fft_flops(slices, n0, n1) / ranks},
    )


def _transposed(case: pc.Case, rank: int) -> pc.Steps:
    ranks, slices = len(group_members(case, rank)), math.prod(case["lead"])
    n0, n1 = fft.sizes(case, ranks)
    spectrum = slices * 8 * n0 / ranks * (n1 // 2 + 1)
    points = slices * 4 * n0 * n1 / ranks
    return fft.transposed_steps(spectrum, 2 * points, points, ranks, fft.fft_flops(slices, n0, n1) / ranks)


TRANSFORM = fft.Transform(lambda spectrum, case, args: inverse(spectrum, case, len(group_members(case, 0)), args[3]), 0, COMPLEX64, FP32)


def _columns(case: pc.Case) -> int:
    """n1"""
    return fft.sizes(case, len(group_members(case, 0)))[1]


def _by_extension(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    d0, d1 = fft.axes(case)
    if is_cropped(case):
        return TRANSFORM.answer(case, inputs, rank)
    whole = extended(TRANSFORM.whole(case, inputs, rank), d0, d1, _columns(case))
    return TRANSFORM.own(case, torch.fft.ifft2(whole, dim=(d0, d1), norm=inputs[rank][3]).real, rank)


def _rows_first(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Along d0 first; then every row is a half spectrum of its own, with real first and middle bins."""
    (d0, d1), norm = fft.axes(case), inputs[rank][3]
    if is_cropped(case):
        return TRANSFORM.answer(case, inputs, rank)
    n0, n1 = fft.sizes(case, len(group_members(case, rank)))
    half = torch.fft.ifft(TRANSFORM.whole(case, inputs, rank), n=n0, dim=d0, norm=norm)
    single = bin_weights(n1, half.device) == 1.0
    half = torch.where(single, torch.complex(half.real, torch.zeros_like(half.real)), half)
    return TRANSFORM.own(case, torch.fft.irfft(half, n=n1, dim=d1, norm=norm), rank)


def _weighted(weight: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[pc.AnswerContext], torch.Tensor]:
    """A wrong answer: other numbers of bins that each bin of the half spectrum stands for, from the right ones."""
    return TRANSFORM.of(lambda spectrum, c: spectrum * (weight(bins := bin_weights(_columns(c.case), spectrum.device)) / bins))


def _real_parts_only(spectrum: torch.Tensor, context: pc.AnswerContext) -> torch.Tensor:
    """Without the imaginary parts of the bins that stand for themselves: what one-dimensional real transforms along d1 do first."""
    single = bin_weights(_columns(context.case), spectrum.device) == 1.0
    return torch.where(single, torch.complex(spectrum.real, torch.zeros_like(spectrum.real)), spectrum)


def _mirrored_in_own_row(context: pc.AnswerContext) -> torch.Tensor:
    (d0, d1), spectrum = fft.axes(context.case), TRANSFORM.whole(context.case, context.inputs, context.rank)
    whole = torch.cat((spectrum, spectrum.narrow(d1, 1, (_columns(context.case) - 1) // 2).flip(d1).conj()), dim=d1)
    return TRANSFORM.own(context.case, torch.fft.ifft2(whole, dim=(d0, d1), norm=context.args[3]).real, context.rank)


def _second_pass_skipped(context: pc.AnswerContext) -> torch.Tensor:
    d1, n1 = fft.axes(context.case)[1], _columns(context.case)
    spectrum = TRANSFORM.whole(context.case, context.inputs, context.rank)
    rows = torch.fft.ifft(spectrum * bin_weights(n1, spectrum.device), n=n1, dim=d1, norm=context.args[3])
    return TRANSFORM.own(context.case, rows.real, context.rank)


def _small(label: str, **params: Any) -> pc.CaseSpec:
    return pc.case(label, COMPLEX64, **{"lead": (1, 2), "rows": (4, 0), "columns": (6, 0), "dim": (2, 3), **params})


PRESETS = (
    pc.preset(
        "small",
        "spectra without any symmetry; odd and even sizes, sizes left out, negative axes, all norms; single bins, single columns; a group",
        _small("plain"),
        _small("negative_axes_backward", dim=(-2, -1), norm="backward", spectrum="steep"),
        _small("forward", rows=(3, 0), columns=(10, 0), norm="forward"),
        _small("sizes_from_x", rows=(5, 0), sizes_from_x=True),
        _small("rows_first_axis", lead=(3,), dim=(0, -1)),
        _small("no_lead_huge", lead=(), dim=(0, 1), scale=1e30),
        _small("single_bin", spectrum="single"),
        _small("constant_columns", columns=(5, 0), spectrum="constant_columns"),
        _small("strided_group", group="strided", world_sizes=(4, 8)),
        _small("public_plain", variant="pkb"),
        _small("public_sizes_from_x", rows=(5, 0), sizes_from_x=True, variant="pkb"),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape, for white noise and for a steep spectrum",
        pc.case("white", COMPLEX64, lead=(2, 10), rows=720, columns=1440, dim=(-2, -1)),
        pc.case("steep", COMPLEX64, lead=(2, 10), rows=720, columns=1440, dim=(-2, -1), spectrum="steep"),
        pc.case("public_white", COMPLEX64, lead=(2, 10), rows=720, columns=1440, dim=(-2, -1), variant="pkb"),
    ),
    pc.preset(
        "production_fourcastnet_quarter_degree",
        "ERA5 at 0.25 degrees, 2 x 73 channels of 720 x 1440",
        pc.case("steep", COMPLEX64, lead=(2, 73), rows=720, columns=1440, dim=(-2, -1), spectrum="steep"),
    ),
    pc.preset(
        "production_fno_4096",
        "Fourier neural operator for Navier-Stokes on a 4096 x 4096 grid",
        pc.case("white", COMPLEX64, lead=(8,), rows=4096, columns=4096, dim=(1, 2)),
    ),
    pc.preset(
        "production_tenth_degree",
        "weather at 0.1 degrees, 26 channels of 1800 x 3600, not normalised",
        pc.case("steep", COMPLEX64, lead=(1, 26), rows=1800, columns=3600, dim=(2, 3), norm="forward", spectrum="steep"),
    ),
)

_CROPPED = "small/public_sizes_from_x"
_IN_HALF = ("small/plain", "small/forward", "small/sizes_from_x", "pkb/white")

PROBLEM = pc.Problem(
    id=60,
    slug="distributed_irfft2",
    title="Two-dimensional inverse real FFT of a row-sharded half spectrum",
    category="geometric_spatial",
    parallelism=("spatial",),
    origin="NVIDIA PhysicsNeMo: distributed inverse FFT of its AFNO and SFNO models",
    summary=(
        "x, complex64, is the rank's part of a half spectrum S of n0 rows (axis dim[0], sharded in rank order over the group, or the world "
        "if None) and n1 // 2 + 1 bins (axis dim[1], the last). irfft2(S, s, dim, norm) as torch.fft defines it comes back sharded along "
        "dim[1]: rank r returns all n0 rows and columns [r n1 / W, (r + 1) n1 / W), float32: the real part of the sum over all n1 bins, "
        "missing ones being conj(S[-k0 mod n0, n1 - k1]). S need not be the spectrum of a real field. s = (n0, n1) or None, for n0 all "
        "ranks' rows and n1 even. n0 and n1 are multiples of W. Axes may be negative."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=fft.fft_tolerance("field"),
    cost=cost,
    attainable=pc.Algorithm("passes of lines, transpose between", "a line of either axis fits in shared memory", _transposed),
    presets=PRESETS,
    known_wrong_answers=(
        TRANSFORM.other_norm,
        pc.wrong("conjugate", "the sign of the exponent", TRANSFORM.of(lambda spectrum, _: spectrum.conj())),
        pc.wrong("second_pass_skipped", "no transform along d0", _second_pass_skipped, pc.except_for(_CROPPED)),
        pc.wrong(
            "mirrored_in_own_row", "missing bins taken from the same row", _mirrored_in_own_row, pc.except_for("constant_columns", _CROPPED)
        ),
        pc.wrong("missing_bins_forgotten", "every bin counted once", _weighted(torch.ones_like), pc.except_for("constant_columns")),
        pc.wrong(
            "every_bin_doubled",
            "bins that stand for themselves counted twice",
            _weighted(lambda bins: torch.full_like(bins, 2.0)),
            pc.except_for("single_bin"),
        ),
        pc.wrong(
            "single_bins_made_real",
            "imaginary parts of bins 0 and n1 / 2 dropped before the pass along d0",
            TRANSFORM.of(_real_parts_only),
            pc.except_for("single_bin"),
        ),
        pc.wrong("sent_in_bfloat16", "the spectrum in bfloat16", TRANSFORM.of(lambda z, _: fft.through(torch.bfloat16, z))),
        pc.wrong("sent_in_half", "the spectrum in float16", TRANSFORM.of(lambda z, _: fft.through(torch.float16, z)), _IN_HALF),
    ),
    alternative_solutions=pc.alternatives(weighted_bins_fp32=TRANSFORM.answer, extended_fp32=_by_extension, rows_first_fp32=_rows_first),
    variant_references={"pkb": legacy_reference},
    process_groups=group_layout,
    notes=(
        "The public reference gathers the whole extended spectrum on every rank, eleven times the bytes that a good schedule moves on 8 "
        "ranks, only to reverse the order of rows. No mirror image is needed: its terms are the conjugates of those that are there, and "
        "the field is real. The reference here doubles bins instead.",
        "With s = None the public reference takes the local number of rows for n0 and crops the mirrored spectrum to it. Here None means "
        "what it means in torch.fft.irfft2; the variant pkb keeps the public meaning.",
        "The public benchmark transforms spectra of real fields only, so that bins 0 and n1 / 2 may be treated wrongly unnoticed. Here "
        "spectra have no symmetry.",
        "Spectra hold no NaN or infinity. As in the public benchmark, dim[1] is always the last axis.",
    ),
    speed_note=(
        "The public one gathers the whole mirrored spectrum on every rank before its all-to-all; this one doubles bins instead of "
        "mirroring them and needs the all-to-all alone."
    ),
)
