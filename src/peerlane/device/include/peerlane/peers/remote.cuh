// The second tier: memory of ranks in other nodes, which is reached by messages alone. They arrive late and in any order. What orders them:
//
// * `put_signal` adds to the counter after its own bytes have arrived;
// * `flush` returns when all messages of the calling thread have arrived, and their sources may be written again;
// * `wait` returns when the own counter has the value: what was flushed, or put with the signal, before it was added to can be read.
#pragma once

#include <peerlane/ptx/ptx_remote.cuh>

namespace peerlane {

// The symmetric allocation of the second tier as a kernel argument; mirrors `peerlane.device.host.remote.RemoteView`. Only the own part can be
// addressed. Every function is of one thread. Sources lie in the own part, counters are 64-bit words at multiples of 8.
struct Remote {
    char* own;
    u64 stride;  // from rank to rank, in the emulator alone
    u32 rank;
    u32 world_size;

    __device__ char* local(u64 offset) const { return own + offset; }

    __device__ void put(int q, u64 offset, const void* source, u64 bytes) const {
        ptx::remote_put(local(offset), part(q, offset), q, source, bytes);
    }
    __device__ void signal(int q, u64 counter, u64 add) const { ptx::remote_signal(word(rank, counter), word(q, counter), q, add); }
    __device__ void put_signal(int q, u64 offset, const void* source, u64 bytes, u64 counter, u64 add) const {
        ptx::remote_put_signal(local(offset), part(q, offset), q, source, bytes, word(rank, counter), word(q, counter), add);
    }
    __device__ void flush() const { ptx::remote_flush(); }

    // The own counter: what arrived before it had this value can be read.
    __device__ u64 count(u64 counter) const { return ptx::remote_counter(word(rank, counter)); }

    // Returns when the own counter is `value` or more; traps after `limit_ns`.
    __device__ void wait(u64 counter, u64 value, u64 limit_ns = 10'000'000'000ull) const {
        const u64 end = ptx::globaltimer() + limit_ns;
        while (count(counter) < value) {
            if (ptx::globaltimer() > end) ptx::trap();
        }
    }

  private:
    __device__ char* part(int q, u64 offset) const { return own + (static_cast<u64>(q) - rank) * stride + offset; }
    __device__ u64* word(int q, u64 offset) const { return reinterpret_cast<u64*>(part(q, offset)); }
};

}  // namespace peerlane
