// Large messages between all ranks through rings of tiles, in one kernel, of any length each: all-gather, all-to-all (uneven ones too), gather
// and scatter; and, where the messages are terms of a sum, reduce-scatter and reduce.
//
// Tile t of a message goes through block t mod grid. In a block one warp sends: tile to shared memory, from there to the receiver's ring, by bulk
// copies, round after round over all other ranks. Another warp receives, in the same way: from the ring to shared memory, from there to its
// place. Both keep `rings.in_flight` tiles on their way out and the rest of their stages on their way in. Where messages are summed, warps that
// add take the receiver's place. Signals and acknowledgements are for `rings.batch` rounds, of all ranks at once, since their fences take longer
// than a tile.
//
// A place of a ring is written again only when its reader has said that it is done (flags of slot `blocks + b`), so there is nothing to argue
// about between launches: numbers go on, and a channel whose message is empty stays still.
//
// Nobody can lock anybody. Both ends of a message go through their tiles in the order of (round, distance between the ranks). Consider the first
// tile in this order that a receiver waits for in vain. Its sender has not sent it, or still owes its signal (at most `in_flight` tiles, and the
// rest of a batch of rounds); so it waits for the place of a tile at most in_flight + batch - 1 rounds later, hence for the acknowledgement of one
// that is `depth` rounds before that. That receiver is at least as far as the one we consider, and has acknowledged all but what it fetches
// ahead (stages - in_flight tiles, of as many rounds at most) and the rest of a batch. With depth >= stages + 2 batch this is impossible. A round in
// which a message ends ends a batch too, so what is told of is the same number of rounds for all messages that have a tile in this round.
//
// The grid is the same at both ends of a message, at most channels.blocks; blocks of exchange_threads or reduce_threads threads with
// exchange_shared_bytes or reduce_shared_bytes of dynamic shared memory, all resident together.
#pragma once

#include <peerlane/collectives/workspace.cuh>

namespace peerlane {

constexpr u32 stages_bytes = rings.stages * rings.tile_bytes;
constexpr u32 exchange_threads = 2 * warp_threads;
constexpr u32 exchange_shared_bytes = 2 * stages_bytes;
constexpr u32 reduce_threads = (1 + rings.summing_warps) * warp_threads;
constexpr u32 reduce_shared_bytes = stages_bytes;

// This block's part of the channels: flags' slots, counters and places of tiles.
template <int W>
struct BlockChannels {
    const Arena& arena;
    const Channels& channels;

    __device__ u32 arrived_slot() const { return blockIdx.x; }
    __device__ u32 used_slot() const { return static_cast<u32>(channels.blocks) + blockIdx.x; }
    __device__ u32* sent(int q) const { return counter(blockIdx.x, q); }
    __device__ u32* used(int q) const { return counter(channels.blocks + blockIdx.x, q); }
    __device__ u64 place(int source, int receiver, u32 number) const {
        const u32 distance = receiver > source ? receiver - source : receiver - source + W;
        return channels.tiles + ((u64(blockIdx.x) * (W - 1) + distance - 1) * rings.depth + number % rings.depth) * rings.tile_bytes;
    }

  private:
    __device__ u32* counter(u64 row, int q) const { return reinterpret_cast<u32*>(arena.local(channels.counters)) + row * W + q; }
};

__device__ inline u64 first_tile() { return u64(blockIdx.x) * rings.tile_bytes; }
__device__ inline u64 tile_step() { return u64(gridDim.x) * rings.tile_bytes; }

// The tiles of a message that this block handles, in turn.
struct MessageTiles {
    u64 bytes;
    u64 at = first_tile();

    __device__ bool any() const { return at < bytes; }
    __device__ bool last() const { return at + tile_step() >= bytes; }
    __device__ u32 count() const { return any() ? static_cast<u32>((bytes - at + tile_step() - 1) / tile_step()) : 0; }
    __device__ u32 length() const { return bytes - at < rings.tile_bytes ? static_cast<u32>(bytes - at) : rings.tile_bytes; }
    __device__ void next() { at += tile_step(); }
};

// Whether a signal or an acknowledgement comes when so many tiles have gone, where all channels go together.
__device__ inline bool ends_batch(u32 count, bool last) { return last || count % rings.batch == 0; }

// All tiles of this block that go to (direction 1) or come from (direction -1) other ranks: one of each message, then the next one of each.
// The caller's own message, if it is `own`, comes last in each round.
template <int W, int direction>
class Rounds {
  public:
    __device__ Rounds(const u64* bytes, u32 rank, bool own) : bytes_(bytes), rank_(rank), distances_(own ? W : W - 1) {
        for (int q = 0; q < W; ++q) {
            if ((own || q != rank) && bytes[q] > longest_) longest_ = bytes[q];
        }
        next();
    }

    __device__ int peer() const { return peer(distance_); }
    __device__ u32 round() const { return round_; }
    __device__ MessageTiles tile() const { return {bytes_[peer()], at_}; }
    __device__ bool any() const { return at_ < longest_; }
    __device__ void next() {
        while (any()) {
            if (++distance_ > distances_) distance_ = 0, ++round_, at_ += tile_step();
            else if (at_ < bytes_[peer()]) return;
        }
    }

    // Whether this is the last tile of its round, the caller's own one apart, and all that went since the last batch is to be told of: because
    // `batch` rounds have gone, or because a message ends in this round. Then all messages in this round have come as far as `round() + 1`.
    __device__ bool ends_batch() const {
        bool ends = (round_ + 1) % rings.batch == 0;
#pragma unroll 1
        for (int distance = 1; distance < W; ++distance) {
            const u64 bytes = bytes_[peer(distance)];
            if (bytes <= at_) continue;
            if (distance > distance_) return false;
            if (bytes <= at_ + tile_step()) ends = true;
        }
        return ends && distance_ < W;
    }

    // The ranks with a tile in this round.
    __device__ u32 ranks() const {
        u32 set = 0;
#pragma unroll 1
        for (int q = 0; q < W; ++q) set |= (at_ < bytes_[q] ? 1u : 0u) << q;
        return set;
    }

  private:
    __device__ int peer(int distance) const { return rank_after<W>(rank_, direction > 0 ? distance : W - distance); }

    const u64* bytes_;
    u32 rank_;
    int distances_, distance_ = 0;
    u32 round_ = 0;
    u64 at_ = first_tile(), longest_ = 0;
};

// What a warp that moves tiles keeps in shared memory: of each rank, the number of the first tile of this launch, and how far it is known to be.
template <int W>
struct MoverState {
    alignas(8) u64 landed[rings.stages];
    u32 first[W], seen[W];
};

// A warp that moves tiles through its stages, by bulk copies in and out: as many ahead of the tile that it delivers as are free.
template <int W>
class Mover {
  public:
    // counters[q]: what has gone in the channel of rank q before, of those that have a message; `behind`: how far rank q may be behind that.
    __device__ Mover(
        const Arena& arena, const Channels& channels, u32 role, MoverState<W>& state, char* stages, const u64* bytes, const u32* counters, u32 behind)
        : peers_(arena, channels.flags, Warp{}, role), queue_(arena, channels.flags, Warp{}, role), state_(state), stages_(stages) {
        const u32 lane = Warp{}.thread();
        if (lane < W && bytes[lane] > 0) state.first[lane] = counters[lane], state.seen[lane] = counters[lane] - behind;
        if (lane < rings.stages) ptx::mbarrier_init(state.landed + lane, 1);
        ptx::mbarrier_init_fence();
        __syncwarp();
    }

    // source(tiles): where the tile is, once it is there. deliver(tiles, stage, queue): one step of the queue.
    template <class Tiles, class Source, class Deliver>
    __device__ void move(Tiles tiles, const Source& source, const Deliver& deliver) {
        Tiles ahead = tiles;
        u32 fetched = 0;
        const auto fetch = [&] {
            load(fetched++, source(ahead), ahead.tile().length());
            ahead.next();
        };
        while (fetched < rings.stages - rings.in_flight && ahead.any()) fetch();
        for (u32 turn = 0; tiles.any(); tiles.next(), ++turn) {
            peers_.wait_load(state_.landed + turn % rings.stages, turn / rings.stages & 1);
            deliver(tiles, stage(turn), queue_);
            if (ahead.any()) fetch();  // its stage is free: the tile that it held was delivered `in_flight` steps ago
        }
        queue_.flush();
    }

    // For the next launch: what has gone in each channel that has a message.
    __device__ void keep(u32* counters, const u64* bytes, u32 rank) const {
        const u32 lane = Warp{}.thread();
        if (lane < W && lane != rank && bytes[lane] > 0) counters[lane] = state_.first[lane] + MessageTiles{bytes[lane]}.count();
    }

    // The number of a tile in its channel.
    template <class Tiles>
    __device__ u32 number(const Tiles& tiles) const { return state_.first[tiles.peer()] + tiles.round(); }

    // For each rank, the number of the first tile in its channel.
    __device__ const u32* first() const { return state_.first; }

    __device__ void wait(int q, u32 slot, u32 number) const { peers_.wait(q, slot, number, state_.seen); }
    __device__ const Peers<W, Warp>& peers() const { return peers_; }

  private:
    __device__ char* stage(u32 turn) const { return stages_ + turn % rings.stages * rings.tile_bytes; }

    // Whole vectors by a bulk copy where the source is aligned, the rest by hand.
    __device__ void load(u32 turn, const char* source, u32 bytes) const {
        const u32 whole = aligned_for<Vec16>(source) ? bytes / sizeof(Vec16) * sizeof(Vec16) : 0;
        copy_bytes(Warp{}, stage(turn) + whole, source + whole, bytes - whole);
        peers_.load_async(stage(turn), source, whole, state_.landed + turn % rings.stages);
    }

    Peers<W, Warp> peers_;
    StoreQueue<W, rings.in_flight> queue_;
    MoverState<W>& state_;
    char* stages_;
};

// By one warp: every message to the ring of its receiver.
template <int W>
__device__ inline void send_messages(
    const Arena& arena, const Channels& channels, const Messages& messages, const char* in, MoverState<W>& state, char* stages) {
    const BlockChannels<W> here{arena, channels};
    Mover<W> mover(arena, channels, storer, state, stages, messages.send_bytes, here.sent(0), rings.depth);
    const auto source = [&](const auto& tiles) { return in + messages.send_at[tiles.peer()] + tiles.tile().at; };
    const auto deliver = [&](const auto& tiles, const char* stage, auto& queue) {
        const int q = tiles.peer();
        const u32 number = mover.number(tiles);
        mover.wait(q, here.used_slot(), number + 1 - rings.depth);
        queue.store(q, here.place(arena.rank, q, number), stage, (tiles.tile().length() + 15) / 16 * 16);
        if (tiles.ends_batch()) {
            queue.end_step(Signal{tiles.ranks(), here.arrived_slot(), tiles.round() + 1, mover.first()});
        } else {
            queue.end_step();
        }
    };
    mover.move(Rounds<W, 1>(messages.send_bytes, arena.rank, false), source, deliver);
    mover.keep(here.sent(0), messages.send_bytes, arena.rank);
}

// By one warp: every message from its ring, and the caller's own one, to its place in `out`.
template <int W>
__device__ inline void receive_messages(
    const Arena& arena, const Channels& channels, const Messages& messages, const char* in, char* out, MoverState<W>& state, char* stages) {
    const BlockChannels<W> here{arena, channels};
    const int rank = arena.rank;
    Mover<W> mover(arena, channels, consumer, state, stages, messages.receive_bytes, here.used(0), 0);
    const auto source = [&](const auto& tiles) -> const char* {
        const int q = tiles.peer();
        if (q == rank) return in + messages.send_at[q] + tiles.tile().at;
        const u32 number = mover.number(tiles);
        mover.wait(q, here.arrived_slot(), number + 1);
        return arena.local(here.place(q, rank, number));
    };
    const auto deliver = [&](const auto& tiles, const char* stage, auto& queue) {
        const int q = tiles.peer();
        const u32 length = tiles.tile().length();
        if (tiles.ends_batch()) mover.peers().acknowledge(Signal{tiles.ranks(), here.used_slot(), tiles.round() + 1, mover.first()});
        char* target = out + messages.receive_at[q] + tiles.tile().at;
        const u32 whole = aligned_for<Vec16>(target) ? length / sizeof(Vec16) * sizeof(Vec16) : 0;
        queue.store(target, stage, whole);
        copy_bytes(Warp{}, target + whole, stage + whole, length - whole);
        queue.end_step();
    };
    const bool in_place = in + messages.send_at[rank] == out + messages.receive_at[rank];
    mover.move(Rounds<W, -1>(messages.receive_bytes, rank, !in_place), source, deliver);
    mover.keep(here.used(0), messages.receive_bytes, rank);
}

// Every message to its place in `out`.
template <int W>
__device__ inline void exchange(const Arena& arena, const CollectiveWorkspace& space, const Messages& messages, const char* in, char* out) {
    __shared__ MoverState<W> states[2];
    char* stages = ptx::dynamic_shared();
    if (threadIdx.x < warp_threads) {
        send_messages<W>(arena, space.copies, messages, in, states[0], stages);
    } else {
        receive_messages<W>(arena, space.copies, messages, in, out, states[1], stages + stages_bytes);
    }
}

// The sum of this tile of all ranks: `own`, and term(q) of every other rank q, to `target`. Several vectors of a thread are on their way at a time.
template <class E, int W, class Term>
__device__ inline void sum_tile(const Warps& team, u32 rank, const char* own, const Term& term, char* target, u32 bytes) {
    constexpr u32 at_once = W * E::lanes <= 4 ? 4 : W * E::lanes <= 8 ? 2 : 1;
    const auto load = [](const char* from, u32 vector, u32(&words)[4]) {
        const Vec16 whole = reinterpret_cast<const Vec16*>(from)[vector];
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = whole.word[w];
    };
    u32 v = team.thread();
    if (aligned_for<Vec16>(own) && aligned_for<Vec16>(target)) {
        for (; (v + (at_once - 1) * team.size() + 1) * sizeof(Vec16) <= bytes; v += at_once * team.size()) {
            u32 owns[at_once][4], terms[at_once][W][4];
#pragma unroll
            for (u32 k = 0; k < at_once; ++k) {
                load(own, v + k * team.size(), owns[k]);
#pragma unroll
                for (int q = 0; q < W; ++q) {
                    if (q != rank) load(term(q), v + k * team.size(), terms[k][q]);
                }
            }
#pragma unroll
            for (u32 k = 0; k < at_once; ++k) {
                u32 total[4];
                sum_in_rank_order<E, W>(rank, owns[k], terms[k], total);
                reinterpret_cast<Vec16*>(target)[v + k * team.size()] = Vec16{{total[0], total[1], total[2], total[3]}};
            }
        }
    }
#pragma unroll 1
    for (; v * sizeof(Vec16) < bytes; v += team.size()) {
        const u32 at = v * sizeof(Vec16);
        u32 owns[4], terms[W][4], total[4];
        load_words(own, at, bytes, owns);
#pragma unroll
        for (int q = 0; q < W; ++q) {
            if (q != rank) load(term(q), v, terms[q]);  // whole vectors: who sends rounds up
        }
        sum_in_rank_order<E, W>(rank, owns, terms, total);
        store_words(target, at, bytes, total);
    }
}

// The sum of the messages from all ranks to out + receive_at[rank]. All messages to a rank have one length, a multiple of the element's size, so
// that all channels to it count alike. Added as in all_reduce.cuh. A rank that gets no sum keeps its message to itself: copies it to that place,
// unless it is there already.
template <class E, int W>
__device__ inline void reduce_scatter(const Arena& arena, const CollectiveWorkspace& space, const Messages& messages, const char* in, char* out) {
    __shared__ MoverState<W> state;
    if (threadIdx.x < warp_threads) {
        send_messages<W>(arena, space.sums, messages, in, state, ptx::dynamic_shared());
        return;
    }
    const Warps team{1, rings.summing_warps, 1};
    const BlockChannels<W> here{arena, space.sums};
    const Peers<W, Warps> peers(arena, space.sums.flags, team, consumer);
    const u32 rank = arena.rank;
    const char* own = in + messages.send_at[rank];
    char* target = out + messages.receive_at[rank];
    u32* counter = here.used(rank);
    const u32 first = *counter;
    u32 number = first, seen = first;
    MessageTiles tile{messages.receive_bytes[rank]};
    for (; tile.any(); tile.next(), ++number) {
        peers.wait_all(here.arrived_slot(), number + 1, seen);
        const auto term = [&](int q) -> const char* { return arena.local(here.place(q, rank, number)); };
        sum_tile<E, W>(team, rank, own + tile.at, term, target + tile.at, tile.length());
        if (ends_batch(number + 1, tile.last())) peers.acknowledge_all(here.used_slot(), number + 1);
    }
    if (number != first && team.thread() == 0) *counter = number;
    if (messages.receive_bytes[rank] != 0 || own == target) return;
    for (tile = {messages.send_bytes[rank]}; tile.any(); tile.next()) copy_bytes(team, target + tile.at, own + tile.at, tile.length());
}

}  // namespace peerlane
