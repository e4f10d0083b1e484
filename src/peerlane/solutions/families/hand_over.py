"""Tensors handed from each stage of a pipeline to the next, part by part, by one small kernel."""

import torch

from peerlane.device import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, per_group
from peerlane.errors import UsageError

THREADS, MAX_BLOCKS = 512, 64
_VECTOR_BYTES = 16
_VECTORS_OF_A_THREAD = 4

# Launch e of every stage belongs to one round: stage s sends what it has, and gets what stage s - 1 sends. A part lies where that part of
# the call before lay. The receiver has used that when it begins this call, which it tells the sender in every launch.
SOURCE = r"""
#include <peerlane/comm.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(512) hand_over(const __grid_constant__ Arena arena, const __grid_constant__ HandOver args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const int next = static_cast<int>(arena.rank) + 1, before = static_cast<int>(arena.rank) - 1;
    if (before >= 0 && blockIdx.x == 0) peers.acknowledge(before, 0, epoch);
    if (args.sends) {
        peers.wait(next, 0, epoch - args.round);
        Vec16* to = reinterpret_cast<Vec16*>(arena.peer(next, args.received)) + args.sent_at;
        const Vec16* from = reinterpret_cast<const Vec16*>(args.x);
        for (u32 v = blockIdx.x * blockDim.x + threadIdx.x; v < args.vectors; v += gridDim.x * blockDim.x) to[v] = from[v];
        peers.signal(next, 1 + blockIdx.x, epoch);
    }
    if (args.gets) peers.wait(before, 1 + blockIdx.x, epoch);
}
"""
HAND_OVER = DeclaredKernel(
    "hand_over",
    SOURCE,
    received=Buffer(),
    flags=Flags(),
    epochs=Epochs(),
    x=Pointer("const char*"),
    vectors=U32,
    sent_at=U32,
    round=U32,
    sends=U32,
    gets=U32,
)


class Pipeline:
    """The ranks of a group as stages, in rank order, that work on the parts of a tensor one behind the other.

    ``shape`` is a part's, the same in all stages. In round t of a call stage s has part t - s; ``hand_over`` ends a round. There are
    ``rounds`` of them in a call. Creating one is collective."""

    def __init__(self, group: Group, shape: tuple[int, ...], dtype: torch.dtype, parts: int) -> None:
        self.group, self.parts = group, parts
        self.rounds = parts + group.world_size - 2
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes % _VECTOR_BYTES or parts * nbytes // _VECTOR_BYTES >= 1 << 32:
            raise UsageError(f"a part {shape} in {dtype} has {nbytes} bytes: expected a multiple of {_VECTOR_BYTES}, and fewer parts")
        self._vectors = nbytes // _VECTOR_BYTES
        grid = min(MAX_BLOCKS, group.sm_count, -(-self._vectors // (THREADS * _VECTORS_OF_A_THREAD)))
        sizes = {"received": parts * nbytes, "flags": 1 + grid}
        self._kernel: BoundKernel = HAND_OVER.bind(group, grid=grid, block=THREADS, sizes=sizes, vectors=self._vectors)
        self._received = self._kernel.tensor("received", (parts, *shape), dtype)
        self._round = 0

    def hand_over(self, own: torch.Tensor | None) -> torch.Tensor | None:
        """Ends a round: ``own`` is this stage's part, if it had one. Gives the next round's, of the stage before, if there is one."""
        sent, got = self._round - self.group.rank, self._round - self.group.rank + 1
        sends = own is not None and self.group.rank + 1 < self.group.world_size
        gets = self.group.rank > 0 and 0 <= got < self.parts
        numbers = {"round": self._round, "sent_at": max(sent, 0) * self._vectors, "sends": int(sends), "gets": int(gets)}
        self._kernel(x=own if sends else None, **numbers)
        self._round = (self._round + 1) % self.rounds
        return self._received[got] if gets else None


pipeline = per_group(Pipeline)
"""The group's one :class:`Pipeline` of this shape; the first call is collective."""
