"""Host side of ``peerlane/collectives/strided.cuh``: an exchange that cuts one axis and joins another, as all-to-alls of attention do."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from peerlane.device.host.declare import U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Pointer, structure
from peerlane.device.host.group import Group, per_group
from peerlane.errors import UsageError

UNITS = {16: "peerlane::Vec16", 8: "peerlane::u64", 4: "peerlane::u32", 2: "peerlane::u16", 1: "peerlane::u8"}
MAX_BLOCKS, THREADS = 128, 512


class StridedBlock(ctypes.Structure):
    """The layout of one exchange. Mirrors ``peerlane::StridedBlock``."""

    _fields_ = (
        *((name, ctypes.c_uint64 * 3) for name in ("source_strides", "target_strides")),
        *((name, ctypes.c_uint64) for name in ("for_rank", "of_rank")),
        ("count", ctypes.c_uint32 * 3),
        ("units", ctypes.c_uint32),
    )

    @classmethod
    def of(cls, counts: Sequence[int], strides: Sequence[int], units: int) -> "StridedBlock":
        """Describes an exchange by its counts along three axes; by distances along them, of the source and of the target, and from what is
        for a rank to what is for the next, and of a rank to that of the next; and by the length of a run. All but counts are in units."""
        three, axes = ctypes.c_uint64 * 3, ctypes.c_uint32 * 3
        return cls(three(*strides[:3]), three(*strides[3:6]), strides[6], strides[7], axes(*counts), units)


SOURCE = r"""
#include <peerlane/collectives/strided.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(512)
    axis_exchange(const __grid_constant__ Arena arena, const __grid_constant__ AxisExchange args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    exchange_strided(peers, arena, args.out + args.part, args.x, args.block, epoch);
}
"""
AXIS_EXCHANGE = DeclaredKernel(
    "axis_exchange",
    SOURCE,
    out=Buffer(),
    flags=Flags(),
    epochs=Epochs(),
    x=Pointer("const UNIT*"),
    part=U64,
    block=structure("StridedBlock", StridedBlock),
)


@dataclass(frozen=True)
class AxisLayout:
    """One rank's contiguous tensor, whose axis ``cut`` is cut among the ranks and whose axis ``joined`` is joined of theirs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    joined: int
    cut: int
    kept: int
    """positions of the joined axis that remain; those behind it are not sent"""

    def result_shape(self, world_size: int) -> tuple[int, ...]:
        shape = list(self.shape)
        shape[self.joined], shape[self.cut] = self.kept, shape[self.cut] // world_size
        return tuple(shape)

    def block(self, rank: int, world_size: int) -> tuple[StridedBlock, int]:
        """Returns what ``rank`` sends to each, and the bytes of a unit: the widest that divides all distances."""
        out, local, size = self.result_shape(world_size), self.shape[self.joined], self.dtype.itemsize
        first, second = sorted((self.joined, self.cut))
        counts = list(out)
        counts[self.joined] = min(max(self.kept - rank * local, 0), local)
        # Axes, outermost first: those before both, the first of both, those between. The second of both and all behind it are one run.
        axes = (first, math.prod(self.shape[:first])), (first + 1, counts[first]), (second, math.prod(self.shape[first + 1 : second]))
        run = counts[second] * math.prod(self.shape[second + 1 :])
        distances = [
            run,
            *(math.prod(self.shape[axis:]) for axis, _ in axes),
            *(math.prod(out[axis:]) for axis, _ in axes),
            out[self.cut] * math.prod(self.shape[self.cut + 1 :]),
            local * math.prod(out[self.joined + 1 :]),
        ]
        # The same on all ranks: it divides the lengths of every rank.
        inner = math.prod(out[self.joined + 1 :]) if self.joined == second else out[self.cut] * math.prod(out[self.cut + 1 :])
        unit = math.gcd(16, size * inner, *(size * distance for distance in distances[1:]))
        units, *strides = (size * distance // unit for distance in distances)
        if (copies := math.prod(count for _, count in axes) * units) >= 1 << 32:
            raise UsageError(f"an exchange of {self.shape}: {copies} copies of {unit} bytes by a rank; expected fewer than 2^32")
        return StridedBlock.of([count for _, count in axes], strides, units), unit


@per_group
def _exchange(group: Group, layout: AxisLayout, parts: int = 1) -> tuple[BoundKernel, torch.Tensor]:
    """Returns the kernel, and where the results of ``parts`` exchanges lie behind each other."""
    block, unit = layout.block(group.rank, group.world_size)
    shape, nbytes = (parts, *layout.result_shape(group.world_size)), math.prod(layout.shape) * layout.dtype.itemsize
    grid = min(MAX_BLOCKS, group.sm_count, max(1, -(-nbytes // (unit * THREADS))))
    sizes = {"out": math.prod(shape) * layout.dtype.itemsize, "flags": 1 + grid}
    bound = AXIS_EXCHANGE.bind(group, grid=grid, block=THREADS, defines={"UNIT": UNITS[unit]}, sizes=sizes)
    bound.set(block=block)
    results = bound.tensor("out", shape, layout.dtype)
    return bound, results if parts > 1 else results[0]


def exchange_axes(group: Group, x: torch.Tensor, *, joined: int, cut: int, kept: int | None = None) -> torch.Tensor:
    """Collective: returns on rank r part r of axis ``cut`` of every rank's tensor, joined along axis ``joined`` in rank order.

    All ranks pass one shape; ``cut`` divides by the ranks. Only the first ``kept`` positions of the joined axis come. The result lies in
    the arena and is valid until the group's next exchange of this shape."""
    joined, cut = joined % x.dim(), cut % x.dim()
    if joined == cut or x.shape[cut] % group.world_size:
        raise UsageError(f"axes {joined} and {cut} of {tuple(x.shape)}: expected two axes, the second divisible by {group.world_size}")
    whole = x.shape[joined] * group.world_size
    layout = AxisLayout(tuple(x.shape), x.dtype, joined, cut, whole if kept is None else kept)
    if not x.numel() or not layout.kept:
        return x.new_empty(layout.result_shape(group.world_size))
    bound, result = _exchange(group, layout)
    bound(x=x.contiguous())
    return result


def exchange_part(group: Group, x: torch.Tensor, part: int, parts: int, *, joined: int, cut: int) -> torch.Tensor:
    """Collective: runs ``exchange_axes`` of a tensor that is number ``part`` of several; returns the results of all of them, (parts, ...).

    They lie in the arena. Each is valid until the group's next exchange of that part."""
    layout = AxisLayout(tuple(x.shape), x.dtype, joined, cut, x.shape[joined] * group.world_size)
    bound, results = _exchange(group, layout, parts)
    results = results.view(parts, *layout.result_shape(group.world_size))
    bound(x=x.contiguous(), part=part * results[0].nbytes)
    return results
