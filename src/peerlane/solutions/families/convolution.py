"""Convolutions as products of the kit, for problems 76 and 87: with channels innermost, a tap reads the image that much further on.

A product's row is a point of the padded image, those where no window begins included. So all rows of a tap lie at one distance from the
result's, and no window is ever copied. A last launch leaves these rows out, turns the result and adds the bias."""

import ctypes
import math
from dataclasses import dataclass

import torch

from peerlane.device import U32, BoundKernel, Buffer, DeclaredKernel, Group, LocalKernel, Pointer, element_type, per_group
from peerlane.device.host.declare import Field, Map, structure
from peerlane.device.host.group import MAX_RANKS
from peerlane.device.host.tensor_maps import tensor_maps
from peerlane.device.products import gemm, gemm_all_reduce, owner_sum

TILE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr u32 pitch = warp_threads + 1;  // words of 64 elements in shared memory

// A matrix of elements of two bytes, and how many bytes a row has there and in the transposed one.
struct Turned {
    u32 rows, columns;
    u64 row_bytes, turned_bytes;
};

// 32 rows of 64 columns to the transposed matrix, by a warp, each column's number added. All loads are under way before the first is used.
template <class Number>
__device__ inline void turn_tile(const Turned& matrix, const char* from, char* to, u32 row, u32 column, const Number& number) {
    u32* const tile = reinterpret_cast<u32*>(ptx::dynamic_shared()) + threadIdx.x / warp_threads * warp_threads * pitch;
    const u32 lane = Warp{}.thread(), pair = column / 2 + lane, first = lane % 4 * row_lanes;
    u32 word[warp_threads];
#pragma unroll
    for (u32 r = 0; r < warp_threads; ++r) {
        const bool inside = row + r < matrix.rows && 2 * pair < matrix.columns;
        word[r] = inside ? reinterpret_cast<const u32*>(from + (row + r) * matrix.row_bytes)[pair] : 0;
    }
#pragma unroll
    for (u32 r = 0; r < warp_threads; ++r) tile[r * pitch + lane] = word[r];
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const u32 at = i * 8 + lane / 4;
        if (row + first >= matrix.rows || column + at >= matrix.columns) continue;
        Vec16 whole;
#pragma unroll
        for (u32 w = 0; w < 4; ++w) {
            const u32 low = tile[(first + 2 * w) * pitch + at / 2], high = tile[(first + 2 * w + 1) * pitch + at / 2];
            whole.word[w] = number(at % 2 == 0 ? (low & 0xffff) | high << 16 : low >> 16 | (high & 0xffff0000), column + at);
        }
        *reinterpret_cast<Vec16*>(to + (column + at) * matrix.turned_bytes + (row + first) * 2) = whole;
    }
    __syncwarp();
}
"""
TO_POINTS = (
    TILE
    + r"""
// Images with channels outermost to channels innermost.
extern "C" __global__ void __launch_bounds__(1024) turned_image(const __grid_constant__ TurnedImage args) {
    const Turned matrix{args.channels, args.points, u64(args.points) * 2, u64(args.channels) * 2};
    const u32 down = (args.channels + 31) / 32, tiles = down * ((args.points + 63) / 64);
    each_row(args.images * tiles, [&](u32 item) {
        const u64 image = u64(item / tiles) * args.points * args.channels * 2;
        const u32 row = item % tiles % down * 32, column = item % tiles / down * 64;
        turn_tile(matrix, args.x + image, args.y + image, row, column, [](u32 word, u32) { return word; });
    });
}
"""
)
TO_CHANNELS = (
    TILE
    + r"""
// Results to channels outermost, and the bias: of each line of `pitch` points the first `columns`, of an image's first planes and lines.
extern "C" __global__ void __launch_bounds__(1024) turned_result(const __grid_constant__ TurnedResult args) {
    const u32 points = args.planes * args.lines * args.columns;
    const Turned matrix{args.columns, args.channels, u64(args.channels) * 2, u64(points) * 2};
    const u32 across = (args.channels + 63) / 64, tiles = (args.columns + 31) / 32 * across;
    each_row(args.images * args.planes * args.lines * tiles, [&](u32 item) {
        const u32 line = item / tiles, plane = line / args.lines, image = plane / args.planes;
        const u64 from = (u64(image * args.all_planes + plane % args.planes) * args.all_lines + line % args.lines) * args.pitch;
        const u64 to = u64(image) * points * args.channels + u64(line - image * args.planes * args.lines) * args.columns;
        const u32 row = item % tiles / across * 32, column = item % across * 64;
        turn_tile(matrix, args.x + from * matrix.row_bytes, args.y + to * 2, row, column, [&](u32 word, u32 channel) {
            if (args.bias == nullptr) return word;
            const float bias = element_of<ELEMENT>(args.bias, channel);
            float value[2];
            ELEMENT::widen(word, value);
            value[0] += bias, value[1] += bias;
            return ELEMENT::narrow(value);
        });
    });
}
"""
)
TURNED_IMAGE = LocalKernel("turned_image", TO_POINTS, x=Pointer("const char*"), y=Pointer(), images=U32, channels=U32, points=U32)
TURNED_RESULT = LocalKernel(
    "turned_result", TO_CHANNELS, x=Pointer("const char*"), bias=Pointer("const char*"), y=Pointer(),
    **dict.fromkeys(("images", "channels", "planes", "lines", "columns", "all_planes", "all_lines", "pitch"), U32),
)  # fmt: skip
TILE_BYTES = 32 * 33 * 4
"""Shared memory of a warp that turns tiles."""


class Windows(ctypes.Structure):
    """Mirrors ``peerlane::Windows``."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in ("channels", "width", "height", "line", "plane"))


WINDOWS: dict[str, Field] = {"windows": structure("Windows", Windows)}
CONVOLUTION = LocalKernel("gemm", gemm.SOURCE, c=Map(), **WINDOWS, **gemm.FIELDS)
SUMMED = DeclaredKernel(
    "gemm_all_reduce", gemm_all_reduce.SOURCE, out=Map(MAX_RANKS), result=Buffer(align=1024), **WINDOWS, **owner_sum.FIELDS
)


@dataclass(frozen=True)
class Images:
    """``images`` of (planes, lines, pitch) points, padding included, and a kernel of (depth, height, width) taps, for ``outputs`` channels.
    Lines of the result have ``columns``. Windows may end in the padding before the next line."""

    images: int
    planes: int
    lines: int
    pitch: int
    columns: int
    taps: tuple[int, int, int]
    channels: int
    outputs: int
    dtype: torch.dtype

    @property
    def points(self) -> int:
        return self.images * self.planes * self.lines * self.pitch

    @property
    def rows(self) -> int:
        """Rows of the product: up to the last point where a window begins."""
        depth, height, _ = self.taps
        behind = ((depth - 1) * self.lines + height - 1) * self.pitch + self.pitch - self.columns
        return self.points - behind

    @property
    def k(self) -> int:
        return self.channels * math.prod(self.taps)

    @property
    def windows(self) -> Windows:
        return Windows(self.channels, self.taps[2], self.taps[1], self.pitch, self.pitch * self.lines)

    @property
    def supported(self) -> bool:
        """Tells whether there are kernels: all vectors are whole."""
        whole = self.channels % 64 == self.outputs % 8 == self.columns % 8 == 0
        return self.dtype in gemm.ELEMENT_TYPES and whole and self.rows > 0


def weights_of(weight: torch.Tensor) -> torch.Tensor:
    """Returns the weights (outputs, channels, ...taps) as the product's right operand lies, (outputs, k)."""
    return gemm.aligned(weight.movedim(1, -1).reshape(weight.shape[0], -1))


@per_group
def turned_image(group: Group, images: int, channels: int, points: int) -> BoundKernel:
    block = min(1024, group.max_threads)
    return TURNED_IMAGE.bind(
        group, grid=group.sm_count, block=block, shared_bytes=block // 32 * TILE_BYTES, images=images, channels=channels, points=points
    )


def whole_words(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy, contiguous from a multiple of four bytes on."""
    return x.contiguous() if x.data_ptr() % 4 == 0 else x.clone(memory_format=torch.contiguous_format)


def points_of(group: Group, x: torch.Tensor) -> torch.Tensor:
    """Returns images (B, C, ...) with channels innermost, (points, C). C is a multiple of 8, and an image has an even number of points."""
    images, channels, *size = x.shape
    y, count = x.new_empty((images * math.prod(size), channels)), math.prod(size)
    turned_image(group, images, channels, count)(x=whole_words(x), y=y)
    return y


@per_group
def turned_result(group: Group, dtype: torch.dtype) -> BoundKernel:
    block, defines = min(1024, group.max_threads), {"ELEMENT": element_type(dtype)}
    return TURNED_RESULT.bind(group, grid=group.sm_count, block=block, defines=defines, shared_bytes=block // 32 * TILE_BYTES)


def channels_of(group: Group, images: Images, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns the result (images, outputs, planes, lines, columns) of a product's rows."""
    (depth, height, _), size = images.taps, images
    planes, lines = size.planes - depth + 1, size.lines - height + 1
    y = rows.new_empty((size.images, size.outputs, planes, lines, size.columns))
    turned_result(group, rows.dtype)(
        x=rows, bias=None if bias is None else bias.contiguous(), y=y, images=size.images, channels=size.outputs, planes=planes,
        lines=lines, columns=size.columns, all_planes=size.planes, all_lines=size.lines, pitch=size.pitch,
    )  # fmt: skip
    return y


TILING: gemm.Tiling | None = None
"""Tiles of all products, for measurements; None: the model's choice."""


def tiling_of(group: Group, images: Images) -> gemm.Tiling:
    return TILING or gemm.choose_tiling(images.rows, images.outputs, images.k, group.sm_count, tilings=gemm.tilings_for(group))


@per_group
def product(group: Group, images: Images) -> BoundKernel:
    tiling = tiling_of(group, images)
    tiles = tiling.grouped(images.rows, images.outputs)
    return CONVOLUTION.bind(
        group, **tiling.shape(min(tiles.rows * tiles.columns * tiling.blocks, group.sm_count)),
        defines=tiling.defines(images.dtype, "k", "k"), tiles=tiles, n=images.outputs, k=images.k, windows=images.windows,
    )  # fmt: skip


def convolve(group: Group, images: Images, points: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the rows of the product of points (points, channels) and weights (outputs, channels, ...taps)."""
    maps, tiling, out = tensor_maps(group), tiling_of(group, images), points.new_empty((images.rows, images.outputs))
    a, b = maps(points, gemm.operand_box("k", tiling.block_rows)), maps(weights_of(weight), tiling.b_box("k"))
    product(group, images)(a=a, b=b, c=maps(out, (64, gemm.PANEL)))
    return out


@per_group
def summed_product(group: Group, images: Images) -> gemm_all_reduce.GemmAllReduce:
    rows, outputs, dtype, tiling = images.rows, images.outputs, images.dtype, tiling_of(group, images)
    memory = gemm_all_reduce.sum_memory(group, rows, outputs, dtype, [tiling], SUMMED)
    return gemm_all_reduce.GemmAllReduce(rows, outputs, dtype, group, tiling=tiling, memory=memory)


def convolve_and_sum(group: Group, images: Images, points: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same, summed over all ranks; valid until the next call."""
    summed = summed_product(group, images)
    maps, tiling = summed.maps, summed.plan.tiling
    a, b = maps(points, gemm.operand_box("k", tiling.block_rows)), maps(weights_of(weight), tiling.b_box("k"))
    summed.bound("k")(a=a, b=b, k=images.k, windows=images.windows)
    return summed.result
