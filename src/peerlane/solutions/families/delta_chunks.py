"""The gated delta rule of bfloat16 tokens in chunks on tensor cores, over a sharded sequence: one kernel with two roles.

Some blocks prepare chunks, which needs no state, and run ahead. The others run heads' states through the chunks and hand them on to
the next rank. ``delta_rule.cuh`` has the algebra. Only scans are a chain from rank to rank: three products a chunk, one after the other.
Preparing is limited by instructions: where channels have decays of their own, four exponentials for each."""

from dataclasses import dataclass

import torch

from peerlane.device import F32, U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, per_group
from peerlane.device.host.declare import Map

SOURCE = r"""
#include <peerlane/attention/delta_rule.cuh>
using namespace peerlane;
using Shape = DeltaShape<DEPTH, GROUPS, SLOTS, BY_CHANNEL, SHARED_BYTES, PARAMETER_RANKS>;
static_assert(sizeof(Shape::Scan) <= SHARED_BYTES && Shape::max_teams >= TEAMS && Shape::part_bytes == PART_BYTES);
constexpr bool moves_registers = THREADS > 256;  // a block of fewer threads has enough of them for all

// One state of 64 values, four numbers of each thread at a time: to or from the memory at `place`.
struct alignas(16) Vec4 { float x[4]; };

__device__ inline void scan(const Arena& arena, const DeltaChunks& args, u32 epoch, Shape::Scan& memory) {
    const u32 warp = threadIdx.x / 32, at_once = args.scan_blocks / args.slices, lines = args.batch * args.heads, rank = arena.rank;
    const u32 chunks = (args.tokens + chunk_tokens - 1) / chunk_tokens, launch = epoch - first_epoch, slice = blockIdx.x % args.slices;
    if (threadIdx.x == 0) {
        memory.front_ring.init(1, 4 * GROUPS + 1);
        memory.back_ring.init(1, 4 * GROUPS + 1);
        ptx::mbarrier_init_fence();
    }
    __syncthreads();
    const auto each_line = [&](const auto& use) {
        for (u32 line = blockIdx.x / args.slices; line < lines; line += at_once) use(DeltaLine{line, slice, chunks, launch});
    };
    // In this order, and idle warps here if there is one group: otherwise the compiler does not give the consumers their registers.
    const bool idle = warp >= 4 + 4 * GROUPS;
    if (warp < 4 || (GROUPS == 1 && idle)) {
        if constexpr (moves_registers) ptx::registers_decrease<40>();
        if (warp == 0) {
            FrontProducer<Shape> front(memory.front, memory.front_ring);
            BackProducer<Shape> back(memory.back, memory.back_ring);
            each_line([&](const DeltaLine& at) { load_line<Shape>(arena, args, at, front, back); });
        } else if (warp == 1) {
            FrontConsumer<Shape> front(memory.front, memory.front_ring);
            BackConsumer<Shape> back(memory.back, memory.back_ring);
            each_line([&](const DeltaLine& at) { free_line<Shape>(arena, args, at, front, back); });
        } else if (warp < 2 + GROUPS) {
            each_line([&](const DeltaLine& at) { store_line<Shape>(args, at, warp - 2, memory.output[warp - 2]); });
            if (ptx::elect_one()) ptx::bulk_wait<0>();
        }
        return;
    }
    if (GROUPS > 1 && idle) {
        if constexpr (moves_registers) ptx::registers_decrease<40>();
        return;
    }
    if constexpr (moves_registers) ptx::registers_increase<GROUPS == 1 ? 240 : 216>();
    const u32 group = warp / 4 - 1, items = lines * args.slices * GROUPS;
    const Warps team{4 + 4 * group, 4, first_free_barrier + group};
    const Peers<WORLD_SIZE, Warps> peers(arena, args.flags, team);
    FrontConsumer<Shape> front(memory.front, memory.front_ring);
    BackConsumer<Shape> back(memory.back, memory.back_ring);
    Scanning<Shape> scanning;
    each_line([&](const DeltaLine& at) {
        const u32 item = (at.line * args.slices + slice) * GROUPS + group;
        const auto place = [&](u32 i) { return args.state + ((u64(item) * (DEPTH / 8) + i) * 128 + team.thread()) * sizeof(Vec4); };
#pragma unroll
        for (int i = 0; i < DEPTH / 2; ++i) scanning.number(i) = 0.0f;
        if (rank > 0) {
            peers.wait(rank - 1, item, epoch);
#pragma unroll
            for (int i = 0; i < DEPTH / 8; ++i) {
                const Vec4 part = *reinterpret_cast<const Vec4*>(arena.local(place(i)));
                for (int e = 0; e < 4; ++e) scanning.number(4 * i + e) = part.x[e];
            }
            peers.acknowledge(rank - 1, items + item, epoch);
        }
        for (u32 chunk = 0; chunk < chunks; ++chunk) {
            scanning.step(group, front, back, [&](const SumTile<64>& out) { scanning.hand_out(out, memory.output[group], group); });
        }
        if (rank + 1 < WORLD_SIZE) {
            if (epoch > first_epoch) peers.wait(rank + 1, items + item, epoch - 1);  // it has read the state of the launch before
#pragma unroll
            for (int i = 0; i < DEPTH / 8; ++i) {
                const float* x = &scanning.number(4 * i);
                *reinterpret_cast<Vec4*>(arena.peer(rank + 1, place(i))) = Vec4{{x[0], x[1], x[2], x[3]}};
            }
            peers.signal(rank + 1, item, epoch);
        }
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    delta_chunks(const __grid_constant__ Arena arena, const __grid_constant__ DeltaChunks args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    if (blockIdx.x < args.scan_blocks) {
        scan(arena, args, epoch, *reinterpret_cast<Shape::Scan*>(ptx::dynamic_shared()));
        return;
    }
    const char* params = args.own_params;
    if (PARAMETER_RANKS > 1) {  // in one of two buffers by the launch's parity: who ends a launch knows that all have begun it
        const Peers<WORLD_SIZE> peers(arena, args.flags);
        const u32 slot = 2 * args.batch * args.heads * args.slices * GROUPS;
        const u64 all = args.params + (epoch & 1) * WORLD_SIZE * args.parameter_bytes;
        if (blockIdx.x == args.scan_blocks) {
            for (int q = 0; q < WORLD_SIZE; ++q) {
                copy_bytes(Block{}, arena.peer(q, all + u64(arena.rank) * args.parameter_bytes), args.own_params, args.parameter_bytes);
            }
            peers.signal_all(slot, epoch);
            peers.signal(arena.rank, slot, epoch);
        }
        for (int q = 0; q < WORLD_SIZE; ++q) peers.wait(q, slot, epoch);
        params = arena.local(all);
    }
    prepare_chunks<Shape>(arena, args, params, epoch);
}
"""
DELTA_CHUNKS = DeclaredKernel(
    "delta_chunks", SOURCE, epochs=Epochs(), flags=Flags(), state=Buffer(), params=Buffer(), parts=Buffer(), ready=Buffer(), taken=Buffer(),
    v=Map(), out=Map(), q=Map(), k=Map(), decays=Map(), decay=Pointer("const char*"), beta=Pointer("const char*"),
    own_params=Pointer("const char*"),
    **dict.fromkeys(("batch", "tokens", "heads", "key_heads", "depth", "slices", "ring", "scan_blocks", "sharing"), U32),
    parameter_bytes=U32, floor=F32,
)  # fmt: skip
CHUNK, VALUES, MAX_DEPTH, MAX_SLICES, MAX_SHARING, MAX_SLOTS = 64, 64, 256, 32, 4, 3
MAX_SHARED_BYTES = 227 << 10
RING, RING_BYTES = 32, 512 << 20
"""Chunks of a line that are prepared ahead: as many as stay in L2; where a scan waits for another rank's, what this memory holds."""
MANY_SCANS = 72
"""Up to so many blocks scan 64 values each. Where that is too few, a block has 128."""
PREPARATION = {True: 6.0, False: 2.0}
"""How much longer a block prepares a chunk than another one scans it, if channels have decays of their own and if not."""


SQUARE_BYTES = 2 * CHUNK * CHUNK


@dataclass(frozen=True)
class ChunkShape:
    """Sizes of a rank's call: ``parameter_bytes`` of a_log and dt_bias, of ``parameter_ranks`` ranks."""

    batch: int
    tokens: int
    heads: int
    values: int
    key_heads: int
    depth: int
    by_channel: bool
    parameter_ranks: int
    parameter_bytes: int

    @property
    def padded(self) -> int:
        """Channels of the kernel's tiles."""
        return max(CHUNK, 1 << (self.depth - 1).bit_length())

    @property
    def groups(self) -> int:
        """Warpgroups that share a line's chunks in shared memory."""
        slices = -(-self.values // VALUES)
        return 1 if slices == 1 or (slices < MAX_SLICES and self.batch * self.heads * slices <= MANY_SCANS) else 2

    @property
    def slices(self) -> int:
        """Blocks that share a line's values."""
        return -(-self.values // (VALUES * self.groups))

    @property
    def slots(self) -> int:
        return max(1, min(MAX_SLOTS, (MAX_SHARED_BYTES - self._kept_bytes) // self._slot_bytes))

    @property
    def threads(self) -> int:
        if self.by_channel:
            return 128 * (1 + self.groups) if self.padded == CHUNK else 512
        return 384

    @property
    def part_bytes(self) -> int:
        return (3 * self._tile_bytes if self.by_channel else 0) + 2 * SQUARE_BYTES + 1024

    @property
    def _tile_bytes(self) -> int:
        return 2 * CHUNK * self.padded

    @property
    def _slot_bytes(self) -> int:
        """Of a scan's chunk: keys, queries, carriers, which are keys if all channels decay alike; solution, values, weights, factors."""
        return (3 if self.by_channel else 2) * self._tile_bytes + (2 + self.groups) * SQUARE_BYTES + 1024

    @property
    def _kept_bytes(self) -> int:
        return self.groups * SQUARE_BYTES + 1024

    @property
    def _preparation_bytes(self) -> int:
        """Of a team."""
        system, small = 4 * CHUNK * (CHUNK + 8) + 64 * 24 * 4, 2560 + 16
        if self.by_channel:
            small = 768 + 16 + 4 * 22 * self.padded
        return -(-(2 * SQUARE_BYTES + system + (3 if self.by_channel else 2) * self._tile_bytes + small) // 1024) * 1024

    @property
    def teams(self) -> int:
        """Teams of a preparing block."""
        return min(self.threads // (2 * self.padded if self.by_channel else 128), MAX_SHARED_BYTES // self._preparation_bytes)

    @property
    def shared_bytes(self) -> int:
        """The more of a scanning and a preparing block's."""
        return max(self.slots * self._slot_bytes + self._kept_bytes, self.teams * self._preparation_bytes)

    def defines(self) -> dict[str, str | int]:
        return {
            "DEPTH": self.padded,
            "GROUPS": self.groups,
            "SLOTS": self.slots,
            "BY_CHANNEL": int(self.by_channel),
            "THREADS": self.threads,
            "SHARED_BYTES": self.shared_bytes,
            "PART_BYTES": self.part_bytes,
            "PARAMETER_RANKS": self.parameter_ranks,
            "TEAMS": self.teams,
        }

    def sharing(self, blocks: int) -> int:
        """Returns how many lines with the same keys a team of ``blocks`` prepares at a time; all of them are scanned at a time."""
        ratio = self.heads // self.key_heads
        return 1 if self.by_channel or ratio > min(MAX_SHARING, (blocks - 1) // self.slices) else ratio

    def scan_blocks(self, blocks: int) -> int:
        """Returns how many of ``blocks`` scan, so that both roles end at about the same time."""
        lines, sharing = self.batch * self.heads, self.sharing(blocks)
        choices = range(sharing, max(sharing, min(lines, (blocks - 1) // self.slices)) + 1, sharing)

        def time(at_once: int) -> float:
            return max(-(-lines // at_once), lines * PREPARATION[self.by_channel] / (blocks - at_once * self.slices))

        return self.slices * min(choices, key=time)


@per_group
def _bound(group: Group, shape: ChunkShape) -> BoundKernel:
    lines, chunks = shape.batch * shape.heads, -(-shape.tokens // CHUNK)
    longest = min(chunks, RING if group.world_size == 1 else max(RING, RING_BYTES // (lines * shape.part_bytes)))
    ring = min(chunks, RING) if group.rank == 0 else longest
    items, blocks = lines * shape.slices, min(group.sm_count, lines * (shape.slices + chunks))
    return DELTA_CHUNKS.bind(
        group,
        grid=blocks,
        block=shape.threads,
        resident=True,
        defines=shape.defines(),
        sizes={
            "flags": 2 * items * shape.groups + 1,
            "state": 4 * items * shape.groups * VALUES * shape.padded,
            "params": 2 * shape.parameter_ranks * shape.parameter_bytes if shape.parameter_ranks > 1 else 0,
            "parts": lines * longest * shape.part_bytes,
            "ready": 4 * lines * longest,
            "taken": 4 * items,
        },
        shared_bytes=shape.shared_bytes,
        **{name: getattr(shape, name) for name in ("batch", "tokens", "heads", "key_heads", "depth", "slices", "parameter_bytes")},
        ring=ring,
        scan_blocks=shape.scan_blocks(blocks),
        sharing=shape.sharing(blocks),
    )


def in_chunks(group: Group, shape: ChunkShape, dtypes: set[torch.dtype]) -> bool:
    """Returns True if :func:`chunked_delta_rule` takes tokens of this shape and these dtypes: the same on all ranks."""
    fits = shape.depth <= MAX_DEPTH and shape.depth % 8 == 0 and shape.values % 8 == 0
    return dtypes == {torch.bfloat16} and fits and shape.slices < min(group.sm_count, MAX_SLICES)


def chunked_delta_rule(group: Group, shape: ChunkShape, tensors: dict[str, torch.Tensor], floor: float) -> torch.Tensor:
    """Collective: o of the ``tensors`` q, k, v, decay, beta and own_params, all contiguous."""
    output, keys = torch.empty_like(tensors["v"]), tensors["k"]
    mapped = {"v": tensors["v"], "out": output, "q": tensors["q"], "k": keys, "decays": tensors["decay"] if shape.by_channel else keys}
    maps = {name: group.place(tensor).map((CHUNK, 1, VALUES)) for name, tensor in mapped.items()}
    _bound(group, shape)(**{**tensors, **maps}, floor=floor)
    return output
