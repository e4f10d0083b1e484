"""Problem 64, neighbours sampled hop by hop: one kernel for all hops, which the host waits for once.

A block takes a stretch of the frontier. It asks the owners, whose blocks of the same number answer: how many neighbours, then, when it
knows where they go, the neighbours themselves. So ranks wait for each other block by block. The least turn in which a node is met stands
in a table of all nodes, which calls leave as they found it. Memory is made for as many nodes and edges as there can be. Bound by eight
meetings a hop, and at large sizes by reads in random places. Meetings are in ``peerlane/moe/moe.cuh``."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from peerlane.device import U32, U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, array, group_of, per_group
from peerlane.device.collectives.counts import HostWords
from peerlane.device.moe.exchange import room_for
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/moe/moe.cuh>
using namespace peerlane;

struct Request { u32 node, place; };  // the place in the frontier
struct alignas(16) Reply { u64 first; u32 taken, unused; };

// The sum of lower threads' values, and of all of the block's.
__device__ inline u32 sum_before(u32 value, u32& total) {
    __shared__ u32 of_warps[32];
    const u32 sum = warp_prefix(value), warp = threadIdx.x / warp_threads;
    __syncthreads();
    if (Warp{}.thread() == warp_threads - 1) of_warps[warp] = sum;
    __syncthreads();
    u32 before = sum - value;
    total = 0;
    for (u32 w = 0; w < blockDim.x / warp_threads; ++w) before += w < warp ? of_warps[w] : 0, total += of_warps[w];
    return before;
}

// use(lane, first, to, k) for every k < count, with what each lane gives, 32 at a time. By a warp.
template <class Use>
__device__ inline void each_of_lanes(u32 count, u64 first, u32 to, const Use& use) {
    const u32 end = warp_prefix(count), total = __shfl_sync(full_warp, end, warp_threads - 1);
    for (u32 begin = 0; begin < total; begin += warp_threads) {
        const u32 item = begin + Warp{}.thread();
        u32 lane = 0;
        for (u32 step = warp_threads / 2; step > 0; step /= 2) {
            if (__shfl_sync(full_warp, end, lane + step - 1) <= item) lane += step;
        }
        const u32 k = item - __shfl_sync(full_warp, end - count, lane), of_to = __shfl_sync(full_warp, to, lane);
        const u64 of_first = __shfl_sync(full_warp, first, lane);
        if (item < total) use(lane, of_first, of_to, k);
    }
}

struct BlockSum { u32 before, all; };  // of blocks of lower numbers, and of all

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_neighbors(const __grid_constant__ Arena arena, const __grid_constant__ SampleNeighbors args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)), args.hops + 1), rank = arena.rank;
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const u32 warp = threadIdx.x / warp_threads, warps = blockDim.x / warp_threads, lane = Warp{}.thread();
    __shared__ u32 scratch[32], of_warps[WORLD_SIZE][32], next[WORLD_SIZE];
    const auto add = [](u32 a, u32 b) { return a + b; };
    const auto words = [&](int q, u64 offset) { return reinterpret_cast<u32*>(arena.peer(q, offset)); };
    const auto area_of = [&](u32 source) { return (u64(source) * gridDim.x + blockIdx.x) * args.room; };  // of requests to a block
    const Reply* replies = reinterpret_cast<const Reply*>(arena.local(args.replies));
    const u32* neighbours = words(rank, args.neighbours);
    u32 *places = args.places, *where = words(rank, args.where), *fresh = words(rank, args.fresh);
    const auto sum_of_blocks = [&](u32 own, u32 kind, u32 number) {
        u32* counts = words(rank, args.counts) + kind * gridDim.x;
        own = block_reduce(own, add, scratch);
        if (threadIdx.x == 0) counts[blockIdx.x] = own;
        meet_blocks(peers, arena, (4 + kind) * gridDim.x, number);
        BlockSum sum{0, 0};
        for (u32 b = threadIdx.x; b < gridDim.x; b += blockDim.x) sum.all += counts[b], sum.before += b < blockIdx.x ? counts[b] : 0;
        return BlockSum{block_reduce(sum.before, add, scratch), block_reduce(sum.all, add, scratch)};
    };
    const auto tell = [&](u32 nodes, u32 edges) {
        if (blockIdx.x != 0 || threadIdx.x != 0) return;
        args.host[1] = nodes, args.host[2] = edges;
        tell_host(args.host, args.stamp);
    };

    u32 begin = 0, known = args.seeds, sampled = 0;  // where the frontier begins among the nodes, and where it ends
    const Part seeds = part_of(known, blockIdx.x, gridDim.x);
    for (u64 i = seeds.first + threadIdx.x; i < seeds.end; i += blockDim.x) {
        args.nodes[i] = args.given[i];
        places[args.given[i]] = u32(i);
    }
    __syncthreads();
    if (args.hops == 0) tell(known, 0);
    for (u32 hop = 0; hop < args.hops; ++hop) {
        const u32 number = epoch + hop;
        const Part own = part_of(known - begin, blockIdx.x, gridDim.x);

        // Requests, by owner.
        if (threadIdx.x < WORLD_SIZE) next[threadIdx.x] = 0;
        __syncthreads();
        for (u64 first = own.first; first < own.end; first += blockDim.x) {
            const u64 i = first + threadIdx.x;
            const u32 node = i < own.end ? u32(args.nodes[begin + i]) : 0, owner = i < own.end ? u32(args.owners[node]) : WORLD_SIZE;
            u32 among = 0;  // of the warp's requests to this owner
#pragma unroll
            for (u32 q = 0; q < WORLD_SIZE; ++q) {
                const u32 lanes = __ballot_sync(full_warp, owner == q);
                if (owner == q) among = __popc(lanes & ((1u << lane) - 1));
                if (lane == 0) of_warps[q][warp] = __popc(lanes);
            }
            __syncthreads();
            if (owner < WORLD_SIZE) {
                u32 slot = next[owner] + among;
                for (u32 w = 0; w < warp; ++w) slot += of_warps[owner][w];
                reinterpret_cast<Request*>(arena.peer(owner, args.requests))[area_of(rank) + slot] = {node, u32(i)};
                where[i] = slot * WORLD_SIZE + owner;
            }
            __syncthreads();
            if (threadIdx.x < WORLD_SIZE) {
                for (u32 w = 0; w < warps; ++w) next[threadIdx.x] += of_warps[threadIdx.x][w];
            }
            __syncthreads();
        }
        if (threadIdx.x < WORLD_SIZE) words(threadIdx.x, args.asked)[rank * gridDim.x + blockIdx.x] = next[threadIdx.x];
        peers.barrier(blockIdx.x, number);
        if (!block_arrived(arena)) return;

        const auto range_of = [&](u32 node) {
            const u64 first = args.pointers[node], degree = args.pointers[node + 1] - first;
            return Reply{first, u32(min(degree, u64(args.fanouts[hop]))), 0};
        };
        const auto requests_of = [&](u32 source) { return reinterpret_cast<const Request*>(arena.local(args.requests)) + area_of(source); };
        for (int k = 1; k <= WORLD_SIZE; ++k) {
            const int q = rank_after<WORLD_SIZE>(rank, k % WORLD_SIZE);
            const u32 count = words(rank, args.asked)[q * gridDim.x + blockIdx.x];
            for (u32 r = threadIdx.x; r < count; r += blockDim.x) {
                const Request request = requests_of(q)[r];
                reinterpret_cast<Reply*>(arena.peer(q, args.replies))[request.place] = range_of(request.node);
            }
        }
        peers.barrier(gridDim.x + blockIdx.x, number);
        if (!block_arrived(arena)) return;

        // Edges in the order of the frontier.
        u32 taken = 0;
        for (u64 i = own.first + threadIdx.x; i < own.end; i += blockDim.x) taken += replies[i].taken;
        const BlockSum edges = sum_of_blocks(taken, 0, number);
        if (!block_arrived(arena)) return;
        u32 edge = edges.before;
        for (u64 first = own.first; first < own.end; first += blockDim.x) {
            const u64 i = first + threadIdx.x;
            const Reply reply = i < own.end ? replies[i] : Reply{0, 0, 0};
            u32 total;
            const u32 to = edge + sum_before(reply.taken, total);
            if (i < own.end) words(where[i] % WORLD_SIZE, args.offsets)[area_of(rank) + where[i] / WORLD_SIZE] = to;
            each_of_lanes(reply.taken, reply.first, to, [&](u32 of, u64 from, u32 at, u32 k) {
                args.cols[sampled + at + k] = begin + first + warp * warp_threads + of;
                args.edges[sampled + at + k] = from + k;
            });
            edge += total;
        }
        peers.barrier(2 * gridDim.x + blockIdx.x, number);
        if (!block_arrived(arena)) return;

        for (int k = 1; k <= WORLD_SIZE; ++k) {
            const int q = rank_after<WORLD_SIZE>(rank, k % WORLD_SIZE);
            const u32 count = words(rank, args.asked)[q * gridDim.x + blockIdx.x];
            for (u32 first = warp * warp_threads; first < count; first += blockDim.x) {
                const u32 r = first + lane;
                const Reply range = r < count ? range_of(requests_of(q)[r].node) : Reply{0, 0, 0};
                const u32 to = r < count ? words(rank, args.offsets)[area_of(q) + r] : 0;
                each_of_lanes(range.taken, range.first, to, [&](u32, u64 from, u32 at, u32 k) {
                    words(q, args.neighbours)[at + k] = u32(args.columns[from + k]);
                });
            }
        }
        peers.barrier(3 * gridDim.x + blockIdx.x, number);
        if (!block_arrived(arena)) return;

        // The block's edges are those of its stretch. What is new has an edge whose turn is the least.
        const u32 count = edge - edges.before;
        for (u32 e = threadIdx.x; e < count; e += blockDim.x) atomicMin(places + neighbours[edges.before + e], known + edges.before + e);
        meet_blocks(peers, arena, 6 * gridDim.x, number);
        if (!block_arrived(arena)) return;
        u32 own_new = 0;
        for (u32 first = warp * warp_threads; first < count; first += blockDim.x) {
            const u32 e = first + lane, turn = known + edges.before + e;
            const u32 mask = __ballot_sync(full_warp, e < count && places[neighbours[edges.before + (e < count ? e : 0)]] == turn);
            if (lane == 0) fresh[edges.before / warp_threads + blockIdx.x + first / warp_threads] = mask, own_new += __popc(mask);
        }
        const BlockSum found = sum_of_blocks(own_new, 1, number);
        if (!block_arrived(arena)) return;
        if (hop + 1 == args.hops) tell(known + found.all, sampled + edges.all);
        u32 place = known + found.before;
        for (u32 first = 0; first < count; first += blockDim.x) {
            const u32 e = first + threadIdx.x;
            const u32 is_new = e < count ? fresh[edges.before / warp_threads + blockIdx.x + e / warp_threads] >> lane & 1 : 0;
            u32 total;
            const u32 at = place + sum_before(is_new, total);
            if (is_new) {
                const u32 node = neighbours[edges.before + e];
                args.nodes[at] = node, places[node] = at;
            }
            place += total;
        }
        meet_blocks(peers, arena, 7 * gridDim.x, number);
        if (!block_arrived(arena)) return;
        for (u32 e = threadIdx.x; e < count; e += blockDim.x) {
            args.rows[sampled + edges.before + e] = places[neighbours[edges.before + e]];
        }
        begin = known, known += found.all, sampled += edges.all;
    }
    meet_blocks(peers, arena, 7 * gridDim.x, epoch + args.hops);
    if (!block_arrived(arena)) return;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < known; i += gridDim.x * blockDim.x) places[args.nodes[i]] = ~0u;
}
"""
MOST_HOPS = 16
THREADS = 1024  # of a block: reads in random places need many under way
SAMPLE_NEIGHBORS = DeclaredKernel(
    "sample_neighbors", SOURCE, epochs=Epochs(), flags=Flags(), requests=Buffer(), asked=Buffer(), offsets=Buffer(), replies=Buffer(),
    neighbours=Buffer(), where=Buffer(), fresh=Buffer(), counts=Buffer(), given=Pointer("const long long*"),
    pointers=Pointer("const long long*"), columns=Pointer("const long long*"), owners=Pointer("const OWNER*"), places=Pointer("u32*"),
    nodes=Pointer("long long*"), rows=Pointer("long long*"), cols=Pointer("long long*"), edges=Pointer("long long*"),
    host=Pointer("u64*"), fanouts=array(U32, MOST_HOPS), room=U64, seeds=U32, hops=U32, stamp=U32,
)  # fmt: skip
OWNER_TYPES = {torch.int32: "int", torch.int64: "long long"}


@per_group
def sample_neighbors(
    group: Group, nodes: int, frontier: int, edges: int, owner: torch.dtype
) -> tuple[BoundKernel, HostWords, torch.Tensor]:
    """Makes the launch of a group. ``frontier``, ``edges``: the most nodes and edges of a hop. The host gets how many of both there are."""
    told, grid, room = HostWords(group, 2), group.sm_count, -(-frontier // group.sm_count)
    requests = group.world_size * grid * room
    sizes = {
        "flags": 8 * grid, "requests": 8 * requests, "asked": 4 * grid * group.world_size, "offsets": 4 * requests,
        "replies": 16 * frontier, "neighbours": 4 * edges, "where": 4 * frontier, "fresh": 4 * (edges // 32 + grid + 1), "counts": 8 * grid,
    }  # fmt: skip
    places = torch.full((nodes,), -1, dtype=torch.int32, device=group.device)
    launch = SAMPLE_NEIGHBORS.bind(
        group, grid=grid, block=min(THREADS, group.max_threads), sizes=sizes, resident=True,
        defines={"OWNER": OWNER_TYPES[owner], "THREADS": THREADS}, places=places, host=told.words, room=room,
    )  # fmt: skip
    return launch, told, places


def most_of(seeds: int, fanouts: Sequence[int], nodes: int, edges: int) -> tuple[list[int], list[int]]:
    """Returns how many nodes every frontier has at most, and how many edges every hop. ``edges``: of the whole graph."""
    frontiers, sampled = [seeds], []
    for fanout in fanouts:
        sampled.append(frontiers[-1] * fanout if fanout >= 0 else edges)
        frontiers.append(min(sampled[-1], nodes))
    return frontiers, sampled


def solution(
    seed_nodes: torch.Tensor,
    fanouts: list[int],
    local_adj_row_ptr: torch.Tensor,
    local_adj_col: torch.Tensor,
    node_to_rank: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    replace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ranks, nodes, hops = group_of(group), node_to_rank.numel(), len(fanouts)
    if hops > MOST_HOPS:
        raise UsageError(f"{hops} hops: expected at most {MOST_HOPS}")
    edges = sum(ranks.agree(local_adj_col.numel())) if min(fanouts, default=0) < 0 else 0
    frontiers, sampled = most_of(room_for(ranks, seed_nodes.numel()), fanouts, nodes, edges)
    if (turns := nodes + sum(sampled)) >= 1 << 32:
        raise UsageError(f"{turns} nodes and edges at most: expected less than 2^32; sample in several calls")
    launch, told, _ = sample_neighbors(ranks, nodes, max(frontiers[: max(1, hops)]), max([1, *sampled]), node_to_rank.dtype)
    found = local_adj_col.new_empty(min(sum(frontiers), nodes))
    row, col, edge = local_adj_col.new_empty((3, max(1, sum(sampled))))
    launch(
        given=seed_nodes.to(torch.int64).contiguous(), pointers=local_adj_row_ptr.contiguous(), columns=local_adj_col.contiguous(),
        owners=node_to_rank.contiguous(), nodes=found, rows=row, cols=col, edges=edge,
        fanouts=[fanout if fanout >= 0 else 0xFFFFFFFF for fanout in fanouts] + [0] * (MOST_HOPS - hops), seeds=seed_nodes.numel(),
        hops=hops, stamp=told.stamp(),
    )  # fmt: skip
    node_count, edge_count = told.read()
    return found[:node_count], row[:edge_count], col[:edge_count], edge[:edge_count]
