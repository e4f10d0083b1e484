"""Descriptions of tensor maps: what is refused before the driver sees it, and what the emulator is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from peerlane.device.host.group import Group
from peerlane.device.host.tensor_map import TensorMapSpec, TensorPlace
from peerlane.errors import UsageError

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
def test_what_the_copy_unit_can_not_do_is_refused_with_its_reason(change: dict[str, object], message: str) -> None:
    usual = {"address": 1 << 20, "dtype": torch.bfloat16, "shape": (3, 40, 72), "strides": (3200, 80, 1), "box": (1, 64, 64)}
    TensorMapSpec(**usual)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        TensorMapSpec(**{**usual, **change})  # type: ignore[arg-type]


def test_without_a_swizzle_rows_may_be_longer() -> None:
    assert PLACE.map((64, 128), swizzled=False).box == (1, 64, 128)
