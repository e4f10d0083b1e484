"""A17: two-dimensional convolutions, one for every tap of the first axis, added up before the reduction."""

import torch.distributed as dist
import torch.nn.functional as F


def three(value):
    return (value,) * 3 if isinstance(value, int) else tuple(value)


def solution(input, weight, bias, stride, padding, dilation, groups=1, group=None):
    stride, padding, dilation = three(stride), three(padding), three(dilation)
    batch, taps = input.shape[0], weight.shape[2]
    padded = F.pad(input.float(), (0, 0, 0, 0, padding[0], padding[0]))
    frames, total = (padded.shape[2] - dilation[0] * (taps - 1) - 1) // stride[0] + 1, 0
    for tap in range(taps):
        first = tap * dilation[0]
        seen = padded[:, :, first : first + stride[0] * (frames - 1) + 1 : stride[0]]
        flat = seen.transpose(1, 2).flatten(0, 1)
        flat = F.conv2d(flat, weight[:, :, tap].float(), None, stride[1:], padding[1:], dilation[1:], groups)
        total = total + flat.unflatten(0, (batch, frames)).transpose(1, 2)
    total = total.contiguous()
    dist.all_reduce(total, group=group)
    return (total if bias is None else total + bias.float().view(-1, 1, 1, 1)).to(input.dtype)
