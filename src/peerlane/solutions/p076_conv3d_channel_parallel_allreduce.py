"""Problem 76, a three-dimensional convolution over sharded input channels: cuDNN for the rank's channels, and the kit's all-reduce.

The sum does not overlap the convolution. Bound by the convolution, 2 N k^3 / W operations an output of N input channels, and by the links,
which carry 2 (W - 1) / W of the result."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.device import communicator

Triple = int | tuple[int, int, int]


def solution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Triple,
    padding: Triple,
    dilation: Triple,
    groups: int = 1,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        result = F.conv3d(input, weight, None, stride, padding, dilation, groups)
    result = result.contiguous()
    communicator(group).all_reduce(result)
    return result if bias is None else result.add(bias.view(-1, 1, 1, 1))
