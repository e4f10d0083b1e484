"""Problem 77, attention over key ranges: one launch exchanges keys, one queries and one results, and a kernel attends for every range.

Strided exchanges put keys into the order of ranges and leave padding out, so nothing is copied before or behind them. The host reads where
ranges end while the exchanges run. Bound by the tensor cores. ``device/include/peerlane/strided.cuh`` and ``attention.cuh``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from peerlane.device import attention, group_of
from peerlane.device.strided import exchange_axes


def solution(
    query: torch.Tensor,
    key_value: torch.Tensor,
    k_ranges: torch.Tensor,
    cp_shuffle_num: int,
    clip_token_nums: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    ranks, key_heads = group_of(group), key_value.shape[1]
    ranges = k_ranges.to("cpu", non_blocking=True)
    copied = torch.cuda.current_stream().record_event() if k_ranges.is_cuda else None
    if key_heads < ranks.world_size:
        key_value = key_value.repeat_interleave(ranks.world_size // key_heads, 1)

    def by_range(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(cp_shuffle_num, -1, *x.shape[1:])

    keys = exchange_axes(ranks, by_range(key_value), joined=1, cut=2, kept=clip_token_nums or None)
    queries = exchange_axes(ranks, by_range(query), joined=1, cut=2)
    keys, out = keys.flatten(0, 1).unsqueeze(0), torch.empty_like(queries)
    if copied is not None:
        copied.synchronize()
    for i, (first, end) in enumerate(ranges.tolist()):
        k, v = keys[:, first:end].chunk(2, -1)
        attention.attend_into(out[i : i + 1], queries[i : i + 1], k, v, group=ranks)
    return exchange_axes(ranks, out, joined=2, cut=1).flatten(0, 1)
