// Where the collectives keep what they send each other, and the messages of one call.
//
// All of it is zero before the first launch, then left to the kernels. Launches that share a workspace are ordered by one stream on every
// rank, and come in the same order on all of them. `in` and `out` may have any alignment; the 16-byte aligned ones are faster.
#pragma once

#include <peerlane/comm.cuh>

namespace peerlane {

// How tiles go round the rings. Mirrors `peerlane.device.workspace.Rings`, which has the defaults and the reasons, and hands them over as the macro.
struct RingSettings {
    u32 tile_bytes;      // what goes round
    u32 depth;           // places per ring
    u32 stages;          // tiles of shared memory of a warp that moves tiles
    u32 in_flight;       // of them, those on their way out
    u32 batch;           // tiles that one signal, or one acknowledgement, speaks for
    u32 summing_warps;   // of a block that sums
};
#ifndef PEERLANE_RINGS
#error "PEERLANE_RINGS is not defined: pass the macros of peerlane.device.workspace.Rings().defines()"
#endif
constexpr RingSettings rings{PEERLANE_RINGS};

constexpr bool is_power_of_two(u32 number) { return number > 0 && (number & (number - 1)) == 0; }
static_assert(is_power_of_two(rings.depth) && is_power_of_two(rings.batch), "numbers of tiles wrap at 2^32");
static_assert(rings.tile_bytes % 128 == 0 && 0 < rings.in_flight && rings.in_flight < rings.stages);
// What a sender may still owe, and what a receiver fetches ahead and acknowledges late: exchange.cuh argues why it has to fit.
static_assert(rings.depth >= rings.stages + 2 * rings.batch, "a ring of this depth can lock sender and receiver");

// Rings of tiles from every rank to every other, one per block: tiles[block][distance - 1][depth] at the receiver, `distance`
// ranks from the source to it.
// Flags of slot b say how many tiles have come, those of slot `blocks + b` how many have been used; counters[2][block][rank] hold, between
// launches, how many this rank has sent to and used from each.
struct Channels {
    u64 tiles, flags, counters, blocks;
};

// One of the two packet buffers, cut into a part per source, the same in every launch: a place has one writer for ever, whose own program
// orders what it stores there. (Ranks that took turns at a place would need a fence: packets order nothing but themselves.)
//
// All kernels that use packets take turns at these two buffers, and number their launches together. A place is written again two launches later,
// whichever kernels they are. That is safe because each of them keeps one rule: to finish a launch, a rank needs a packet of every other rank's
// same launch, an empty one if there is nothing to say. So the writer, which has finished launch n + 1, had a packet of that launch from the
// reader, who had therefore begun it, and finished launch n with all its reads. A packet that nobody has read when its launch ends is harmless:
// its number is that of no later launch.
struct PacketBuffer {
    u64 at, stride;

    __device__ u64 place(u32 source, u64 i) const { return at + source * stride + i * sizeof(Vec16); }
};

// Mirrors `peerlane.device.workspace.Workspace`. Offsets and sizes in bytes; places for as many blocks as `blocks` says.
struct CollectiveWorkspace {
    u64 epochs;               // u32[max_epoch_blocks]
    u64 packets;              // two alternating buffers of packet_buffer_bytes each
    u64 packet_buffer_bytes;
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
