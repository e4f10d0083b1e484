"""A gated causal convolution with filters as long as the sequence: ranks exchange positions for channels around Fourier transforms.

    out = convolve_by_transforms(group, Inputs(x1, x2, v, h, bias), zigzag)

Gated values are pushed to the owners of channels, at their final place, zigzag included. Owners transform some filters' rows at a
time, which fit into the L2 cache, and leave results where the values were. Each rank fetches its positions from there, gated and
transposed.

Two rows that share a filter are the real and imaginary parts of one transform. That saves the passes before and behind real ones. The
factor of the inverse transform is in the filter. Transforms are as long as sequence and filter together.

Channels go in up to eight parts. Exchanges run on a stream of their own beside the transforms of the part before. Bound by HBM and L2,
which transforms go through several times; the links carry values and results once each. Memory: one buffer of all positions of the rank's
channels, and workspace: some tens of megabytes for transforms, and the filters' spectra of one part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from peerlane.device import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, LocalKernel, Pointer, element_type, per_group
from peerlane.device.host.declare import Reserved
from peerlane.device.host.side_stream import side_stream

EXCHANGE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int bytes = 4 / ELEMENT::lanes;
constexpr u32 tile_channels = 32, tile_positions = 64;
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
            each_column(args.length, [&](u32 column) {
                float value[row_lanes], gate[row_lanes];
                RowOf<ELEMENT>(args.x, from, args.length).load(column, value);
                RowOf<ELEMENT>(args.gate, from, args.length).load(column, gate);
                for (int e = 0; e < row_lanes; ++e) value[e] *= gate[e];
                target.store(column, value);
            });
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
        for (u32 i = threadIdx.x; i < tile_channels * tile_positions / row_lanes; i += blockDim.x) {
            const u32 at = i % (tile_positions / row_lanes) * row_lanes, column = span * tile_positions + at;
            const u32 c = i / (tile_positions / row_lanes), channel = bundle * tile_channels + c;
            if (channel >= args.count || column >= args.length) continue;
            float value[row_lanes], gate[row_lanes];
            const u64 row = Place{args}.of_owner(channel, b, place_of(arena.rank, piece));
            RowOf<ELEMENT>(arena.peer(q, args.rows), row, args.length).load(column, value);
            RowOf<ELEMENT>(args.gate, Place{args}.of_rank(q, channel, b, piece), args.length).load(column, gate);
            for (int e = 0; e < row_lanes; ++e) turned[at + e][c] = value[e] * gate[e];
        }
        __syncthreads();
        const u32 width = min(tile_channels, args.count - bundle * tile_channels);
        for (u32 i = threadIdx.x; i < tile_channels / row_lanes * tile_positions; i += blockDim.x) {
            const u32 c = i % (tile_channels / row_lanes) * row_lanes;
            const u32 at = i / (tile_channels / row_lanes), position = span * tile_positions + at;
            if (c >= width || position >= args.length) continue;
            const u64 row = (u64(b) * PIECES + piece) * args.length + position;
            const u32 channels = WORLD_SIZE * args.own, first = q * args.own + args.first + bundle * tile_channels;
            float value[row_lanes];
            for (int e = 0; e < row_lanes; ++e) value[e] = turned[at][c + e];
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

AROUND = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

// PARTS rows of values at a time become the parts of numbers, with zeros behind them; or such numbers become rows, with their bias.
extern "C" __global__ void __launch_bounds__(512) hyena_rows(const __grid_constant__ HyenaRows args) {
    const u32 limit = BACK ? args.length : args.size, step = 4 * blockDim.x, spans = (limit + step - 1) / step;
    for (u64 item = blockIdx.x; item < u64(args.count / PARTS) * spans; item += gridDim.x) {
        const u64 set = item / spans;
        char* rows = args.rows + set * PARTS * args.length * (4 / ELEMENT::lanes);
        float* numbers = args.numbers + set * args.size * PARTS;
        float bias[PARTS];
        for (u32 p = 0; p < PARTS; ++p) {
            bias[p] = BACK ? element_of<ELEMENT>(args.bias, args.first + (set * PARTS + p) / args.batch) : 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 at = u32(item % spans) * step + i * blockDim.x + threadIdx.x;
            if (at >= limit) break;
#pragma unroll
            for (u32 p = 0; p < PARTS; ++p) {
                const u64 place = u64(p) * args.length + at;
                float& number = numbers[u64(at) * PARTS + p];
                if (BACK) set_element<ELEMENT>(rows, place, number + bias[p] * element_of<ELEMENT>(rows, place));
                else number = at < args.length ? element_of<ELEMENT>(rows, place) : 0.0f;
            }
        }
    }
}
"""
HYENA_ROWS = LocalKernel(
    "hyena_rows", AROUND, rows=Pointer(), numbers=Pointer("float*"), bias=Pointer("const char*"), count=U32, length=U32, size=U32,
    first=U32, batch=U32,
)  # fmt: skip

WORKSPACE_BYTES = 24 * 2**20
"""The bytes of one buffer of transforms: two of them and their filter are in the L2 cache together."""
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


@per_group
def exchange_of(group: Group, shape: tuple[int, int, int], pieces: int, parts: int, dtype: torch.dtype) -> Exchange:
    """Returns the exchange for parts of one shape."""
    return Exchange(group, shape, pieces, parts, dtype)


@per_group
def _around(group: Group, parts: int, back: bool, dtype: torch.dtype) -> BoundKernel:
    return HYENA_ROWS.bind(
        group, grid=8 * group.sm_count, block=min(256, group.max_threads),
        defines={"PARTS": parts, "BACK": int(back), "ELEMENT": element_type(dtype)},
    )  # fmt: skip


def transform_length(least: int) -> int:
    """Returns the smallest even number of at least this that cuFFT likes: a power of two times 1, 3, 5, 9 or 15."""
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
    per_part = filters // parts
    transforms = Transforms(group, inputs, exchange, per_part)
    for part in range(parts):
        arrived[part]()
        transforms.convolve(part * per_part, per_part)
        side.follow()
        with side():
            exchange.fetch(gate=x1, out=out, first=part * count)
    side.behind()()
    return out


class Transforms:
    """Transforms of some rows at a time, and their workspace for one call."""

    def __init__(self, group: Group, inputs: Inputs, exchange: Exchange, most: int) -> None:
        self.rows, (_, self.length) = exchange.rows, exchange.rows_shape
        self.h, self.batch = inputs.h, inputs.v.shape[0]
        filters = inputs.h.shape[0] // group.world_size
        self.first, self.per_filter = group.rank * filters, exchange.rows_shape[0] // filters
        self.parts = 2 - self.per_filter % 2  # rows of one filter in a transform
        self.size = transform_length(self.length + inputs.h.shape[1] - 1)
        fit = max(1, WORKSPACE_BYTES // (4 * self.size * self.per_filter))
        self.step = next(count for count in range(min(most, fit), 0, -1) if most % count == 0)  # filters at a time
        self.bias = inputs.bias[group.rank * exchange.own : (group.rank + 1) * exchange.own]
        self.numbers = inputs.v.new_empty((self.step, self.per_filter // self.parts, self.size, self.parts), dtype=torch.float32)
        self.before, self.behind = (_around(group, self.parts, back, inputs.v.dtype) for back in (False, True))

    def convolve(self, first: int, count: int) -> None:
        """Convolves the rows of ``count`` of this rank's filters, from ``first`` on, in place."""
        fft, ifft = (torch.fft.fft, torch.fft.ifft) if self.parts == 2 else (torch.fft.rfft, torch.fft.irfft)
        step, numbers = self.step, self.numbers
        # Of all filters at once: with three launches a step more, the host would take longer than the GPU.
        taps = fft(self.h[self.first + first : self.first + first + count].to(torch.float32) * (1 / self.size), n=self.size).unsqueeze(1)
        for begin in range(first, first + count, step):
            rows = self.rows[begin * self.per_filter : (begin + step) * self.per_filter]
            sizes = {"rows": rows, "count": rows.shape[0], "length": self.length, "size": self.size, "batch": self.batch}
            self.before(numbers=numbers, bias=None, first=0, **sizes)
            spectrum = fft(torch.view_as_complex(numbers) if self.parts == 2 else numbers.squeeze(-1), n=self.size)
            spectrum *= taps[begin - first : begin - first + step]
            y = ifft(spectrum, n=self.size, norm="forward")
            y = torch.view_as_real(y) if self.parts == 2 else y
            self.behind(numbers=y, bias=self.bias, first=begin * self.per_filter // self.batch, **sizes)
