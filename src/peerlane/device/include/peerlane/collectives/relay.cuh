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
// most channels.blocks. Blocks of relay_threads (broadcast: broadcast_threads) threads with relay_shared_bytes (broadcast_shared_bytes) bytes of
// dynamic shared memory. All blocks are resident together.
#pragma once

#include <peerlane/collectives/exchange.cuh>
#include <peerlane/collectives/routes.cuh>

namespace peerlane {

constexpr u32 relay_threads = (3 + rings.summing_warps) * warp_threads;
constexpr u32 sum_stages = rings.in_flight + 1;
constexpr u32 relay_shared_bytes = 2 * stages_bytes + sum_stages * rings.tile_bytes;
constexpr u32 broadcast_threads = 3 * warp_threads;
constexpr u32 broadcast_shared_bytes = 2 * stages_bytes;

// Where shares lie: owners' shares are as long as each other, of whole vectors; the last ones may be shorter or empty.
struct Shares {
    u64 bytes, length;

    __device__ Shares(u64 bytes, u32 owners) : bytes(bytes), length(((bytes + sizeof(Vec16) - 1) / sizeof(Vec16) + owners - 1) / owners * sizeof(Vec16)) {}
    __device__ u64 at(int share) const { return share < 0 || share * length > bytes ? bytes : share * length; }
    __device__ u64 size(int share) const { return share < 0 ? 0 : at(share + 1) - at(share); }
};

// What the teams of a block that takes both trips tell.
template <int W>
struct RelayProgress {
    Progress<W> lines[4];

    __device__ Progress<W>& terms_sent() { return lines[0]; }
    __device__ Progress<W>& terms_used() { return lines[1]; }
    __device__ Progress<W>& totals_sent() { return lines[2]; }
    __device__ Progress<W>& totals_used() { return lines[3]; }
};

// The adding warps of an owner: its share of all ranks' tensors, tile by tile into shared memory, and from there to its own `out` and to the rings
// of all that take.
template <class E, int W, class Route>
__device__ inline void sum_share(
    const Arena& arena, const CollectiveWorkspace& space, const Route& route, u64 bytes, const char* own, char* out, RelayProgress<W>& progress, char* stages) {
    const Warps team{2, rings.summing_warps, 1};
    const BlockChannels<W> terms{arena, space.sums}, totals{arena, space.copies};
    const Peers<W, Warps> givers(arena, space.sums.flags, team, consumer), takers(arena, space.copies.flags, team, storer);
    StoreQueue<W, rings.in_flight, Warps, Post<W>> queue(arena, space.copies.flags, team, storer);
    const int rank = arena.rank;
    const Progress<W>& sent = progress.totals_sent();
    const u32 thread = team.thread();
    const bool counts = thread < W && sent.steps[thread] > 0;  // for the rank of its number
    const u32 first_sent = counts ? sent.first[thread] : 0, first = progress.terms_used().first[rank_after<W>(rank, 1)];
    u32 known_used = first_sent - rings.depth, known_arrived = first, turn = 0;
    for (MessageTiles tile{bytes}; tile.any(); tile.next(), ++turn) {
        const u32 number = first + turn;
        char* stage = stages + turn % sum_stages * rings.tile_bytes;
        givers.wait_all(terms.arrived_slot(), number + 1, known_arrived);
        const auto term = [&](int q) -> const char* { return arena.local(terms.place(q, rank, number)); };
        sum_tile<E, W>(team, rank, own + tile.at, term, stage, tile.length(), space.factor);
        // Who does not take is known to have come as far as is wanted of it.
        takers.wait_all(totals.used_slot(), counts ? first_sent + turn + 1 - rings.depth : known_used, known_used);
        if (thread == 0) post(progress.terms_used(), turn + 1);
#pragma unroll 1
        for (int k = 1; k < W; ++k) {
            const int q = rank_after<W>(rank, k);
            if (sent.steps[q] > 0) queue.store(q, totals.place(rank, q, sent.first[q] + turn), stage, whole_vectors(tile.length()));
        }
        if (route.takes(rank)) store_here(queue, team, out + tile.at, stage, tile.length());
        queue.end_step(Post<W>{&progress.totals_sent(), turn + 1});
    }
    queue.flush();
}

template <class E, int W, class Route>
__device__ inline void relay(
    const Arena& arena, const CollectiveWorkspace& space, const Route& route, const char* in, char* out, u64 bytes) {
    __shared__ MoverState<W> states[2];
    __shared__ RelayProgress<W> progress;
    __shared__ Messages messages;
    const int rank = arena.rank;
    const Shares shares(bytes, route.owners());
    const u64 own_at = shares.at(route.share_of(rank)), own_bytes = shares.size(route.share_of(rank));
    if (const int q = threadIdx.x; q < W) {
        const int share = route.share_of(q);
        const bool other = q != rank;
        messages.send_at[q] = messages.receive_at[q] = shares.at(share);
        messages.send_bytes[q] = other ? shares.size(share) : 0;
        messages.receive_bytes[q] = other && route.takes(rank) ? shares.size(share) : 0;
        const BlockChannels<W> terms{arena, space.sums}, totals{arena, space.copies};
        terms.begin_sending(progress.terms_sent(), q, tiles_of(messages.send_bytes[q]));
        terms.begin_reading(progress.terms_used(), q, other ? tiles_of(own_bytes) : 0);
        totals.begin_sending(progress.totals_sent(), q, other && route.takes(q) ? tiles_of(own_bytes) : 0);
        totals.begin_reading(progress.totals_used(), q, tiles_of(messages.receive_bytes[q]));
    }
    __syncthreads();
    char* stages = ptx::dynamic_shared();
    const u32 warp = threadIdx.x / warp_threads;
    if (warp == 0) {
        send_messages<W>(arena, space.sums, messages, in, progress.terms_sent(), states[0], stages);
    } else if (warp == 1) {
        if (route.keeps(rank)) {
            copy_own<W>(arena, in, out, bytes, states[1], stages + stages_bytes);
        } else {
            receive_messages<W>(arena, space.copies, messages, out, progress.totals_used(), states[1], stages + stages_bytes);
        }
    } else if (warp < 2 + rings.summing_warps) {
        sum_share<E, W>(arena, space, route, own_bytes, in + own_at, out + own_at, progress, stages + 2 * stages_bytes);
    } else {
        tell_progress<W>(arena, progress.lines);
    }
}

// What the teams of a block tell that passes a broadcast on.
template <int W>
struct BroadcastProgress {
    Progress<W> lines[3];

    __device__ Progress<W>& sent() { return lines[0]; }
    __device__ Progress<W>& used_of_root() { return lines[1]; }
    __device__ Progress<W>& used_of_others() { return lines[2]; }
};

// By one warp: the share of an owner from the root, to its place in `out` and on to the others. `seen`: how far these are known to be.
template <int W>
__device__ inline void pass_on(
    const Arena& arena, const Channels& channels, int root, u64 bytes, char* out, BroadcastProgress<W>& progress, MoverState<W>& state, u32 (&seen)[W],
    char* stages) {
    const BlockChannels<W> here{arena, channels};
    const int rank = arena.rank;
    const Progress<W>& used = progress.used_of_root();
    Progress<W>& sent = progress.sent();
    if (const u32 lane = Warp{}.thread(); lane < W) seen[lane] = sent.first[lane] - rings.depth;
    Mover<W> mover(arena, channels.flags, storer, state, stages);
    mover.expect(used, 0);
    u32 fetched = 0, turn = 0;
    const auto source = [&](const MessageTiles&) -> const char* {
        const u32 number = used.first[root] + fetched++;
        mover.wait(root, here.arrived_slot(), number + 1);
        return arena.local(here.place(root, rank, number));
    };
    const auto deliver = [&](const MessageTiles& tile, const char* stage, auto& queue) {
        if (Warp{}.thread() == 0) post(progress.used_of_root(), turn + 1);  // the tile is in shared memory
#pragma unroll
        for (int k = 1; k < W; ++k) {
            const int q = rank_after<W>(rank, k);
            if (q == root) continue;
            const u32 number = sent.first[q] + turn;
            mover.peers().wait(q, here.used_slot(), number + 1 - rings.depth, seen);
            queue.store(q, here.place(rank, q, number), stage, whole_vectors(tile.length()));
        }
        store_here(queue, Warp{}, out + tile.at, stage, tile.length());
        queue.end_step(Post<W>{&sent, ++turn});
    };
    mover.move(MessageTiles{bytes}, source, deliver);
}

// The root's tensor to all.
template <int W>
__device__ inline void broadcast(const Arena& arena, const CollectiveWorkspace& space, int root, const char* in, char* out, u64 bytes) {
    __shared__ MoverState<W> states[2];
    __shared__ BroadcastProgress<W> progress;
    __shared__ Messages messages;  // to owners, and to their end
    __shared__ u32 seen[W];
    const int rank = arena.rank;
    const Shares shares(bytes, W - 1);
    const u64 own_at = shares.at(share_beside(root, rank)), own_bytes = shares.size(share_beside(root, rank));
    if (const int q = threadIdx.x; q < W) {
        const int share = share_beside(root, q);
        const bool other = q != rank;
        messages.send_at[q] = messages.receive_at[q] = shares.at(share);
        messages.send_bytes[q] = other && rank == root ? shares.size(share) : 0;
        messages.receive_bytes[q] = other && rank != root ? shares.size(share) : 0;
        const BlockChannels<W> here{arena, space.copies};
        const u64 passed_on = other && q != root ? own_bytes : 0;  // nothing at the root, which has no share
        here.begin_sending(progress.sent(), q, tiles_of(rank == root ? messages.send_bytes[q] : passed_on));
        here.begin_reading(progress.used_of_root(), q, q == root ? tiles_of(own_bytes) : 0);
        here.begin_reading(progress.used_of_others(), q, tiles_of(messages.receive_bytes[q]));
    }
    __syncthreads();
    char* stages = ptx::dynamic_shared();
    const u32 warp = threadIdx.x / warp_threads;
    if (warp == 2) {
        tell_progress<W>(arena, progress.lines);
    } else if (warp == 1) {
        if (rank == root) {
            copy_own<W>(arena, in, out, bytes, states[1], stages + stages_bytes);
        } else {
            receive_messages<W>(arena, space.copies, messages, out, progress.used_of_others(), states[1], stages + stages_bytes);
        }
    } else if (rank == root) {
        send_messages<W>(arena, space.copies, messages, in, progress.sent(), states[0], stages);
    } else {
        pass_on<W>(arena, space.copies, root, own_bytes, out + own_at, progress, states[0], seen, stages);
    }
}

}  // namespace peerlane
