"""Collectives and fused kernels inside a node, by the kit. CPU ranks, which the kit does not serve, use torch.distributed."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.device import communicator, group_of
from peerlane.device.attention.forward import merge, wide_attention
from peerlane.device.attention.ring import attend_over_ranks
from peerlane.device.products import gemm
from peerlane.device.products.row_gather_gemm import row_gather_gemm

# PyTorch 2.13 renamed these two and warns about the old names.
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def scatter_sum(x: torch.Tensor, node: dist.ProcessGroup) -> torch.Tensor:
    """Returns this rank's part, of equal ones along axis 0, of the sum of all ranks' contiguous x."""
    part = x.new_empty((x.shape[0] // dist.get_world_size(node), *x.shape[1:]))
    if x.is_cuda:
        communicator(node).reduce_scatter_tensor(part, x)
    else:
        _scatter(part, x, group=node)
    return part


def gather(x: torch.Tensor, whole: torch.Tensor, node: dist.ProcessGroup) -> None:
    """Writes all ranks' contiguous x to ``whole``, in rank order."""
    if x.is_cuda:
        communicator(node).all_gather_into_tensor(whole, x)
    else:
        _gather(whole, x, group=node)


def exchange_rows(rows: torch.Tensor, sent: list[int], received: list[int], node: dist.ProcessGroup) -> torch.Tensor:
    """Returns the rows that all ranks have for this one, rank by rank; both lists are numbers of rows by rank."""
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    if rows.is_cuda:
        communicator(node).all_to_all_single(arrived, rows, received, sent)
    else:
        dist.all_to_all_single(arrived, rows, received, sent, group=node)
    return arrived


def multiply_gathered_rows(a: torch.Tensor, b: torch.Tensor, node: dist.ProcessGroup) -> torch.Tensor:
    """Returns the product of all ranks' rows a (m, k), in rank order, with this rank's b (k, n)."""
    if a.is_cuda and a.dtype in gemm.ELEMENT_TYPES and a.numel() and b.numel():
        (product,) = row_gather_gemm(group_of(node), a.shape[0], a.shape[1], a.dtype)(gemm.aligned(a), [b])
        return product
    whole = a.new_empty((dist.get_world_size(node) * a.shape[0], a.shape[1]))
    gather(a.contiguous(), whole, node)
    return whole @ b


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, node: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention (B, S, h, D) of this rank's queries to all ranks' keys, and logarithms (B, h, S) of sums of exponentials."""
    if q.is_cuda:
        out, logarithms = attend_over_ranks(q, k, v, scale=scale, causal=causal, group=node)
        return out.clone(), logarithms.clone()  # the next call overwrites them
    ranks, rank = dist.get_world_size(node), dist.get_rank(node)
    blocks = torch.stack((k, v))
    whole = blocks.new_empty((ranks * 2, *k.shape))
    gather(blocks, whole, node)
    seen = range(rank + 1 if causal else ranks)
    return merge([wide_attention(q, *whole[2 * i : 2 * i + 2], scale=scale, causal=causal and i == rank) for i in seen])


def join(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Returns attention to several sets of keys together, from what :func:`attend` returns for each."""
    return merge(parts)[0] if len(parts) > 1 else parts[0][0]
