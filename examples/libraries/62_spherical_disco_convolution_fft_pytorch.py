"""Problem 62, DISCO convolution on the sphere: a product for every frequency along the longitude, by cuFFT and cuBLAS.

The filters become dense: K x nlat_out x rows x nlon_in numbers, three times over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def shares(size: int, count: int) -> list[int]:
    """How many of ``size`` rows or longitudes each rank holds."""
    each = -(-size // count)
    each = size // count if each * (count - 1) >= size else each
    return [each] * (count - 1) + [size - each * (count - 1)]


def exchanged(blocks: Sequence[torch.Tensor], shapes: list[list[int]], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Sends the q-th block to rank q of the group; returns what they send here, of these shapes."""
    sent, sizes = torch.cat([block.flatten() for block in blocks]), [torch.Size(shape).numel() for shape in shapes]
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, [block.numel() for block in blocks], group=group)
    return [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]


def solution(
    x: torch.Tensor,
    psi: torch.Tensor,
    weight: torch.Tensor,
    groups: int,
    nlon_out: int,
    nlon_in: int,
    azimuth_group: dist.ProcessGroup | None = None,
    polar_group: dist.ProcessGroup | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    azimuths, polars = dist.get_world_size(azimuth_group), dist.get_world_size(polar_group)
    batch, channels, rows, _ = x.shape
    channel_shares = shares(channels, azimuths)
    own = channel_shares[dist.get_rank(azimuth_group)]
    # All longitudes of some of the channels.
    columns = [[batch, own, rows, count] for count in shares(nlon_in, azimuths)]
    circles = torch.cat(exchanged(x.split(channel_shares, 1), columns, azimuth_group), 3)

    waves = torch.fft.rfft(circles).flatten(0, 1).permute(2, 1, 0)  # (frequency, row, batch and channel)
    filters = torch.fft.rfft(psi.to_dense().view(-1, rows, nlon_in)).conj().permute(2, 0, 1)  # (frequency, filter and output row, row)
    y = torch.fft.irfft(filters @ waves, n=nlon_in, dim=0)[:: nlon_in // nlon_out]
    y = y.view(nlon_out, *psi.shape[:2], batch, own)

    # Other ranks' rows add to those of the output here, whose longitudes then go back to their ranks.
    row_shares, column_shares = shares(psi.shape[1], polars), shares(nlon_out, azimuths)
    shape = [nlon_out, psi.shape[0], row_shares[dist.get_rank(polar_group)], batch, own]
    y = torch.stack(exchanged(y.split(row_shares, 2), [shape] * polars, polar_group)).sum(0)
    mine = column_shares[dist.get_rank(azimuth_group)]
    y = torch.cat(exchanged(y.split(column_shares), [[mine, *shape[1:4], count] for count in channel_shares], azimuth_group), 4)
    output = torch.einsum("qkhbgc,gock->bgohq", y.unflatten(4, (groups, -1)), weight.unflatten(0, (groups, -1))).flatten(1, 2)
    return (output if bias is None else output + bias.view(-1, 1, 1)).contiguous()
