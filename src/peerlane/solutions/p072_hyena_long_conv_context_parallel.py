"""Problem 72, a gated convolution over a sharded sequence: direct with a halo where filters are short, by transforms where they are long.

``families/gated_convolution.py`` convolves filters of up to 8192 taps in one kernel, which fetches only what filters reach;
``families/long_convolution.py`` exchanges positions for channels beside Fourier transforms."""

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.solutions.families.gated_convolution import MOST_TAPS, Shape, aligned, gated_convolution
from peerlane.solutions.families.long_convolution import Inputs, convolve_by_transforms


def solution(
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
    ranks, (batch, channels, local), pieces = group_of(group), v_seq.shape, 2 if with_zigzag_splitting else 1
    inputs = Inputs(aligned(x1_seq), aligned(x2_seq), aligned(v_seq), h.contiguous(), conv_bias.contiguous())
    if h.shape[-1] <= MOST_TAPS and h.dtype == v_seq.dtype:
        shape = Shape(batch, channels, local // pieces, pieces, num_groups, h.shape[-1], v_seq.dtype)
        if (convolve := gated_convolution(ranks, shape)) is not None:
            out = v_seq.new_empty((batch, local, channels))
            convolve(x1=inputs.x1, x2=inputs.x2, v=inputs.v, h=inputs.h, bias=inputs.bias, out=out)
            return out
    return convolve_by_transforms(ranks, inputs, with_zigzag_splitting)
