// Rings of buffers in shared memory between the warps that fill them and the warps that use them, with the phases kept inside.
//
// A ring has `slots` buffers of type T. The producer takes the next free one and fills it; the consumers take the next full one (`wait`) and give
// the oldest that they hold back (`release`). Each end is one object, made once per role, that counts for itself: neither slot numbers
// nor parities are ever in the caller's hands.
#pragma once

#include <peerlane/peers/arena.cuh>
#include <peerlane/ptx/ptx_async.cuh>

namespace peerlane {

// The barriers of a ring, in shared memory.
template <int Slots>
struct Ring {
    static constexpr int slots = Slots;
    u64 full[Slots];
    u64 empty[Slots];

    // By one thread, before ptx::mbarrier_init_fence and a barrier of the block, or of the cluster. `producers` warps fill a slot, `consumers`
    // warps release it.
    __device__ void init(u32 producers, u32 consumers) {
        for (int slot = 0; slot < Slots; ++slot) {
            ptx::mbarrier_init(full + slot, producers);
            ptx::mbarrier_init(empty + slot, consumers);
        }
    }
};

// By one thread: until the phase of this parity has ended. What came before the arrivals, and what copies have brought, is seen from here on.
__device__ inline void poll_phase(u64* barrier, u32 parity) {
    LocalDeadline deadline;
    while (!ptx::mbarrier_try_wait(barrier, parity)) deadline.check();
}

// The same by a warp; one lane polls for all.
__device__ inline void wait_phase(u64* barrier, u32 parity) {
    if (ptx::elect_one()) poll_phase(barrier, parity);
    __syncwarp();
}

// A place in a ring, and the parity of the phase that its barriers are in.
template <int slots>
struct Cursor {
    int slot = 0;
    u32 parity = 0;

    __device__ void advance() {
        if (++slot == slots) slot = 0, parity ^= 1;
    }
};

// The filling end for one warp that starts copies. Ring::init with one producer.
template <class T, int slots>
class CopyProducer {
  public:
    __device__ CopyProducer(T* buffers, Ring<slots>& ring) : buffers_(buffers), ring_(ring) {}

    // One thread waits for a free slot, and calls `copy(buffer, full)`, which starts copies of `bytes` in all into the buffer that count
    // towards the barrier `full`. To be called by all lanes; the others do not wait.
    template <class Copy>
    __device__ void fill(u32 bytes, const Copy& copy) {
        if (ptx::elect_one()) {
            poll_phase(ring_.empty + at_.slot, at_.parity ^ 1);  // of a new barrier, the phase before the first counts as ended
            u64* full = ring_.full + at_.slot;
            ptx::mbarrier_arrive_expect(full, bytes);
            copy(buffers_[at_.slot], full);
        }
        at_.advance();
    }

    // Until every slot has been released: nobody, of other blocks neither, will arrive here any more, and the block may end.
    __device__ void drain() {
        for (int slot = 0; slot < slots; ++slot) {
            if (ptx::elect_one()) poll_phase(ring_.empty + at_.slot, at_.parity ^ 1);
            at_.advance();
        }
    }

  private:
    T* buffers_;
    Ring<slots>& ring_;
    Cursor<slots> at_;
};

// The filling end for warps that write themselves, all of them to every slot; Ring::init with their number.
template <class T, int slots>
class StoreProducer {
  public:
    __device__ StoreProducer(T* buffers, Ring<slots>& ring) : buffers_(buffers), ring_(ring) {}

    // Waits for a free slot.
    __device__ T& acquire() {
        wait_phase(ring_.empty + at_.slot, at_.parity ^ 1);
        return buffers_[at_.slot];
    }

    // What this warp wrote to the slot that it acquired last is for the consumers to read, by copies too.
    __device__ void commit() {
        ptx::fence_proxy_async_shared();
        __syncwarp();
        if (ptx::elect_one()) ptx::mbarrier_arrive(ring_.full + at_.slot);
        at_.advance();
    }

  private:
    T* buffers_;
    Ring<slots>& ring_;
    Cursor<slots> at_;
};

// The using end, for whole warps. A ring whose copies go to all `blocks` of a cluster is filled when all of them have room: warps release the
// slot in each, and Ring::init counts the consumers of all.
template <class T, int slots, int blocks = 1>
class Consumer {
  public:
    __device__ Consumer(T* buffers, Ring<slots>& ring) : buffers_(buffers), ring_(ring) {}

    // The next slot, once it is full. What is in flight from an earlier slot is not disturbed.
    __device__ T& wait() {
        T& buffer = buffers_[next_.slot];
        wait_phase(ring_.full + next_.slot, next_.parity);
        next_.advance();
        return buffer;
    }

    // This warp is done with the oldest slot that it has waited for and not released.
    __device__ void release() {
        __syncwarp();
        if (ptx::elect_one()) {
            u64* empty = ring_.empty + oldest_.slot;
            if constexpr (blocks == 1) {
                ptx::mbarrier_arrive(empty);
            } else {
                for (u32 block = 0; block < blocks; ++block) ptx::mbarrier_arrive_at(empty, block);
            }
        }
        oldest_.advance();
    }

  private:
    T* buffers_;
    Ring<slots>& ring_;
    Cursor<slots> next_, oldest_;
};

}  // namespace peerlane
