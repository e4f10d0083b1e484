"""Host side of ``peerlane/products/scales.cuh``: scales of operands in e4m3, as kernels read them."""

import ctypes
from typing import Literal

import torch

from peerlane.device.host.group import Group

Scaling = Literal["none", "fp8", "fp8_promoted", "fp8_blocks"]
"""A product's operands: 16 bits without scales; e4m3 with a scale for each or for its rows, with sums in the matrix units, or promoted to
fp32 every 128 of k; e4m3 with scales of blocks, promoted."""

BLOCK = 128
"""k of a block of one scale; in a right operand, its columns too."""
PAIR = 2
"""Numbers in e4m3 that pass for an element of 16 bits."""
HEADER_ALIGNMENT = 128


class OperandScales(ctypes.Structure):
    """Mirrors ``peerlane::OperandScales``."""

    _fields_ = (("at", ctypes.c_uint64), *((name, ctypes.c_uint32) for name in ("outer_stride", "block_stride", "matrix_stride", "last")))


def scales_at(group: Group, scales: torch.Tensor) -> OperandScales:
    """Returns where scales of (matrices, rows or columns, blocks of k) lie. A dimension of one element counts for all."""
    matrix, outer, block = (stride if size > 1 else 0 for size, stride in zip(scales.shape, scales.stride(), strict=True))
    return OperandScales(group.address(scales), outer, block, matrix, scales.shape[1] - 1)


def header_bytes(scaling: Scaling, pairs: int) -> int:
    """Returns the bytes in front of a row of so many pairs of e4m3 that travels with its scales."""
    if scaling == "none":
        return 0
    count = -(-pairs * PAIR // BLOCK) if scaling == "fp8_blocks" else 1
    return -(-4 * count // HEADER_ALIGNMENT) * HEADER_ALIGNMENT
