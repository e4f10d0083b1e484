// A large tensor in two trips through rings of tiles, in one kernel, correct for any size:
//
//   relay       shares are summed by their owners, by a route (routes.cuh): all-reduce and reduce
//   broadcast   the root gives each other rank a share, which passes it on: once the tensor out of the root's port, not W - 1 times
//
// Terms are added in rank order in fp32 and rounded once, by one rank for each element: all ranks have the same bits.
//
// The trips are those of exchange.cuh: the first one its senders and, in place of receivers, warps that add and pass on; the second one its
// receivers. Tile t of a share goes through block t mod grid in both. Who adds or passes on waits for tile i of the first trip, and for places of
// tile i - depth in the second one, whose receivers wait for nothing else. So the argument there that nobody can lock anybody goes through.
//
// `in` and `out` are local and may be the same. `bytes` is a multiple of the element size and the same on all ranks, as is the grid, of at
// most channels.blocks. Blocks of relay_threads (broadcast: exchange_threads) threads with relay_shared_bytes (exchange_shared_bytes) bytes of
// dynamic shared memory. All blocks are resident together.
#pragma once

#include <peerlane/collectives/exchange.cuh>
#include <peerlane/collectives/routes.cuh>

namespace peerlane {

constexpr u32 relay_threads = (2 + rings.summing_warps) * warp_threads;
constexpr u32 sum_stages = rings.in_flight + 1;
constexpr u32 relay_shared_bytes = 2 * stages_bytes + sum_stages * rings.tile_bytes;

// Where shares lie: owners' shares are as long as each other, of whole vectors; the last ones may be shorter or empty.
struct Shares {
    u64 bytes, length;

    __device__ Shares(u64 bytes, u32 owners) : bytes(bytes), length(((bytes + sizeof(Vec16) - 1) / sizeof(Vec16) + owners - 1) / owners * sizeof(Vec16)) {}
    __device__ u64 at(int share) const { return share < 0 || share * length > bytes ? bytes : share * length; }
    __device__ u64 size(int share) const { return share < 0 ? 0 : at(share + 1) - at(share); }
};

// What an owner keeps in shared memory: of each rank, the number of the first tile that it sends on, and, who passes on, how far it is known to be.
template <int W>
struct OwnerState {
    u32 first[W], seen[W];
};

// The adding warps of an owner: its share of all ranks' tensors, tile by tile into shared memory, and from there to its own `out` and to the rings
// of all that take.
template <class E, int W, class Route>
__device__ inline void sum_share(
    const Arena& arena, const CollectiveWorkspace& space, const Route& route, u64 bytes, const char* own, char* out, OwnerState<W>& state, char* stages) {
    const Warps team{2, rings.summing_warps, 1};
    const BlockChannels<W> terms{arena, space.sums}, totals{arena, space.copies};
    const Peers<W, Warps> givers(arena, space.sums.flags, team, consumer), takers(arena, space.copies.flags, team, storer);
    StoreQueue<W, rings.in_flight, Warps> queue(arena, space.copies.flags, team, storer);
    const int rank = arena.rank;
    u32 taking = 0;
#pragma unroll 1
    for (int q = 0; q < W; ++q) taking |= (q != rank && route.takes(q) ? 1u : 0u) << q;
    const u32 thread = team.thread();
    const bool counts = thread < W && (taking >> thread & 1);  // for the rank of its number
    u32 sent = counts ? *totals.sent(thread) : 0, known_used = sent - rings.depth;
    if (counts) state.first[thread] = sent;
    const u32 first = *terms.used(rank);
    u32 number = first, known_arrived = first;
    team.sync();
    MessageTiles tile{bytes};
    for (u32 turn = 0; tile.any(); tile.next(), ++turn, ++number) {
        char* stage = stages + turn % sum_stages * rings.tile_bytes;
        givers.wait_all(terms.arrived_slot(), number + 1, known_arrived);
        const auto term = [&](int q) -> const char* { return arena.local(terms.place(q, rank, number)); };
        sum_tile<E, W>(team, rank, own + tile.at, term, stage, tile.length());
        const bool ends = ends_batch(number + 1, tile.last());
        if (ends) givers.acknowledge_all(terms.used_slot(), number + 1);
        // Who does not take is known to have come as far as is wanted of it.
        takers.wait_all(totals.used_slot(), counts ? ++sent - rings.depth : known_used, known_used);
#pragma unroll 1
        for (int k = 1; k < W; ++k) {
            const int q = rank_after<W>(rank, k);
            if (taking >> q & 1) queue.store(q, totals.place(rank, q, state.first[q] + turn), stage, (tile.length() + 15) / 16 * 16);
        }
        if (route.takes(rank)) {
            const u32 whole = aligned_for<Vec16>(out + tile.at) ? tile.length() / sizeof(Vec16) * sizeof(Vec16) : 0;
            queue.store(out + tile.at, stage, whole);
            copy_bytes(team, out + tile.at + whole, stage + whole, tile.length() - whole);
        }
        if (turn % rings.batch == rings.batch - 1 || tile.last()) {
            queue.end_step(Signal{taking, totals.arrived_slot(), turn + 1, state.first});
        } else {
            queue.end_step();
        }
    }
    queue.flush();
    if (counts) *totals.sent(thread) = sent;
    if (thread == 0) *terms.used(rank) = number;
}

template <class E, int W, class Route>
__device__ inline void relay(
    const Arena& arena, const CollectiveWorkspace& space, const Route& route, const char* in, char* out, u64 bytes) {
    __shared__ MoverState<W> states[2];
    __shared__ OwnerState<W> owner;
    __shared__ Messages messages;
    const int rank = arena.rank;
    const Shares shares(bytes, route.owners());
    if (const int q = threadIdx.x; q < W) {
        const int share = route.share_of(q);
        messages.send_at[q] = q == rank ? 0 : shares.at(share);
        messages.send_bytes[q] = q == rank ? 0 : shares.size(share);
        messages.receive_at[q] = q == rank ? 0 : shares.at(share);
        messages.receive_bytes[q] = q == rank ? (route.keeps(rank) ? bytes : 0) : (route.takes(rank) ? shares.size(share) : 0);
    }
    __syncthreads();
    char* stages = ptx::dynamic_shared();
    const u32 warp = threadIdx.x / warp_threads;
    if (warp == 0) {
        send_messages<W>(arena, space.sums, messages, in, states[0], stages);
    } else if (warp == 1) {
        receive_messages<W>(arena, space.copies, messages, in, out, states[1], stages + stages_bytes);
    } else {
        const u64 at = shares.at(route.share_of(rank));
        sum_share<E, W>(arena, space, route, shares.size(route.share_of(rank)), in + at, out + at, owner, stages + 2 * stages_bytes);
    }
}

// By one warp: the share of an owner from the root, to its place in `out` and on to the others.
template <int W>
__device__ inline void pass_on(
    const Arena& arena, const Channels& channels, int root, const u64* bytes, char* out, MoverState<W>& state, OwnerState<W>& owner, char* stages) {
    const BlockChannels<W> here{arena, channels};
    const int rank = arena.rank;
    const u32 others = ((1u << W) - 1) & ~(only(root) | only(rank)), lane = Warp{}.thread();
    if (lane < W) owner.first[lane] = *here.sent(lane), owner.seen[lane] = owner.first[lane] - rings.depth;
    __syncwarp();
    Mover<W> mover(arena, channels, storer, state, stages, bytes, here.used(0), 0);
    const auto source = [&](const auto& tiles) -> const char* {
        const u32 number = mover.number(tiles);
        mover.wait(root, here.arrived_slot(), number + 1);
        return arena.local(here.place(root, rank, number));
    };
    const auto deliver = [&](const auto& tiles, const char* stage, auto& queue) {
        const u32 count = mover.number(tiles) + 1, round = tiles.round(), length = tiles.tile().length();
        if (ends_batch(count, tiles.tile().last())) mover.peers().acknowledge(root, here.used_slot(), count);
#pragma unroll
        for (int k = 1; k < W; ++k) {
            const int q = rank_after<W>(rank, k);
            if (q == root) continue;
            mover.peers().wait(q, here.used_slot(), owner.first[q] + round + 1 - rings.depth, owner.seen);
            queue.store(q, here.place(rank, q, owner.first[q] + round), stage, (length + 15) / 16 * 16);
        }
        char* target = out + tiles.tile().at;
        const u32 whole = aligned_for<Vec16>(target) ? length / sizeof(Vec16) * sizeof(Vec16) : 0;
        queue.store(target, stage, whole);
        copy_bytes(Warp{}, target + whole, stage + whole, length - whole);
        if (ends_batch(round + 1, tiles.tile().last())) {
            queue.end_step(Signal{others, here.arrived_slot(), round + 1, owner.first});
        } else {
            queue.end_step();
        }
    };
    mover.move(Rounds<W, -1>(bytes, rank, false), source, deliver);
    mover.keep(here.used(0), bytes, rank);
    if (lane < W && (others >> lane & 1)) *here.sent(lane) = owner.first[lane] + MessageTiles{bytes[root]}.count();
}

// The root's tensor to all.
template <int W>
__device__ inline void broadcast(const Arena& arena, const CollectiveWorkspace& space, int root, const char* in, char* out, u64 bytes) {
    __shared__ MoverState<W> states[2];
    __shared__ OwnerState<W> owner;
    __shared__ Messages messages;  // to owners, and to their end
    __shared__ u64 from_root[W];
    const int rank = arena.rank;
    const Shares shares(bytes, W - 1);
    const auto share_of = [&](int q) { return share_beside(root, q); };
    if (const int q = threadIdx.x; q < W) {
        messages.send_at[q] = q == rank ? 0 : shares.at(share_of(q));
        messages.send_bytes[q] = q == rank ? 0 : shares.size(share_of(q));
        messages.receive_at[q] = q == rank ? 0 : shares.at(share_of(q));
        messages.receive_bytes[q] = rank == root ? (q == root ? bytes : 0) : (q == rank ? 0 : shares.size(share_of(q)));
        from_root[q] = q == root ? shares.size(share_of(rank)) : 0;
    }
    __syncthreads();
    char* stages = ptx::dynamic_shared();
    if (threadIdx.x >= warp_threads) {
        receive_messages<W>(arena, space.copies, messages, in, out, states[1], stages + stages_bytes);
    } else if (rank == root) {
        send_messages<W>(arena, space.copies, messages, in, states[0], stages);
    } else {
        pass_on<W>(arena, space.copies, root, from_root, out + shares.at(share_of(rank)), states[0], owner, stages);
    }
}

}  // namespace peerlane
