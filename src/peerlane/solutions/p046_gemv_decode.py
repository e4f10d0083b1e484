"""Problem 46, the vocabulary-parallel LM head in decoding: one kernel computes logits and stores them where they belong on all ranks.

A warp takes as few rows of the weight as give all warps work, two to eight, and has eight loads a lane under way. Bound by HBM, which
reads the weight once; the public shape by the launch and two trips of a flag.
More than eight tokens are a matrix product: cuBLAS makes it, and the kernel distributes it.

The next call overwrites the results, which lie in the arena."""

import torch
import torch.nn.functional as F

from peerlane.device import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, element_type, group_of, per_group

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int bytes = 4 / ELEMENT::lanes, vectors = 8 / ROWS;

extern "C" __global__ void __launch_bounds__(THREADS)
    head_gather(const __grid_constant__ Arena arena, const __grid_constant__ HeadGather args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    if (blockIdx.x == 0) peers.acknowledge_all(0, epoch);
    const auto target = [&](int k, u32 token) {  // this rank's logits of a token at the k-th rank after it
        const u64 at = (u64(token) * WORLD_SIZE + arena.rank) * args.shard;
        return arena.peer(rank_after<WORLD_SIZE>(arena.rank, k), args.out + at * bytes);
    };
#if TOKENS
    bool may_store = false;
    each_row((args.shard + ROWS - 1) / ROWS, [&](u32 group) {
        float sum[TOKENS][ROWS] = {};
        for (u32 first = 0; first < args.depth; first += vectors * row_lanes * warp_threads) {
            float w[ROWS * vectors][row_lanes];  // some rows' parts, so that eight loads of a lane are under way
            const auto column = [&](int v) { return first + (v * warp_threads + Warp{}.thread()) * row_lanes; };
            load_together<ELEMENT>(args.weight, args.depth, [&](int i, u32& row, u32& at) {
                row = min(group * ROWS + i / vectors, args.shard - 1), at = column(i % vectors);
            }, w);
#pragma unroll
            for (int i = 0; i < TOKENS * vectors; ++i) {
                float x[row_lanes];
                RowOf<ELEMENT>(args.hidden, i / vectors, args.depth).load(column(i % vectors), x);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    for (int e = 0; e < row_lanes; ++e) sum[i / vectors][r] += x[e] * w[r * vectors + i % vectors][e];
                }
            }
        }
        if (!may_store) {  // the callers of all ranks have read the results of the launch before
            Peers<WORLD_SIZE, Warp>(arena, args.flags).wait_all(0, epoch);
            may_store = true;
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            float logits[row_lanes];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                logits[r] = warp_sum(sum[t][r]);
                if (const u32 row = group * ROWS + r; row < args.shard) logits[r] += element_of<ELEMENT>(args.bias, row);
            }
            const u32 k = Warp{}.thread(), size = min(args.shard, (group + 1) * ROWS) * bytes;
            u32 words[ROWS / ELEMENT::lanes];
#pragma unroll
            for (int w = 0; w < ROWS / ELEMENT::lanes; ++w) words[w] = ELEMENT::narrow(logits + w * ELEMENT::lanes);
            if (k < WORLD_SIZE) store_words(target(k, t), group * ROWS * bytes, size, words);
        }
    });
#else
    peers.wait_all(0, epoch);
    each_row(args.tokens, [&](u32 token) {
        const u64 row_bytes = u64(args.shard) * bytes;
        for (int k = 0; k < WORLD_SIZE; ++k) copy_bytes(Warp{}, target(k, token), args.hidden + token * row_bytes, row_bytes);
    });
#endif
    peers.barrier(1 + blockIdx.x, epoch);
}
"""
HEAD_GATHER = DeclaredKernel(
    "head_gather", SOURCE, epochs=Epochs(), flags=Flags(), out=Buffer(), hidden=Pointer("const char*"), weight=Pointer("const char*"),
    bias=Pointer("const char*"), tokens=U32, depth=U32, shard=U32,
)  # fmt: skip
MOST_TOKENS = 8


@per_group
def head_gather(group: Group, tokens: int, depth: int, shard: int, dtype: torch.dtype) -> tuple[BoundKernel, torch.Tensor]:
    inside = tokens if tokens <= MOST_TOKENS else 0
    vocabulary, threads = group.world_size * shard, min(512 if inside <= 4 else 256, group.max_threads)  # as registers allow
    rows = next((rows for rows in (2, 4) if rows * group.sm_count * (threads // 32) >= shard), 8)  # of a warp
    grid = min(group.sm_count, -(-shard // rows) if inside else tokens)
    bound = HEAD_GATHER.bind(
        group,
        grid=grid,
        block=threads,
        defines={"ELEMENT": element_type(dtype), "TOKENS": inside, "ROWS": rows, "THREADS": threads},
        sizes={"flags": 1 + grid, "out": tokens * vocabulary * dtype.itemsize},
        tokens=tokens,
        depth=depth,
        shard=shard,
    )
    return bound, bound.tensor("out", (tokens, vocabulary), dtype)


def solution(hidden_states: torch.Tensor, weight_shard: torch.Tensor, bias_shard: torch.Tensor) -> torch.Tensor:
    tokens, depth = hidden_states.shape
    launch, logits = head_gather(group_of(), tokens, depth, weight_shard.shape[0], hidden_states.dtype)
    if tokens > MOST_TOKENS:
        launch(hidden=F.linear(hidden_states, weight_shard, bias_shard).contiguous())
    else:
        launch(hidden=hidden_states.contiguous(), weight=weight_shard.contiguous(), bias=bias_shard.contiguous())
    return logits
