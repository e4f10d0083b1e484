"""The gated delta rule over a sharded sequence: one kernel runs a rank's tokens and hands the state on to the next rank.

    output = gated_delta_rule(group, DeltaInputs(q, k, v, decay, beta, a_log, dt_bias), by_channel=True)

bfloat16 tokens go in chunks, ``delta_chunks.py``. This kernel takes the others, token by token: those in float32, whose tolerance
allows no rounded operands. A block takes 32 value channels of a head, for these columns of the state are independent. Half of its warps
hold the state in registers and run through the tokens, the other half prepare the next ones in shared memory. Heads pass from rank to
rank in one order, so that ranks work on different heads at a time where there are many."""

from dataclasses import dataclass

import torch

from peerlane.device import F32, U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, element_type, per_group
from peerlane.solutions.families.delta_chunks import ChunkShape, chunked_delta_rule, in_chunks

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr u32 tile_tokens = 16, lanes_of_column = 8, lanes_of_token = 16, compute_threads = COLUMNS * lanes_of_column, columns = COLUMNS;
constexpr u32 channels = (DEPTH + 31) / 32 * 4, padded = channels * lanes_of_column;  // of a lane, of a token
struct alignas(16) Vec4 { float x[4]; };
struct Tile {
    float k[tile_tokens][padded], q[tile_tokens][padded], keep[tile_tokens][BY_CHANNEL ? padded : 4];
    float v[tile_tokens][columns], beta[tile_tokens], product[tile_tokens];
};

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Sixteen lanes prepare a token: its normalised key and scaled query, their product, decays and values. All tokens of a tile at a time.
__device__ void prepare(const DeltaRule& args, const char* params, Tile& tile, u32 head, u32 batch, u32 slice, u32 token, u32 count) {
    constexpr int vectors = (padded + lanes_of_token * row_lanes - 1) / (lanes_of_token * row_lanes);
    const u32 lane = threadIdx.x % lanes_of_token, heads = args.heads, own = heads / PARAMETER_RANKS;
    const char* of_owner = params + u64(head / own) * args.parameter_bytes;
    const char* dt_bias = of_owner + own * (4 / SCALAR::lanes);
    const float rate = expf(element_of<SCALAR>(of_owner, head % own));
    for (u32 first = 0; first < count; first += compute_threads / lanes_of_token) {
        const u32 t = min(first + (threadIdx.x - compute_threads) / lanes_of_token, count - 1);  // the last one may be prepared by several
        const u64 row = (u64(batch) * args.tokens + token + t) * heads + head, shared_row = row / (heads / args.key_heads);
        float kk = 0, qq = 0, kq = 0, k[vectors][row_lanes], q[vectors][row_lanes];
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
            const u32 column = (i * lanes_of_token + lane) * row_lanes;
            RowOf<ELEMENT>(args.k, shared_row, DEPTH).load(column, k[i]);
            RowOf<ELEMENT>(args.q, shared_row, DEPTH).load(column, q[i]);
            for (int e = 0; e < row_lanes; ++e) kk += k[i][e] * k[i][e], qq += q[i][e] * q[i][e], kq += k[i][e] * q[i][e];
        }
        const float k_scale = 1.0f / fmaxf(sqrtf(warp_sum<lanes_of_token>(kk)), args.floor);
        const float q_scale = rsqrtf(float(DEPTH)) / fmaxf(sqrtf(warp_sum<lanes_of_token>(qq)), args.floor);
        kq = warp_sum<lanes_of_token>(kq) * k_scale * q_scale;
        if (first + (threadIdx.x - compute_threads) / lanes_of_token >= count) continue;
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
            const u32 column = (i * lanes_of_token + lane) * row_lanes;
            if (column >= padded) break;
            float g[row_lanes] = {}, bias[row_lanes] = {};
            if (BY_CHANNEL) RowOf<SCALAR>(args.decay, row, DEPTH).load(column, g);
            if (BY_CHANNEL) RowOf<SCALAR>(dt_bias, head % own, DEPTH).load(column, bias);
            for (int e = 0; e < row_lanes; ++e) {
                tile.k[t][column + e] = k[i][e] * k_scale, tile.q[t][column + e] = q[i][e] * q_scale;
                if (BY_CHANNEL) tile.keep[t][column + e] = expf(-5.0f * sigmoid(rate * (g[e] + bias[e])));
            }
        }
        for (u32 column = lane; column < columns; column += lanes_of_token) {
            const u32 value = slice * columns + column;
            tile.v[t][column] = value < args.values ? element_of<ELEMENT>(args.v, row * args.values + value) : 0.0f;
        }
        if (lane > 0) continue;
        const float beta = element_of<SCALAR>(args.beta, row);
        tile.beta[t] = BY_CHANNEL ? sigmoid(beta) : beta, tile.product[t] = kq;
        if (!BY_CHANNEL) {
            const float x = element_of<SCALAR>(args.decay, row) + element_of<SCALAR>(dt_bias, head % own);
            tile.keep[t][0] = expf(-rate * (x > 20.0f ? x : log1pf(expf(x))));
        }
    }
}

// Eight lanes run a column of the state through the tokens of a tile; a lane has every eighth four of its channels.
__device__ void run(const DeltaRule& args, const Tile& tile, float (&state)[channels], u64 out_row, u32 slice, u32 count) {
    const u32 lane = threadIdx.x % lanes_of_column, column = threadIdx.x / lanes_of_column, value = slice * columns + column;
    for (u32 t = 0; t < count; ++t) {
        float helds[4] = {}, reads[4] = {};
        Vec4 k[channels / 4];
#pragma unroll
        for (u32 i = 0; i < channels / 4; ++i) {
            const u32 at = (i * lanes_of_column + lane) * 4;
            k[i] = *reinterpret_cast<const Vec4*>(&tile.k[t][at]);
            const Vec4 q = *reinterpret_cast<const Vec4*>(&tile.q[t][at]);
            const Vec4 keep = *reinterpret_cast<const Vec4*>(&tile.keep[t][BY_CHANNEL ? at : 0]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& m = state[4 * i + e];
                m *= BY_CHANNEL ? keep.x[e] : keep.x[0];
                helds[e] += m * k[i].x[e], reads[e] += m * q.x[e];
            }
        }
        const float held = warp_sum<lanes_of_column>(helds[0] + helds[1] + (helds[2] + helds[3]));
        const float read = warp_sum<lanes_of_column>(reads[0] + reads[1] + (reads[2] + reads[3]));
        const float u = tile.beta[t] * (tile.v[t][column] - held);
#pragma unroll
        for (u32 i = 0; i < channels; ++i) state[i] += k[i / 4].x[i % 4] * u;
        if (lane == 0 && value < args.values) {
            set_element<ELEMENT>(args.out, (out_row + u64(t) * args.heads) * args.values + value, read + tile.product[t] * u);
        }
    }
}

extern "C" __global__ void __launch_bounds__(2 * compute_threads, 1)
    delta_rule(const __grid_constant__ Arena arena, const __grid_constant__ DeltaRule args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs))), rank = arena.rank;
    const u32 slices = (args.values + columns - 1) / columns, items = args.batch * args.heads * slices;
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const char* params = args.own_params;
    if (PARAMETER_RANKS > 1) {  // in one of two buffers by the launch's parity: who ends a launch knows that all have begun it
        const u64 all = args.params + (epoch & 1) * WORLD_SIZE * args.parameter_bytes;
        if (blockIdx.x == 0) {
            for (int q = 0; q < WORLD_SIZE; ++q) {
                copy_bytes(Block{}, arena.peer(q, all + u64(rank) * args.parameter_bytes), args.own_params, args.parameter_bytes);
            }
            peers.signal_all(2 * items, epoch);
            peers.signal(rank, 2 * items, epoch);
        }
        for (int q = 0; q < WORLD_SIZE; ++q) peers.wait(q, 2 * items, epoch);
        params = arena.local(all);
    }
    Tile* tiles = reinterpret_cast<Tile*>(ptx::dynamic_shared());
    const bool runs = threadIdx.x < compute_threads;
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
        const u32 slice = item % slices, head = item / slices % args.heads, batch = item / slices / args.heads;
        const auto place = [&](u32 i) {
            return args.state + ((u64(item) * (channels / 4) + i) * compute_threads + threadIdx.x) * sizeof(Vec4);
        };
        float state[channels] = {};
        const auto prepared = [&](u32 token) {
            if (!runs && token < args.tokens) {
                prepare(args, params, tiles[token / tile_tokens % 2], head, batch, slice, token, min(tile_tokens, args.tokens - token));
            }
        };
        prepared(0);
        if (rank > 0) {
            peers.wait(rank - 1, item, epoch);
#pragma unroll
            for (u32 i = 0; i < channels / 4; ++i) {
                if (!runs) break;
                const Vec4 part = *reinterpret_cast<const Vec4*>(arena.local(place(i)));
                for (int e = 0; e < 4; ++e) state[4 * i + e] = part.x[e];
            }
            peers.acknowledge(rank - 1, items + item, epoch);
        }
        for (u32 token = 0; token < args.tokens; token += tile_tokens) {
            __syncthreads();
            prepared(token + tile_tokens);
            if (!runs) continue;
            const u64 out_row = (u64(batch) * args.tokens + token) * args.heads + head;
            run(args, tiles[token / tile_tokens % 2], state, out_row, slice, min(tile_tokens, args.tokens - token));
        }
        if (rank + 1 < WORLD_SIZE) {
            if (epoch > first_epoch) peers.wait(rank + 1, items + item, epoch - 1);  // it has read the state of the launch before
#pragma unroll
            for (u32 i = 0; i < channels / 4; ++i) {
                if (!runs) break;
                const Vec4 part{{state[4 * i], state[4 * i + 1], state[4 * i + 2], state[4 * i + 3]}};
                *reinterpret_cast<Vec4*>(arena.peer(rank + 1, place(i))) = part;
            }
            peers.signal(rank + 1, item, epoch);
        }
        __syncthreads();
    }
}
"""
DELTA_RULE = DeclaredKernel(
    "delta_rule", SOURCE, epochs=Epochs(), flags=Flags(), state=Buffer(), params=Buffer(), q=Pointer("const char*"),
    k=Pointer("const char*"), v=Pointer("const char*"), decay=Pointer("const char*"), beta=Pointer("const char*"),
    own_params=Pointer("const char*"), out=Pointer(), batch=U32, tokens=U32, heads=U32, key_heads=U32, values=U32, parameter_bytes=U32,
    floor=F32,
)  # fmt: skip
THREADS, TILE_TOKENS = 512, 16


@dataclass(frozen=True)
class DeltaInputs:
    """One rank's tokens: q and k (B, L, key heads, K), v (B, L, heads, V); decay (B, L, heads, K), or (B, L, heads) if all channels decay
    alike; beta (B, L, heads); a_log and dt_bias as the decays need them. q, k and v have one dtype, and so do the others."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor


@per_group
def _bound(
    group: Group,
    shape: tuple[int, ...],
    key_shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    by_channel: bool,
    sharded: bool,
) -> BoundKernel:
    (batch, tokens, heads, values), (key_heads, depth) = shape, key_shape
    threads = min(THREADS, group.max_threads)
    columns = threads // 16  # eight threads run a column, and as many prepare tokens
    items, padded = batch * heads * -(-values // columns), -(-depth // 32) * 32
    own = heads // group.world_size if sharded else heads
    parameters = (own + own * (depth if by_channel else 1)) * dtypes[1].itemsize
    return DELTA_RULE.bind(
        group,
        grid=min(group.sm_count, items),
        block=threads,
        defines={
            "COLUMNS": columns,
            "ELEMENT": element_type(dtypes[0]),
            "SCALAR": element_type(dtypes[1]),
            "DEPTH": depth,
            "BY_CHANNEL": int(by_channel),
            "PARAMETER_RANKS": group.world_size if sharded else 1,
        },
        sizes={
            "flags": 2 * items + 1,
            "state": 4 * items * padded * columns,
            "params": 2 * group.world_size * parameters if sharded else 0,
        },
        shared_bytes=2 * 4 * TILE_TOKENS * (padded * (3 if by_channel else 2) + (0 if by_channel else 4) + columns + 2),
        batch=batch,
        tokens=tokens,
        heads=heads,
        key_heads=key_heads,
        values=values,
        parameter_bytes=parameters,
    )


def gated_delta_rule(group: Group, inputs: DeltaInputs, *, by_channel: bool, floor: float, sharded: bool) -> torch.Tensor:
    """Collective: returns o (B, L, heads, V) of the rank's tokens, which follow those of the rank before; problems 74 and 75 have the
    formulas.

    ``by_channel``: every key channel has a decay of its own, d = exp(-5 sigmoid(exp(a_log) (decay + dt_bias))), and beta is a logit;
    else d = exp(-exp(a_log) softplus(decay + dt_bias)). Keys and queries are divided by their norm, or by ``floor`` if that is larger.
    ``sharded``: ranks have a_log and dt_bias of heads of their own, in rank order."""
    names = ("q", "k", "v", "decay", "beta")
    tensors = {name: getattr(inputs, name).contiguous() for name in names}
    tensors["own_params"] = torch.cat((inputs.a_log, inputs.dt_bias))
    q, v = tensors["q"], tensors["v"]
    if v.numel() == 0:
        return torch.empty_like(v)
    (batch, length, heads, values), (key_heads, depth) = v.shape, q.shape[2:]
    ranks, nbytes = group.world_size if sharded else 1, tensors["own_params"].nbytes
    shape = ChunkShape(batch, length, heads, values, key_heads, depth, by_channel, ranks, nbytes)
    if in_chunks(group, shape, {tensor.dtype for tensor in tensors.values()}):
        return chunked_delta_rule(group, shape, tensors, floor)
    output = torch.empty_like(v)
    launch = _bound(group, tuple(v.shape), tuple(q.shape[2:]), (v.dtype, tensors["beta"].dtype), by_channel, sharded)
    launch(**tensors, out=output, floor=floor)
    return output
