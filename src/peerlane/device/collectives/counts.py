"""Counts that the host must know, of all ranks: one kernel, one question to the device.

    table = share_counts(group, counts)         table[q]: the counts of rank q, as Python integers

Collectives whose parts' sizes follow from data need them before they can allocate; ``Communicator.exchange`` then moves the parts.
A kernel that knows sizes early tells them with ``HostWords``, and the host goes on while it runs.
"""

import ctypes
from collections.abc import Sequence

import torch

from peerlane.device.host.declare import U32, U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Pointer, array
from peerlane.device.host.group import Group, per_group
from peerlane.errors import DeviceError

SOURCE = r"""
#include <peerlane/comm.cuh>
using namespace peerlane;

// Rows lie in one of two buffers by the launch's parity: a rank that has finished a launch knows that all have finished the one before.
extern "C" __global__ void __launch_bounds__(128)
    share_counts(const __grid_constant__ Arena arena, const __grid_constant__ ShareCounts args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const u64 table = args.table + (epoch & 1) * WORLD_SIZE * args.count * sizeof(u64);
    for (u32 i = threadIdx.x; i < args.count * WORLD_SIZE; i += blockDim.x) {
        const u32 q = i / args.count, k = i % args.count;
        const u64 value = args.counts != nullptr ? args.counts[k] : args.given[k];
        reinterpret_cast<u64*>(arena.peer(q, table))[arena.rank * args.count + k] = value;
    }
    Peers<WORLD_SIZE>(arena, args.flags).barrier(0, epoch);
    const u64* all = reinterpret_cast<const u64*>(arena.local(table));
    for (u32 i = threadIdx.x; i < args.count * WORLD_SIZE; i += blockDim.x) args.out[i] = all[i];
}
"""
MOST_GIVEN = 8
SHARE_COUNTS = DeclaredKernel(
    "share_counts", SOURCE, epochs=Epochs(), flags=Flags(), table=Buffer(), counts=Pointer("const u64*"), given=array(U64, MOST_GIVEN),
    out=Pointer("u64*"), count=U32,
)  # fmt: skip


_POLLS = 20_000
"""Looks at the stamp, some milliseconds in all, before the host waits for the stream."""


class HostWords:
    """Memory of the host in which a kernel writes ``count`` numbers, and then their call's stamp: ``tell_host`` of rows.cuh.

    The kernel gets ``words`` as a pointer, and ``stamp()`` of every call."""

    def __init__(self, group: Group, count: int) -> None:
        self.words = torch.zeros(1 + count, dtype=torch.int64, device="cpu", pin_memory=group.device.type == "cuda")
        self._group, self._calls = group, 0
        self._told = ctypes.c_uint32.from_address(self.words.data_ptr())

    def stamp(self) -> int:
        """Returns what the next launch writes behind its numbers."""
        self._calls = self._calls % 0xFFFFFFFF + 1
        return self._calls

    def wait(self) -> None:
        """Waits until the numbers of the latest launch have come; its results may still be on their way."""
        polls = 0
        while self._told.value != self._calls and polls < _POLLS:
            polls += 1
        if self._told.value != self._calls:
            if self._group.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            self._group.waits.check()
        if self._told.value != self._calls:  # nobody takes a number that has not come
            raise DeviceError(f"a kernel has ended without the numbers of call {self._calls}; expected that it calls tell_host")

    def read(self) -> list[int]:
        """Returns these numbers."""
        self.wait()
        return list(self.words[1:].tolist())


@per_group
def _bound(group: Group, count: int) -> tuple[BoundKernel, torch.Tensor]:
    sizes = {"flags": 1, "table": 16 * group.world_size * count}
    on_gpu = group.device.type == "cuda"
    return (
        SHARE_COUNTS.bind(group, grid=1, block=128, sizes=sizes, count=count),
        # the kernel writes, and the host reads
        torch.zeros(group.world_size * count, dtype=torch.int64, device="cpu", pin_memory=on_gpu),
    )


def share_counts(group: Group, counts: torch.Tensor | Sequence[int]) -> list[list[int]]:
    """Collective: returns every rank's counts, an int64 vector on the device or up to eight integers; as many on all ranks.

    Waits for the current stream, so it cannot be captured."""
    table = share_table(group, counts).tolist()
    return [table[first : first + len(counts)] for first in range(0, len(table), len(counts))]


def share_table(group: Group, counts: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Returns the counts of :func:`share_counts` as one vector of the host, which the next call for as many counts overwrites."""
    launch, out = _bound(group, len(counts))
    if isinstance(counts, torch.Tensor):
        launch(counts=counts.to(torch.int64).contiguous(), out=out)
    else:
        launch(counts=None, given=counts, out=out)
    if group.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
        group.waits.check()  # nobody takes a size from what has not come
    return out
