"""A gated causal convolution over a sharded sequence: one kernel fetches the history from earlier chunks and convolves directly.

    convolve = gated_convolution(group, Shape(batch, channels, length, pieces, filters, taps, dtype))
    convolve(x1=x1, x2=x2, v=v, h=h, bias=bias, out=out)        out (batch, positions, channels) = x1 (h * (x2 v) + bias x2 v)

A team of eight warps takes some channels of a stretch of time, keeps the gated values and their history in shared memory, and transposes
results there. 16-bit elements go through the matrix units: a filter is a row of 16 x 16 Toeplitz matrices, which multiply eight segments of
a stretch at a time. ``taps / 16 + 1`` products make 16 results of each, so that no product but those at both ends of a filter is wasted.
float32 goes through the ordinary units, eight outputs a thread.

Bound: HBM up to about 300 taps (8 bytes against 2 taps operations an element), the matrix units beyond. What limits it: mma.sync, which
reaches about 60% of them; a stretch reads its history again, 1 + taps / 1024 times the values, mostly from L2.

Every rank pushes the last gated values of its chunks to the ranks that continue them, behind a team's first stretch, and convolves what
needs no history of others meanwhile. The history has one buffer: a launch first says that the rank's launch before has ended.
"""

from dataclasses import dataclass

import torch

from peerlane.device import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, element_type, per_group
from peerlane.device.host.roles import SHARED_LIMIT_BYTES

SOURCE = r"""
#include <peerlane/ptx/ptx_mma.cuh>
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int segment = 16 * STEPS, pitch = segment + 8;  // of eight segments in a tile; the gap keeps lanes in banks of their own
constexpr int tile = 8 * segment, window = HISTORY_SEGMENTS + 8 * SUBTILES, octets = (tile / row_lanes + 31) / 32;
constexpr int bytes = 4 / ELEMENT::lanes, chunks = WORLD_SIZE * PIECES, words = row_lanes / ELEMENT::lanes;
constexpr bool on_matrix_units = ELEMENT::lanes == 2;
// A filter h, backwards and with zeros around it: word w holds h[start - 2 w] and h[start - 2 w - 1]; the second copy is one tap later.
constexpr int filter_start = 16 * STEPS * HISTORY_SEGMENTS + 16, filter_words = filter_start / 2 + 8;
using Cell = ElementBits<ELEMENT::lanes>::type;

struct alignas(16) Octet {
    u32 word[words];
};
struct Shared {
    alignas(16) Cell values[CHANNELS][window * pitch];
    u32 filter[FILTERS][2 * filter_words];
};

// Which chunk of the sequence a rank's piece is, and how much of what lies before it a filter reaches.
__device__ inline int chunk_of(int rank, int piece) { return piece == 0 ? rank : 2 * WORLD_SIZE - 1 - rank; }
__device__ inline int history_of(const GatedConvolution& args, int chunk) { return int(min(args.reach, u32(chunk) * args.length)); }
__device__ inline u32 padded(int count) { return (count + row_lanes - 1) / row_lanes * row_lanes; }
// Where the history of a piece ends in a row of a rank's buffer.
__device__ inline u32 history_end(const GatedConvolution& args, int rank, int piece) {
    const u32 first = padded(history_of(args, chunk_of(rank, 0)));
    return piece == 0 ? first : first + padded(history_of(args, chunk_of(rank, 1)));
}

__device__ inline Octet load_octet(const char* matrix, u64 row, u32 column, u32 columns) {
    Octet value = {};
    if (ALIGNED) {
        if (column < columns) value = *reinterpret_cast<const Octet*>(matrix + (row * columns + column) * bytes);
    } else {
        load_words(matrix + row * columns * bytes, u64(column) * bytes, u64(columns) * bytes, value.word);
    }
    return value;
}
__device__ inline Octet product(const Octet& a, const Octet& b) {
    Octet result;
#pragma unroll
    for (int w = 0; w < words; ++w) {
        float x[ELEMENT::lanes], y[ELEMENT::lanes];
        ELEMENT::widen(a.word[w], x), ELEMENT::widen(b.word[w], y);
#pragma unroll
        for (int e = 0; e < ELEMENT::lanes; ++e) x[e] *= y[e];
        result.word[w] = ELEMENT::narrow(x);
    }
    return result;
}
__device__ inline int cell_of(int position) { return position / segment * pitch + position % segment; }
__device__ inline float widened(Cell cell) {
    float value[ELEMENT::lanes];
    ELEMENT::widen(cell, value);
    return value[0];
}
__device__ inline Cell narrowed(float number) {
    const float value[ELEMENT::lanes] = {number};
    return static_cast<Cell>(ELEMENT::narrow(value));
}

struct Item {
    u32 batch, channel, unit, piece, start;  // the unit is the tile of channels among all; the start lies in the piece

    __device__ u64 row(const GatedConvolution& args, u32 c) const { return u64(batch) * args.channels + channel + c; }
};

// Gated values of the last positions of this rank's pieces, to where they are history.
template <class Team>
__device__ void push_history(const Arena& arena, const GatedConvolution& args, const Team& team, const Item& item) {
    const int length = args.length;
    for (int piece = 0; piece < PIECES; ++piece) {
        const int own = chunk_of(arena.rank, piece);
        for (int reader = own + 1; reader < chunks; ++reader) {
            const int history = history_of(args, reader), first = max((own - reader) * length, -history), end = (own - reader + 1) * length;
            if (first >= end) continue;
            const int rank = reader < WORLD_SIZE ? reader : 2 * WORLD_SIZE - 1 - reader;
            const u32 count = padded(end - first) / row_lanes, stop = history_end(args, rank, reader >= WORLD_SIZE);
            for (u32 i = team.thread(); i < count * CHANNELS; i += team.size()) {
                const u32 c = i / count, at = i % count * row_lanes;
                if (item.channel + c >= args.channels) break;
                const u64 row = item.row(args, c);
                const u32 column = u32(first - (own - reader) * length) + at;
                const Octet gate = load_octet(args.x2, row * PIECES + piece, column, length);
                const Octet z = product(gate, load_octet(args.v, row * PIECES + piece, column, length));
                char* target = arena.peer(rank, args.history + row * args.history_stride * bytes);
                store_words(target, u64(stop + first + at) * bytes, u64(stop + end) * bytes, z.word);
            }
        }
    }
}

// Filters of the item's channels, and their gated values with what lies before them.
template <class Team>
__device__ void load_tile(const Arena& arena, const GatedConvolution& args, const Team& team, const Item& item, Shared& shared, u32& held) {
    const u32 first = item.channel / args.group_dim;
    if (held != first) {
        for (u32 i = team.thread(); i < FILTERS * filter_words; i += team.size()) {
            const u32 f = i / filter_words, w = i % filter_words;
            const char* h = args.h + u64(first + f) * args.taps * bytes;
            const auto tap = [&](int at) {
                const bool inside = first + f < args.filters && at >= 0 && at < int(args.taps);
                return inside ? reinterpret_cast<const Cell*>(h)[at] : Cell{0};
            };
            if constexpr (on_matrix_units) {
                const int at = filter_start - 2 * int(w);
                const u32 low = tap(at), middle = tap(at - 1), high = tap(at - 2);
                shared.filter[f][w] = low | middle << 16;
                shared.filter[f][filter_words + w] = middle | high << 16;
            } else {
                for (u32 k = w; k < 2 * filter_words; k += filter_words) shared.filter[f][k] = tap(k);
            }
        }
        held = first;
    }
    const int chunk = chunk_of(arena.rank, item.piece), history = history_of(args, chunk);
    const u32 stop = history_end(args, arena.rank, item.piece);
    constexpr u32 row_octets = window * segment / row_lanes;
    constexpr int at_once = on_matrix_units ? 4 : 1;
#pragma unroll 1
    for (u32 i = team.thread(); i < row_octets * CHANNELS; i += at_once * team.size()) {
        Octet gate[at_once], value[at_once];
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
            const u32 at = i + k * team.size(), c = at / row_octets;
            const int position = int(item.start) + int(at % row_octets) * row_lanes - HISTORY_SEGMENTS * segment;
            gate[k] = value[k] = {};
            if (c >= CHANNELS || item.channel + c >= args.channels) continue;
            const u64 row = item.row(args, c);
            if (position >= 0) {
                gate[k] = load_octet(args.x2, row * PIECES + item.piece, position, args.length);
                value[k] = load_octet(args.v, row * PIECES + item.piece, position, args.length);
            } else if (position + row_lanes > -history) {
                const char* source = arena.local(args.history + row * args.history_stride * bytes);
                value[k] = *reinterpret_cast<const Octet*>(source + (int(stop) + position) * bytes);
            }
        }
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
            const u32 at = i + k * team.size(), c = at / row_octets;
            const int place = int(at % row_octets) * row_lanes, position = int(item.start) + place - HISTORY_SEGMENTS * segment;
            if (c >= CHANNELS) continue;
            Octet z = value[k];
            if (position >= 0) z = product(gate[k], value[k]);
            Cell* target = shared.values[c] + cell_of(place);
            *reinterpret_cast<Octet*>(target) = z;
            // Before the sequence, or of no tap.
            for (int e = 0; position + e < -history && position < 0 && e < row_lanes; ++e) target[e] = 0;
        }
    }
}

// y[16 i + row][segment] of a tile, in fragments of STEPS products; `values` begins with the tile, behind its history.
__device__ void convolve(const Cell* values, const u32* filter, int known, u32 taps, float (&sum)[STEPS][4]) {
    const int lane = Warp{}.thread(), row = lane / 4, k = 2 * (lane % 4), last = (int(taps) + 15) / 16;
    const u32* const toeplitz = filter + (row & 1) * filter_words + ((filter_start - row + k) >> 1);
    const Cell* const column = values + row * pitch + k;
    u32 top[STEPS] = {}, below[STEPS] = {}, right[STEPS] = {};  // a matrix's words at (row, k), eight rows down, and eight k further
    const auto step = [&](int block, auto first, auto end) {
#pragma unroll
        for (int u = 0; u < STEPS; ++u) {
            const int fresh = (STEPS - u) % STEPS, place = block * STEPS + u;
            if (!end || u == 0) {  // the next of the matrices that are multiplied with one after another: down by one
                below[fresh] = right[(fresh + 1) % STEPS];
                top[fresh] = toeplitz[8 * place], right[fresh] = toeplitz[8 * place + 4];
            }
            const u32* const source = reinterpret_cast<const u32*>(column + block * pitch + 16 * u);
            const u32 z[2] = {source[0], source[4]};
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                if (end && i < u) continue;
                if (first && i - place > last) continue;
                const int s = (i - u + STEPS) % STEPS;
                const u32 matrix[4] = {top[s], below[s], right[s], top[s]};
                ptx::mma<MATRIX_TYPE>(sum[i], matrix, z);
            }
        }
    };
    struct Yes { __device__ constexpr operator bool() const { return true; } };
    struct No { __device__ constexpr operator bool() const { return false; } };
    const int begin = -min(HISTORY_SEGMENTS, known);
    right[1 % STEPS] = toeplitz[8 * begin * STEPS - 4];
    step(begin, Yes{}, No{});
#pragma unroll 1
    for (int block = begin + 1; block < 0; ++block) step(block, No{}, No{});
    step(0, No{}, Yes{});
}

// The same for float32: a lane has eight positions in a row.
__device__ void convolve(const Cell* values, const u32* filter, u32 taps, float (&sum)[octets][row_lanes]) {
    const float* h = reinterpret_cast<const float*>(filter);
#pragma unroll
    for (int i = 0; i < octets; ++i) {
        const int place = (int(Warp{}.thread()) + 32 * i) * row_lanes;
        if (place >= tile) break;
        float window_[2 * row_lanes];
        const auto load = [&](int position, float* to) {
            const auto at = position + HISTORY_SEGMENTS * segment;
            const float* from = reinterpret_cast<const float*>(values) + cell_of(at) - HISTORY_SEGMENTS * pitch;
#pragma unroll
            for (int e = 0; e < row_lanes; ++e) to[e] = from[e];
        };
        load(place, window_ + row_lanes);
#pragma unroll 1
        for (int first = 0; first < int(taps); first += row_lanes) {
            load(place - first - row_lanes, window_);
#pragma unroll
            for (int t = 0; t < row_lanes; ++t) {
                const float weight = h[first + t];
#pragma unroll
                for (int e = 0; e < row_lanes; ++e) sum[i][e] += weight * window_[row_lanes + e - t];
            }
#pragma unroll
            for (int e = 0; e < row_lanes; ++e) window_[row_lanes + e] = window_[e];
        }
    }
}

// A warp's tile: convolved, with bias, gated; it stays where its values were.
template <class Team>
__device__ void finish_tile(
    const GatedConvolution& args, const Team& team, const Item& item, Shared& shared, u32 c, u32 subtile, int chunk) {
    const u32 lane = Warp{}.thread(), start = item.start + subtile * tile, channel = min(item.channel + c, args.channels - 1);
    const u64 row = item.row(args, channel - item.channel) * PIECES + item.piece;
    Cell* const values = shared.values[c] + (HISTORY_SEGMENTS + 8 * subtile) * pitch;
    const u32* const filter = shared.filter[channel / args.group_dim - item.channel / args.group_dim];
    Octet gate[octets];
#pragma unroll
    for (int i = 0; i < octets; ++i) gate[i] = load_octet(args.x1, row, start + (lane + 32 * i) * row_lanes, args.length);
    const float bias = element_of<ELEMENT>(args.bias, channel);
    const auto meet = [&] {  // other tiles of this channel have read their history, which is what this one's results replace
        if (SUBTILES > 1) team.sync();
        else __syncwarp();
    };
    if constexpr (on_matrix_units) {
        const u64 before = u64(chunk) * args.length + start;
        float sum[STEPS][4] = {};
        convolve(values, filter, int(min((before + segment - 1) / segment + 8, u64(1) << 20)), args.taps, sum);
        meet();
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                Cell& cell = values[(2 * (lane % 4) + e % 2) * pitch + 16 * i + lane / 4 + e / 2 * 8];
                cell = narrowed(sum[i][e] + bias * widened(cell));
            }
        }
    } else {
        float sum[octets][row_lanes] = {};
        convolve(values, filter, args.taps, sum);
        meet();
#pragma unroll
        for (int i = 0; i < octets; ++i) {
            const int place = (lane + 32 * i) * row_lanes;
            for (int e = 0; e < row_lanes && place < tile; ++e) {
                Cell& cell = values[cell_of(place) + e];
                cell = narrowed(sum[i][e] + bias * widened(cell));
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < octets; ++i) {
        const int place = (lane + 32 * i) * row_lanes;
        if (place >= tile) break;
        Octet& y = *reinterpret_cast<Octet*>(values + cell_of(place));
        y = product(gate[i], y);
    }
}

// Results of all channels of a position lie side by side.
template <class Team>
__device__ void write_tile(const GatedConvolution& args, const Team& team, const Item& item, const Shared& shared) {
    for (u32 at = team.thread(); at < SUBTILES * tile && item.start + at < args.length; at += team.size()) {
        const Cell* from = shared.values[0] + HISTORY_SEGMENTS * pitch + cell_of(at);
        u32 word[CHANNELS / ELEMENT::lanes] = {};
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) word[c / ELEMENT::lanes] |= u32(from[c * (window * pitch)]) << c % ELEMENT::lanes * 16;
        const u64 position = (u64(item.batch) * PIECES + item.piece) * args.length + item.start + at;
        store_words(args.out + position * args.channels * bytes, u64(item.channel) * bytes, u64(args.channels) * bytes, word);
    }
}

extern "C" __global__ void __launch_bounds__(32 * TEAMS * WARPS, 1)
    gated_convolution(const __grid_constant__ Arena arena, const __grid_constant__ GatedConvolution args) {
    static_assert(SUBTILES == 1 || CHANNELS * SUBTILES == WARPS);
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const u32 number = threadIdx.x / (32 * WARPS), first = number * gridDim.x + blockIdx.x, teams = gridDim.x * TEAMS;
    const Warps team{number * WARPS, WARPS, 1 + number};
    const Peers<WORLD_SIZE, Warps> peers(arena, args.flags, team);
    Shared& shared = reinterpret_cast<Shared*>(ptx::dynamic_shared())[number];
    if (first == 0) peers.acknowledge_all(0, epoch);  // nothing reads the history of the launch before any more

    const u32 bundles = (args.channels + CHANNELS - 1) / CHANNELS, units = args.batch * bundles, stretch = SUBTILES * tile;
    const u32 stretches = (args.length + stretch - 1) / stretch, edges = min(stretches, (args.reach + stretch - 1) / stretch);
    const u32 inner = units * PIECES * (stretches - edges), items = units * PIECES * stretches;
    const auto unit_of = [&](u32 unit) { return Item{unit / bundles, unit % bundles * CHANNELS, unit, 0, 0}; };
    u32 held = ~0u;
    bool pushed = false;
#pragma unroll 1
    for (u32 i = first; i < items || !pushed; i += teams) {  // what needs no history first
        const bool edge = i >= inner;
        if (!pushed && (edge || i != first)) {
            pushed = true;
            peers.wait_all(0, epoch);
#pragma unroll 1
            for (u32 unit = first; unit < units; unit += teams) {
                push_history(arena, args, team, unit_of(unit));
                peers.signal_all(1 + unit, epoch);
                peers.signal(arena.rank, 1 + unit, epoch);
            }
        }
        if (i >= items) break;
        const u32 at = edge ? i - inner : i, turn = at / units;
        Item item = unit_of(at % units);
        item.piece = turn % PIECES, item.start = (turn / PIECES + (edge ? 0 : edges)) * stretch;
        if (edge) peers.wait_all(1 + item.unit, epoch), peers.wait(arena.rank, 1 + item.unit, epoch);
        team.sync();  // the item before has been written
        load_tile(arena, args, team, item, shared, held);
        team.sync();
#pragma unroll 1
        for (u32 w = threadIdx.x / 32 % WARPS; w < CHANNELS * SUBTILES; w += WARPS) {
            finish_tile(args, team, item, shared, w % CHANNELS, w / CHANNELS, chunk_of(arena.rank, item.piece));
        }
        team.sync();
        write_tile(args, team, item, shared);
    }
}
"""
GATED_CONVOLUTION = DeclaredKernel(
    "gated_convolution", SOURCE, epochs=Epochs(), flags=Flags(), history=Buffer(), x1=Pointer("const char*"), x2=Pointer("const char*"),
    v=Pointer("const char*"), h=Pointer("const char*"), bias=Pointer("const char*"), out=Pointer(), batch=U32, channels=U32, length=U32,
    filters=U32, group_dim=U32, taps=U32, reach=U32, history_stride=U32,
)  # fmt: skip

MATRIX_TYPES = {torch.bfloat16: "MmaType::bf16", torch.float16: "MmaType::f16"}
WARPS = 8
MOST_TAPS = 8192
"""The most taps of a filter that is convolved directly: 2 taps operations an element, against some 130 bytes of HBM for transforms."""


@dataclass(frozen=True)
class Shape:
    """A rank's part. Zigzag parts have two ``pieces``, ``length`` positions each; ``filters`` serve ``group_dim`` channels each."""

    batch: int
    channels: int
    length: int
    pieces: int
    filters: int
    taps: int
    dtype: torch.dtype

    @property
    def group_dim(self) -> int:
        return self.channels // self.filters

    def history(self, world_size: int, rank: int) -> int:
        """Positions before a rank's pieces that filters reach, as its buffer holds them."""
        reach, chunks = _up(self.taps - 1, 8), (rank, 2 * world_size - 1 - rank)[: self.pieces]
        return sum(_up(min(reach, chunk * self.length), 8) for chunk in chunks)


@dataclass(frozen=True)
class Tiling:
    """A team's part in shared memory: ``channels``, ``subtiles`` stretches of eight segments of 16 ``steps`` positions, and history."""

    channels: int
    subtiles: int
    steps: int
    history_segments: int
    filters: int
    itemsize: int

    @classmethod
    def of(cls, shape: Shape, channels: int, steps: int, warps: int) -> "Tiling":
        dim = shape.group_dim
        filters = 1 if dim % channels == 0 else channels // dim if channels % dim == 0 else min(channels, (channels - 1) // dim + 2)
        segments = -(-shape.taps // (16 * steps))
        return cls(channels, max(1, warps // channels), steps, segments, filters, shape.dtype.itemsize)

    @property
    def stretch(self) -> int:
        return 128 * self.steps * self.subtiles

    @property
    def shared_bytes(self) -> int:
        values = self.channels * (self.history_segments + 8 * self.subtiles) * (16 * self.steps + 8) * self.itemsize
        return values + self.filters * 2 * (8 * self.steps * self.history_segments + 16) * 4

    def defines(self) -> dict[str, int]:
        names = ("CHANNELS", "SUBTILES", "STEPS", "HISTORY_SEGMENTS", "FILTERS")
        return dict(zip(names, (self.channels, self.subtiles, self.steps, self.history_segments, self.filters), strict=True))


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Returns x contiguous, at an address for vectors of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def tiling_of(shape: Shape, teams: int, warps: int) -> Tiling | None:
    """Returns the tiling with the most channels, then with the longest segments that the length fills; None if no filter fits."""
    for channels in (16, 8, 4, 2):
        for steps in (8, 4, 2, 1):
            tiling = Tiling.of(shape, channels, steps, warps)
            if tiling.stretch > max(shape.length, 128 * tiling.subtiles) or (tiling.subtiles > 1 and channels * tiling.subtiles != warps):
                continue
            if teams * tiling.shared_bytes <= SHARED_LIMIT_BYTES:
                return tiling
    return None


@per_group
def gated_convolution(group: Group, shape: Shape, tiling: Tiling | None = None) -> BoundKernel | None:
    """Makes the launch for parts of this shape; None where the filters are too long for shared memory."""
    warps = max(1, min(WARPS, group.max_threads // 64))
    teams = min(2, group.max_threads // (32 * warps))
    tiling = tiling or tiling_of(shape, teams, warps)
    if tiling is None:
        return None
    world, units = group.world_size, shape.batch * -(-shape.channels // tiling.channels)
    stride = max(shape.history(world, rank) for rank in range(world))
    items = units * shape.pieces * -(-shape.length // tiling.stretch)
    return GATED_CONVOLUTION.bind(
        group,
        grid=min(group.sm_count, -(-items // teams)),
        block=32 * warps * teams,
        shared_bytes=teams * tiling.shared_bytes,
        resident=True,
        defines={
            **tiling.defines(),
            "WARPS": warps,
            "TEAMS": teams,
            "PIECES": shape.pieces,
            "ELEMENT": element_type(shape.dtype),
            "MATRIX_TYPE": MATRIX_TYPES.get(shape.dtype, "MmaType::bf16"),
            "ALIGNED": int(shape.length % 8 == 0),
        },
        sizes={"flags": 1 + units, "history": shape.batch * shape.channels * stride * shape.dtype.itemsize},
        **{name: getattr(shape, name) for name in ("batch", "channels", "length", "filters", "group_dim", "taps")},
        reach=_up(shape.taps - 1, 8),
        history_stride=stride,
    )
