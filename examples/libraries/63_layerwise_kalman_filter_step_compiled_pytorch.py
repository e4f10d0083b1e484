"""Problem 63, a step of the layer-wise Kalman filter: torch.compile makes one pass of each covariance block's update."""

from __future__ import annotations

import torch
import torch.distributed as dist


@torch.compile(dynamic=True)
def update(weight: torch.Tensor, p: torch.Tensor, gain: torch.Tensor, step: torch.Tensor, total: torch.Tensor, forgetting: float) -> None:
    """Updates a block's weights (n, 1) and covariance (n, n) in place."""
    weight.add_(gain * step)
    p.copy_((p - gain / total * gain.t()) / forgetting)


def gathered(row: torch.Tensor) -> torch.Tensor:
    """(W, n): every rank's row."""
    rows = row.new_empty(dist.get_world_size() * row.numel())
    dist.all_gather_into_tensor(rows, row)
    return rows.view(-1, row.numel())


def solution(
    H: list[torch.Tensor],
    error: torch.Tensor,
    weights: list[torch.Tensor],
    P: list[torch.Tensor],
    kalman_lambda: float,
    kalman_nue: float = 0.9987,
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    gains = [p @ h for p, h in zip(P, H, strict=True)]
    total = torch.cat(H).flatten().dot(torch.cat(gains).flatten()) + kalman_lambda * len(P)
    dist.all_reduce(total)
    step = error.to(total.dtype) / total
    for weight, p, gain in zip(weights, P, gains, strict=True):
        update(weight, p, gain, step, total, kalman_lambda)

    # Every rank's block sizes, then its blocks, padded to the longest.
    own = [weight.numel() for weight in weights]
    counts = gathered(torch.tensor([len(own), sum(own)], device=total.device)).tolist()
    most, longest = (max(column) for column in zip(*counts, strict=True))
    sizes = gathered(torch.tensor(own + [0] * (most - len(own)), device=total.device)).tolist()
    flat = total.new_zeros(longest)
    torch.cat([weight.flatten() for weight in weights], out=flat[: sum(own)])
    blocks = []
    for row, (count, filled), each in zip(gathered(flat), counts, sizes, strict=True):
        blocks += [block.unsqueeze(1) for block in row[:filled].split(each[:count])]
    return blocks, P, total.new_full((), kalman_nue * kalman_lambda + 1.0 - kalman_nue)
