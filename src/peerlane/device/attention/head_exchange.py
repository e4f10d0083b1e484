"""Exchanges of shards of a sequence for some heads of the whole sequence, and back, for the gradients of attention.

    exchange = head_exchange(group, shape)          collective
    for piece in range(shape.pieces):
        exchange.send(piece, tensors)               dout, q, k, v of this rank's tokens, and numbers of its queries
    for piece in range(shape.pieces):
        whole = exchange.arrived(piece)             the same of all tokens, for this rank's heads of the piece
        exchange.bring(piece, gradients)            dq, dk, dv of those
    exchange.results                                dq, dk, dv of this rank's tokens

Rank r has the key heads r h_kv / W to (r + 1) h_kv / W and the query heads that share them, in equal pieces. Each exchange is one launch
of few blocks, for the stream beside the one that computes. Data is stored where it belongs: nothing is packed before or behind.

A launch pushes at once. What a call sends lands where the gradients of the call before were computed from, and all ranks have brought
those. What it brings lands where results of the call before were read, and all ranks have sent since. So a call sends all pieces, then
brings all.
``peerlane/collectives/strided.cuh``.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from peerlane.device.attention.backward import PADDING
from peerlane.device.collectives.strided import StridedBlock
from peerlane.device.host.declare import U32, U64, BoundKernel, BoundLaunches, Buffer, DeclaredKernel, Epochs, Field, Flags, array, layouts
from peerlane.device.host.group import Group, per_group
from peerlane.device.products.gemm import ELEMENT_BYTES

_SENT = "dout", "q", "k", "v", "numbers"
BLOCKS_BESIDE, _BLOCKS_ALONE, _THREADS = 32, 128, 512
_UNIT = 16 // ELEMENT_BYTES

SOURCE = r"""
#include <peerlane/collectives/strided.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(512)
    head_exchange(const __grid_constant__ Arena arena, const __grid_constant__ HeadExchange args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const auto push = [&](u32 t, auto unit) {
        using Unit = decltype(unit);
        Unit* targets[WORLD_SIZE];
        const Unit* sources[WORLD_SIZE];
#pragma unroll
        for (int k = 0; k < WORLD_SIZE; ++k) {
            const int q = rank_after<WORLD_SIZE>(arena.rank, k);
            targets[k] = reinterpret_cast<Unit*>(arena.peer(q, args.kept + args.to[t])) + arena.rank * args.blocks[t].of_rank;
            sources[k] = reinterpret_cast<const Unit*>(args.from[t]) + q * args.blocks[t].for_rank;
        }
        push_strided<Unit, WORLD_SIZE>(targets, sources, args.blocks[t]);
    };
    for (u32 t = 0; t < args.count; ++t) {
        if (args.numbers >> t & 1) push(t, u32());
        else push(t, Vec16());
    }
    peers.barrier(blockIdx.x, epoch);
}
"""
HEAD_EXCHANGE = DeclaredKernel(
    "head_exchange",
    SOURCE,
    kept=Buffer(align=1024),
    flags=Flags(),
    epochs=Epochs(),
    **{name: array(U64, len(_SENT)) for name in ("from", "to")},
    blocks=Field("StridedBlock", StridedBlock, len(_SENT)),
    count=U32,
    numbers=U32,
)


@dataclass(frozen=True)
class HeadShape:
    """What all ranks agree on: shards q and k (batch, length, heads or key_heads, depth), v and dout (.., value_depth), and how many
    ``pieces`` the key heads of a rank come in, which they divide."""

    batch: int
    length: int
    heads: int
    key_heads: int
    depth: int
    value_depth: int
    dtype: torch.dtype
    pieces: int = 1

    def shard(self, name: str) -> tuple[int, int, int, int]:
        """The shape of this rank's tokens of ``dout``, ``q``, ``k`` or ``v``."""
        heads = self.heads if name in ("dout", "q") else self.key_heads
        return self.batch, self.length, heads, self.value_depth if name in ("dout", "v") else self.depth

    def piece(self, name: str, world_size: int) -> tuple[int, int, int, int]:
        """The shape of all tokens of it, of some heads."""
        batch, length, heads, depth = self.shard(name)
        return batch, world_size * length, heads // (world_size * self.pieces), depth

    def numbers(self, world_size: int) -> tuple[int, int, int, int]:
        """The shape of all queries' numbers, of some heads."""
        tokens = world_size * self.length
        return 2, self.batch, self.heads // (world_size * self.pieces), -(-tokens // PADDING) * PADDING


def _block(counts: Sequence[int], source: Sequence[int], target: Sequence[int], ranks: tuple[int, int], unit: int) -> StridedBlock:
    """Counts along three axes and the run, distances along the axes, and from rank to rank, in elements of which ``unit`` are one."""
    return StridedBlock.of(counts[:3], [stride // unit for stride in (*source, *target, *ranks)], counts[3] // unit)


def _strides(shape: Sequence[int]) -> list[int]:
    """Returns the strides of a contiguous tensor, without the innermost."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape) - 1)]


class HeadExchange:
    """The kernel's memory for one shape, and its launches. Creating one is collective; see the module.

    The arena holds dout, q, k and v of this rank's heads for all tokens, which are as much as those of its tokens, and the results."""

    def __init__(self, group: Group, shape: HeadShape) -> None:
        self.group, self.shape = group, shape
        self._offsets: dict[str, int] = {}
        end = 0
        for name in ("dout", "q", "k", "v"):
            end = self._take(name, end, shape.pieces * math.prod(shape.piece(name, group.world_size)) * ELEMENT_BYTES)
        end = self._take("numbers", end, shape.pieces * math.prod(shape.numbers(group.world_size)) * 4)
        for name in ("q", "k", "v"):
            end = self._take(f"d{name}", end, math.prod(shape.shard(name)) * ELEMENT_BYTES)
        grid = min(group.sm_count, BLOCKS_BESIDE if shape.pieces > 1 else _BLOCKS_ALONE)
        self._bound: BoundKernel = HEAD_EXCHANGE.bind(group, grid=grid, block=_THREADS, sizes={"kept": end, "flags": grid})
        self._launches: BoundLaunches[tuple[Hashable, ...]] = BoundLaunches()
        self._kept = self._bound.tensor("kept", (end,), torch.uint8)
        numbers = self._part("numbers", (shape.pieces, *shape.numbers(group.world_size)), torch.float32)
        tokens = group.world_size * shape.length
        numbers[:, 0, ..., tokens:], numbers[:, 1, ..., tokens:] = math.inf, 0  # nothing is sent to behind the last query
        claims = torch.zeros(1, dtype=torch.int32, device=group.device)
        self._pieces = [
            {name: self._part(name, (shape.pieces, *shape.piece(name, group.world_size)))[piece] for name in ("dout", "q", "k", "v")}
            | {f"d{name}": claims.new_empty(shape.piece(name, group.world_size), dtype=shape.dtype) for name in ("q", "k", "v")}
            | {"numbers": numbers[piece], "claims": claims}
            for piece in range(shape.pieces)
        ]
        dq, dk, dv = (self._part(f"d{name}", shape.shard(name)) for name in ("q", "k", "v"))
        self.results = dq, dk, dv
        """dq, dk and dv of this rank's tokens; valid until the next ``bring``"""

    def _take(self, name: str, at: int, nbytes: int) -> int:
        self._offsets[name] = at
        return -(-(at + nbytes) // 1024) * 1024

    def _part(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self.shape.dtype
        at = self._offsets[name]
        return self._kept[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def arrived(self, piece: int) -> Mapping[str, torch.Tensor]:
        """dout, q, k and v of all tokens and their queries' numbers, of this rank's heads; valid until the next ``send`` of the piece. Also
        what ``gradients`` may keep from call to call."""
        return self._pieces[piece]

    def send(self, piece: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Collective: the piece's heads of dout, q, k, v (this rank's tokens, ``aligned``) and numbers, to the ranks that have them."""
        key = "send", piece, layouts(self.group, *(tensors[name] for name in _SENT))
        self._launches.get(key, lambda: self._sending(piece, tensors))()

    def bring(self, piece: int, gradients: Sequence[torch.Tensor]) -> None:
        """Collective: dq, dk and dv of all tokens of the piece's heads, contiguous, to the ranks that have the tokens."""
        key = "bring", piece, layouts(self.group, *gradients)
        self._launches.get(key, lambda: self._bringing(piece, gradients))()

    def _sending(self, piece: int, tensors: Mapping[str, torch.Tensor]) -> BoundKernel:
        shape, world = self.shape, self.group.world_size
        parts = []
        for name in ("dout", "q", "k", "v"):
            x, target = tensors[name], shape.piece(name, world)
            batch, _, heads, depth = target
            own, to = x.stride()[:3], _strides(target)
            block = _block((batch, shape.length, heads, depth), own, to, (shape.pieces * heads * own[2], shape.length * to[1]), _UNIT)
            at = self._offsets[name] + piece * math.prod(target) * ELEMENT_BYTES
            parts.append((self.group.address(x) + piece * heads * own[2] * ELEMENT_BYTES, at, block))
        numbers, target = tensors["numbers"], shape.numbers(world)
        heads, own, to = target[2], numbers.stride(), _strides(target)
        counts = 2 * shape.batch, heads, 1, shape.length
        block = _block(counts, (own[1], own[2], 0), (*to[1:], 0), (shape.pieces * heads * own[2], shape.length), 1)
        at = self._offsets["numbers"] + piece * math.prod(target) * 4
        parts.append((self.group.address(numbers) + piece * heads * own[2] * 4, at, block))
        return self._bind(parts, numbers=1 << _SENT.index("numbers"))

    def _bringing(self, piece: int, gradients: Sequence[torch.Tensor]) -> BoundKernel:
        shape, parts = self.shape, []
        for name, x in zip(("q", "k", "v"), gradients, strict=True):
            batch, _, heads, depth = x.shape
            own, to = _strides(x.shape), _strides(shape.shard(name))
            all_heads = shape.pieces * heads * depth
            block = _block((batch, shape.length, heads, depth), own, to, (shape.length * own[1], all_heads), _UNIT)
            parts.append((self.group.address(x), self._offsets[f"d{name}"] + piece * heads * depth * ELEMENT_BYTES, block))
        return self._bind(parts)

    def _bind(self, parts: Sequence[tuple[int, int, StridedBlock]], numbers: int = 0) -> BoundKernel:
        """The launch that pushes parts: where each lies, where it goes in the arena, and how. ``numbers``: a bit for each of words."""
        missing = len(_SENT) - len(parts)
        sources, targets, blocks = zip(*parts, *[(0, 0, StridedBlock())] * missing, strict=True)
        return self._bound.again(**{"from": sources}, to=targets, blocks=blocks, count=len(parts), numbers=numbers)


head_exchange = per_group(HeadExchange)
"""The group's one :class:`HeadExchange` of this shape; the first call is collective."""
