"""Fused products of many sizes: how much memory they take, and how often it is asked for."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from device.pool_doubles import HostMemory, HostRegion, Meeting
from peerlane.device.host.group import Group, Small
from peerlane.device.host.group_cache import MOST_COLLECTIVE
from peerlane.device.host.memory_report import MemoryReport
from peerlane.device.host.pool import Lease, MemoryPool
from peerlane.device.host.tensor_map import TensorMap
from peerlane.device.products.all_gather_gemm import all_gather_gemm
from peerlane.device.products.gemm_reduce_scatter import gemm_reduce_scatter

WORLD, N, K, LARGEST_M = 4, 512, 512, 8192


class AddressesAlone(HostMemory):
    """Regions without memory: nothing runs."""

    def __init__(self, grows_in_place: bool) -> None:
        super().__init__(Meeting(), 0, grows_in_place)

    def exchange(self, value: Small) -> list[Small]:
        return [value] * WORLD

    def add(self, nbytes: int) -> Any:
        if self.grows_in_place and self.regions:
            self.regions[0].nbytes += nbytes  # type: ignore[misc]
            return self.regions[0]
        region: Any = SimpleNamespace(nbytes=nbytes, bases=[1 << 40] * WORLD)
        self.regions.append(region)
        return region

    def zero(self, region: HostRegion, offset: int, nbytes: int) -> None:
        pass


class LaunchesNothing(Group):
    """A group whose kernels are not run."""

    def __init__(self, grows_in_place: bool) -> None:
        super().__init__(1, WORLD, torch.device("cpu"))
        self.sm_count, self.launches = 132, 0
        self.pool = MemoryPool(AddressesAlone(grows_in_place))

    def exchange(self, value: Small) -> list[Small]:
        return [value] * WORLD

    def allocate(self, nbytes: int, name: str = "") -> Lease:
        return self.pool.lease(nbytes, name)

    def memory_report(self) -> MemoryReport:
        return self.pool.report()

    def kernel(self, source: Any, name: str, *, defines: Any, on_failure: Any = None) -> Any:
        def launch() -> None:
            self.launches += 1

        def bind(grid: Any, block: Any, args: Any, **rest: Any) -> Any:
            bound: Any = lambda: launch()  # noqa: E731
            bound.args = args
            return bound

        attributes = {"registers": 128, "local_bytes": 0, "shared_bytes": 0}
        return SimpleNamespace(name=name, attributes=lambda: attributes, bind=bind)

    def address(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def copy(self, target: int, source: torch.Tensor) -> None:
        pass

    def encode(self, spec: Any) -> TensorMap:
        return TensorMap()


@pytest.mark.parametrize("grows_in_place", [False, True])
def test_a_thousand_sizes_ask_for_memory_a_few_times(grows_in_place: bool) -> None:
    group, draw = LaunchesNothing(grows_in_place), random.Random(0)
    sizes = [WORLD * draw.randrange(1, LARGEST_M // WORLD + 1) for _ in range(1000)]
    operand = torch.zeros((LARGEST_M, K), dtype=torch.bfloat16)
    shard, own = operand[:, : K // WORLD].contiguous(), operand[:K, :N].contiguous()
    allocations = []
    for m in sizes:
        gemm_reduce_scatter(group, m, N, torch.bfloat16)(operand[:m], own)
        all_gather_gemm(group, m, K // WORLD, torch.bfloat16)(shard[:m], own)
        allocations.append(group.pool.allocations)
    report = group.memory_report()
    assert group.launches == 2 * len(sizes)
    largest_bytes = report.largest_lease_bytes
    assert report.leased_bytes <= MOST_COLLECTIVE * largest_bytes and report.reserved_bytes <= 2 * MOST_COLLECTIVE * largest_bytes
    assert set(report.by_kernel) == {"gemm_reduce_scatter", "all_gather_gemm"}
    assert allocations[-1] == allocations[len(sizes) // 2], "no memory is asked for any more"
    assert allocations[-1] <= 16
