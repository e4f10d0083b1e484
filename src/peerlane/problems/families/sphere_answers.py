"""The convolution on the sphere: what each band of latitudes adds to a rank's output, and right and wrong ways to put it together.

See :mod:`peerlane.problems.p062_spherical_disco_convolution` for the arguments and the cases.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import FP32
from peerlane.problems.families.matmul import FP64
from peerlane.problems.families.sphere import grid_of, mixed, place_of, shares, span


def _band_sum(
    case: pc.Case,
    inputs: pc.Inputs,
    rank: int,
    polar: int,
    *,
    work: torch.dtype = FP64,
    absolute: bool = False,
    arcs: Sequence[int] | None = None,
    step: int | None = None,
    from_zero: bool = False,
    closed: bool = True,
) -> torch.Tensor:
    """What one band of latitudes adds to the rank's rows and longitudes of y, all channels: (q, K, h, B, C).

    ``absolute``: the sum of absolute values. The others make mistakes: only some azimuth ranks' longitudes, another step, output
    longitudes from 0 on, a circle that is cut at longitude 0.
    """
    (azimuths, polars), (azimuth, own_polar) = grid_of(case), place_of(case, rank)
    source = range(polar * azimuths, (polar + 1) * azimuths)
    h_span, q_span = span(case["nlat_out"], polars, own_polar), span(case["nlon_out"], azimuths, azimuth)
    nlon, batch, taps = case["nlon_in"], case["batch"], case["taps"]
    step = nlon // case["nlon_out"] if step is None else step
    circles = torch.cat([inputs[q][0] if arcs is None or i in arcs else torch.zeros_like(inputs[q][0]) for i, q in enumerate(source)], 3)
    found = []
    for owner, channels in zip(source, torch.split(circles, shares(case["channels"], azimuths), 1), strict=True):
        k, h, column = inputs[owner][1].indices()
        kept = (h >= h_span.start) & (h < h_span.stop)
        rows, values = k * len(h_span) + h - h_span.start, inputs[owner][1].values().to(work)
        filters = torch.sparse_coo_tensor(
            torch.stack([rows, column])[:, kept],
            values[kept].abs() if absolute else values[kept],
            (taps * len(h_span), channels.shape[2] * nlon),
            is_coalesced=True,
            check_invariants=False,
        )
        wide = channels.to(work).permute(2, 3, 0, 1).flatten(2)
        wide = wide.abs() if absolute else wide
        turned = []
        for q in range(len(q_span)) if from_zero else q_span:
            view = wide.roll(-q * step, 1)
            if not closed:
                view[:, nlon - q * step :] = 0.0
            turned.append(torch.sparse.mm(filters, view.flatten(0, 1)))
        found.append(torch.stack(turned).view(len(q_span), taps, len(h_span), batch, channels.shape[1]))
    return torch.cat(found, 4)


def total_of(case: pc.Case, inputs: pc.Inputs, rank: int, polars: Sequence[int] | None = None, **options: Any) -> torch.Tensor:
    """y from all bands, or from some."""
    bands = range(grid_of(case)[1]) if polars is None else polars
    total = _band_sum(case, inputs, rank, bands[0], **options)
    for polar in bands[1:]:
        total += _band_sum(case, inputs, rank, polar, **options)
    return total


def finished(inputs: pc.Inputs, rank: int, y: torch.Tensor, *, absolute: bool = False, biased: bool = True) -> torch.Tensor:
    """The output from y, in y's dtype."""
    _, _, weight, groups, _, _, _, _, bias = inputs[rank]
    weight, bias = weight.to(y.dtype), bias.to(y.dtype) if bias is not None and biased else None
    if absolute:
        weight, bias = weight.abs(), None if bias is None else bias.abs()
    return mixed(y, weight, bias, groups)


def bands_reversed(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    return finished(inputs, rank, total_of(case, inputs, rank, range(grid_of(case)[1])[::-1], work=FP32))


def mixed_first(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Channels mixed within every band, before the sum over bands."""
    bands = range(grid_of(case)[1])
    parts = [finished(inputs, rank, _band_sum(case, inputs, rank, polar, work=FP32), biased=polar == 0) for polar in bands]
    return torch.stack(parts).sum(0)


def wrong(**options: Any) -> Callable[[pc.AnswerContext], torch.Tensor]:
    """An answer with mistakes of :func:`_band_sum`."""
    return lambda c: finished(c.inputs, c.rank, total_of(c.case, c.inputs, c.rank, work=FP32, **options))


def own_arc(context: pc.AnswerContext) -> torch.Tensor:
    return wrong(arcs=[place_of(context.case, context.rank)[0]])(context)


def own_band(context: pc.AnswerContext) -> torch.Tensor:
    return wrong(polars=[place_of(context.case, context.rank)[1]])(context)


def last_band_dropped(context: pc.AnswerContext) -> torch.Tensor:
    return wrong(polars=range(grid_of(context.case)[1] - 1))(context)


def backwards(context: pc.AnswerContext) -> torch.Tensor:
    return wrong(step=-(context.case["nlon_in"] // context.case["nlon_out"]))(context)


def remixed(
    context: pc.AnswerContext,
    *,
    y: Callable[[torch.Tensor], torch.Tensor] = lambda y: y,
    weight: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight,
    biased: bool = True,
) -> torch.Tensor:
    """With y or the weight changed before channels are mixed."""
    args = context.args
    changed = {context.rank: (*args[:2], weight(args[2]), *args[3:])}
    total = total_of(context.case, context.inputs, context.rank, work=FP32)
    return finished([changed.get(q, item) for q, item in enumerate(context.inputs)], context.rank, y(total), biased=biased)


def channels_interleaved(context: pc.AnswerContext) -> torch.Tensor:
    """Groups of every n-th channel instead of consecutive ones."""
    groups = context.case["groups"]
    return remixed(context, y=lambda y: y.view(*y.shape[:4], -1, groups).transpose(4, 5).flatten(4))


def tensor_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to 10 bits of fraction."""
    return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(FP32)
