"""Memory and kernels of a group's operators, made before they are needed: behind ``ops.prepare``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from peerlane.device import Group, communicator
from peerlane.device.host.memory_report import MemoryReport
from peerlane.device.moe.dispatch import token_combine, token_dispatch
from peerlane.device.moe.exchange import LEAST_TOKENS
from peerlane.device.moe.layer import ExpertSizes, expert_layer
from peerlane.device.products import all_gather_gemm, gemm, gemm_all_gather, gemm_all_reduce, gemm_reduce_scatter, row_gather_gemm
from peerlane.device.products.capacity import LEAST_ROWS, capacity, with_room
from peerlane.errors import UsageError
from peerlane.ops.groups import GroupLike
from peerlane.ops.memory import kit_of, memory_report
from peerlane.settings import batch_invariant

PRODUCTS = ("gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm", "row_gather_gemm", "gemm_all_gather")
"""Operators whose memory grows with the number of tokens."""


@dataclass(frozen=True)
class ExpertLayers:
    """Mixtures of experts, for ``prepare``: those of all ranks, a token's slots, and the experts' inner width for ``gated_experts``."""

    num_experts: int
    top_k: int
    inner: int | None = None
    """None: dispatch and combine alone"""


def prepare(
    *,
    max_tokens: int,
    hidden: int | Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    group: GroupLike = None,
    products: Sequence[str] = PRODUCTS,
    experts: ExpertLayers | None = None,
) -> MemoryReport:
    """Collective: takes the memory and compiles the kernels for calls of up to ``max_tokens`` rows, and returns what the group takes.

    ``hidden``: the widths, for each of which each of ``products`` gets memory: columns of the whole result of ``gemm_all_reduce``,
    ``gemm_reduce_scatter`` and ``gemm_all_gather``, and depth of the whole left operand of ``all_gather_gemm`` and ``row_gather_gemm``.
    Right operands are taken to have as many columns, or a rank's share of them; others compile at their first call, as those of
    ``row_gather_gemm`` do. Later calls of these sizes take no memory, compile nothing and exchange nothing; nor do collectives that sum or
    move. ``experts``: ``dispatch``, ``combine`` and ``gated_experts`` of each width get memory too; hosts meet in ``gated_experts``.
    Raises UsageError for other names and sizes. On CPU ranks and in groups that the kit does not serve it does nothing."""
    if unknown := set(products) - set(PRODUCTS):
        raise UsageError(f"prepare got products={sorted(unknown)}: expected some of {', '.join(PRODUCTS)}")
    if max_tokens < 1 or dtype not in gemm.ELEMENT_TYPES:
        raise UsageError(f"prepare got max_tokens={max_tokens} and dtype={dtype}: expected 1 or more, and bfloat16 or float16")
    kit = kit_of(group)
    if kit is None:
        return memory_report(group)
    widths = [hidden] if isinstance(hidden, int) else hidden
    communicator(kit).load(dtype, max_tokens * max(widths) * dtype.itemsize)
    for width in widths:
        for product in products:
            _PREPARED[product](kit, max_tokens, width, dtype)
        if experts is not None:
            _experts(kit, max_tokens, width, dtype, experts)
    return kit.memory_report()


def plain() -> gemm.Epilogue:
    """Returns the epilogue of a product alone, in the process's mode."""
    return gemm.Epilogue(batch_invariant=batch_invariant())


def _kept(
    make: Any, memory_of: Any, kit: Group, rows: int, width: int, dtype: torch.dtype, *, of_rows: bool = False, of_columns: bool = False
) -> None:
    """Prepares a product whose result has a rank's share ``of_rows``, or to which a rank gives its share ``of_columns``."""
    parts = kit.world_size if of_rows else 1
    own, columns = -(-rows // parts), -(-width // kit.world_size) if of_columns else width
    with_room(memory_of, kit, own, columns, dtype)
    for size in _sizes(kit, own, columns, parts=parts):
        make(kit, parts * size, columns, dtype, plain())


def _all_gather_gemm(kit: Group, rows: int, width: int, dtype: torch.dtype) -> None:
    share = -(-width // kit.world_size)
    with_room(all_gather_gemm.memory_of, kit, rows, share, False)
    depth = share * kit.world_size
    for columns in {width, share}:
        b = gemm.empty_aligned(depth, columns, torch.empty(0, dtype=dtype, device=kit.device))
        for size in _sizes(kit, rows, columns, depth=depth):
            a, out = gemm.empty_aligned(size, share, b), gemm.empty_aligned(size, columns, b)
            all_gather_gemm.all_gather_gemm(kit, size, share, dtype, epilogue=plain(), n=columns).bind(a, b, out)


def _row_gather_gemm(kit: Group, rows: int, width: int, dtype: torch.dtype) -> None:
    """Memory alone: kernels follow from the right operands."""
    with_room(row_gather_gemm.memory_of, kit, -(-rows // kit.world_size), width)


def _experts(kit: Group, rows: int, width: int, dtype: torch.dtype, experts: ExpertLayers) -> None:
    own, rest = divmod(experts.num_experts, kit.world_size)
    if rest or not own:
        raise UsageError(f"prepare got {experts} on {kit.world_size} ranks: expected a multiple of the ranks")
    k, row_bytes = experts.top_k, width * dtype.itemsize
    rows = rows if experts.inner is None else max(LEAST_TOKENS, capacity(rows))
    token_dispatch(kit, rows, k, own, row_bytes).load()
    token_combine(kit, rows, k, own, row_bytes).load(dtype)
    if experts.inner is not None:
        token_dispatch(kit, rows, k, own, 2 * row_bytes).load()  # of gradients: tokens and theirs
        for doubling in range((rows // LEAST_TOKENS).bit_length()):
            expert_layer(kit, ExpertSizes(LEAST_TOKENS << doubling, k, width, experts.inner, own, 1, dtype, batch_invariant()))


_PREPARED: Mapping[str, Any] = {
    "gemm_all_reduce": partial(_kept, gemm_all_reduce.gemm_all_reduce, gemm_all_reduce.memory_of),
    "gemm_reduce_scatter": partial(_kept, gemm_reduce_scatter.gemm_reduce_scatter, gemm_reduce_scatter.memory_of, of_rows=True),
    "gemm_all_gather": partial(_kept, gemm_all_gather.gemm_all_gather, gemm_all_gather.memory_of, of_columns=True),
    "all_gather_gemm": _all_gather_gemm,
    "row_gather_gemm": _row_gather_gemm,
}


def _sizes(kit: Group, rows: int, columns: int, *, parts: int = 1, depth: int = gemm.TYPICAL_DEPTH) -> list[int]:
    """Returns one size, of up to ``rows``, for every capacity, and for every tiling that the model chooses: by whole tiles, whose rows are
    multiples of ``LEAST_ROWS``."""
    found, known = [], set[object]()
    for size in range(LEAST_ROWS, capacity(rows) + 1, LEAST_ROWS):
        tiling = gemm.choose_tiling(size, columns, depth, kit.sm_count, parts, gemm.tilings_for(kit))
        if {tiling, capacity(size)} - known:
            known |= {tiling, capacity(size)}
            found.append(size)
    return found
