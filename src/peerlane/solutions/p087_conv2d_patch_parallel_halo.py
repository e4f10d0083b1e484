"""Problem 87, a convolution over an image with sharded rows: border rows go to both neighbours in one launch, and cuDNN convolves.

The exchange does not overlap the convolution, which is by far the longer of the two. Bound by the convolution.
``peerlane/collectives/exchange.cuh`` has the exchange."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.device import communicator, group_of


def solution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int = 1,
    padding: int = 1,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    ranks = group_of(group)
    if padding:
        ours = torch.stack((x[:, :, :padding], x[:, :, x.shape[2] - padding :]))
        theirs, side = torch.zeros_like(ours), ours.nbytes // 2
        sends, receives = [(0, 0)] * ranks.world_size, [(0, 0)] * ranks.world_size
        if ranks.rank > 0:
            sends[ranks.rank - 1], receives[ranks.rank - 1] = (0, side), (0, side)
        if ranks.rank + 1 < ranks.world_size:
            sends[ranks.rank + 1], receives[ranks.rank + 1] = (side, side), (side, side)
        communicator(ranks).exchange(theirs, ours, sends, receives)
        x = torch.cat((theirs[0], x, theirs[1]), 2)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return F.conv2d(x, weight, bias, stride=stride, padding=(0, padding))
