"""A gated causal convolution with filters as long as the sequence: ranks exchange positions for channels around Fourier transforms.

    out = convolve_by_transforms(group, Inputs(x1, x2, v, h, bias), zigzag)

Gated values are pushed to the owners of channels, at their final place, zigzag included. Owners convolve some filters' rows at a
time and leave results where the values were. Each rank fetches its positions from there, gated and transposed.

A row of S values is transformed at S frequencies, a quarter of a step beside the usual ones. The product's transform then holds what
runs over the end as imaginary parts, so that a row needs no zeros behind it. A row is a matrix; its columns are transformed, then its
rows, which are multiplied with the filter's and transformed back in one kernel, then its columns again. Complex rows pass memory four
times. ``peerlane/tiles/fourier.cuh`` has the transform of a tile.

Channels go in up to eight parts. Exchanges run on a stream of their own beside the transforms of the part before. Bound by HBM and the
instructions of transforms; the links carry values and results once each. Memory: one buffer of all positions of the rank's channels,
the complex rows of one part, and those of the rank's filters.
"""

import math
from typing import NamedTuple

import torch

from peerlane.device import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, LocalKernel, Pointer, element_type, per_group
from peerlane.device.host.declare import Reserved
from peerlane.device.host.side_stream import side_stream
from peerlane.errors import UsageError
from peerlane.solutions.families.fourier import Tiling, roots, twiddles

EXCHANGE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int bytes = 4 / ELEMENT::lanes;
constexpr int at_once = 2;  // vectors of a thread that are on their way
constexpr u32 tile_channels = 64, tile_positions = 128;
__device__ u32 place_of(int rank, u32 piece) { return piece == 0 ? rank : 2 * WORLD_SIZE - 1 - rank; }

// Some channels' rows of all positions, (channel, batch, piece) each, of a rank's `own` ones. `rows` lie in the arena.
struct Place {
    const HyenaExchange& args;
    __device__ u64 of_owner(u32 channel, u32 b, u32 place) const {
        return (u64(args.first + channel) * args.batch + b) * (WORLD_SIZE * PIECES) + place;
    }
    __device__ u64 of_rank(int owner, u32 channel, u32 b, u32 piece) const {
        return (u64(b) * WORLD_SIZE * args.own + owner * args.own + args.first + channel) * PIECES + piece;
    }
};

// Gated values of this rank's positions, to the owners of channels.
__device__ void send(const Arena& arena, const HyenaExchange& args) {
    for (int k = 0; k < WORLD_SIZE; ++k) {
        const int q = rank_after<WORLD_SIZE>(arena.rank, k);
        each_row(args.count * args.batch * PIECES, [&](u32 item) {
            const u32 piece = item % PIECES, b = item / PIECES % args.batch, channel = item / PIECES / args.batch;
            const u64 from = Place{args}.of_rank(q, channel, b, piece);
            const u64 to = Place{args}.of_owner(channel, b, place_of(arena.rank, piece));
            const RowOf<ELEMENT> target(arena.peer(q, args.rows), to, args.length);
            constexpr u32 step = row_lanes * warp_threads;
            for (u32 first = Warp{}.thread() * row_lanes; first < args.length; first += at_once * step) {
                const auto place = [&](int i, u32& row, u32& column) { row = 0, column = first + i * step; };
                float value[at_once][row_lanes], gate[at_once][row_lanes];
                load_together<ELEMENT, at_once>(args.x + from * args.length * bytes, args.length, place, value);
                load_together<ELEMENT, at_once>(args.gate + from * args.length * bytes, args.length, place, gate);
#pragma unroll
                for (int i = 0; i < at_once; ++i) {
                    for (int e = 0; e < row_lanes; ++e) value[i][e] *= gate[i][e];
                    if (first + i * step < args.length) target.store(first + i * step, value[i]);
                }
            }
        });
    }
}

// Results of this rank's positions, from the owners of channels; a tile is turned over in shared memory.
__device__ void fetch(const Arena& arena, const HyenaExchange& args) {
    __shared__ float turned[tile_positions][tile_channels + 1];
    const u32 bundles = (args.count + tile_channels - 1) / tile_channels, spans = (args.length + tile_positions - 1) / tile_positions;
    for (u32 item = blockIdx.x; item < WORLD_SIZE * args.batch * PIECES * spans * bundles; item += gridDim.x) {
        const int q = rank_after<WORLD_SIZE>(arena.rank, item % WORLD_SIZE);
        const u32 bundle = item / WORLD_SIZE % bundles, span = item / WORLD_SIZE / bundles % spans;
        const u32 piece = item / WORLD_SIZE / bundles / spans % PIECES, b = item / WORLD_SIZE / bundles / spans / PIECES;
        __syncthreads();
        const u32 width = min(tile_channels, args.count - bundle * tile_channels);
        for (u32 first = threadIdx.x; first < tile_channels * tile_positions / row_lanes; first += at_once * blockDim.x) {
            const auto channel = [&](int i) { return (first + i * blockDim.x) / (tile_positions / row_lanes); };
            const auto at = [&](int i) { return (first + i * blockDim.x) % (tile_positions / row_lanes) * row_lanes; };
            const auto column = [&](int i) { return channel(i) < width ? span * tile_positions + at(i) : args.length; };
            float value[at_once][row_lanes], gate[at_once][row_lanes];
            const u64 theirs = Place{args}.of_owner(bundle * tile_channels, b, place_of(arena.rank, piece));
            const u64 ours = Place{args}.of_rank(q, bundle * tile_channels, b, piece);
            load_together<ELEMENT, at_once>(
                arena.peer(q, args.rows) + theirs * args.length * bytes, args.length,
                [&](int i, u32& row, u32& from) { row = channel(i) * args.batch * WORLD_SIZE * PIECES, from = column(i); }, value);
            load_together<ELEMENT, at_once>(
                args.gate + ours * args.length * bytes, args.length,
                [&](int i, u32& row, u32& from) { row = channel(i) * PIECES, from = column(i); }, gate);
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                if (column(i) >= args.length) continue;
                for (int e = 0; e < row_lanes; ++e) turned[at(i) + e][channel(i)] = value[i][e] * gate[i][e];
            }
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < tile_channels / row_lanes * tile_positions; i += blockDim.x) {
            const u32 c = i % (tile_channels / row_lanes) * row_lanes;
            const u32 at = i / (tile_channels / row_lanes), position = span * tile_positions + at;
            if (c >= width || position >= args.length) continue;
            const u64 row = (u64(b) * PIECES + piece) * args.length + position;
            const u32 channels = WORLD_SIZE * args.own, first = q * args.own + args.first + bundle * tile_channels;
            float value[row_lanes];
            for (int e = 0; e < row_lanes; ++e) value[e] = c + e < width ? turned[at][c + e] : 0.0f;
            // A row that ends with the tile, so that nothing behind it is written.
            RowOf<ELEMENT>(args.out + (row * channels + first) * bytes, 0, width).store(c, value);
        }
    }
}

extern "C" __global__ void __launch_bounds__(512)
    hyena_exchange(const __grid_constant__ Arena arena, const __grid_constant__ HyenaExchange args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    if (args.fetches) {
        if (blockIdx.x == 0) peers.signal_all(0, epoch);  // results of this part lie here
        peers.wait_all(0, epoch);
        fetch(arena, args);
        return;
    }
    if (args.first == 0) {  // what read the results of the call before has ended on all ranks
        if (blockIdx.x == 0) peers.acknowledge_all(0, epoch);
        peers.wait_all(0, epoch);
    }
    send(arena, args);
    peers.barrier(1 + blockIdx.x, epoch);
}
"""
HYENA_EXCHANGE = DeclaredKernel(
    "hyena_exchange", EXCHANGE, epochs=Epochs(), flags=Flags(), rows=Buffer(), x=Pointer("const char*"), gate=Pointer("const char*"),
    out=Pointer(), batch=U32, own=U32, length=U32, first=U32, count=U32, fetches=U32,
)  # fmt: skip

COLUMNS = r"""
#include <peerlane/rows.cuh>
#include <peerlane/tiles/fourier.cuh>
using namespace peerlane;

// Rows of values, as matrices of POINTS x SECOND, to rows of numbers whose columns are transformed and turned; or such numbers back.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) hyena_columns(const __grid_constant__ HyenaColumns args) {
    constexpr u32 bundles = (SECOND + LINES - 1) / LINES, bytes = 4 / ELEMENT::lanes;
    const FourierTile<POINTS, LINES, false, THREADS> tile(ptx::dynamic_shared());
    const u64 row = blockIdx.x / bundles;
    const u32 first = blockIdx.x % bundles * LINES;
    char* const values = args.values + row * args.length * bytes;
    Complex* const numbers = args.numbers + row * (POINTS * SECOND);
    // e^(-2 pi i index / (4 POINTS SECOND)).
    const auto root = [&](u32 index) { return args.turns[index / FINE] * args.turns[COARSE + index % FINE]; };
    // use(i, place, turn) for R places of a column: its point k is turned by column (k + 1 / 4) of POINTS SECOND.
    const auto each_turned = [&](int count, u32 line, u32 point, u32 step, const auto& use) {
        const u32 column = first + line;
        if (column >= SECOND) return;
        Complex turn = root(column * (4 * point + 1));
        const Complex next = root(column * 4 * step);
#pragma unroll
        for (int i = 0; i < count; ++i) {
            use(i, (point + i * step) * SECOND + column, turn);
            turn = turn * next;
        }
    };
    // use(i, place, turn) for R places of a column that are inside: its value k is turned by k / 4 of POINTS.
    const auto each_value = [&](int count, u32 line, u32 point, u32 step, const auto& use) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const u32 at = (point + i * step) * SECOND + first + line;
            if (first + line < SECOND && at < args.length) use(i, at, args.quarters[point + i * step]);
        }
    };
    if constexpr (BACK) {
        const float bias = element_of<ELEMENT>(args.bias, args.first + row / args.batch);
        tile.transform<LINES, 1, RADICES>(
            args.twiddles,
            [&]<int R>(u32 line, u32 point, u32 step, Complex(&x)[R]) {
                each_turned(R, line, point, step, [&](int i, u32 at, Complex turn) { x[i] = numbers[at] * turn; });
            },
            [&]<int R>(u32 line, u32 point, u32 step, const Complex(&x)[R]) {
                each_value(R, line, point, step, [&](int i, u32 at, Complex turn) {
                    set_element<ELEMENT>(values, at, (x[i] * turn).x + bias * element_of<ELEMENT>(values, at));
                });
            });
    } else {
        tile.transform<LINES, 1, RADICES>(
            args.twiddles,
            [&]<int R>(u32 line, u32 point, u32 step, Complex(&x)[R]) {
#pragma unroll
                for (int i = 0; i < R; ++i) x[i] = {};
                each_value(R, line, point, step, [&](int i, u32 at, Complex turn) { x[i] = element_of<ELEMENT>(values, at) * turn; });
            },
            [&]<int R>(u32 line, u32 point, u32 step, const Complex(&x)[R]) {
                each_turned(R, line, point, step, [&](int i, u32 at, Complex turn) { numbers[at] = x[i] * turn; });
            });
    }
}
"""
HYENA_COLUMNS = LocalKernel(
    "hyena_columns", COLUMNS, values=Pointer(), numbers=Pointer("Complex*"), bias=Pointer("const char*"),
    twiddles=Pointer("const Complex*"), quarters=Pointer("const Complex*"), turns=Pointer("const Complex*"), length=U32, first=U32,
    batch=U32,
)  # fmt: skip

PRODUCT = r"""
#include <peerlane/tiles/fourier.cuh>
using namespace peerlane;

// Row `k` of LINES matrices is transformed, multiplied with that of their filter and transformed back, all conjugated.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) hyena_product(const __grid_constant__ HyenaProduct args) {
    constexpr u64 size = u64(FIRST) * POINTS;
    const FourierTile<POINTS, LINES + 1, true, THREADS> tile(ptx::dynamic_shared());
    const u32 bundles = (args.rows + LINES - 1) / LINES, first = blockIdx.x % bundles * LINES;
    const u32 k = blockIdx.x / bundles % FIRST, filter = blockIdx.x / bundles / FIRST;
    Complex* const numbers = args.numbers + (u64(filter) * args.rows + first) * size + k * POINTS;
    const Complex* const taps = args.filters + filter * size + k * POINTS;
    tile.transform<LINES + 1, 1, RADICES>(
        args.twiddles,
        [&]<int R>(u32 line, u32 point, u32 step, Complex(&x)[R]) {
            const Complex* const from = line < LINES ? numbers + line * size : taps;
#pragma unroll
            for (int i = 0; i < R; ++i) x[i] = line == LINES || first + line < args.rows ? from[point + i * step] : Complex{};
        },
        tile.into());
    __syncthreads();
    tile.transform<LINES, 1, RADICES>(
        args.twiddles,
        [&]<int R>(u32 line, u32 point, u32 step, Complex(&x)[R]) {
#pragma unroll
            for (int i = 0; i < R; ++i) {
                const u32 p = point + i * step;
                x[i] = 1.0f / size * conjugate(tile.at(line, p) * tile.at(LINES, p));
            }
        },
        [&]<int R>(u32 line, u32 point, u32 step, const Complex(&x)[R]) {
            if (first + line >= args.rows) return;
#pragma unroll
            for (int i = 0; i < R; ++i) numbers[line * size + point + i * step] = x[i];
        });
}
"""
HYENA_PRODUCT = LocalKernel(
    "hyena_product", PRODUCT, numbers=Pointer("Complex*"), filters=Pointer("const Complex*"), twiddles=Pointer("const Complex*"), rows=U32,
)  # fmt: skip

BLOCKS_BESIDE = 48
"""Blocks of an exchange that runs beside transforms."""


class Inputs(NamedTuple):
    """The problem's tensors, contiguous."""

    x1: torch.Tensor
    x2: torch.Tensor
    v: torch.Tensor
    h: torch.Tensor
    bias: torch.Tensor


class Exchange:
    """The kernels for parts of the shape (batch, channels, positions)."""

    def __init__(self, group: Group, shape: tuple[int, int, int], pieces: int, parts: int, dtype: torch.dtype) -> None:
        batch, channels, local = shape
        self.own = channels // group.world_size
        self.rows_shape = (self.own * batch, group.world_size * local)
        grid = min(group.sm_count, BLOCKS_BESIDE) if parts > 1 else group.sm_count
        reserved: Reserved = HYENA_EXCHANGE.reserve(group, sizes={"flags": 1 + grid, "rows": batch * channels * local * dtype.itemsize})

        def bind(fetches: bool) -> BoundKernel:
            return reserved.bind(
                grid=grid, block=min(512, group.max_threads), batch=batch, own=self.own, length=local // pieces, count=self.own // parts,
                defines={"ELEMENT": element_type(dtype), "PIECES": pieces}, fetches=int(fetches),
            )  # fmt: skip

        self.send, self.fetch = bind(False), bind(True)
        self.rows = reserved.tensor("rows", self.rows_shape, dtype)


exchange_of = per_group(Exchange)
"""The exchange for parts of one shape."""


def transform_length(least: int) -> int:
    """Returns the smallest even number of at least this that is a power of two times 1, 3, 5, 9 or 15: both its factors have stages."""
    return min(factor << max(1, (-(-least // factor) - 1).bit_length()) for factor in (1, 3, 5, 9, 15))


def convolve_by_transforms(group: Group, inputs: Inputs, zigzag: bool) -> torch.Tensor:
    """Returns the rank's positions of the convolution, (batch, positions, channels)."""
    x1, x2, v, h, _ = inputs
    batch, channels, local = v.shape
    filters = h.shape[0] // group.world_size
    parts = next(count for count in (8, 4, 2, 1) if filters % count == 0)
    exchange, side = exchange_of(group, (batch, channels, local), 2 if zigzag else 1, parts, v.dtype), side_stream(group, v.is_cuda)
    count, out = exchange.own // parts, v.new_empty((batch, local, channels))
    side.follow()
    arrived = []
    with side():
        for part in range(parts):
            exchange.send(x=v, gate=x2, first=part * count)
            arrived.append(side.behind())
    per_filter, per_part = exchange.rows_shape[0] // filters, filters // parts
    transforms = transforms_of(group, exchange.rows_shape[1], per_part, per_filter, v.dtype, h.dtype, filters)
    spectra = v.new_empty((filters, transforms.size), dtype=torch.complex64)
    numbers = v.new_empty((per_part * per_filter, transforms.size), dtype=torch.complex64)
    transforms.of_filters(values=h[group.rank * filters :], length=h.shape[1], numbers=spectra)
    bias = inputs.bias[group.rank * exchange.own :]
    for part in range(parts):
        arrived[part]()
        rows = exchange.rows[part * count * batch : (part + 1) * count * batch]
        transforms.forth(values=rows, numbers=numbers)
        transforms.product(numbers=numbers, filters=spectra[part * per_part :])
        transforms.back(values=rows, numbers=numbers, bias=bias, first=part * count, batch=batch)
        side.follow()
        with side():
            exchange.fetch(gate=x1, out=out, first=part * count)
    side.behind()()
    return out


class Transforms:
    """The launches for ``filters`` filters at a time, with ``rows`` rows of ``length`` values each."""

    def __init__(
        self, group: Group, length: int, filters: int, rows: int, dtype: torch.dtype, of_taps: torch.dtype, all_filters: int
    ) -> None:
        self.size = transform_length(length)
        first = next(divisor for divisor in range(math.isqrt(self.size), 0, -1) if self.size % divisor == 0)
        second, fine = self.size // first, 1 << self.size.bit_length() // 2 + 1
        coarse = -(-4 * self.size // fine)
        columns, lines = Tiling.of(group, first, False, 16), Tiling.of(group, second, True, 1 << max(0, rows - 1).bit_length(), beside=1)
        if columns is None or lines is None:
            raise UsageError(f"a convolution of {length} positions: expected fewer; cut the sequence")
        self.tables = [roots(first, 4 * first), torch.cat((roots(coarse, 4 * self.size / fine), roots(fine, 4 * self.size)))]
        self.tables = [table.to(group.device) for table in self.tables]

        def of_columns(rows: int, dtype: torch.dtype, back: bool) -> BoundKernel:
            macros = {"SECOND": second, "FINE": fine, "COARSE": coarse, "ELEMENT": element_type(dtype), "BACK": int(back)}
            return HYENA_COLUMNS.bind(
                group, grid=rows * -(-second // columns.lines), block=columns.threads, shared_bytes=columns.shared_bytes, length=length,
                defines={**columns.defines(first), **macros}, twiddles=twiddles(group, first), quarters=self.tables[0],
                turns=self.tables[1],
            )  # fmt: skip

        self.of_filters = of_columns(all_filters, of_taps, False)
        self.forth, self.back = (of_columns(filters * rows, dtype, back) for back in (False, True))
        self.product = HYENA_PRODUCT.bind(
            group, grid=filters * first * -(-rows // lines.lines), block=lines.threads, shared_bytes=lines.shared_bytes, rows=rows,
            defines={**lines.defines(second), "FIRST": first}, twiddles=twiddles(group, second),
        )  # fmt: skip


transforms_of = per_group(Transforms)
"""The launches for one shape."""
