"""Matrices in e4m3 with scales: made by torch anywhere, and by a kernel where rows are made on a GPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from peerlane.device.host.declare import U32, BoundKernel, LocalKernel, Pointer
from peerlane.device.host.element_types import element_type
from peerlane.device.host.group import Group, per_group
from peerlane.device.products.scales import BLOCK, HEADER_ALIGNMENT, PAIR, Scaling, header_bytes
from peerlane.errors import UsageError

E4M3 = torch.float8_e4m3fn
LARGEST, SMALLEST_SCALE = 448.0, 1e-12
ALIGNMENT = 16
By = Literal["tensor", "row", "block", "square"]


@dataclass(frozen=True)
class Quantised:
    """A matrix, or matrices of one shape, in e4m3 and its scales in float32: ``values * scales``, each scale for its part.

    ``products/fp8.py`` has a table of shapes."""

    values: torch.Tensor
    scales: torch.Tensor

    def t(self) -> "Quantised":
        """Returns the transpose, without a copy."""
        return Quantised(self.values.mT, self.scales.mT)

    def float(self) -> torch.Tensor:
        scales = self.scales
        for axis in (-2, -1):
            size, count = self.values.shape[axis], self.scales.shape[axis]
            if count not in (1, size):
                scales = scales.repeat_interleave(BLOCK, axis).narrow(axis, 0, size)
        return self.values.float() * scales


def by_rows(a: Quantised) -> Quantised:
    """Returns a matrix scaled by squares with the same scales for each row, as kernels read those of left operands; others as they are."""
    m, count = a.values.shape[-2], a.scales.shape[-2]
    return a if count in (1, m) else Quantised(a.values, a.scales.repeat_interleave(BLOCK, -2)[..., :m, :])


def _parts(rows: int, k: int, by: By) -> tuple[int, int]:
    """Returns the rows and the numbers of each that share a scale."""
    return {"tensor": (rows, k), "row": (1, k), "block": (1, BLOCK), "square": (BLOCK, BLOCK)}[by]


def scale_counts(shape: Sequence[int], by: By) -> tuple[int, ...]:
    """Returns the shape of the scales of rows (..., rows, k)."""
    *lead, rows, k = shape
    return (*lead, *(-(-size // part) for size, part in zip((rows, k), _parts(rows, k, by), strict=True)))


def require_rows(x: torch.Tensor, by: str) -> None:
    """Raises UsageError unless ``quantise`` takes x."""
    if x.dim() < 2 or x.shape[-1] % ALIGNMENT or 0 in x.shape or not x.is_floating_point() or by not in get_args(By):
        raise UsageError(
            f"e4m3 of {tuple(x.shape)} in {x.dtype} by {by!r}: expected floating-point rows (..., rows, k), k a multiple of {ALIGNMENT}, "
            f"no size of 0, and by one of {get_args(By)}; pad rows with zeros"
        )


def quantise(x: torch.Tensor, by: By) -> Quantised:
    """Returns rows (..., rows, k) in e4m3, each part by the scale that makes its largest number 448. Rows of two axes lie with their scales
    in front of them, so that ``row_gather`` sends both at once."""
    require_rows(x, by)
    *lead, rows, k = x.shape
    counts, parts = scale_counts(x.shape, by)[-2:], _parts(rows, k, by)
    padded = torch.nn.functional.pad(x.float(), (0, counts[1] * parts[1] - k, 0, counts[0] * parts[0] - rows))
    cut = padded.view(*lead, counts[0], parts[0], counts[1], parts[1])
    scales = (cut.abs().amax((-3, -1)) / LARGEST).clamp(min=SMALLEST_SCALE)
    values = (cut / scales[..., :, None, :, None]).clamp(-LARGEST, LARGEST).view(padded.shape)[..., :rows, :k].to(E4M3)
    if lead or by in ("tensor", "square"):
        return Quantised(values.contiguous(), scales)
    scaling: Scaling = "fp8_blocks" if by == "block" else "fp8"
    return opened(packed(Quantised(values, scales), scaling, torch.bfloat16), scaling, counts[1])


def quantise_parts(x: torch.Tensor, columns: int) -> Quantised:
    """Returns x (..., k) in e4m3, and scales (..., k / columns): each makes the largest number of so many columns 448."""
    parts = x.float().reshape(*x.shape[:-1], x.shape[-1] // columns, columns)
    scales = (parts.abs().amax(-1) / LARGEST).clamp(min=SMALLEST_SCALE)
    return Quantised((parts / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST).flatten(-2).to(E4M3), scales)


def packed(a: Quantised, scaling: Scaling, dtype: torch.dtype) -> torch.Tensor:
    """Returns rows with their scales in front of them, as pairs: the operand's memory if it lies so, else a copy."""
    (m, k), header = a.values.shape, header_bytes(scaling, a.values.shape[1] // PAIR)
    count = -(-k // BLOCK) if scaling == "fp8_blocks" else 1
    values, scales, stride = a.values, a.scales, header + k
    lies_so = (
        tuple(scales.shape) == (m, count)
        and values.untyped_storage().data_ptr() == scales.untyped_storage().data_ptr()
        and values.data_ptr() - scales.data_ptr() == header
        and (values.stride(), scales.stride(0)) == ((stride, 1), stride // 4)
        and (count == 1 or scales.stride(1) == 1)
        and scales.data_ptr() % ALIGNMENT == 0
    )
    if lies_so:
        bytes_of = values.view(torch.uint8)
        return bytes_of.as_strided((m, stride), (stride, 1), bytes_of.storage_offset() - header).view(dtype)
    rows = torch.empty((m, stride), dtype=torch.uint8, device=values.device)
    rows[:, header:].copy_(values.view(torch.uint8))
    rows[:, : 4 * count].view(torch.float32).copy_(scales.expand(m, count))
    return rows.view(dtype)


def opened(rows: torch.Tensor, scaling: Scaling, count: int) -> Quantised:
    """Returns what packed rows hold; ``count`` scales in front of each."""
    header = header_bytes(scaling, 0) if scaling != "fp8_blocks" else -(-4 * count // HEADER_ALIGNMENT) * HEADER_ALIGNMENT
    whole = rows.view(torch.uint8)
    return Quantised(whole[:, header:].view(E4M3), whole[:, : 4 * count].view(torch.float32))


# --- kernels: one pass over what a product, a norm or an activation leaves ---

ROWS_SOURCE = r"""
#include <peerlane/products/quantise.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(256) quantise_rows(const __grid_constant__ QuantiseRows args) {
    quantise_rows<X_TYPE, GATED, BLOCKS>(args);
}
"""
QUANTISE_ROWS = LocalKernel(
    "quantise_rows",
    ROWS_SOURCE,
    x=Pointer("const char*"),
    codes=Pointer(strided=True),
    scales=Pointer("float*", strided=True),
    **dict.fromkeys(("rows", "columns", "code_stride", "scale_stride"), U32),
)
SQUARES_SOURCE = r"""
#include <peerlane/products/quantise.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(square_threads) quantise_squares(const __grid_constant__ QuantiseSquares args) {
    quantise_squares<X_TYPE, TRANSPOSES>(args);
}
"""
QUANTISE_SQUARES = LocalKernel(
    "quantise_squares",
    SQUARES_SOURCE,
    x=Pointer("const char*"),
    codes=Pointer(),
    transposed=Pointer(),
    scales=Pointer("float*"),
    **dict.fromkeys(("matrices", "rows", "columns"), U32),
)
_BLOCKS_OF_SM, _THREADS = 8, 256


@per_group
def _rows_kernel(group: Group, dtype: torch.dtype, gated: bool, blocks: bool) -> BoundKernel:
    defines = {"X_TYPE": element_type(dtype), "GATED": int(gated), "BLOCKS": int(blocks)}
    return QUANTISE_ROWS.bind(group, grid=_BLOCKS_OF_SM * group.sm_count, block=min(_THREADS, group.max_threads), defines=defines)


@per_group
def _squares_kernel(group: Group, dtype: torch.dtype, transposes: bool) -> BoundKernel:
    defines = {"X_TYPE": element_type(dtype), "TRANSPOSES": int(transposes)}
    return QUANTISE_SQUARES.bind(group, grid=_BLOCKS_OF_SM * group.sm_count, block=_THREADS, defines=defines)


def quantise_rows(group: Group, x: torch.Tensor, by: Literal["row", "block"], *, gated: bool = False) -> Quantised:
    """Returns rows (m, k) as ``quantise`` does, by one kernel. With ``gated``, x (m, 2 k) is silu of its first half times its second one
    before."""
    require_rows(x[..., : x.shape[-1] // 2] if gated else x, by)
    (m, width), blocks = x.shape, by == "block"
    k = width // 2 if gated else width
    scaling: Scaling = "fp8_blocks" if blocks else "fp8"
    stride = header_bytes(scaling, k // PAIR) + k
    made = opened(torch.empty((m, stride), dtype=torch.uint8, device=x.device), scaling, -(-k // BLOCK) if blocks else 1)
    _rows_kernel(group, x.dtype, gated, blocks)(
        x=x.contiguous(), codes=made.values, scales=made.scales, rows=m, columns=k, code_stride=stride, scale_stride=stride // 4
    )
    return made


def quantise_squares(group: Group, x: torch.Tensor, *, transposes: bool = False) -> tuple[Quantised, Quantised | None]:
    """Returns (..., rows, k) by "square" as ``quantise`` does, and with ``transposes`` its transpose (..., k, rows), contiguous along rows:
    the same numbers, for the products of a gradient. One kernel. Rows are then a multiple of 16."""
    require_rows(x, "square")
    *lead, rows, k = x.shape
    if transposes and rows % ALIGNMENT:
        raise UsageError(f"a transposed copy of {tuple(x.shape)} in e4m3: expected rows of a multiple of {ALIGNMENT}; pad them with zeros")
    made = Quantised(
        torch.empty(x.shape, dtype=E4M3, device=x.device),
        torch.empty(scale_counts(x.shape, "square"), dtype=torch.float32, device=x.device),
    )
    turned = torch.empty((*lead, k, rows), dtype=E4M3, device=x.device) if transposes else None
    _squares_kernel(group, x.dtype, transposes)(
        x=x.contiguous(), codes=made.values, transposed=turned, scales=made.scales, matrices=math.prod(lead), rows=rows, columns=k
    )
    return made, None if turned is None else Quantised(turned, made.scales.mT)
