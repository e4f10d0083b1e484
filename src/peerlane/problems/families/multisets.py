"""Rows of labels as multisets: which occurrence of a label answers to which."""

import torch


def by_label(first: torch.Tensor, labels: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Every row of the tensors, all (rows, columns), in the order of its labels, otherwise unchanged."""
    order = labels.argsort(dim=1, stable=True)
    return tuple(x.gather(1, order) for x in (first, labels, *others))


def counterpart(labels: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For the i-th occurrence of a label in a sorted row: where its i-th occurrence in that row of ``others`` is, and if there is one."""
    first = torch.searchsorted(labels, labels)
    occurrence = torch.arange(labels.shape[1], device=labels.device) - first
    place = torch.searchsorted(others, labels) + occurrence
    inside = place.clamp(max=others.shape[1] - 1)
    return inside, (place < others.shape[1]) & (others.gather(1, inside) == labels)
