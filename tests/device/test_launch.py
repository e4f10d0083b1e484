"""Shared memory of a launch, with a stand-in for the driver that refuses what the driver refuses, and descriptions of tensor maps."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peerlane.device import ArenaView, Cubin, Kernel
from peerlane.device.host import cuda_bindings
from peerlane.device.host.group import Group
from peerlane.device.host.tensor_map import TensorMapSpec, TensorPlace
from peerlane.errors import LaunchError, UsageError

UNASKED_BYTES, MOST_BYTES = 48 << 10, 227 << 10
"""Shared memory of a block on Hopper, static ones included: what it gets without asking, and the most that it can ask for."""


class SharedMemoryDriver:
    """One function with ``static_bytes`` of static shared memory; notes the dynamic ones of its launches."""

    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic",
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="static",
        CU_FUNC_ATTRIBUTE_NUM_REGS="registers",
        CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES="local",
    )
    OK, REFUSED = 0, 1

    def __init__(self, static_bytes: int) -> None:
        self.attributes = {"static": static_bytes, "dynamic": UNASKED_BYTES}
        self.allowed = UNASKED_BYTES - static_bytes
        self.launched: list[int] = []

    def cuModuleLoadData(self, image: bytes) -> tuple[int, bytes]:
        return self.OK, image

    def cuModuleGetFunction(self, module: object, name: bytes) -> tuple[int, str]:
        return self.OK, name.decode()

    def cuFuncLoad(self, function: str) -> tuple[int]:
        return (self.OK,)

    def cuFuncGetAttribute(self, attribute: str, function: str) -> tuple[int, int]:
        return self.OK, self.attributes.get(attribute, 0)

    def cuFuncSetAttribute(self, function: str, attribute: str, value: int) -> tuple[int]:
        if value + self.attributes["static"] > MOST_BYTES:
            return (self.REFUSED,)
        self.attributes[attribute] = self.allowed = value
        return (self.OK,)

    def cuLaunchKernel(self, function: str, *sizes: Any) -> tuple[int]:
        shared_bytes = sizes[6]
        if shared_bytes > self.allowed:
            return (self.REFUSED,)
        self.launched.append(shared_bytes)
        return (self.OK,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SharedMemoryDriver:
    stand_in = SharedMemoryDriver(static_bytes=96)
    monkeypatch.setattr(cuda_bindings, "driver", lambda: stand_in)
    monkeypatch.setattr(cuda_bindings, "describe", lambda status: "CUDA_ERROR_INVALID_VALUE")
    monkeypatch.setattr(torch, "empty", lambda size, device: None)  # which makes a context current
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)  # only in builds with CUDA
    return stand_in


@pytest.fixture
def cubin(tmp_path: Path) -> Cubin:
    (tmp_path / "kernel.cubin").write_bytes(b"machine code")
    return Cubin(tmp_path / "kernel.cubin", "sm_90a", compiled_here=False)


def test_dynamic_memory_is_granted_beside_static_memory(driver: SharedMemoryDriver, cubin: Cubin) -> None:
    sizes = [UNASKED_BYTES - 96, UNASKED_BYTES, UNASKED_BYTES + 1]
    for shared_bytes in sizes:
        Kernel(cubin, "k").bind(1, 32, [], shared_bytes=shared_bytes)(0)
    assert driver.launched == sizes


def test_a_second_kernel_takes_nothing_from_the_first(driver: SharedMemoryDriver, cubin: Cubin) -> None:
    large = Kernel(cubin, "k").bind(1, 32, [], shared_bytes=200 << 10)
    Kernel(cubin, "k").bind(1, 32, [], shared_bytes=100 << 10)(0)
    large(0)
    assert driver.launched == [100 << 10, 200 << 10]


def test_more_than_a_block_has_is_refused(driver: SharedMemoryDriver, cubin: Cubin) -> None:
    with pytest.raises(LaunchError, match=r"asks for 232448 bytes of dynamic shared memory beside 96 static ones.*232448 bytes for both"):
        Kernel(cubin, "k").bind(1, 32, [], shared_bytes=MOST_BYTES)


def test_a_launch_asks_its_arena_first(driver: SharedMemoryDriver, cubin: Cubin) -> None:
    view, asked = ArenaView(), list[str]()
    bound = Kernel(cubin, "k").bind(1, 32, [view])
    bound(0)
    view.before_launch = lambda: asked.append("may it stay?")
    bound(0)
    assert asked == ["may it stay?"] and len(driver.launched) == 2

    def refuse() -> None:
        raise UsageError("the arena is closed")

    view.before_launch = refuse
    with pytest.raises(UsageError, match="the arena is closed"):
        bound(0)
    assert len(driver.launched) == 2


PLACE = TensorPlace(1 << 20, torch.bfloat16, (3, 40, 72), (40 * 80, 80, 1))


def test_a_map_counts_dimensions_from_the_innermost_one() -> None:
    spec = PLACE.map((64, 64))
    words = list(spec.emulated().words)
    assert spec.box == (1, 64, 64)
    assert words[0] == 1 << 20
    assert words[1:6] == [72, 40, 3, 1, 1]
    assert words[6:10] == [160, 40 * 160, 0, 0]
    assert words[10:14] == [64 | 64 << 32, 1 | 1 << 32, 1 | 2 << 32, 3 | 128 << 32]


def test_a_tensor_is_described_as_it_lies_in_memory() -> None:
    tensor = torch.zeros(6, 16, dtype=torch.float16)[:, :9]
    place = Group.place(SimpleNamespace(address=torch.Tensor.data_ptr), tensor)  # type: ignore[arg-type]
    assert place == TensorPlace(tensor.data_ptr(), torch.float16, (6, 9), (16, 1))
    assert place.split(2) == TensorPlace(tensor.data_ptr(), torch.float16, (2, 3, 9), (48, 16, 1))
    assert place.split(1).shape == (1, 6, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.complex64}, r"complex64: expected one of .*bfloat16"),
        ({"address": (1 << 20) + 8}, r"0x100008: expected a multiple of 16"),
        ({"shape": (3, 0, 72)}, r"expected 1 to 2\^32"),
        ({"strides": (3200, 80, 2)}, r"innermost stride of 1; call contiguous"),
        ({"strides": (3200, 76, 1)}, r"expected multiples of 16 bytes; pad the rows to a multiple of 8"),
        ({"box": (1, 257, 64)}, r"expected 1 to 256"),
        ({"box": (1, 64, 128)}, r"have 256 bytes; expected a multiple of 16, at most 128"),
        ({"box": (64, 64)}, r"three tuples of one length"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_the_copy_unit_cannot_do_is_refused_with_a_reason(change: dict[str, object], message: str) -> None:
    usual = {"address": 1 << 20, "dtype": torch.bfloat16, "shape": (3, 40, 72), "strides": (3200, 80, 1), "box": (1, 64, 64)}
    TensorMapSpec(**usual)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        TensorMapSpec(**{**usual, **change})  # type: ignore[arg-type]


def test_without_a_swizzle_rows_may_be_longer() -> None:
    assert PLACE.map((64, 128), swizzled=False).box == (1, 64, 128)
