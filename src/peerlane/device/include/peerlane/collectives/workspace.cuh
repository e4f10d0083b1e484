// Where the collectives keep what they send each other, and the messages of one call.
//
// All of it is zero before the first launch, then left to the kernels. Launches that share a workspace are ordered by one stream on every
// rank, and come in the same order on all of them. `in` and `out` may have any alignment; the 16-byte aligned ones are faster.
#pragma once

#include <peerlane/comm.cuh>

namespace peerlane {

constexpr u32 ring_depth = 4;  // places per ring; divides 2^32, so that numbers may wrap
#ifndef PEERLANE_RING_TILE_BYTES
#define PEERLANE_RING_TILE_BYTES 16384
#endif
constexpr u32 ring_tile_bytes = PEERLANE_RING_TILE_BYTES;  // smaller where many tiles are to be seen with little data

// Rings of tiles from every rank to every other, one per block: tiles[block][source][ring_depth] at the receiver.
// Flags of slot b say how many tiles have come, those of slot `blocks + b` how many have been used; counters[2][block][rank] hold, between
// launches, how many this rank has sent to and used from each.
struct Channels {
    u64 tiles, flags, counters, blocks;
};

// One of the two packet buffers, cut into a part per source, the same in every launch: a place has one writer for ever, whose own program
// orders what it stores there. (Ranks that took turns at a place would need a fence: packets order nothing but themselves.)
struct PacketBuffer {
    u64 at, stride;

    __device__ u64 place(u32 source, u64 i) const { return at + source * stride + i * sizeof(Vec16); }
};

// Mirrors `peerlane.device.workspace.Workspace`. Offsets and sizes in bytes; places for as many blocks as `blocks` says.
struct CollectiveWorkspace {
    u64 epochs;               // u32[max_epoch_blocks]
    u64 packets;              // two alternating buffers of packet_buffer_bytes each
    u64 packet_buffer_bytes;
    u64 relay_tiles;          // [relay_blocks][2][ring_depth][W]
    u64 relay_flags;          // relay_blocks slots
    u64 relay_numbers;        // u32[relay_blocks]
    u64 relay_blocks;
    Channels copies, sums;    // apart, because tiles of one may still be unread when a launch of the other begins

    // The one that belongs to an epoch. A rank has packet_buffer_bytes / W / 16 packets in it.
    template <int W>
    __device__ PacketBuffer packet_buffer(u32 epoch) const {
        return {packets + (epoch & 1) * packet_buffer_bytes, packet_buffer_bytes / W / sizeof(Vec16) * sizeof(Vec16)};
    }
};

// What this rank sends to and gets from every rank, itself included: bytes, and where they lie in `in` and `out`. Both ends of a message
// agree on its length; a rank need not know of other ranks' messages. Mirrors `peerlane.device.messages.Messages`.
struct Messages {
    u64 send_at[max_ranks], send_bytes[max_ranks];
    u64 receive_at[max_ranks], receive_bytes[max_ranks];
};

}  // namespace peerlane
