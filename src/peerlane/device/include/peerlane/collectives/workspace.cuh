// Where the collectives keep what they send each other, and the messages of one call.
//
// All of it is zero before the first launch, then left to the kernels. Launches that share a workspace are ordered by one stream on every
// rank, and come in the same order on all of them. `in` and `out` may have any alignment; the 16-byte aligned ones are faster.
#pragma once

#include <peerlane/collectives/reductions.cuh>
#include <peerlane/comm.cuh>

namespace peerlane {

// How tiles go round the rings. Mirrors `peerlane.device.collectives.workspace.Rings`, which has the defaults and the reasons, and hands them over as the macro.
struct RingSettings {
    u32 tile_bytes;      // what goes round
    u32 depth;           // places per ring
    u32 stages;          // tiles of shared memory of a warp that moves tiles
    u32 in_flight;       // of them, those on their way out
    u32 summing_warps;   // of a block that sums
};
#ifndef PEERLANE_RINGS
#error "PEERLANE_RINGS is not defined: pass the macros of peerlane.device.collectives.workspace.Rings().defines()"
#endif
constexpr RingSettings rings{PEERLANE_RINGS};

constexpr bool is_power_of_two(u32 number) { return number > 0 && (number & (number - 1)) == 0; }
static_assert(is_power_of_two(rings.depth), "numbers of tiles wrap at 2^32");
static_assert(rings.tile_bytes % 128 == 0 && 0 < rings.in_flight && rings.in_flight < rings.stages);
// What a sender may still owe, and what a receiver fetches ahead and acknowledges late: exchange.cuh argues why it has to fit.
static_assert(rings.depth >= rings.stages + 2, "a ring of this depth can lock sender and receiver");

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
// All kernels that use packets take turns at these two buffers, and number together what they do, in epochs: even ones use one buffer, odd ones
// the other. A launch is one epoch if its messages fit a part of a buffer; else it sends them in rounds, each of which is an epoch (PacketRounds).
// A place is written again two epochs later, whichever kernels those are of. Before a rank writes in epoch e + 2, every reader must have read what
// it wrote in e. It knows that from packets of epoch e + 1, because two rules are kept:
//
//   every launch   To finish it, a rank needs a packet of every other rank's same launch, an empty one if there is nothing to say.
//   every round    Where there are several, thread t reads and writes the places t, t + threads, ... of every part, on all ranks and in all rounds,
//                  so all ranks launch one grid. It sends its packets of a round before it waits for any of it, and waits for all of them before it
//                  sends any of the next. If it has a place at all, it sends a packet to thread t of every other rank in every round, and waits
//                  for one from it: where there is no data, an empty one.
//
// If e + 2 is a later round of a launch, the thread that writes has a packet of e + 1 from thread t of the reader. If e was a round of this launch
// too, that thread sent it after it had read all that thread t ever reads in e: the very places. If e was of an earlier launch, the reader had begun
// this one, and hence finished that one with all its reads. If e + 2 begins a launch, all threads of the writer have finished the one that
// e + 1 ended. If that one began with e + 1, the reader had begun it, and finished the one with e. If e was a round of it too, each thread had
// a packet of e + 1 from its like, which had read e; places that no thread had were not written.
//
// Nobody waits for leave to write: by the time that a thread comes to a round, it has what it must know. A packet that nobody has read when
// its launch ends is harmless: its number is that of no later epoch.
struct PacketBuffer {
    u64 at, stride;

    __device__ u64 place(u32 source, u64 i) const { return at + source * stride + i * sizeof(Vec16); }
};

// Mirrors `peerlane.device.collectives.workspace.Workspace`. Offsets and sizes in bytes; places for as many blocks as `blocks` says.
struct CollectiveWorkspace {
    u64 epochs;               // u32[max_epoch_blocks]
    u64 packets;              // two alternating buffers of packet_buffer_bytes each
    u64 packet_buffer_bytes;
    Channels copies, sums;    // apart, because tiles of one may still be unread when a launch of the other begins
    float factor;             // of a reduction that scales its sums

    // Packets of each rank that a packet buffer holds.
    template <int W>
    __device__ u32 packet_room() const {
        return static_cast<u32>(packet_buffer_bytes / W / sizeof(Vec16));
    }

    // The one that belongs to an epoch.
    template <int W>
    __device__ PacketBuffer packet_buffer(u32 epoch) const {
        return {packets + (epoch & 1) * packet_buffer_bytes, packet_room<W>() * sizeof(Vec16)};
    }
};

// One of the rounds of a launch: packet begin + i of every message goes to place i.
struct PacketRound {
    u32 epoch, begin, least, most;
    PacketBuffer buffer;

    // How many packets of a message of `packets` go in this round. Those behind its end are empty.
    __device__ u32 places(u32 packets) const {
        const u32 left = packets > begin ? packets - begin : 0;
        const u32 wanted = left > least ? left : least;
        return wanted < most ? wanted : most;
    }

    // Whether place i has data of a message of `packets`, or lies behind its end; and where in the message the data are, in bytes.
    // (In 32 bits: what goes by packets is far shorter than 4 GiB, and registers are scarce.)
    __device__ bool holds(u32 i, u32 packets) const { return least == 1 || begin + i < packets; }
    __device__ u32 offset(u32 i) const { return (begin + i) * packet_data_bytes; }
};

// The rounds of a launch whose longest message has `packets` > 0 packets, where `room` fit at a time; both are the same on all ranks. A kernel is
// made for one round, or for several: the one for one round sends nothing beyond the messages but one packet in the place of an empty one, and
// keeps nothing in registers for the sake of a loop over rounds.
template <int W, bool several>
class PacketRounds {
  public:
    __device__ PacketRounds(const Arena& arena, const CollectiveWorkspace& space, u32 packets, u32 room)
        : space_(space),
          room_(room),
          count_(several ? (packets + room - 1) / room : 1),
          epoch_(next_epoch(reinterpret_cast<u32*>(arena.local(space.epochs)), count_)) {}

    __device__ u32 count() const { return several ? count_ : 1; }

    __device__ PacketRound operator[](u32 number) const {
        if constexpr (!several) return {epoch_, 0, 1, 0xffffffffu, space_.packet_buffer<W>(epoch_)};
        const u32 epoch = epoch_ + number;
        return {epoch, number * room_, gridDim.x * blockDim.x, room_, space_.packet_buffer<W>(epoch)};
    }

  private:
    const CollectiveWorkspace& space_;
    u32 room_, count_, epoch_;
};

// What this rank sends to and gets from every rank, itself included: bytes, and where they lie in `in` and `out`. Both ends of a message
// agree on its length; a rank need not know of other ranks' messages. Mirrors `peerlane.device.collectives.messages.Messages`.
struct Messages {
    u64 send_at[max_ranks], send_bytes[max_ranks];
    u64 receive_at[max_ranks], receive_bytes[max_ranks];
};

}  // namespace peerlane
