"""Problem 59, a two-dimensional transform of a field with sharded columns, in two kernels.

The first transforms columns and stores every bin where its row belongs; the second transforms rows and leaves out the conjugates.
``families/fourier.py`` says what bounds them. Lengths that it can not cut go through cuFFT, with an exchange between."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.device.collectives.strided import exchange_axes
from peerlane.solutions.families.fourier import transform_planes


def solution(
    x: torch.Tensor, s: Sequence[int | None], dim: Sequence[int], norm: str = "ortho", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    ranks, (d0, d1) = group_of(group), (axis % x.dim() for axis in dim)
    n0, n1 = s[0] or x.shape[d0], s[1] or x.shape[d1] * ranks.world_size
    out = transform_planes(ranks, x, (n0, n1), (d0, d1), norm, inverse=False)
    if out is None:
        columns = exchange_axes(ranks, torch.fft.fft(x, n=n0, dim=d0, norm=norm), joined=d1, cut=d0)
        out = torch.fft.fft(columns, n=n1, dim=d1, norm=norm).narrow(d1, 0, n1 // 2 + 1).contiguous()
    return out
