"""Problem 59, a two-dimensional transform of a field with sharded columns: cuFFT twice, and one kernel between.

The reference cuts, stacks, exchanges and joins; the kernel stores every run where it belongs. Bound by HBM, which the transforms pass
several times, and by the links, which carry (W - 1) / W of the spectrum. ``device/include/peerlane/strided.cuh`` has the exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.device.collectives.strided import exchange_axes


def solution(
    x: torch.Tensor, s: Sequence[int | None], dim: Sequence[int], norm: str = "ortho", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    d0, d1 = (axis % x.dim() for axis in dim)
    rows = exchange_axes(group_of(group), torch.fft.fft(x, n=s[0], dim=d0, norm=norm), joined=d1, cut=d0)
    spectrum = torch.fft.fft(rows, n=s[1], dim=d1, norm=norm)
    half: torch.Tensor = spectrum.narrow(d1, 0, spectrum.shape[d1] // 2 + 1)
    return half.contiguous()
