"""A17: every rank publishes the two ends that others may need; each picks its history out of all of them, and adds tap by tap."""

import torch
import torch.distributed as dist


def solution(x, weight, group=None):
    rank, world, taps = dist.get_rank(group), dist.get_world_size(group), weight.shape[-1]
    length, reach = x.shape[-1] // 2, weight.shape[-1] - 1
    chunks = x.view(*x.shape[:2], 2, length) if x.is_contiguous() else x.reshape(*x.shape[:2], 2, length)
    mine = chunks[..., length - reach :].contiguous()
    edges = [torch.empty_like(mine) for _ in range(world)]
    if mine.numel():
        dist.all_gather(edges, mine, group=group)

    def history(chunk):
        """The last samples of the chunk before."""
        before = chunk - 1
        if before < 0:
            return torch.zeros_like(mine[..., 0, :])
        return edges[before][..., 0, :] if before < world else edges[2 * world - 1 - before][..., 1, :]

    answers = []
    for place, chunk in enumerate((rank, 2 * world - 1 - rank)):
        extended = torch.cat([history(chunk), chunks[..., place, :]], -1).float()
        total = torch.zeros_like(extended[..., reach:])
        for tap in range(taps):
            total += weight[:, 0, tap, None].float() * extended[..., tap : tap + length]
        answers.append(total)
    return torch.cat(answers, -1).to(x.dtype)
