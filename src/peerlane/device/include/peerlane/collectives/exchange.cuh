// Large messages between all ranks through rings of tiles, in one kernel, of any length each: all-gather, all-to-all (uneven ones too), gather
// and scatter; and, where the messages are terms of a sum, reduce-scatter.
//
// A block has one channel to every other rank: a warp that sends (tile to shared memory, from there to the receiver's ring, by bulk copies)
// and two warps that receive. Tile t of a message goes through block t mod grid. Senders run ahead as far as the ring is deep.
//
// A place of a ring is written again only when its reader has said that it is done (flags of slot `blocks + b`), so there is nothing to argue
// about between launches: numbers go on, and a channel whose message is empty stays still.
//
// The grid is the same at both ends of a message, at most channels.blocks; blocks of exchange_threads<W>() threads with
// exchange_shared_bytes<W>() bytes of dynamic shared memory, all resident together.
#pragma once

#include <peerlane/collectives/workspace.cuh>

namespace peerlane {

constexpr u32 stages_per_sender = 2;
constexpr u32 warps_per_receiver = 2;

template <int W>
__device__ constexpr u32 exchange_threads() {
    return warp_threads * (W - 1 + W * warps_per_receiver);
}

template <int W>
__device__ constexpr u32 exchange_shared_bytes() {
    return (W - 1) * stages_per_sender * ring_tile_bytes;
}

// This block's part of the channels: flags' slots, counters and places of tiles.
template <int W>
struct BlockChannels {
    const Arena& arena;
    const Channels& channels;

    __device__ u32 arrived_slot() const { return blockIdx.x; }
    __device__ u32 used_slot() const { return static_cast<u32>(channels.blocks) + blockIdx.x; }
    __device__ u32* sent(int q) const { return counter(blockIdx.x, q); }
    __device__ u32* used(int q) const { return counter(channels.blocks + blockIdx.x, q); }
    __device__ u64 place(u32 source, u32 number) const {
        return channels.tiles + ((u64(blockIdx.x) * W + source) * ring_depth + number % ring_depth) * ring_tile_bytes;
    }

  private:
    __device__ u32* counter(u64 row, int q) const { return reinterpret_cast<u32*>(arena.local(channels.counters)) + row * W + q; }
};

// The tiles of a message that this block handles, in turn.
struct MessageTiles {
    u64 bytes;
    u64 at = u64(blockIdx.x) * ring_tile_bytes;

    __device__ bool any() const { return at < bytes; }
    __device__ u32 length() const { return bytes - at < ring_tile_bytes ? static_cast<u32>(bytes - at) : ring_tile_bytes; }
    __device__ void next() { at += u64(gridDim.x) * ring_tile_bytes; }
};

// One warp: a message to rank q. Two tiles are on their way at a time, one into shared memory and one out of it.
template <int W>
class Sender {
  public:
    __device__ Sender(const Arena& arena, const Channels& channels, char* stages, u64* barriers)
        : arena_(arena), here_{arena, channels}, peers_(arena, channels.flags, Warp{}, storer), stages_(stages), barriers_(barriers) {}

    __device__ void send(int q, const char* source, u64 bytes) {
        u32* counter = here_.sent(q);
        const u32 first = *counter;
        u32 number = first;
        MessageTiles tile{bytes}, ahead{bytes};
        if (ahead.any()) fetch(source, ahead, 0);
        for (; tile.any(); tile.next(), ++number) {
            const u32 turn = number - first;
            char* stage = stages_ + turn % stages_per_sender * ring_tile_bytes;
            peers_.wait(q, here_.used_slot(), number + 1 - ring_depth);
            if (loads_by_bulk(source, tile)) peers_.wait_load(barriers_ + turn % stages_per_sender, turn / stages_per_sender & 1);
            peers_.store_async(q, here_.place(arena_.rank, number), stage, (tile.length() + 15) / 16 * 16);
            // The other stage is free: the signal of the tile before has waited for its store.
            ahead.next();
            if (ahead.any()) fetch(source, ahead, turn + 1);
            peers_.signal(q, here_.arrived_slot(), number + 1);
        }
        if (number != first && Warp{}.thread() == 0) *counter = number;
    }

  private:
    __device__ static bool loads_by_bulk(const char* source, const MessageTiles& tile) {
        return aligned_for<Vec16>(source) && tile.length() >= sizeof(Vec16);
    }

    // Whole vectors by a bulk copy where the source is aligned, the rest by hand.
    __device__ void fetch(const char* source, const MessageTiles& tile, u32 turn) {
        char* stage = stages_ + turn % stages_per_sender * ring_tile_bytes;
        u32 done = 0;
        if (loads_by_bulk(source, tile)) {
            done = tile.length() / 16 * 16;
            peers_.load_async(stage, source + tile.at, done, barriers_ + turn % stages_per_sender);
        }
        copy_bytes(Warp{}, stage + done, source + tile.at + done, tile.length() - done);
    }

    const Arena& arena_;
    BlockChannels<W> here_;
    Peers<W, Warp> peers_;
    char* stages_;
    u64* barriers_;
};

// The senders' warps send; returns whether the caller is one of them.
template <int W>
__device__ inline bool send_messages(const Arena& arena, const Channels& channels, const Messages& messages, const char* in) {
    __shared__ alignas(8) u64 barriers[(W - 1) * stages_per_sender];
    if (threadIdx.x == 0) {
        for (u32 b = 0; b < (W - 1) * stages_per_sender; ++b) ptx::mbarrier_init(barriers + b, 1);
        ptx::mbarrier_init_fence();
    }
    __syncthreads();
    const u32 warp = threadIdx.x / warp_threads;
    if (warp >= W - 1) return false;
    const int q = rank_after<W>(arena.rank, warp + 1);
    char* stages = ptx::dynamic_shared() + warp * stages_per_sender * ring_tile_bytes;
    Sender<W>(arena, channels, stages, barriers + warp * stages_per_sender).send(q, in + messages.send_at[q], messages.send_bytes[q]);
    return true;
}

// Every message to its place in `out`.
template <int W>
__device__ inline void exchange(const Arena& arena, const CollectiveWorkspace& space, const Messages& messages, const char* in, char* out) {
    if (send_messages<W>(arena, space.copies, messages, in)) return;
    const u32 group = (threadIdx.x / warp_threads - (W - 1)) / warps_per_receiver;
    const Warps team{W - 1 + group * warps_per_receiver, warps_per_receiver, 1 + group};
    const int q = rank_after<W>(arena.rank, group);
    char* target = out + messages.receive_at[q];
    MessageTiles tile{messages.receive_bytes[q]};
    if (q == arena.rank) {
        const char* own = in + messages.send_at[q];
        for (; own != target && tile.any(); tile.next()) copy_bytes(team, target + tile.at, own + tile.at, tile.length());
        return;
    }
    const BlockChannels<W> here{arena, space.copies};
    const Peers<W, Warps> peers(arena, space.copies.flags, team, consumer);
    u32* counter = here.used(q);
    const u32 first = *counter;
    u32 number = first;
    for (; tile.any(); tile.next(), ++number) {
        peers.wait(q, here.arrived_slot(), number + 1);
        copy_bytes(team, target + tile.at, arena.local(here.place(q, number)), tile.length());
        peers.signal(q, here.used_slot(), number + 1);
    }
    if (number != first && team.thread() == 0) *counter = number;
}

// The sum of the messages from all ranks to out + receive_at[rank]. All messages of all ranks have one length, a multiple of the element's
// size, so that all channels of space.sums count alike. Added as in all_reduce.cuh.
template <class E, int W>
__device__ inline void reduce_scatter(const Arena& arena, const CollectiveWorkspace& space, const Messages& messages, const char* in, char* out) {
    if (send_messages<W>(arena, space.sums, messages, in)) return;
    const Warps team{W - 1, W * warps_per_receiver, 1};
    const BlockChannels<W> here{arena, space.sums};
    const Peers<W, Warps> peers(arena, space.sums.flags, team, consumer);
    const u32 rank = arena.rank;
    u32* counter = here.used(rank);
    const u32 first = *counter;
    u32 number = first;
    MessageTiles tile{messages.receive_bytes[rank]};
    for (; tile.any(); tile.next(), ++number) {
        peers.wait_all(here.arrived_slot(), number + 1);
        const char* own_tile = in + messages.send_at[rank] + tile.at;
        char* target = out + messages.receive_at[rank] + tile.at;
        for (u32 at = team.thread() * sizeof(Vec16); at < tile.length(); at += team.size() * sizeof(Vec16)) {
            u32 own[4], terms[W][4], total[4];
            load_words(own_tile, at, tile.length(), own);
#pragma unroll
            for (int q = 0; q < W; ++q) {
                if (q != rank) load_words(arena.local(here.place(q, number)), at, ~u64(0), terms[q]);
            }
            sum_in_rank_order<E, W>(rank, own, terms, total);
            store_words(target, at, tile.length(), total);
        }
        peers.signal_all(here.used_slot(), number + 1);
    }
    if (number != first && team.thread() == 0) *counter = number;
}

}  // namespace peerlane
