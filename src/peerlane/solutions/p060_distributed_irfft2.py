"""Problem 60, an inverse transform of a half spectrum with sharded rows: cuFFT twice, and one kernel between.

The kernel stores every run where it belongs. The bins left out are conjugates and the field is real, so the others count twice, and no bin
is mirrored. Large spectra go in parts, so that a part is exchanged beside the transforms of others. Bound by HBM, which the transforms pass
several times, and by the links, which carry (W - 1) / W of the rows. ``peerlane/collectives/strided.cuh`` has the exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.solutions.families.parted_exchange import exchange_between


def solution(
    x: torch.Tensor, s: Sequence[int] | None, dim: Sequence[int], norm: str = "ortho", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    ranks, (d0, d1) = group_of(group), (axis % x.dim() - x.dim() for axis in dim)
    n0, n1 = (x.shape[d0] * ranks.world_size, 2 * (x.shape[d1] - 1)) if s is None else s
    weights = torch.full((n1 // 2 + 1,), 2.0, device=x.device)
    weights[:1].fill_(1.0)
    if n1 % 2 == 0:
        weights[-1:].fill_(1.0)
    weights = weights.view(-1, *[1] * (-1 - d1))

    def rows(part: torch.Tensor) -> torch.Tensor:
        field: torch.Tensor = torch.fft.ifft(part * weights, n=n1, dim=d1, norm=norm)
        return field

    def columns(part: torch.Tensor) -> torch.Tensor:
        field: torch.Tensor = torch.fft.ifft(part, n=n0, dim=d0, norm=norm).real
        return field

    nbytes = x.numel() // max(1, x.shape[d1]) * n1 * x.itemsize
    return exchange_between(ranks, x, rows, columns, joined=d0, cut=d1, nbytes=nbytes)
