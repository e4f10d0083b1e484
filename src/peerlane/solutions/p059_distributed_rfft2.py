"""Problem 59, a two-dimensional transform of a field with sharded columns: cuFFT twice, and one kernel between.

The reference cuts, stacks, exchanges and joins; the kernel stores every run where it belongs. Large fields go in parts, so that a part is
exchanged beside the transforms of others. Bound by HBM, which the transforms pass several times, and by the links, which carry (W - 1) / W
of the spectrum. ``peerlane/collectives/strided.cuh`` has the exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.solutions.families.parted_exchange import exchange_between


def solution(
    x: torch.Tensor, s: Sequence[int | None], dim: Sequence[int], norm: str = "ortho", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    d0, d1 = (axis % x.dim() - x.dim() for axis in dim)

    def columns(part: torch.Tensor) -> torch.Tensor:
        spectrum: torch.Tensor = torch.fft.fft(part, n=s[0], dim=d0, norm=norm)
        return spectrum

    def rows(part: torch.Tensor) -> torch.Tensor:
        spectrum: torch.Tensor = torch.fft.fft(part, n=s[1], dim=d1, norm=norm)
        return spectrum.narrow(d1, 0, spectrum.shape[d1] // 2 + 1)

    nbytes = x.numel() // max(1, x.shape[d0]) * (s[0] or x.shape[d0]) * torch.complex64.itemsize
    return exchange_between(group_of(group), x, columns, rows, joined=d1, cut=d0, nbytes=nbytes)
