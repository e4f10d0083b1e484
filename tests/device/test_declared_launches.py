"""Launches of declared kernels on a group that launches nothing: what is loaded once, kept, told apart and forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from peerlane.device.host.declare import U32, BoundLaunches, DeclaredKernel, Epochs, LocalKernel, Pointer, layouts
from peerlane.device.host.group import Group, Memory
from peerlane.device.host.tensor_map import TensorMap, TensorMapSpec
from peerlane.errors import UsageError


@dataclass
class Kernel:
    """A kernel whose launches write down what they would have passed."""

    name: str
    launched: list[bytes]

    def attributes(self) -> dict[str, int]:
        return {"registers": 0, "shared_bytes": 0}

    def bind(self, grid: Any, block: Any, args: Sequence[Any], *, shared_bytes: int = 0, cluster: int = 1) -> Any:
        return lambda: self.launched.append(bytes(args[-1]))


@dataclass
class Loaded:
    defines: list[Mapping[str, str | int]] = field(default_factory=list)
    launched: list[bytes] = field(default_factory=list)


class StubGroup(Group):
    """Two ranks without a device."""

    def __init__(self) -> None:
        super().__init__(0, 2, torch.device("cpu"))
        self.loaded = Loaded()

    def exchange(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def allocate(self, nbytes: int) -> Memory:
        raise NotImplementedError

    def kernel(
        self, source: str | Path, name: str, *, defines: Mapping[str, str | int], on_failure: Callable[[], None] | None = None
    ) -> Kernel:
        self.loaded.defines.append(defines)
        return Kernel(name, self.loaded.launched)

    def address(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def encode(self, spec: TensorMapSpec) -> TensorMap:
        return TensorMap()


def numbers(first: int, second: int) -> bytes:
    return first.to_bytes(4, "little") + second.to_bytes(4, "little")


PAIR = LocalKernel("pair", "// source", first=U32, second=U32)


def test_a_local_kernel_is_loaded_once_for_its_macros_alone() -> None:
    group = StubGroup()
    for kind in ("short", "long", "short"):
        PAIR.bind(group, grid=1, block=32, defines={"KIND": kind})
    assert group.loaded.defines == [{"KIND": "short"}, {"KIND": "long"}], "its cubin is the same in groups of any size"


def test_a_launch_made_again_leaves_the_first_one_as_it_is() -> None:
    group = StubGroup()
    first = PAIR.bind(group, grid=1, block=32, first=1, second=2)
    again = first.again(second=3)
    first.set(first=4)
    again()
    first()
    assert group.loaded.launched == [numbers(1, 3), numbers(4, 2)]


def test_a_local_kernel_has_nothing_in_an_arena() -> None:
    with pytest.raises(UsageError, match="declare it as a DeclaredKernel"):
        LocalKernel("epochs", "// source", epochs=Epochs()).bind(StubGroup(), grid=1, block=32)
    with pytest.raises(UsageError, match="runs on one rank alone"):
        PAIR.bind(StubGroup(), grid=1, block=32).addresses("first")


def test_kept_launches_are_bounded_and_bound_once() -> None:
    group, bound = StubGroup(), list[int]()
    launches: BoundLaunches[int] = BoundLaunches(most=2)
    reserved = PAIR.reserve(group)

    def get(key: int) -> None:
        def bind() -> Any:
            bound.append(key)
            return reserved.bind(grid=1, block=32, first=key, second=0)

        launches.get(key, bind)()

    for key in (1, 2, 1, 3, 2):
        get(key)
    assert bound == [1, 2, 3, 2] and launches.find(1) is None
    assert group.loaded.launched == [numbers(key, 0) for key in (1, 2, 1, 3, 2)]


def test_layouts_tell_tensors_at_one_address_apart() -> None:
    group, tensor = StubGroup(), torch.zeros(4, 4, dtype=torch.bfloat16)
    others = tensor.t(), tensor.view(2, 8), tensor.view(torch.float16)
    assert layouts(group, tensor) == layouts(group, tensor.view(4, 4))
    assert len({layouts(group, one) for one in (tensor, *others)}) == 4


def test_a_kernel_says_which_source_its_author_wrote() -> None:
    kernel = DeclaredKernel("copies", "#include <peerlane/comm.cuh>\n// body", x=Pointer())
    assert kernel.text == "#include <peerlane/comm.cuh>\n// body" and "struct Copies" in kernel.source
