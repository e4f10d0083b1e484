"""What ring and Ulysses attention share: the plan of shards, memory and launches.

Also the host side of ``peerlane/attention/parcels.cuh``."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from peerlane.device.attention.forward import AttentionTiling, aligned, check_scale
from peerlane.device.host.declare import BoundKernel, DeclaredKernel, Reserved, layouts
from peerlane.device.host.group import Group
from peerlane.device.host.tensor_map import MAX_BOX, TensorMapSpec, TensorPlace
from peerlane.device.products.gemm import ELEMENT_BYTES

PARCEL_BYTES, PARCELS = 4096, 3  # of parcels.cuh
_PIECE_BYTES = 64 << 10
"""The bytes of keys and values that one signal covers, or a block of keys if that is more. A signal costs little, and pieces come early."""


def parcel_tokens(depth: int) -> int:
    """Tokens of one head that are copied at a time."""
    return min(MAX_BOX, PARCEL_BYTES // (depth * ELEMENT_BYTES))


def parcel_map(place: TensorPlace) -> TensorMapSpec:
    """The map of a tensor (batch, tokens, heads, depth) for copies of a parcel."""
    depth = place.shape[3]
    return place.map((parcel_tokens(depth), 1, depth), swizzled=False)


def piece_tokens(tiling: AttentionTiling, depths: int) -> int:
    """Tokens of a piece: some blocks of keys. ``depths``: of keys and values together."""
    return tiling.keys * max(1, _PIECE_BYTES // (tiling.keys * depths * ELEMENT_BYTES))


class ShardPlan(ABC):
    """What all ranks agree on before they reserve memory: sizes, tiles, and the part of each rank."""

    tiling: AttentionTiling
    dtype: torch.dtype

    @property
    @abstractmethod
    def result_shape(self) -> tuple[int, int, int, int]:
        """Returns the shape of a rank's result: (batch, tokens, heads, depth)."""

    @property
    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """How much each field in the arena holds."""

    @abstractmethod
    def grid(self, rank: int, sm_count: int) -> int:
        """Blocks: no more than there is work for."""

    @abstractmethod
    def fixed(self, reserved: Reserved) -> dict[str, Any]:
        """Fields that are the same in all calls: sizes, and maps of the arena."""

    @abstractmethod
    def maps(self, q: TensorPlace, k: TensorPlace, v: TensorPlace) -> dict[str, Any]:
        """Fields of one call: maps of its operands."""

    @abstractmethod
    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raise UsageError unless these are shards of the plan."""

    @property
    def shared_bytes(self) -> int:
        return self.tiling.shared_bytes + PARCELS * PARCEL_BYTES


class ShardAttention:
    """A kernel's memory for one plan, and its launches. Creating one is collective."""

    def __init__(self, kernel: DeclaredKernel, plan: ShardPlan, group: Group, timeout_s: float | None) -> None:
        self.group, self.plan = group, plan
        self.reserved = kernel.reserve(group, sizes=plan.sizes, timeout_s=timeout_s)
        self.out = self.reserved.tensor("result", plan.result_shape, plan.dtype)
        # Now: this compiles and loads, which is not possible while a graph is captured.
        self._bound = self.reserved.bind(
            grid=plan.grid(group.rank, group.sm_count),
            block=plan.tiling.threads,
            shared_bytes=plan.shared_bytes,
            defines={"SHAPE": plan.tiling.define(plan.dtype)},
            resident=True,
            **plan.fixed(self.reserved),
        )

    def close(self) -> None:
        """Give the memory back, once no rank's calls use it."""
        self.reserved.close()

    def launch(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> None:
        """Start the kernel on these shards; ``out`` holds the result."""
        launches = self.reserved.launches
        found = launches.find((scale, layouts(self.group, q, k, v)))
        if found is None:
            q, k, v = aligned(q), aligned(k), aligned(v)
            found = launches.get((scale, layouts(self.group, q, k, v)), lambda: self.bind(q, k, v, scale))
        found()

    def bind(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> BoundKernel:
        """The launch for these tensors. It holds their addresses, not them."""
        self.plan.check(q, k, v)
        maps = self.plan.maps(self.group.place(q), self.group.place(k), self.group.place(v))
        return self._bound.again(scale=check_scale(scale, q.shape[3]), **maps)


def transposed_place(address: int, dtype: torch.dtype, shape: Sequence[int]) -> TensorPlace:
    """Memory (batches, heads, tokens, depth) at ``address``, seen as ``shape``: (batches, tokens, heads, depth)."""
    batches, tokens, heads, depth = shape
    return TensorPlace(address, dtype, (batches, tokens, heads, depth), (heads * tokens * depth, depth, tokens * depth, 1))


def plain_place(address: int, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> TensorPlace:
    """Memory of this shape at ``address``."""
    _, tokens, heads, depth = shape
    return TensorPlace(address, dtype, shape, (tokens * heads * depth, heads * depth, depth, 1))
