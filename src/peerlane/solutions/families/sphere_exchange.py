"""Longitudes of other ranks that filters on the sphere reach: found on the device, and pushed by their owners.

    exchange = arc_exchange(group, x.shape, nlon_in, nlon_out)
    for images in exchange(x, places): ...        others' longitudes of these images are in exchange.arcs

All ranks of an azimuth group have the same filters, so that an owner knows what the others need: in an input row, what lies in the union of
its taps' offsets, turned to all longitudes of their outputs. A disk reaches a few columns over the border of an arc, and all near a pole.
Eight columns go together, 32 bytes. Bound by the links, or by two small launches. One buffer holds others' arcs whole, for the host does
not know what is needed; a launch pushes when all ranks have ended the call before.
"""

from collections.abc import Iterator

import torch

from peerlane.device import U32, Buffer, DeclaredKernel, Epochs, Flags, Group, LocalKernel, Pointer, array, per_group
from peerlane.device.host.group import MAX_RANKS
from peerlane.device.host.side_stream import side_stream

MARK = r"""
#include <peerlane/comm.cuh>
using namespace peerlane;

// A bit for every input row and longitude: whether a filter has a tap there.
extern "C" __global__ void __launch_bounds__(256) sphere_mark(const __grid_constant__ SphereMark args) {
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < args.count; i += gridDim.x * blockDim.x) {
        atomicOr(args.marks + args.places[i] / 32, 1u << args.places[i] % 32);
    }
}
"""
SPHERE_MARK = LocalKernel("sphere_mark", MARK, places=Pointer("const u64*"), marks=Pointer("u32*"), count=U32)

CHOOSE = r"""
#include <peerlane/comm.cuh>
using namespace peerlane;

constexpr u32 together = 8;

// Which columns of this rank's arc, eight together, the outputs of each rank need of an input row. A block takes a row. Longitudes that
// differ by whole steps lie side by side on a ring; marks are counted along all rings, so that a stretch has some if the counts at its
// ends differ.
extern "C" __global__ void __launch_bounds__(128) sphere_choose(const __grid_constant__ SphereChoose args) {
    __shared__ u32 sums[128], count;
    u32* const before = reinterpret_cast<u32*>(ptx::dynamic_shared());
    const bool all = args.circle % args.step != 0;
    const u32 turns = args.circle / args.step, places = turns * args.step, each = (places + blockDim.x - 1) / blockDim.x;
    const u32 width = args.width[args.rank], begin = args.rank * args.width[0], groups = (width + together - 1) / together;
    const auto marked = [&](u32 place) {
        const u32 at = blockIdx.x * args.circle + place % turns * args.step + place / turns;
        return args.marks[at / 32] >> at % 32 & 1;
    };
    const u32 first = min(threadIdx.x * each, places), end = min(first + each, places);
    u32 sum = 0;
    for (u32 place = first; place < end; ++place) sum += marked(place);
    sums[threadIdx.x] = sum;
    __syncthreads();
    u32 total = 0;
    for (u32 t = 0; t < threadIdx.x; ++t) total += sums[t];
    for (u32 place = first; place < end; ++place) before[place] = total, total += marked(place);
    if (threadIdx.x == blockDim.x - 1) before[places] = total;
    for (u32 q = 0; q < args.ranks; ++q) {
        if (q == args.rank) continue;
        __syncthreads();
        if (threadIdx.x == 0) count = 0;
        __syncthreads();
        u32* const chosen = args.chosen + (blockIdx.x * args.ranks + q) * (1 + args.most);
        const u32 length = min(args.outputs[q], turns), offset = q * args.outputs[0] % turns;
        for (u32 group = threadIdx.x; group < groups; group += blockDim.x) {
            bool needed = all;
            for (u32 column = group * together; column < min(width, (group + 1) * together) && length > 0; ++column) {
                const u32 longitude = begin + column, ring = longitude % args.step * turns;
                // Taps at longitude - o step, for the rank's outputs o: a stretch of the ring that ends here and may come round.
                const u32 stop = (longitude / args.step + turns - offset) % turns + 1;
                if (all) continue;
                if (length <= stop) needed |= before[ring + stop] != before[ring + stop - length];
                else needed |= before[ring + stop] != before[ring] || before[ring + turns] != before[ring + turns - (length - stop)];
            }
            if (needed) chosen[1 + atomicAdd(&count, 1u)] = group;
        }
        __syncthreads();
        if (threadIdx.x == 0) chosen[0] = count;
    }
}
"""
SPHERE_CHOOSE = LocalKernel(
    "sphere_choose", CHOOSE, marks=Pointer("const u32*"), chosen=Pointer("u32*"), rank=U32, ranks=U32, circle=U32, step=U32, most=U32,
    width=array(U32, MAX_RANKS), outputs=array(U32, MAX_RANKS),
)  # fmt: skip

SEND = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr u32 together = 8, images_at_once = 8;

// The chosen columns of this rank's arc, of images [first, end), to the same place of the arc at every rank that needs them.
extern "C" __global__ void __launch_bounds__(512)
    sphere_send(const __grid_constant__ Arena arena, const __grid_constant__ SphereSend args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    if (args.first == 0) {  // what read others' arcs in the call before has ended on all ranks
        if (blockIdx.x == 0) peers.acknowledge_all(0, epoch);
        peers.wait_all(0, epoch);
    }
    const int rank = arena.rank;
    const u32 width = args.width[rank], bundles = (args.end - args.first + images_at_once - 1) / images_at_once;
    for (int k = 1; k < WORLD_SIZE; ++k) {
        const int q = rank_after<WORLD_SIZE>(rank, k);
        // Arcs lie one behind the other, without the reader's own.
        char* const arc = arena.peer(q, args.arcs + u64(rank > q ? rank - 1 : rank) * args.width[0] * args.images * args.rows * 4);
        each_row(args.rows * bundles, [&](u32 item) {
            const u32 row = item / bundles, image = args.first + item % bundles * images_at_once;
            const u32* const chosen = args.chosen + (row * WORLD_SIZE + q) * (1 + args.most);
            const u32 count = chosen[0], images = min(images_at_once, args.end - image);
            for (u32 i = Warp{}.thread(); i < count * images; i += warp_threads) {
                const u64 from = u64(image + i / count) * args.rows + row;
                float value[row_lanes];
                RowOf<Float32>(args.x, from, width).load(chosen[1 + i % count] * together, value);
                RowOf<Float32>(arc, from, width).store(chosen[1 + i % count] * together, value);
            }
        });
    }
    peers.barrier(1 + blockIdx.x, epoch);
}
"""
SPHERE_SEND = DeclaredKernel(
    "sphere_send", SEND, epochs=Epochs(), flags=Flags(), arcs=Buffer(), x=Pointer("const char*"), chosen=Pointer("const u32*"), images=U32,
    rows=U32, first=U32, end=U32, most=U32, width=array(U32, MAX_RANKS),
)  # fmt: skip


def shares(size: int, count: int) -> list[int]:
    """Returns how many of ``size`` items each rank has: ceil(size / count) but for the last; floor, if that left it none."""
    each = -(-size // count)
    if each * (count - 1) >= size:
        each = size // count
    return [each] * (count - 1) + [size - each * (count - 1)]


class ArcExchange:
    """The kernels for one shape of x (images, channels, rows, longitudes)."""

    def __init__(self, group: Group, shape: tuple[int, ...], nlon_in: int, nlon_out: int) -> None:
        self.group, self.shape, self.circle, self.step = group, shape, nlon_in, nlon_in // nlon_out
        self.widths, self.outputs = shares(nlon_in, group.world_size), shares(nlon_out, group.world_size)
        batch, channels, self.rows = shape[:3]
        self.images = batch * channels
        self.most = -(-max(self.widths) // 8)
        self.arcs: torch.Tensor | None = None
        if group.world_size == 1:
            return
        fill = [0] * (MAX_RANKS - group.world_size)
        width, outputs = [*self.widths, *fill], [*self.outputs, *fill]
        self._mark = SPHERE_MARK.bind(group, grid=4 * group.sm_count, block=min(256, group.max_threads))
        self._choose = SPHERE_CHOOSE.bind(
            group, grid=max(1, self.rows), block=min(128, group.max_threads), shared_bytes=4 * (nlon_in + 1), rank=group.rank,
            ranks=group.world_size, circle=nlon_in, step=self.step, most=self.most, width=width, outputs=outputs,
        )  # fmt: skip
        others = nlon_in - min(self.widths)
        self.send = SPHERE_SEND.bind(
            group, grid=group.sm_count, block=min(512, group.max_threads), images=self.images, rows=self.rows, most=self.most, width=width,
            sizes={"flags": 1 + group.sm_count, "arcs": 4 * self.images * self.rows * others},
        )  # fmt: skip
        self.arcs = self.send.tensor("arcs", (self.images * self.rows * others,), torch.float32)

    def __call__(self, x: torch.Tensor, places: torch.Tensor, most_parts: int) -> Iterator[range]:
        """Yields parts of the images of contiguous x; the caller's stream then has others' longitudes of these in ``arcs``.

        ``places`` are where filters have taps, row times nlon_in plus longitude. Every part must be taken.
        """
        batch, channels = self.shape[:2]
        if self.group.world_size == 1:
            yield range(batch)
            return
        marks = torch.zeros(-(-self.rows * self.circle // 32), dtype=torch.int32, device=x.device)
        chosen = torch.empty((self.rows, self.group.world_size, 1 + self.most), dtype=torch.int32, device=x.device)
        self._mark(places=places, marks=marks, count=places.numel())
        self._choose(marks=marks, chosen=chosen)
        side = side_stream(self.group, x.is_cuda)
        side.follow()
        each = -(-batch // most_parts)
        parts = [range(first, min(first + each, batch)) for first in range(0, batch, each)]
        ready = []
        with side():
            for part in parts:
                self.send(x=x, chosen=chosen, first=part.start * channels, end=part.stop * channels)
                ready.append(side.behind())
        for part, wait in zip(parts, ready, strict=True):
            wait()
            yield part


arc_exchange = per_group(ArcExchange)
"""The exchange for x of one shape."""
