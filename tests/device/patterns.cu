// Faults of one-sided communication, as collections of them in the literature name them, each beside its repair: BROKEN is 1 or 0.
// Three ranks, one block. Every kernel ends with a barrier of all ranks, so that launches can follow each other.
#include <peerlane/comm.cuh>
#include <peerlane/ptx/ptx_async.cuh>
using namespace peerlane;

#define PATTERN(name) extern "C" __global__ void name(const __grid_constant__ Arena arena, u64 data, u64 flags, u32* out, u32 epoch)

__device__ u32* word(const Arena& arena, u32 rank, u64 at, u32 i = 0) { return reinterpret_cast<u32*>(arena.peer(rank, at)) + i; }
__device__ u32* flag(const Arena& arena, u32 rank, u64 flags, u32 slot) { return word(arena, rank, flags, 32 * slot); }
__device__ void set(u32* flag, u32 value) { ptx::store_relaxed_system(flag, value); }
__device__ u32 seen(const u32* flag) { return ptx::load_relaxed_system(flag); }
__device__ void signal(u32* flag, u32 value) {
    ptx::fence_system();
    set(flag, value);
}
__device__ void await(const u32* flag, u32 value) {
    while (seen(flag) < value) {}
    ptx::fence_system();
}
// All ranks, by a counter on rank 0.
__device__ void meet(const Arena& arena, u64 flags, u32 epoch, u32 slot = 15) {
    ptx::fence_system();
    ptx::add_relaxed_system(flag(arena, 0, flags, slot), 1);
    await(flag(arena, 0, flags, slot), 3 * epoch);
}
__device__ void lock(u32* flag) {
    while (atomicCAS_system(flag, 0u, 1u) != 0) {}
    ptx::fence_system();
}
__device__ void unlock(u32* flag) {
    ptx::fence_system();
    atomicExch_system(flag, 0u);
}

// ---- conflicts without synchronisation

PATTERN(put_put) {  // two origins write the same words of a target
    if (arena.rank < 2) *word(arena, 2, data, BROKEN ? 0 : arena.rank) = epoch;
    meet(arena, flags, epoch);
}
PATTERN(put_get) {  // one origin writes what another reads
    if (arena.rank == 0) {
        *word(arena, 2, data) = epoch;
        signal(flag(arena, 1, flags, 0), epoch);
    }
    if (arena.rank == 1) {
        if (!BROKEN) await(flag(arena, 1, flags, 0), epoch);
        *out = *word(arena, 2, data);
    }
    meet(arena, flags, epoch);
}
PATTERN(put_local_read) {  // the target reads before it knows that the put is there
    if (arena.rank == 0) {
        *word(arena, 1, data) = epoch;
        signal(flag(arena, 1, flags, 0), epoch);
    }
    if (arena.rank == 1) {
        if (!BROKEN) await(flag(arena, 1, flags, 0), epoch);
        *out = *word(arena, 1, data);
    }
    meet(arena, flags, epoch);
}
PATTERN(put_local_write) {  // the target writes its own words while a put arrives
    if (arena.rank == 0) {
        if (!BROKEN) await(flag(arena, 0, flags, 0), epoch);
        *word(arena, 1, data) = 1;
    }
    if (arena.rank == 1) {
        *word(arena, 1, data) = 2;
        signal(flag(arena, 0, flags, 0), epoch);
    }
    meet(arena, flags, epoch);
}
PATTERN(get_local_write) {  // the target changes what an origin still reads
    if (arena.rank == 0) {
        *out = *word(arena, 1, data);
        signal(flag(arena, 1, flags, 0), epoch);
    }
    if (arena.rank == 1) {
        if (!BROKEN) await(flag(arena, 1, flags, 0), epoch);
        *word(arena, 1, data) = epoch;
    }
    meet(arena, flags, epoch);
}
PATTERN(accumulate_put) {  // an addition beside a plain store to the same word
    if (arena.rank < 2) {
        if (BROKEN && arena.rank == 0) *word(arena, 2, data) = 5;
        else atomicAdd_system(word(arena, 2, data), 1u);
    }
    meet(arena, flags, epoch);
}
PATTERN(accumulate_narrow) {  // atomic, but only within one GPU
    if (BROKEN) atomicAdd(word(arena, 2, data), 1u);
    else atomicAdd_system(word(arena, 2, data), 1u);
    meet(arena, flags, epoch);
}

// ---- a signal that comes without what it announces

PATTERN(missing_release) {
    if (arena.rank == 0) {
        *word(arena, 1, data) = epoch;
        if (BROKEN) set(flag(arena, 1, flags, 0), epoch);
        else signal(flag(arena, 1, flags, 0), epoch);
    }
    if (arena.rank == 1) {
        await(flag(arena, 1, flags, 0), epoch);
        *out = *word(arena, 1, data);
    }
    meet(arena, flags, epoch);
}
PATTERN(one_thread_signals) {  // one warp stores a tile, a thread of the other one signals without waiting for it
    if (arena.rank == 0) {
        if (threadIdx.x >= 32) *word(arena, 1, data, threadIdx.x - 32) = epoch;
        if (!BROKEN) __syncthreads();
        if (threadIdx.x == 0) signal(flag(arena, 1, flags, 0), epoch);
    }
    if (arena.rank == 1) {
        if (threadIdx.x == 0) await(flag(arena, 1, flags, 0), epoch);
        __syncthreads();
        if (threadIdx.x == 63) *out = *word(arena, 1, data, 31);
    }
    __syncthreads();
    if (threadIdx.x == 0) meet(arena, flags, epoch);
    __syncthreads();
}
PATTERN(missing_acquire) {
    if (arena.rank == 0) {
        *word(arena, 1, data) = epoch;
        signal(flag(arena, 1, flags, 0), epoch);
    }
    if (arena.rank == 1) {
        while (seen(flag(arena, 1, flags, 0)) < epoch) {}
        if (!BROKEN) ptx::fence_system();
        *out = *word(arena, 1, data);
    }
    meet(arena, flags, epoch);
}
PATTERN(signal_first) {  // the signal overtakes the put
    if (arena.rank == 0) {
        if (BROKEN) signal(flag(arena, 1, flags, 0), epoch);
        *word(arena, 1, data) = epoch;
        if (!BROKEN) signal(flag(arena, 1, flags, 0), epoch);
    }
    if (arena.rank == 1) {
        await(flag(arena, 1, flags, 0), epoch);
        *out = *word(arena, 1, data);
    }
    meet(arena, flags, epoch);
}
PATTERN(broken_chain) {  // rank 1 passes a signal on without having acquired what came with it
    if (arena.rank == 0) {
        *word(arena, 2, data) = epoch;
        signal(flag(arena, 1, flags, 0), epoch);
    }
    if (arena.rank == 1) {
        while (seen(flag(arena, 1, flags, 0)) < epoch) {}
        if (!BROKEN) ptx::fence_system();
        set(flag(arena, 2, flags, 1), epoch);
    }
    if (arena.rank == 2) {
        await(flag(arena, 2, flags, 1), epoch);
        *out = *word(arena, 2, data);
    }
    meet(arena, flags, epoch);
}
PATTERN(narrow_fence) {  // a fence for one GPU before a signal to another
    if (arena.rank == 0) {
        *word(arena, 1, data) = epoch;
        if (BROKEN) ptx::fence_gpu();
        else ptx::fence_system();
        set(flag(arena, 1, flags, 0), epoch);
    }
    if (arena.rank == 1) {
        await(flag(arena, 1, flags, 0), epoch);
        *out = *word(arena, 1, data);
    }
    meet(arena, flags, epoch);
}

// ---- local completion

PATTERN(origin_reused) {  // the source of an asynchronous put is written again before it was read
    u32* tile = reinterpret_cast<u32*>(ptx::dynamic_shared());
    if (arena.rank == 0) {
        for (u32 i = 0; i < 4; ++i) tile[i] = epoch;
        ptx::fence_proxy_async_shared();
        ptx::bulk_store(word(arena, 1, data), tile, 16);
        ptx::bulk_commit();
        if (!BROKEN) ptx::bulk_wait_read<0>();
        tile[0] = 0;
        ptx::bulk_wait<0>();
    }
    meet(arena, flags, epoch);
}
PATTERN(put_not_complete) {  // signalled when the source was read, not when the target was written
    u32* tile = reinterpret_cast<u32*>(ptx::dynamic_shared());
    if (arena.rank == 0) {
        for (u32 i = 0; i < 4; ++i) tile[i] = epoch;
        ptx::fence_proxy_async_shared();
        ptx::bulk_store(word(arena, 1, data), tile, 16);
        ptx::bulk_commit();
        if (BROKEN) ptx::bulk_wait_read<0>();
        else ptx::bulk_wait<0>();
        signal(flag(arena, 1, flags, 0), epoch);
        ptx::bulk_wait<0>();
    }
    if (arena.rank == 1) {
        await(flag(arena, 1, flags, 0), epoch);
        *out = *word(arena, 1, data);
    }
    meet(arena, flags, epoch);
}
PATTERN(get_used_early) {  // the result of an asynchronous get is read before it is there
    __shared__ u64 full;
    u32* tile = reinterpret_cast<u32*>(ptx::dynamic_shared());
    if (arena.rank == 0) {
        ptx::mbarrier_init(&full, 1);
        ptx::mbarrier_init_fence();
        ptx::mbarrier_arrive_expect(&full, 16);
        ptx::bulk_load(tile, word(arena, 1, data), 16, &full);
        if (BROKEN) *out = tile[0];
        while (!ptx::mbarrier_try_wait(&full, 0)) {}
        if (!BROKEN) *out = tile[0];
    }
    meet(arena, flags, epoch);
}
PATTERN(proxy_mixed) {  // ordinary stores, then an asynchronous put that may not see them
    u32* tile = reinterpret_cast<u32*>(ptx::dynamic_shared());
    if (arena.rank == 0) {
        for (u32 i = 0; i < 4; ++i) tile[i] = epoch;
        if (!BROKEN) ptx::fence_proxy_async_shared();
        ptx::bulk_store(word(arena, 1, data), tile, 16);
        ptx::bulk_commit();
        ptx::bulk_wait<0>();
    }
    meet(arena, flags, epoch);
}

// ---- reuse

PATTERN(no_acknowledgement) {  // the next put overwrites what the target has not read
    for (u32 round = 1; round <= 2; ++round) {
        const u32 number = 2 * (epoch - 1) + round;
        if (arena.rank == 0) {
            *word(arena, 1, data) = number;
            signal(flag(arena, 1, flags, 0), number);
            if (!BROKEN) await(flag(arena, 0, flags, 1), number);
        }
        if (arena.rank == 1) {
            await(flag(arena, 1, flags, 0), number);
            *out = *word(arena, 1, data);
            signal(flag(arena, 0, flags, 1), number);
        }
    }
    meet(arena, flags, epoch);
}
PATTERN(flag_reset) {  // the target resets a flag that the origin may have set again
    for (u32 round = 1; round <= 2; ++round) {
        const u32 number = 2 * (epoch - 1) + round;
        if (arena.rank == 0) signal(flag(arena, 1, flags, 0), BROKEN ? 1 : number);
        if (arena.rank == 1) {
            await(flag(arena, 1, flags, 0), BROKEN ? 1 : number);
            if (BROKEN) set(flag(arena, 1, flags, 0), 0);
        }
    }
    meet(arena, flags, epoch);
}
PATTERN(lock_without_release) {  // the lock is free before the holder's writes are there
    lock(flag(arena, 0, flags, 2));
    *word(arena, 0, data) += 1;
    if (BROKEN) atomicExch_system(flag(arena, 0, flags, 2), 0u);
    else unlock(flag(arena, 0, flags, 2));
    meet(arena, flags, epoch);
}

// ---- deadlocks

PATTERN(cyclic_wait) {  // every rank waits for its neighbour before it signals
    const u32 next = (arena.rank + 1) % 3;
    if (!BROKEN) signal(flag(arena, next, flags, 0), epoch);
    await(flag(arena, arena.rank, flags, 0), epoch);
    if (BROKEN) signal(flag(arena, next, flags, 0), epoch);
    meet(arena, flags, epoch);
}
PATTERN(crossed_locks) {  // two locks taken in two orders
    const u32 first = BROKEN && arena.rank == 1 ? 3 : 2;
    if (arena.rank < 2) {
        lock(flag(arena, 0, flags, first));
        lock(flag(arena, 0, flags, 5 - first));
        unlock(flag(arena, 0, flags, 5 - first));
        unlock(flag(arena, 0, flags, first));
    }
    meet(arena, flags, epoch);
}
PATTERN(missing_participant) {  // one rank leaves before the barrier of all
    if (BROKEN && arena.rank == 2) return;
    meet(arena, flags, epoch);
}
PATTERN(number_missed) {  // a wait for one number exactly, which is over before it was seen
    if (arena.rank == 0) {
        signal(flag(arena, 1, flags, 0), 2 * epoch - 1);
        signal(flag(arena, 1, flags, 0), 2 * epoch);
    }
    if (arena.rank == 1) {
        while (BROKEN ? seen(flag(arena, 1, flags, 0)) != 2 * epoch - 1 : seen(flag(arena, 1, flags, 0)) < 2 * epoch - 1) {}
        ptx::fence_system();
    }
    meet(arena, flags, epoch);
}

// ---- what only stale values show

PATTERN(store_buffering) {  // two ranks each announce themselves and look for the other: without a fence both may see nobody
    if (arena.rank < 2) {
        set(flag(arena, arena.rank, flags, 4), epoch);
        if (!BROKEN) ptx::fence_system();
        const bool alone = seen(flag(arena, 1 - arena.rank, flags, 4)) != epoch;
        if (alone && atomicAdd_system(flag(arena, 2, flags, 5), 1u) != epoch - 1) __trap();
    }
    meet(arena, flags, epoch);
    if (arena.rank == 0 && seen(flag(arena, 2, flags, 5)) < epoch) set(flag(arena, 2, flags, 5), epoch);
    meet(arena, flags, epoch, 14);
}
PATTERN(stale_pair) {  // two flags without an order: who sees the second may not see the first
    if (arena.rank == 0) {
        set(flag(arena, 1, flags, 0), epoch);
        if (!BROKEN) ptx::fence_system();
        set(flag(arena, 1, flags, 1), epoch);
    }
    if (arena.rank == 1) {
        while (seen(flag(arena, 1, flags, 1)) < epoch) {}
        if (!BROKEN) ptx::fence_system();
        if (seen(flag(arena, 1, flags, 0)) < epoch) __trap();
    }
    meet(arena, flags, epoch);
}
