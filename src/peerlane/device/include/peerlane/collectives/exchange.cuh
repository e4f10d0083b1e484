// Large messages between all ranks through rings of tiles, in one kernel, of any length each: all-gather, all-to-all (uneven ones too), gather
// and scatter; and, where the messages are terms of a sum, reduce-scatter and reduce.
//
// Tile t of a message goes through block t mod grid. In a block one warp sends: tile to shared memory, from there to the receiver's ring, by bulk
// copies, round after round over all other ranks. Another warp receives, in the same way: from the ring to shared memory, from there to its
// place; a third one copies the rank's message to itself. All keep `rings.in_flight` tiles on their way out and the rest of their stages on their
// way in. Where messages are summed, warps that add take the receiver's place. What has been sent, and what of a ring has been read, is told by one
// more warp (progress.cuh): the fences that this takes stop nobody who moves tiles.
//
// A place of a ring is written again only when its reader has said that it is done (flags of slot `blocks + b`), so there is nothing to argue
// about between launches: numbers go on, and a channel whose message is empty stays still.
//
// Nobody can lock anybody. Both ends of a message go through their tiles in the order of (round, distance between the ranks), and post what is done
// by whole rounds; the warp that tells waits for nobody. Consider the first tile in this order that a receiver waits for in vain. Its sender has not
// sent it, or still owes its post (at most `in_flight` tiles, and the rest of its round); so it waits for the place of a tile at most in_flight
// rounds later, hence for the acknowledgement of one that is `depth` rounds before that. That receiver is at least as far as the one we consider,
// and has posted all rounds but those of what it fetches ahead (stages - in_flight tiles, of as many rounds at most) and the one that it is in.
// With depth >= stages + 2 this is impossible.
//
// The grid is the same at both ends of a message, at most channels.blocks; blocks of exchange_threads or reduce_threads threads with
// exchange_shared_bytes or reduce_shared_bytes of dynamic shared memory, all resident together.
#pragma once

#include <peerlane/collectives/workspace.cuh>

namespace peerlane {

// How much of a message is a tile: what a place holds, or less where tiles are whole rows.
#ifndef PEERLANE_TILE_BYTES
#define PEERLANE_TILE_BYTES rings.tile_bytes
#endif
constexpr u32 message_tile_bytes = PEERLANE_TILE_BYTES;
static_assert(0 < message_tile_bytes && message_tile_bytes <= rings.tile_bytes && message_tile_bytes % sizeof(Vec16) == 0);

constexpr u32 stages_bytes = rings.stages * rings.tile_bytes;
constexpr u32 exchange_threads = 4 * warp_threads;
constexpr u32 exchange_shared_bytes = 3 * stages_bytes;
constexpr u32 reduce_threads = (2 + rings.summing_warps) * warp_threads;
constexpr u32 reduce_shared_bytes = stages_bytes;

// This block's part of the channels: flags' slots, counters and places of tiles.
template <int W>
struct BlockChannels {
    const Arena& arena;
    const Channels& channels;

    __device__ u32 arrived_slot() const { return blockIdx.x; }
    __device__ u32 used_slot() const { return static_cast<u32>(channels.blocks) + blockIdx.x; }
    __device__ u64 place(int source, int receiver, u32 number) const {
        const u32 distance = receiver > source ? receiver - source : receiver - source + W;
        return channels.tiles + ((u64(blockIdx.x) * (W - 1) + distance - 1) * rings.depth + number % rings.depth) * rings.tile_bytes;
    }

    // For one thread for every rank q: what this launch sends to q, or reads of what q has sent here, is `tiles` tiles.
    __device__ void begin_sending(Progress<W>& sent, int q, u32 tiles) const {
        sent.begin(q, channels.flags, arrived_slot(), counter(blockIdx.x, q), tiles);
    }
    __device__ void begin_reading(Progress<W>& used, int q, u32 tiles) const {
        used.begin(q, channels.flags, used_slot(), counter(channels.blocks + blockIdx.x, q), tiles);
    }

  private:
    __device__ u32* counter(u64 row, int q) const { return reinterpret_cast<u32*>(arena.local(channels.counters)) + row * W + q; }
};

__device__ inline u64 first_tile() { return u64(blockIdx.x) * message_tile_bytes; }
__device__ inline u64 tile_step() { return u64(gridDim.x) * message_tile_bytes; }

// The tiles of a message that this block handles, in turn.
struct MessageTiles {
    u64 bytes;
    u64 at = first_tile();

    __device__ bool any() const { return at < bytes; }
    __device__ u32 count() const { return any() ? static_cast<u32>((bytes - at + tile_step() - 1) / tile_step()) : 0; }
    __device__ u32 length() const { return bytes - at < message_tile_bytes ? static_cast<u32>(bytes - at) : message_tile_bytes; }
    __device__ void next() { at += tile_step(); }
};

// How many tiles of a message of so many bytes this block handles.
__device__ inline u32 tiles_of(u64 bytes) { return MessageTiles{bytes}.count(); }

// All tiles of this block that go to (direction 1) or come from (direction -1) other ranks: one of each message, then the next one of each.
template <int W, int direction>
class Rounds {
  public:
    __device__ Rounds(const u64* bytes, u32 rank) : bytes_(bytes), rank_(rank) {
        for (int distance = 1; distance < W; ++distance) {
            if (const u64 own = bytes[peer(distance)]; own > longest_) longest_ = own;
        }
        next();
    }

    __device__ int peer() const { return peer(distance_); }
    __device__ u32 round() const { return round_; }
    __device__ u64 at() const { return at_; }
    __device__ u32 length() const { return MessageTiles{bytes_[peer()], at_}.length(); }
    __device__ bool any() const { return at_ < longest_; }
    __device__ void next() {
        while (any()) {
            if (++distance_ == W) distance_ = 0, ++round_, at_ += tile_step();
            else if (at_ < bytes_[peer()]) return;
        }
    }

    // How many rounds are done with this tile.
    __device__ u32 done() const {
#pragma unroll 1
        for (int distance = distance_ + 1; distance < W; ++distance) {
            if (at_ < bytes_[peer(distance)]) return round_;
        }
        return round_ + 1;
    }

  private:
    __device__ int peer(int distance) const { return rank_after<W>(rank_, direction > 0 ? distance : W - distance); }

    const u64* bytes_;
    u32 rank_;
    int distance_ = 0;
    u32 round_ = 0;
    u64 at_ = first_tile(), longest_ = 0;
};

// What a warp that moves tiles keeps in shared memory; of each rank, how far it is known to be.
template <int W>
struct MoverState {
    alignas(8) u64 landed[rings.stages];
    u32 seen[W];
};

// A warp that moves tiles through its stages, by bulk copies in and out: as many ahead of the tile that it delivers as are free.
template <int W>
class Mover {
  public:
    using Queue = StoreQueue<W, rings.in_flight, Warp, Post<W>>;

    __device__ Mover(const Arena& arena, u64 flags, u32 role, MoverState<W>& state, char* stages)
        : peers_(arena, flags, Warp{}, role), queue_(arena, flags, Warp{}, role), state_(state), stages_(stages) {
        const u32 lane = Warp{}.thread();
        if (lane < rings.stages) ptx::mbarrier_init(state.landed + lane, 1);
        ptx::mbarrier_init_fence();
        __syncwarp();
    }

    // The other end of each channel of `progress` is known to be no further behind its first number than this.
    __device__ void expect(const Progress<W>& progress, u32 behind) const {
        const u32 lane = Warp{}.thread();
        if (lane < W) state_.seen[lane] = progress.first[lane] - behind;
        __syncwarp();
    }

    // source(tiles): where the tile is, once it is there. deliver(tiles, stage, queue): one step of the queue.
    template <class Tiles, class Source, class Deliver>
    __device__ void move(Tiles tiles, const Source& source, const Deliver& deliver) {
        Tiles ahead = tiles;
        u32 fetched = 0;
        const auto fetch = [&] {
            load(fetched++, source(ahead), ahead.length());
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
    Queue queue_;
    MoverState<W>& state_;
    char* stages_;
};

// A tile from shared memory to the caller's own memory, of any alignment, as part of a step: as much as can by a bulk copy.
template <class Queue, class Team>
__device__ inline void store_here(Queue& queue, const Team& team, char* target, const char* stage, u32 bytes) {
    const u32 whole = aligned_for<Vec16>(target) ? bytes / sizeof(Vec16) * sizeof(Vec16) : 0;
    queue.store(target, stage, whole);
    copy_bytes(team, target + whole, stage + whole, bytes - whole);
}

// What is sent of a tile: whole vectors, which the stages and places have room for.
__device__ inline u32 whole_vectors(u32 bytes) { return (bytes + sizeof(Vec16) - 1) / sizeof(Vec16) * sizeof(Vec16); }

// By one warp: every message to the ring of its receiver.
template <int W>
__device__ inline void send_messages(
    const Arena& arena, const Channels& channels, const Messages& messages, const char* in, Progress<W>& sent, MoverState<W>& state, char* stages) {
    const BlockChannels<W> here{arena, channels};
    Mover<W> mover(arena, channels.flags, storer, state, stages);
    mover.expect(sent, rings.depth);
    const auto source = [&](const auto& tiles) { return in + messages.send_at[tiles.peer()] + tiles.at(); };
    const auto deliver = [&](const auto& tiles, const char* stage, auto& queue) {
        const int q = tiles.peer();
        const u32 number = sent.first[q] + tiles.round();
        mover.wait(q, here.used_slot(), number + 1 - rings.depth);
        queue.store(q, here.place(arena.rank, q, number), stage, whole_vectors(tiles.length()));
        queue.end_step(Post<W>{&sent, tiles.done()});
    };
    mover.move(Rounds<W, 1>(messages.send_bytes, arena.rank), source, deliver);
}

// By one warp: every message of another rank from its ring to its place in `out`.
template <int W>
__device__ inline void receive_messages(
    const Arena& arena, const Channels& channels, const Messages& messages, char* out, Progress<W>& used, MoverState<W>& state, char* stages) {
    const BlockChannels<W> here{arena, channels};
    Mover<W> mover(arena, channels.flags, consumer, state, stages);
    mover.expect(used, 0);
    const auto source = [&](const auto& tiles) -> const char* {
        const int q = tiles.peer();
        const u32 number = used.first[q] + tiles.round();
        mover.wait(q, here.arrived_slot(), number + 1);
        return arena.local(here.place(q, arena.rank, number));
    };
    const auto deliver = [&](const auto& tiles, const char* stage, auto& queue) {
        if (Warp{}.thread() == 0) post(used, tiles.done());  // the tile is in shared memory
        store_here(queue, Warp{}, out + messages.receive_at[tiles.peer()] + tiles.at(), stage, tiles.length());
        queue.end_step();
    };
    mover.move(Rounds<W, -1>(messages.receive_bytes, arena.rank), source, deliver);
}

// By one warp: `bytes` within the caller's own memory, unless they are there already.
template <int W>
__device__ inline void copy_own(const Arena& arena, const char* from, char* to, u64 bytes, MoverState<W>& state, char* stages) {
    if (from == to) return;
    Mover<W> mover(arena, 0, consumer, state, stages);
    const auto source = [&](const MessageTiles& tile) { return from + tile.at; };
    const auto deliver = [&](const MessageTiles& tile, const char* stage, auto& queue) {
        store_here(queue, Warp{}, to + tile.at, stage, tile.length());
        queue.end_step();
    };
    mover.move(MessageTiles{bytes}, source, deliver);
}

// Every message to its place in `out`.
template <int W>
__device__ inline void exchange(const Arena& arena, const CollectiveWorkspace& space, const Messages& messages, const char* in, char* out) {
    __shared__ MoverState<W> states[3];
    __shared__ Progress<W> progress[2];
    auto& [sent, used] = progress;
    const int rank = arena.rank;
    if (const int q = threadIdx.x; q < W) {
        const BlockChannels<W> here{arena, space.copies};
        here.begin_sending(sent, q, q == rank ? 0 : tiles_of(messages.send_bytes[q]));
        here.begin_reading(used, q, q == rank ? 0 : tiles_of(messages.receive_bytes[q]));
    }
    __syncthreads();
    char* stages = ptx::dynamic_shared();
    const u32 warp = threadIdx.x / warp_threads;
    if (warp == 0) {
        send_messages<W>(arena, space.copies, messages, in, sent, states[0], stages);
    } else if (warp == 1) {
        receive_messages<W>(arena, space.copies, messages, out, used, states[1], stages + stages_bytes);
    } else if (warp == 2) {
        copy_own<W>(arena, in + messages.send_at[rank], out + messages.receive_at[rank], messages.receive_bytes[rank], states[2], stages + 2 * stages_bytes);
    } else {
        tell_progress<W>(arena, progress);
    }
}

// The sum of this tile of all ranks: `own`, and term(q) of every other rank q, to `target`. Several vectors of a thread are on their way at a time.
template <class E, int W, class Term>
__device__ inline void sum_tile(const Warps& team, u32 rank, const char* own, const Term& term, char* target, u32 bytes, float factor) {
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
                sum_in_rank_order<E, W>(rank, owns[k], terms[k], total, factor);
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
        sum_in_rank_order<E, W>(rank, owns, terms, total, factor);
        store_words(target, at, bytes, total);
    }
}

// The sum of the messages from all ranks to out + receive_at[rank]. All messages to a rank have one length, a multiple of the element's size, so
// that all channels to it count alike. Added as in all_reduce.cuh. A rank that gets no sum keeps its message to itself: copies it to that place,
// unless it is there already.
template <class E, int W>
__device__ inline void reduce_scatter(const Arena& arena, const CollectiveWorkspace& space, const Messages& messages, const char* in, char* out) {
    __shared__ MoverState<W> state;
    __shared__ Progress<W> progress[2];
    auto& [sent, used] = progress;
    const BlockChannels<W> here{arena, space.sums};
    const int rank = arena.rank;
    if (const int q = threadIdx.x; q < W) {
        here.begin_sending(sent, q, q == rank ? 0 : tiles_of(messages.send_bytes[q]));
        here.begin_reading(used, q, q == rank ? 0 : tiles_of(messages.receive_bytes[q]));
    }
    __syncthreads();
    const u32 warp = threadIdx.x / warp_threads;
    if (warp == 0) {
        send_messages<W>(arena, space.sums, messages, in, sent, state, ptx::dynamic_shared());
        return;
    }
    if (warp > rings.summing_warps) {
        tell_progress<W>(arena, progress);
        return;
    }
    const Warps team{1, rings.summing_warps, 1};
    const Peers<W, Warps> peers(arena, space.sums.flags, team, consumer);
    const char* own = in + messages.send_at[rank];
    char* target = out + messages.receive_at[rank];
    const u32 first = used.first[rank_after<W>(rank, 1)];
    u32 seen = first, done = 0;
    for (MessageTiles tile{messages.receive_bytes[rank]}; tile.any(); tile.next()) {
        const u32 number = first + done;
        peers.wait_all(here.arrived_slot(), number + 1, seen);
        const auto term = [&](int q) -> const char* { return arena.local(here.place(q, rank, number)); };
        sum_tile<E, W>(team, rank, own + tile.at, term, target + tile.at, tile.length(), space.factor);
        team.sync();
        ++done;
        if (team.thread() == 0) post(used, done);
    }
    if (messages.receive_bytes[rank] != 0 || own == target) return;
    for (MessageTiles tile{messages.send_bytes[rank]}; tile.any(); tile.next()) copy_bytes(team, target + tile.at, own + tile.at, tile.length());
}

}  // namespace peerlane
