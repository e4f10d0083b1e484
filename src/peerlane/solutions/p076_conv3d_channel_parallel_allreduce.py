"""Problem 76, a three-dimensional convolution over sharded input channels: one kernel multiplies and adds the ranks' tiles up meanwhile.

It is the kit's product with an all-reduce, which reads windows of the image where they lie (``families/convolution.py``). One launch before
it puts channels innermost, one behind it turns the result. Bound by the convolution, 2 N k^3 / W operations an output of N input channels.
Where there are strides, padding or groups, or channels make no whole tiles, cuDNN convolves, and the kit's all-reduce follows."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.device import communicator, group_of
from peerlane.solutions.families.convolution import Images, channels_of, convolve_and_sum, points_of

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
    plain = all(value in (usual, (usual,) * 3) for value, usual in ((stride, 1), (padding, 0), (dilation, 1), (groups, 1)))
    batch, channels, planes, lines, columns = input.shape
    outputs, _, *taps = weight.shape
    images = Images(
        batch, planes, lines, columns, columns - taps[2] + 1, (taps[0], taps[1], taps[2]), channels, outputs, input.dtype
    )  # fmt: skip
    if plain and images.supported and planes * lines * columns % 2 == 0:
        ranks = group_of(group)
        return channels_of(ranks, images, convolve_and_sum(ranks, images, points_of(ranks, input), weight), bias)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        result = F.conv3d(input, weight, None, stride, padding, dilation, groups)
    result = result.contiguous()
    communicator(group).all_reduce(result)
    return result if bias is None else result.add(bias.view(-1, 1, 1, 1))
