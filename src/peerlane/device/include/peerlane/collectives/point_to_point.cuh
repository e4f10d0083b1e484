// Messages between two ranks: sends and receives of any length and address, matched by a key, in any order.
//
// Every rank has `slots` slots for each source, itself included, in its own arena. A message goes through one slot, tile by tile. The sender takes
// a free slot, stores a tile and posts it with the message's key. The receiver looks for a post with its key, copies the tile out, and gives the
// slot back: for the next tile of the message, or behind the last one for any message. So a message of one tile is sent whether or not its
// receive has begun, and messages with different keys never wait for each other while slots are free.
//
// Of messages with one key, the earliest is received first. Their sends run one after the other, and so do their receives; that is up to the host.
// A send draws a ticket, so a later message has a later ticket. Whoever sees a post also sees those that came before it, so a second look finds
// the earliest. The last tile of a message may wait in one slot while the next message is in another; all its other tiles have been read by then.
//
// Long messages are cut into parts, tile by tile in turn. A block carries one part, and parts are matched like messages. All words of a slot are zero between
// messages, but for its key, so a captured launch can be replayed. Blocks that wait must be resident together with those that they wait for.
#pragma once

#include <peerlane/comm.cuh>

namespace peerlane {

#ifndef PEERLANE_MESSAGES
#error "PEERLANE_MESSAGES is not defined: pass the macros of peerlane.device.collectives.point_to_point.Slots().defines()"
#endif
// Mirrors `peerlane.device.collectives.point_to_point.Slots`.
struct MessageSlots {
    u32 count;       // from each source
    u32 tile_bytes;
    u32 parts;       // most of a message
};
constexpr MessageSlots message_slots{PEERLANE_MESSAGES};
static_assert(message_slots.tile_bytes % sizeof(Vec16) == 0 && message_slots.tile_bytes > 0);

// Mirrors `peerlane.device.collectives.point_to_point.Space`: where in the arena the slots lie.
struct MessageSpace {
    u64 tiles;    // [source][slot] of tile_bytes
    u64 posts;    // [source][slot] of a line: a post
    u64 owners;   // [receiver][slot] of a line: SlotOwner
    u64 tickets;  // u32[receiver]: how many parts this rank has sent there
};

// At the receiver. `full` is the number of the message while there is a tile; the sender sets it last, and the receiver clears it. Receivers of
// other messages may read the rest while the sender writes it: they look at `full` before and after, and it has another number each time.
struct SlotPost {
    u32 full, key[2], part;
};

// At the sender. `taken` is set by the sender and cleared by the receiver; `read` is set by the receiver and cleared by the sender. Both sides
// change words by exchanges, which are ordered among themselves.
struct SlotOwner {
    u32 taken, read;
};

// Mirrors `peerlane.device.collectives.point_to_point.Transfer`.
struct Transfer {
    char* at;
    u64 bytes;
    u32 key[2];
    u32 peer;
    u32 receives;
    u32 first_block;  // of the blocks that begin with it; none of those that follow another one
    u32 next;         // the one with the same peer and key that follows it, or 0
};

constexpr u32 most_transfers = 64;

struct Transfers {
    Transfer list[most_transfers];
    u32 count;
};

// The tiles of one part of a message; an empty message has one tile of no bytes.
struct PartTiles {
    u64 bytes;
    u32 part;

    __device__ u32 tiles() const {
        const u64 whole = (bytes + message_slots.tile_bytes - 1) / message_slots.tile_bytes;
        return whole > 0 ? static_cast<u32>(whole) : 1;
    }
    __device__ u32 parts() const { return tiles() < message_slots.parts ? tiles() : message_slots.parts; }
    __device__ u32 count() const { return (tiles() - part + parts() - 1) / parts(); }
    __device__ u64 at(u32 number) const { return u64(part + number * parts()) * message_slots.tile_bytes; }
    __device__ u32 length(u32 number) const {
        const u64 left = bytes - at(number);
        return left < message_slots.tile_bytes ? static_cast<u32>(left) : message_slots.tile_bytes;
    }
};

// One part of one transfer, by one block.
class PartTransfer {
  public:
    __device__ PartTransfer(const Arena& arena, const MessageSpace& space, const Transfer& transfer, u32 part, u32& shared)
        : arena_(arena), space_(space), transfer_(transfer), part_(part), tiles_{transfer.bytes, part}, shared_(shared) {}

    // Whether every wait has ended with what it waited for.
    __device__ bool send() const {
        u32 slot = 0, ticket = 0;
        if (threadIdx.x == 0) {
            ticket = ptx::add_relaxed_gpu(reinterpret_cast<u32*>(arena_.local(space_.tickets)) + transfer_.peer, 1);
            slot = take_slot(ticket);
        }
        for (u32 number = 0; number < tiles_.count(); ++number) {
            if (threadIdx.x == 0 && number > 0 && !await_leave(slot, number)) slot = none;
            slot = everyone(slot);
            if (slot == none) return false;
            copy_bytes(Block{}, arena_.peer(transfer_.peer, tile(arena_.rank, slot)), transfer_.at + tiles_.at(number), tiles_.length(number));
            __syncthreads();
            if (threadIdx.x == 0) post(slot, ticket);
        }
        return true;
    }

    __device__ bool receive() const {
        u32 slot = none;
        __syncthreads();  // thread 0 has cleared the post of the message before
        if (threadIdx.x < warp_threads) slot = find_post();
        for (u32 number = 0; number < tiles_.count(); ++number) {
            if (threadIdx.x == 0 && number > 0 && !await_tile(slot, number)) slot = none;
            slot = everyone(slot);
            if (slot == none) return false;
            copy_bytes(Block{}, transfer_.at + tiles_.at(number), arena_.local(tile(transfer_.peer, slot)), tiles_.length(number));
            __syncthreads();
            if (threadIdx.x == 0) give_back(slot, number + 1 == tiles_.count());
        }
        return true;
    }

  private:
    static constexpr u32 none = ~0u;

    __device__ u64 tile(u32 source, u32 slot) const { return space_.tiles + (u64(source) * message_slots.count + slot) * message_slots.tile_bytes; }
    __device__ SlotPost* post_of(int rank, u32 source, u32 slot) const {
        return reinterpret_cast<SlotPost*>(arena_.peer(rank, space_.posts + (u64(source) * message_slots.count + slot) * line_bytes));
    }
    __device__ SlotOwner* owner_of(int rank, u32 receiver, u32 slot) const {
        return reinterpret_cast<SlotOwner*>(arena_.peer(rank, space_.owners + (u64(receiver) * message_slots.count + slot) * line_bytes));
    }

    // What thread 0 has, for all threads.
    __device__ u32 everyone(u32 value) const {
        __syncthreads();
        if (threadIdx.x == 0) shared_ = value;
        __syncthreads();
        return shared_;
    }

    // By one thread: until a word is set; whether it is.
    __device__ bool await(const u32* word, const Awaited& awaited) const {
        Deadline deadline;
        while (ptx::load_relaxed_system(word) == 0) {
            if (deadline.ends(arena_, awaited, 0)) return false;
        }
        ptx::load_acquire_system(word);
        return true;
    }

    // By one thread: until the receiver has read the tile; whether it has.
    __device__ bool await_leave(u32 slot, u32 number) const {
        u32* read = &owner_of(arena_.rank, transfer_.peer, slot)->read;
        return await(read, Awaited{storer, transfer_.peer, slot, number}) && ptx::exchange_relaxed_system(read, 0) != 0;
    }

    // By one thread: until the sender has posted another tile; whether it has.
    __device__ bool await_tile(u32 slot, u32 number) const {
        return await(&post_of(arena_.rank, transfer_.peer, slot)->full, Awaited{consumer, transfer_.peer, slot, number + 1});
    }

    // By one thread: a slot that nobody has, or none.
    __device__ u32 take_slot(u32 first) const {
        Deadline deadline;
        for (u32 tries = 0;; ++tries) {
            const u32 slot = (first + tries) % message_slots.count;
            u32* taken = &owner_of(arena_.rank, transfer_.peer, slot)->taken;
            if (ptx::load_relaxed_system(taken) == 0) {
                ptx::load_acquire_system(taken);
                if (ptx::exchange_relaxed_system(taken, 1) == 0) {
                    ptx::fence_system();
                    return slot;
                }
            }
            if (deadline.ends(arena_, Awaited{storer, transfer_.peer, slot, 0}, 1)) return none;
        }
    }

    __device__ void post(u32 slot, u32 ticket) const {
        SlotPost* there = post_of(transfer_.peer, arena_.rank, slot);
        ptx::store_relaxed_system(&there->key[0], transfer_.key[0]);
        ptx::store_relaxed_system(&there->key[1], transfer_.key[1]);
        ptx::store_relaxed_system(&there->part, part_);
        ptx::fence_system();
        ptx::exchange_relaxed_system(&there->full, 2 * ticket + 1);
    }

    __device__ void give_back(u32 slot, bool last) const {
        SlotOwner* there = owner_of(transfer_.peer, arena_.rank, slot);
        ptx::exchange_relaxed_system(&post_of(arena_.rank, transfer_.peer, slot)->full, 0);
        ptx::fence_system();
        ptx::exchange_relaxed_system(last ? &there->taken : &there->read, last ? 0 : 1);
    }

    // By one warp: the slot of the earliest post with this key, or none.
    __device__ u32 find_post() const {
        Deadline deadline;
        u32 ended = 0;
        while (ended == 0) {
            if (look() != none) return look();
            if (threadIdx.x == 0) ended = deadline.ends(arena_, Awaited{consumer, transfer_.peer, 0, 1}, 0);
            ended = ptx::uniform(ended);
        }
        return none;
    }

    // By one warp, one look at all slots: the one with the earliest post of this key, or none.
    __device__ u32 look() const {
        u32 found = none, earliest = 0;
        for (u32 slot = threadIdx.x; slot < message_slots.count; slot += warp_threads) {
            const SlotPost* post = post_of(arena_.rank, transfer_.peer, slot);
            const u32 full = ptx::load_relaxed_system(&post->full);
            if (full == 0 || !fits(post)) continue;
            ptx::fence_system();
            if (!fits(post)) continue;
            ptx::fence_system();
            if (ptx::load_relaxed_system(&post->full) != full) continue;
            if (found == none || !reached(full, earliest)) found = slot, earliest = full;
        }
        __syncwarp();
#pragma unroll
        for (u32 distance = warp_threads / 2; distance > 0; distance /= 2) {
            const u32 other = __shfl_xor_sync(full_warp, found, distance), full = __shfl_xor_sync(full_warp, earliest, distance);
            if (other != none && (found == none || !reached(full, earliest))) found = other, earliest = full;
        }
        return found;
    }

    __device__ bool fits(const SlotPost* post) const {
        return ptx::load_relaxed_system(&post->part) == part_ && ptx::load_relaxed_system(&post->key[0]) == transfer_.key[0] &&
               ptx::load_relaxed_system(&post->key[1]) == transfer_.key[1];
    }

    const Arena& arena_;
    const MessageSpace& space_;
    const Transfer& transfer_;
    u32 part_;
    PartTiles tiles_;
    u32& shared_;
};

// All transfers of one launch side by side; those with one peer and key one after the other.
__device__ inline void move_messages(const Arena& arena, const MessageSpace& space, const Transfers& transfers) {
    __shared__ u32 shared;
    u32 index = 0;
    for (; index < transfers.count; ++index) {
        const Transfer& head = transfers.list[index];
        if (blockIdx.x >= head.first_block && blockIdx.x - head.first_block < PartTiles{head.bytes, 0}.parts()) break;
    }
    if (index == transfers.count) return;
    const u32 part = blockIdx.x - transfers.list[index].first_block;
    for (bool more = true; more;) {
        const Transfer& own = transfers.list[index];
        const PartTransfer transfer(arena, space, own, part, shared);
        more = (own.receives ? transfer.receive() : transfer.send()) && own.next != 0;
        index = own.next;
    }
}

}  // namespace peerlane
