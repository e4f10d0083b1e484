"""Stands for torch's symmetric memory where there is no GPU: files that all ranks map, and gloo for barriers."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class Handle:
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    @property
    def buffer_ptrs(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors]

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        dist.barrier()

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        assert self._tensors[rank].dtype == dtype
        return self._tensors[rank][storage_offset : storage_offset + math.prod(sizes)].view(sizes)


class SharedMemory:
    """Has the functions of ``torch.distributed._symmetric_memory`` that the examples call."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._places: dict[int, int] = {}

    def empty(self, *size: int, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
        own = self._map(self._count, dist.get_rank(), math.prod(size), dtype)
        self._places[own.data_ptr()] = self._count
        self._count += 1
        return own.view(size)

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> Handle:
        dist.barrier()
        place = self._places[tensor.data_ptr()]
        ranks = range(dist.get_world_size())
        return Handle([self._map(place, rank, tensor.numel(), tensor.dtype) if rank != dist.get_rank() else tensor for rank in ranks])

    def _map(self, place: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_file(str(self._folder / f"{place}-{rank}"), shared=True, size=max(count, 1), dtype=dtype)
