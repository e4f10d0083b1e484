"""Problem 60, an inverse transform of a half spectrum with sharded rows, in two kernels.

The first transforms rows and stores every column where it belongs; the second transforms columns and leaves out imaginary parts. The bins
that are missing are conjugates and the field is real, so the others count twice, and no bin is mirrored. ``families/fourier.py`` says what
bounds them. Lengths that it can not cut go through cuFFT, with an exchange between."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.device.collectives.strided import exchange_axes
from peerlane.solutions.families.fourier import transform_planes


def solution(
    x: torch.Tensor, s: Sequence[int] | None, dim: Sequence[int], norm: str = "ortho", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    ranks, (d0, d1) = group_of(group), (axis % x.dim() for axis in dim)
    n0, n1 = (x.shape[d0] * ranks.world_size, 2 * (x.shape[d1] - 1)) if s is None else s
    out = transform_planes(ranks, x, (n0, n1), (d0, d1), norm, inverse=True)
    if out is None:
        weights = torch.full((n1 // 2 + 1,), 2.0, device=x.device)
        weights[:1].fill_(1.0)
        if n1 % 2 == 0:
            weights[-1:].fill_(1.0)
        rows = torch.fft.ifft(x * weights.view(-1, *[1] * (x.dim() - 1 - d1)), n=n1, dim=d1, norm=norm)
        out = torch.fft.ifft(exchange_axes(ranks, rows, joined=d0, cut=d1), n=n0, dim=d0, norm=norm).real.contiguous()
    return out
