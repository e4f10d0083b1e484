"""Fourier transforms in our own kernels: how a line is cut into stages, and both passes of a distributed transform of planes.

    out = transform_planes(group, x, (n0, n1), (d0, d1), norm, inverse)        None: a length is too long, or has a large prime factor

The first pass transforms the axis that a rank has whole and stores results where they belong, in other ranks' memory too. The second one
transforms the other axis. Each passes memory once. Bound by the links, which carry (W - 1) / W of the complex planes, and by HBM.
``peerlane/tiles/fourier.cuh`` has the transform of a tile."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from peerlane.device import F32, U32, U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, per_group
from peerlane.device.host.declare import MAX_EPOCH_BLOCKS
from peerlane.device.host.roles import SHARED_LIMIT_BYTES

SOURCE = r"""
#include <peerlane/comm.cuh>
#include <peerlane/tiles/fourier.cuh>
using namespace peerlane;

// Lines go along rows of memory in the first pass of an inverse transform and the second of the others; real numbers are at the other side.
constexpr bool along = INVERSE == FIRST, packed = FIRST && !INVERSE;
constexpr u32 columns = LINES * (packed ? 2 : 1);
constexpr u64 reads[3] = {READS}, writes[3] = {WRITES};  // from one slice, line and point to the next
using Tile = FourierTile<POINTS, LINES, along, THREADS>;

// Line `line` of the tile that begins with line `first` of a slice.
struct Place {
    const FourierLines& args;
    u32 slice, first;

    __device__ bool has(u32 line) const { return first + line < args.lines; }
    __device__ u64 at(const u64 (&strides)[3], u32 line, u32 point) const {
        return slice * strides[0] + (first + line) * strides[1] + point * strides[2];
    }
};

template <int R>
__device__ void load(const Place& place, u32 line, u32 point, u32 step, Complex (&x)[R]) {
    const FourierLines& args = place.args;
    const u64 from = place.at(reads, packed ? 2 * line : line, point), stride = step * reads[2];
#pragma unroll
    for (int i = 0; i < R; ++i) {
        const u64 at = from + i * stride;
        const u32 p = point + i * step;
        x[i] = {};
        if (p >= GIVEN) continue;
        if constexpr (packed) {  // two real lines are the parts of one
            const float* numbers = reinterpret_cast<const float*>(args.x);
            if (place.has(2 * line)) x[i].x = numbers[at];
            if (place.has(2 * line + 1)) x[i].y = numbers[at + reads[1]];
        } else if (place.has(line)) {
            x[i] = reinterpret_cast<const Complex*>(args.x)[at];
            // Bins that are left out are conjugates of those that are there, and the field is real.
            if (INVERSE) x[i] = (FIRST && p > 0 && 2 * p != POINTS ? 2.0f : 1.0f) * conjugate(x[i]);
        }
    }
}

template <int R>
__device__ void store(const Arena& arena, const Place& place, u32 line, u32 point, u32 step, const Complex (&x)[R]) {
    const FourierLines& args = place.args;
    if (!place.has(line)) return;
#pragma unroll
    for (int i = 0; i < R; ++i) {
        const u32 p = point + i * step, owner = p / SHARE;
        const u64 at = place.at(writes, line, FIRST ? p % SHARE : p);
        const Complex value = args.scale * (INVERSE ? conjugate(x[i]) : x[i]);
        if (p >= TAKEN) continue;
        if constexpr (FIRST) reinterpret_cast<Complex*>(arena.peer(owner, args.planes))[args.offset + at] = value;
        else if constexpr (INVERSE) reinterpret_cast<float*>(args.out)[at] = value.x;
        else reinterpret_cast<Complex*>(args.out)[at] = value;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    fourier_lines(const __grid_constant__ Arena arena, const __grid_constant__ FourierLines args) {
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    u32 epoch = 0;
    if (FIRST) {  // the streams of all ranks have done what read the planes of the call before
        epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
        if (blockIdx.x == 0) peers.acknowledge_all(0, epoch);
        peers.wait_all(0, epoch);
    }
    const u32 bundles = (args.lines + columns - 1) / columns;
    for (u32 item = blockIdx.x; item < args.slices * bundles; item += gridDim.x) {
        const Place place{args, item / bundles, item % bundles * columns};
        const Tile tile(ptx::dynamic_shared());
        const auto from = [&]<int R>(u32 line, u32 point, u32 step, Complex(&x)[R]) { load(place, line, point, step, x); };
        if constexpr (packed) {
            tile.transform<LINES, 1, RADICES>(args.twiddles, from, tile.into());
            __syncthreads();
#pragma unroll 4
            for (u32 i = threadIdx.x; i < columns * POINTS; i += THREADS) {
                const u32 column = i % columns, point = i / columns;
                const Complex z = tile.at(column / 2, point), mirrored = conjugate(tile.at(column / 2, (POINTS - point) % POINTS));
                const Complex even = 0.5f * (z + mirrored), odd = 0.5f * (z - mirrored);
                const Complex part[1] = {column % 2 == 0 ? even : Complex{odd.y, -odd.x}};
                store(arena, place, column, point, 0, part);
            }
        } else {
            const auto to = [&]<int R>(u32 line, u32 point, u32 step, const Complex(&x)[R]) { store(arena, place, line, point, step, x); };
            tile.transform<LINES, 1, RADICES>(args.twiddles, from, to);
        }
    }
    if (FIRST) peers.barrier(1 + blockIdx.x, epoch);
}
"""
FOURIER_LINES = DeclaredKernel(
    "fourier_lines", SOURCE, epochs=Epochs(), flags=Flags(), planes=Buffer(), x=Pointer("const char*"), out=Pointer(),
    twiddles=Pointer("const Complex*"), offset=U64, slices=U32, lines=U32, scale=F32,
)  # fmt: skip

MOST_RADIX = 16
SM_REGISTERS = 65536
THREAD_REGISTERS, NUMBER_REGISTERS = 32, 3
"""Of a thread, and of each number of its butterfly: what the compiler takes without a spill, for radices from 8 to 16."""


@functools.cache
def radices(points: int) -> tuple[int, ...] | None:
    """Returns the fewest factors of at most ``MOST_RADIX``, the smallest of which is as large as can be; None if there are none."""
    if points <= MOST_RADIX:
        return (points,)
    found = [(radix, *rest) for radix in range(2, MOST_RADIX + 1) if points % radix == 0 and (rest := radices(points // radix))]
    # Of an odd first radix, threads that follow each other write to different banks.
    return min(found, key=lambda one: (len(one), -min(one), one[0] % 2 == 0, one), default=None)


def roots(count: int, of: float) -> torch.Tensor:
    """Returns e^(-2 pi i k / of) for k < ``count``, complex64."""
    angle = torch.arange(count, dtype=torch.float64) * (-2 * math.pi / of)
    return torch.complex(angle.cos(), angle.sin()).to(torch.complex64)


@per_group
def twiddles(group: Group, points: int) -> torch.Tensor:
    """Returns factors of all stages but the first one, on the group's device: of a stage behind S points, of radix R, R - 1 rows of S."""
    span, parts = 1, [torch.zeros(1, dtype=torch.complex64)]
    for radix in radices(points) or ():
        if span > 1:
            parts.append(roots(points, span * radix)[torch.arange(1, radix).view(-1, 1) * torch.arange(span) % (span * radix)].flatten())
        span *= radix
    return torch.cat(parts[1:] or parts).to(group.device)


class Tiling(NamedTuple):
    """Lines of a tile, and its block."""

    lines: int
    threads: int
    blocks: int
    shared_bytes: int

    @classmethod
    def of(cls, group: Group, points: int, along: bool, most_lines: int, beside: int = 0) -> Tiling | None:
        """A power of two of lines, at most ``most_lines``, and ``beside`` lines that stay. None if a line is too long or has no stages."""
        stages, pitch = radices(points), 8 * (points + (points // 16 if points % 64 == 0 else 0) + 1 if along else points)
        if stages is None:
            return None
        fit = min(most_lines, SHARED_LIMIT_BYTES // pitch - beside)
        registers, limit = THREAD_REGISTERS + NUMBER_REGISTERS * max(stages), min(1024, group.max_threads)

        def butterflies(lines: int) -> int:
            return (lines + beside) * points // min(stages)

        def tiling(lines: int) -> Tiling:
            nbytes, work = (lines + beside) * pitch, butterflies(lines)
            threads = max(32, -(-work // -(-work // limit) // 32) * 32)
            blocks = min(32, SM_REGISTERS // (threads * registers), SHARED_LIMIT_BYTES // (nbytes + 1024), 2048 // threads)
            return cls(lines, threads, max(1, blocks), nbytes)

        possible = [tiling(1 << k) for k in range(max(0, fit).bit_length()) if k == 0 or butterflies(1 << k) <= 1024]
        # Along memory, what an SM holds most lines of; else the longest rows of a tile.
        return max(possible, key=lambda one: (one.blocks * one.lines if along else 0, one.lines), default=None)

    def defines(self, points: int) -> dict[str, str | int]:
        """Macros of a kernel that transforms such tiles."""
        stages = ",".join(map(str, radices(points) or ()))
        return {"POINTS": points, "LINES": self.lines, "THREADS": self.threads, "BLOCKS": self.blocks, "RADICES": stages}


Strides = tuple[int, int, int]


class Planes(NamedTuple):
    """The shape of a rank's part: planes of a field, rows x columns, whose columns are sharded; or of a half spectrum, whose rows are."""

    inverse: bool
    slices: int
    rows: int
    columns: int


class Passes:
    """Both launches for planes of one shape and transforms of n0 x n1 points."""

    def __init__(self, group: Group, given: Planes, lengths: tuple[int, int], tilings: tuple[Tiling, Tiling]) -> None:
        inverse, slices, rows, columns = given
        world, rank = group.world_size, group.rank
        if inverse:
            lengths, local, whole = lengths[::-1], rows, columns
        else:
            local, whole = columns, rows
        self.lengths, share = lengths, lengths[0] // world
        kept = min(lengths[1], world * local)
        # Between lie planes of `share` lines with `kept` points, in memory line by line, or point by point in an inverse transform.
        between = (share * kept, 1, share) if inverse else (share * kept, kept, 1)
        self.shape, self.dtype = (
            ((slices, lengths[1], share), torch.float32) if inverse else ((slices, share, lengths[1] // 2 + 1), torch.complex64)
        )
        reserved = FOURIER_LINES.reserve(
            group, sizes={"planes": 8 * slices * share * kept, "flags": 1 + tilings[0].blocks * group.sm_count}
        )

        def bind(
            first: bool, points: int, tiling: Tiling, given: int, taken: int, reads: Strides, writes: Strides, **values: Any
        ) -> BoundKernel:
            macros = {"INVERSE": int(inverse), "FIRST": int(first), "SHARE": share, "GIVEN": given, "TAKEN": taken}
            strides = {"READS": ",".join(map(str, reads)), "WRITES": ",".join(map(str, writes))}
            return reserved.bind(
                grid=min(MAX_EPOCH_BLOCKS, tiling.blocks * group.sm_count), block=tiling.threads,
                shared_bytes=tiling.shared_bytes, resident=first,
                defines={**tiling.defines(points), **macros, **strides}, twiddles=twiddles(group, points), **values,
            )  # fmt: skip

        self.first = bind(
            True, lengths[0], tilings[0], slices=slices, lines=min(local, max(0, kept - rank * local)), given=min(whole, lengths[0]),
            taken=lengths[0], reads=(rows * columns, columns, 1) if inverse else (rows * columns, 1, columns),
            writes=(between[0], between[2], between[1]), offset=rank * local * between[2],
        )  # fmt: skip
        self.second = bind(
            False, lengths[1], tilings[1], slices=slices, lines=share, given=kept, taken=self.shape[1] if inverse else self.shape[2],
            reads=between, writes=(lengths[1] * share, 1, share) if inverse else (share * self.shape[2], self.shape[2], 1), offset=0,
        )  # fmt: skip
        self.planes = reserved.tensor("planes", (slices * share * kept,), torch.complex64)

    def __call__(self, x: torch.Tensor, norm: str) -> torch.Tensor:
        """Collective: returns the transform of this rank's contiguous planes."""
        out = torch.empty(self.shape, dtype=self.dtype, device=x.device)
        unscaled = "forward" if self.dtype == torch.float32 else "backward"
        scales = [1.0 if norm == unscaled else points ** (-0.5 if norm == "ortho" else -1.0) for points in self.lengths]
        self.first(x=x, scale=scales[0])
        self.second(x=self.planes, out=out, scale=scales[1])
        return out


@per_group
def plane_passes(group: Group, given: Planes, lengths: tuple[int, int]) -> Passes | None:
    """Collective: returns the launches; None if a length is too long for shared memory, or has a prime factor above the largest radix, or
    if the axis that is cut does not divide by the ranks."""
    order = lengths[::-1] if given.inverse else lengths
    if order[0] % group.world_size:
        return None
    first, second = (Tiling.of(group, points, along == given.inverse, 8) for points, along in zip(order, (True, False), strict=True))
    return None if first is None or second is None else Passes(group, given, lengths, (first, second))


def transform_planes(
    group: Group, x: torch.Tensor, lengths: tuple[int, int], axes: tuple[int, int], norm: str, inverse: bool
) -> torch.Tensor | None:
    """Collective: returns what the rank gets of ``rfft2`` or ``irfft2`` of the whole field or spectrum; None if our kernels can not."""
    planes = x.movedim(axes, (-2, -1))
    lead, given = planes.shape[:-2], Planes(inverse, math.prod(planes.shape[:-2]), *planes.shape[-2:])
    if x.dtype != (torch.complex64 if inverse else torch.float32) or not x.numel():
        return None
    passes = plane_passes(group, given, lengths)
    if passes is None:
        return None
    out = passes(planes.contiguous(), norm)
    return out.view(*lead, *out.shape[1:]).movedim((-2, -1), axes).contiguous()
