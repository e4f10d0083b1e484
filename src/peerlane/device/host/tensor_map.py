"""Tensor maps: what the copy unit needs to know of a tensor in global memory, and of the box that one copy moves.

A map is a kernel argument of 128 bytes (``peerlane::TensorMap``). Maps are kept by their description, so that a call with tensors that were
seen before encodes none."""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch

from peerlane.device.host import cuda_bindings
from peerlane.errors import DeviceError, UsageError

SWIZZLED_ROW_BYTES = 128
MAX_BOX = 256
"""Elements of a box along any dimension."""

_DRIVER_TYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT32", torch.int32: "INT32"}


class TensorMap(ctypes.Structure):
    """Mirrors ``peerlane::TensorMap``. In a structure it belongs at a multiple of 64 bytes."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


@dataclass(frozen=True)
class TensorMapSpec:
    """A tensor and the box of one copy. Sizes are in elements, outermost dimension first, as in PyTorch; device code counts coordinates
    from the innermost one."""

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzled: bool = True
    """128-byte swizzle: the box's rows are at most 128 bytes, and its place in shared memory is 1024-byte aligned."""

    def __post_init__(self) -> None:
        size, rank = self.dtype.itemsize, len(self.shape)
        if self.dtype not in _DRIVER_TYPES:
            raise UsageError(
                f"a tensor map of {self.dtype}: expected one of {', '.join(map(str, _DRIVER_TYPES))}; view the tensor as one of them"
            )
        if not 1 <= rank <= 5 or len(self.strides) != rank or len(self.box) != rank:
            raise UsageError(
                f"a tensor map of shape {self.shape}, strides {self.strides} and box {self.box}: "
                "expected three tuples of one length, 1 to 5; add or fold dimensions"
            )
        if not 1 <= min(self.shape) <= max(self.shape) <= 1 << 32:
            raise UsageError(
                f"a tensor map of shape {self.shape}: expected 1 to 2^32 elements along each dimension; treat empty tensors apart"
            )
        if self.address % 16:
            raise UsageError(
                f"a tensor map of address {self.address:#x}: expected a multiple of 16 bytes; copy the tensor to memory of its own"
            )
        if self.strides[-1] != 1:
            raise UsageError(f"a tensor map of strides {self.strides}: expected an innermost stride of 1; call contiguous() first")
        if any(stride * size % 16 or not 0 <= stride * size < 1 << 40 for stride in self.strides[:-1]):
            raise UsageError(
                f"a tensor map of strides {self.strides} ({size} bytes an element): expected multiples of 16 bytes; "
                f"pad the rows to a multiple of {16 // size} elements"
            )
        if not 1 <= min(self.box) <= max(self.box) <= MAX_BOX:
            raise UsageError(
                f"a tensor map with the box {self.box}: expected 1 to {MAX_BOX} elements along each dimension; copy in several boxes"
            )
        row = self.box[-1] * size
        if row % 16 or (self.swizzled and row > SWIZZLED_ROW_BYTES):
            limit = f", at most {SWIZZLED_ROW_BYTES} under the swizzle" if self.swizzled else ""
            raise UsageError(f"a tensor map with the box {self.box}: its rows have {row} bytes; expected a multiple of 16{limit}")

    def encode(self) -> TensorMap:
        """The map as the GPU wants it. Needs the driver."""
        return _encode(self)

    def emulated(self) -> TensorMap:
        """The map as the emulator wants it: the description itself (``emulator/include/peerlane/ptx/ptx_tensor.cuh``)."""
        size, rank = self.dtype.itemsize, len(self.shape)
        extents = [*reversed(self.shape), *[1] * (5 - rank)]
        strides = [*(stride * size for stride in reversed(self.strides[:-1])), *[0] * (5 - rank)]
        boxes = [*reversed(self.box), *[1] * (5 - rank)]
        small = [*boxes, size, rank, SWIZZLED_ROW_BYTES if self.swizzled else 0]
        packed = [low | high << 32 for low, high in zip(small[::2], small[1::2], strict=True)]
        return TensorMap(words=(ctypes.c_uint64 * 16)(self.address, *extents, *strides[:4], *packed))


@dataclass(frozen=True)
class TensorPlace:
    """A tensor as it lies in memory: what maps are made from, on the GPU and for the emulator. ``group.place(tensor)`` gives one."""

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def split(self, parts: int) -> "TensorPlace":
        """The outermost dimension as ``parts`` equal ones; one part gives a tensor of two dimensions a third."""
        extent = self.shape[0] // parts
        return TensorPlace(self.address, self.dtype, (parts, extent, *self.shape[1:]), (extent * self.strides[0], *self.strides))

    def split_columns(self, parts: int) -> "TensorPlace":
        """The columns of a matrix in as many equal parts, the outermost dimension."""
        (rows, columns), (row_stride, stride) = self.shape, self.strides
        extent = columns // parts
        return TensorPlace(self.address, self.dtype, (parts, rows, extent), (extent * stride, row_stride, stride))

    def map(self, box: tuple[int, ...], *, swizzled: bool = True) -> TensorMapSpec:
        """``box`` has as many dimensions as the tensor, or fewer: then it is 1 along the outer ones."""
        full = (1,) * (len(self.shape) - len(box)) + box
        return TensorMapSpec(self.address, self.dtype, self.shape, self.strides, full, swizzled)


@lru_cache(maxsize=8192)
def _encode(spec: TensorMapSpec) -> TensorMap:
    driver = cuda_bindings.driver()
    size, rank = spec.dtype.itemsize, len(spec.shape)
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    status, encoded = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_DRIVER_TYPES[spec.dtype]}"),
        rank,
        spec.address,
        [wide(extent) for extent in reversed(spec.shape)],
        [wide(stride * size) for stride in reversed(spec.strides[:-1])],
        [narrow(extent) for extent in reversed(spec.box)],
        [narrow(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{'128B' if spec.swizzled else 'NONE'}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise DeviceError(
            f"the driver does not take the tensor map {spec}: {cuda_bindings.describe(status)}; "
            "compare with the rules of cuTensorMapEncodeTiled"
        )
    return TensorMap.from_buffer_copy(ctypes.string_at(encoded.getPtr(), ctypes.sizeof(TensorMap)))
