"""The memory that a group's operators take on GPUs: sized once, told, and given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from peerlane.device import Group, communicator
from peerlane.device.host.memory_report import MemoryReport
from peerlane.device.products import all_gather_gemm, gemm, gemm_all_gather, gemm_all_reduce, gemm_reduce_scatter
from peerlane.device.products.capacity import LEAST_ROWS, capacity, with_room
from peerlane.errors import UsageError
from peerlane.ops.groups import GroupLike, group_name, kit_group

PRODUCTS = ("gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm", "gemm_all_gather")
"""Operators whose memory grows with the number of tokens."""


def prepare(
    *,
    max_tokens: int,
    hidden: int | Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    group: GroupLike = None,
    products: Sequence[str] = PRODUCTS,
) -> MemoryReport:
    """Collective: takes the memory for all calls of up to ``max_tokens`` rows now, and returns what the group takes.

    ``hidden``: the widths, of which each of ``products`` gets memory for each: columns of the whole result of ``gemm_all_reduce``,
    ``gemm_reduce_scatter`` and ``gemm_all_gather``, and depth of the whole left operand of ``all_gather_gemm``. Later calls of these sizes
    take no memory and exchange nothing. The collectives' memory does not depend on sizes. Raises UsageError for other names and sizes. On
    CPU ranks and in groups that the kit does not serve it does nothing."""
    if unknown := set(products) - set(PRODUCTS):
        raise UsageError(f"prepare got products={sorted(unknown)}: expected some of {', '.join(PRODUCTS)}")
    if max_tokens < 1 or dtype not in gemm.ELEMENT_TYPES:
        raise UsageError(f"prepare got max_tokens={max_tokens} and dtype={dtype}: expected 1 or more, and bfloat16 or float16")
    kit = _kit(group)
    if kit is None:
        return memory_report(group)
    communicator(kit)
    for width in [hidden] if isinstance(hidden, int) else hidden:
        for product in products:
            _prepare(kit, product, max_tokens, width, dtype)
    return kit.memory_report()


def memory_report(group: GroupLike = None) -> MemoryReport:
    """Returns the bytes that the group's kernels take on this rank, by kernel; print it for a table. All zero where the kit serves no
    operator. The first call for a group is collective."""
    kit = _kit(group)
    return MemoryReport.of("torch.distributed", [], 0, 0) if kit is None else kit.memory_report()


def close(group: GroupLike = None) -> None:
    """Collective: gives all memory of the group's operators back, once their kernels have ended. Graphs that hold them are not to be
    replayed. Later calls take memory anew. A group of the backend ``peerlane`` does the same when it is destroyed."""
    kit = _kit(group)
    if kit is None:
        return
    if kit.device.type == "cuda":
        torch.cuda.synchronize(kit.device)
    kit.exchange(None)
    kit.close()
    kit.free_closed()


def _kit(group: GroupLike) -> Group | None:
    on_gpu = torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu")
    return kit_group(on_gpu, group_name(group))


def _prepare(kit: Group, product: str, rows: int, width: int, dtype: torch.dtype) -> None:
    """Collective: memory and tilings of a product for up to so many rows."""
    shard = -(-width // kit.world_size)
    tiling_of: Callable[[int], object]
    if product == "all_gather_gemm":
        with_room(all_gather_gemm.memory_of, kit, rows, shard, False)
        return
    if product == "gemm_reduce_scatter":
        rows = -(-rows // kit.world_size)
        with_room(gemm_reduce_scatter.memory_of, kit, rows, width, dtype)
        tiling_of = lambda size: gemm_reduce_scatter.tiling_of(kit, size, width, dtype)  # noqa: E731
    elif product == "gemm_all_gather":
        with_room(gemm_all_gather.memory_of, kit, rows, shard)
        tiling_of = lambda size: gemm_all_gather.tiling_of(kit, size, shard, dtype)  # noqa: E731
    else:
        with_room(gemm_all_reduce.memory_of, kit, rows, width, dtype)
        tiling_of = lambda size: gemm_all_reduce.tiling_of(kit, size, width, dtype)  # noqa: E731
    size = LEAST_ROWS
    while size <= capacity(rows):
        tiling_of(size)
        size *= 2
