"""Problem 80, Sinkhorn-Knopp assignment: torch.compile of the passes between the all-reduces."""

from __future__ import annotations

import torch
import torch.distributed as dist


@torch.compile
def exponentials(teacher_output: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """E (b, K), and its sums over the rank's samples."""
    q = torch.exp(teacher_output.to(torch.float32) / temperature)
    return q, q.sum(0, keepdim=True)


@torch.compile
def balanced(q: torch.Tensor, popularity: torch.Tensor, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q after one iteration, and its sums over the rank's samples."""
    q = q / (popularity * popularity.shape[1])
    q = q / (q.sum(1, keepdim=True) * samples)
    return q, q.sum(0, keepdim=True)


def solution(
    teacher_output: torch.Tensor,
    teacher_temp: float,
    n_masked_patches_tensor: torch.Tensor,
    n_iterations: int = 3,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    samples = n_masked_patches_tensor.clone()
    dist.all_reduce(samples, group=group)
    # The sum of all E cancels in the first iteration.
    q, popularity = exponentials(teacher_output, teacher_temp)
    for _ in range(n_iterations):
        dist.all_reduce(popularity, group=group)
        q, popularity = balanced(q, popularity, samples)
    if n_iterations == 0:
        dist.all_reduce(popularity, group=group)
        q /= popularity.sum()
    return q.mul_(samples)
