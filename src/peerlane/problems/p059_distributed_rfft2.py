"""Problem 59: two-dimensional real Fourier transform of a field whose columns are sharded across ranks."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import fft
from peerlane.problems.families.collective import FP32, FP64, group_layout, group_members
from peerlane.problems.families.fft import COMPLEX64

# Plane waves of a field with a steep spectrum, and the white noise beside them.
_WAVES, _NOISE = 8, 1e-3


def reference(
    x: torch.Tensor, s: Sequence[int | None], dim: Sequence[int], norm: str = "ortho", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    d0, d1 = (axis % x.dim() for axis in dim)
    first = torch.fft.fft(x, n=s[0], dim=d0, norm=norm)
    if first.shape[d0] % ranks:
        raise ValueError(f"the transform has {first.shape[d0]} rows on {ranks} ranks: expected a multiple of the number of ranks")
    received = fft.exchange(torch.stack(first.chunk(ranks, dim=d0)), group)
    spectrum = torch.fft.fft(torch.cat(received.unbind(), dim=d1), n=s[1], dim=d1, norm=norm)
    half: torch.Tensor = spectrum.narrow(d1, 0, spectrum.shape[d1] // 2 + 1)
    return half.contiguous()


def transform_sizes(case: pc.Case, ranks: int) -> tuple[int, int]:
    """(n0, n1): the transform's lengths."""
    rules = zip(case["s"], fft.sizes(case, ranks), strict=True)
    n0, n1 = (length if rule is None else fft.size(rule, ranks) for rule, length in rules)
    return n0, n1


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """White noise, different on every rank, each slice with a scale of its own. ``case["field"]``:

    * ``steep``: a few plane waves, from amplitude 1 down like the third power of the wave number, and noise of 1e-3
    * ``delta``: one element of the whole field is not zero, every time another; its row is odd, so that no two ranks' spectra are equal
    * ``constant``: one value per slice
    """
    members = group_members(case, rank)
    place, ranks, (d0, d1) = members.index(rank), len(members), fft.axes(case)
    rows, columns = fft.sizes(case, ranks)
    local = columns // ranks
    field, shared = case.params.get("field"), draw.shared
    x = draw.normal(fft.full_shape(case, rows, local), FP32)
    position = torch.arange(place * local, (place + 1) * local, device=draw.device)
    if field == "steep":
        slices = math.prod(case["lead"])
        waves = _waves(slices, rows, columns, shared)[:, :, place * local : (place + 1) * local]
        shape = [*case["lead"], rows, local]
        x = torch.movedim(waves.reshape(shape), (-2, -1), (d0, d1)) + _NOISE * x
    elif field == "delta":
        row, column = 2 * shared.integers(0, rows // 2, (1,)) + 1, shared.integers(0, columns, (1,))
        at = (torch.arange(rows, device=draw.device) == row).unsqueeze(1) & (position == column)
        x = torch.movedim(at.expand(*case["lead"], rows, local), (-2, -1), (d0, d1)).to(FP32)
    elif field == "constant":
        x = torch.ones_like(x)
    x = x * fft.slice_scales(case, draw)
    s = [None if rule is None else length for rule, length in zip(case["s"], transform_sizes(case, ranks), strict=True)]
    group = next((pc.GroupRef(name) for name in group_layout(case)), None)
    return (x, tuple(s), tuple(case["dim"]), case.params.get("norm", "ortho"), group)


def _waves(slices: int, rows: int, columns: int, shared: pc.Draw) -> torch.Tensor:
    """(slices, rows, columns) of sums of cos(a + b), a for the row and b for the column: cos a cos b - sin a sin b."""
    phases = []
    for length in (rows, columns):
        number = (
            shared.integers(0, length // 2, (slices, _WAVES, 1), FP32) * torch.arange(_WAVES, device=shared.device).view(-1, 1) / _WAVES
        )
        angle = 2 * math.pi * (number.round() / length)
        phases.append(angle * torch.arange(length, device=shared.device) + 2 * math.pi * shared.uniform((slices, _WAVES, 1), FP32))
    a, b = phases
    amplitude = torch.arange(1, _WAVES + 1, device=shared.device, dtype=FP32).pow(-3.0).view(-1, 1)
    left = torch.cat((amplitude * a.cos(), -amplitude * a.sin()), dim=1)
    return left.transpose(1, 2) @ torch.cat((b.cos(), b.sin()), dim=1)


def _spectrum(field: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    """All rows of the half spectrum of a whole field."""
    _, s, dim, norm, _ = args
    lengths = [field.shape[axis] if length is None else length for axis, length in zip(dim, s, strict=True)]
    spectrum: torch.Tensor = torch.fft.rfft2(field, s=lengths, dim=tuple(dim), norm=norm)
    return spectrum


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    d0, d1 = fft.axes(case)
    field = fft.gathered(inputs, group_members(case, rank), d1, FP64)
    return fft.expected("spectrum", case, _spectrum(field, inputs[rank]), d0, rank, COMPLEX64)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """What is received must determine the rank's spectrum as far as other ranks' columns do; what is sent, all of the rank's own field.

    Both are fewer bytes than known schedules move: the direct transpose sends twice as much, one that uses the symmetry of the first pass
    a third more.
    """
    members = group_members(case, rank)
    ranks, place, slices = len(members), members.index(rank), math.prod(case["lead"])
    (rows, columns), (n0, n1) = fft.sizes(case, ranks), transform_sizes(case, ranks)
    rows, used = min(rows, n0), min(columns, n1)
    local = columns // ranks
    own = min(max(used - place * local, 0), local)
    bins = n0 // ranks * (n1 // 2 + 1)
    return pc.Cost(
        hbm_bytes=slices * (4 * rows * own + 8 * bins),
        egress_bytes=slices * 4 * rows * own,
        ingress_bytes=slices * min(4 * rows * (used - own), 8 * bins),
        flops={"fp32": fft.fft_flops(slices, rows, used) / ranks},
    )


def _transposed(case: pc.Case, rank: int) -> pc.Steps:
    members, slices = group_members(case, rank), math.prod(case["lead"])
    ranks, (_, columns), (n0, n1) = len(members), fft.sizes(case, len(members)), transform_sizes(case, len(members))
    points, spectrum = slices * 4 * n0 * columns / ranks, slices * 8 * n0 / ranks * (n1 // 2 + 1)
    return fft.transposed_steps(points, 2 * points, spectrum, ranks, cost(case, rank).flops["fp32"])


TRANSFORM = fft.Transform(lambda field, case, args: _spectrum(field, args), 1, FP32, COMPLEX64)


def _columns_first(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """The half spectrum along d1 first, then the transform along d0."""
    (d0, d1), norm, field = fft.axes(case), inputs[rank][3], TRANSFORM.whole(case, inputs, rank)
    n0, n1 = transform_sizes(case, len(group_members(case, rank)))
    half = torch.fft.rfft(field, n=n1, dim=d1, norm=norm)
    return TRANSFORM.own(case, torch.fft.fft(half, n=n0, dim=d0, norm=norm), rank)


def _by_symmetry(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Rows up to n0 / 2 alone are transformed; the others are conjugates of theirs, columns backwards."""
    (d0, d1), norm, field = fft.axes(case), inputs[rank][3], TRANSFORM.whole(case, inputs, rank)
    n0, n1 = transform_sizes(case, len(group_members(case, rank)))
    half = torch.fft.rfft(field, n=n0, dim=d0, norm=norm)
    upper = torch.fft.fft(half, n=n1, dim=d1, norm=norm)
    mirrored = upper.narrow(d0, 1, (n0 - 1) // 2).flip(d0, d1).roll(1, d1).conj()
    whole = torch.cat((upper, mirrored), dim=d0)
    return TRANSFORM.own(case, whole.narrow(d1, 0, n1 // 2 + 1), rank)


def _in_two_passes(context: pc.AnswerContext, between: Callable[[torch.Tensor], torch.Tensor], *, second: bool = True) -> torch.Tensor:
    """Along d0, then ``between``, then along d1; without ``second`` the first pass is cut or padded to the number of bins."""
    case, norm, field = context.case, context.args[3], TRANSFORM.whole(context.case, context.inputs, context.rank)
    (d0, d1), (n0, n1) = fft.axes(case), transform_sizes(case, len(context.members))
    first = between(torch.fft.fft(field, n=n0, dim=d0, norm=norm))
    if second:
        first = torch.fft.fft(first, n=n1, dim=d1, norm=norm)
    bins, width = n1 // 2 + 1, first.shape[d1]
    kept = first.index_select(d1, torch.arange(bins, device=first.device) % width)
    return TRANSFORM.own(case, kept, context.rank)


def _from_the_end(field: torch.Tensor, context: pc.AnswerContext) -> torch.Tensor:
    """Padding in front of the field, or a crop that keeps its end."""
    for axis, length in zip(fft.axes(context.case), transform_sizes(context.case, len(context.members)), strict=True):
        field = torch.cat((torch.zeros_like(field), field), dim=axis)
        short = length - field.shape[axis]
        if short > 0:
            field = torch.cat((torch.zeros_like(field.narrow(axis, 0, 1)).expand_as(field.narrow(axis, 0, short)), field), dim=axis)
        field = field.narrow(axis, field.shape[axis] - length, length)
    return field


def _small(label: str, **params: Any) -> pc.CaseSpec:
    defaults = {"lead": (2,), "rows": (12, 0), "columns": (6, 0), "s": ((12, 0), (6, 0)), "dim": (1, 2)}
    return pc.case(label, COMPLEX64, **{**defaults, **params})


PRESETS = (
    pc.preset(
        "small",
        "padding and crops, odd lengths, None, negative and swapped axes, all norms; steep, delta, constant and huge fields; a group",
        _small("plain"),
        _small("negative_axes_backward", dim=(-2, -1), norm="backward", field="steep"),
        _small("padded_odd", s=((16, 0), (6, 5)), norm="forward"),
        _small("cropped", s=((10, 0), (6, -3))),
        _small("sizes_from_x", s=(None, None), columns=(5, 0)),
        _small("four_axes_steep", lead=(2, 3), rows=(8, 0), columns=(5, 0), s=((8, 0), None), dim=(2, 3), field="steep"),
        _small("swapped_axes", rows=(3, 0), s=(None, (6, 1)), dim=(2, 0)),
        _small("no_lead_huge", lead=(), dim=(0, 1), scale=1e30),
        _small("delta", field="delta"),
        _small("constant", field="constant"),
        _small("strided_group", group="strided", world_sizes=(4, 8)),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape, for white noise and for a steep spectrum",
        pc.case("white", COMPLEX64, lead=(16,), rows=1024, columns=1024, s=(1024, 1024), dim=(1, 2)),
        pc.case("steep", COMPLEX64, lead=(16,), rows=1024, columns=1024, s=(1024, 1024), dim=(1, 2), field="steep"),
    ),
    pc.preset(
        "production_fourcastnet_quarter_degree",
        "ERA5 at 0.25 degrees, 2 x 73 channels of 720 x 1440",
        pc.case("steep", COMPLEX64, lead=(2, 73), rows=720, columns=1440, s=(720, 1440), dim=(2, 3), field="steep"),
    ),
    pc.preset(
        "production_fno_4096",
        "Fourier neural operator for Navier-Stokes on a 4096 x 4096 grid",
        pc.case("white", COMPLEX64, lead=(8,), rows=4096, columns=4096, s=(4096, 4096), dim=(1, 2)),
    ),
    pc.preset(
        "production_tenth_degree",
        "weather at 0.1 degrees, 26 channels of 1800 x 3600, not normalised",
        pc.case("steep", COMPLEX64, lead=(1, 26), rows=1800, columns=3600, s=(1800, 3600), dim=(2, 3), norm="backward", field="steep"),
    ),
)

_CUT = ("small/padded_odd", "small/cropped", "small/swapped_axes")
_IN_HALF = ("small/plain", "small/sizes_from_x", "pkb/white", "pkb/steep")

PROBLEM = pc.Problem(
    id=59,
    slug="distributed_rfft2",
    title="Two-dimensional real FFT of a column-sharded field",
    category="geometric_spatial",
    parallelism=("spatial",),
    origin="NVIDIA PhysicsNeMo: distributed FFT of its AFNO and SFNO models",
    summary=(
        "x, float32, is the rank's part of a real field that is sharded in rank order over the group (the world if None) along axis "
        "dim[1]. Its half spectrum rfft2(field, s, dim, norm), as torch.fft defines it, dim[1] being the axis of n1 // 2 + 1 bins, comes "
        "back sharded along dim[0]: rank r returns rows [r n0 / W, (r + 1) n0 / W) and all bins, complex64. s = (n0, n1): the field is cut "
        "or zero-padded at its end; None stands for the whole field's size. n0 must be a multiple of W. Axes may be negative."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=fft.fft_tolerance("spectrum"),
    cost=cost,
    attainable=pc.Algorithm("passes of lines, transpose between", "a line of either axis fits in shared memory", _transposed),
    presets=PRESETS,
    known_wrong_answers=(
        TRANSFORM.other_norm,
        pc.wrong("conjugate", "the sign of the exponent", lambda c: c.answer.conj().resolve_conj(), pc.except_for("small/constant")),
        pc.wrong("second_pass_skipped", "no transform along d1", lambda c: _in_two_passes(c, lambda z: z, second=False)),
        pc.wrong("sent_in_bfloat16", "bfloat16 between the passes", lambda c: _in_two_passes(c, partial(fft.through, torch.bfloat16))),
        pc.wrong("sent_in_half", "float16 between the passes", lambda c: _in_two_passes(c, partial(fft.through, torch.float16)), _IN_HALF),
        pc.wrong("padded_or_cut_in_front", "the wrong end padded or cut", TRANSFORM.of(_from_the_end), _CUT),
    ),
    alternative_solutions=pc.alternatives(whole_fp32=TRANSFORM.answer, columns_first_fp32=_columns_first, by_symmetry_fp32=_by_symmetry),
    process_groups=group_layout,
    notes=(
        "The public benchmark's tolerance of one per cent accepts numbers that were sent in half precision. Here errors are held to what "
        "float32 transforms make.",
        "It transforms white noise of one square size with all arguments at hand. Here padding, crops, odd lengths, None, other axes and "
        "norms, and fields with a steep spectrum occur.",
        "Fields hold no NaN or infinity: which of the parts of a spoilt complex number is NaN depends on the algorithm.",
    ),
)
