// What device code that was compiled for the CPU asks of the emulator.
//
// Headers that stand in for the kit's lowest layer (peerlane/ptx beside this folder) are written in these terms alone. Every function
// takes the place of its caller in the source from its return address, so wrappers around them are PEERLANE_INLINE.
#pragma once

#include <type_traits>

#define PEERLANE_INLINE __attribute__((always_inline)) inline

namespace peerlane::emulator {

// Which threads an access or a fence is meant for.
enum Scope : unsigned { block_scope, gpu_scope, system_scope };

// What a fence adds to an access, for instructions that have both in one. `sequential`: of fences, which all have one order.
enum Order : unsigned { relaxed, acquire, release, acquire_release, sequential = acquire_release | 1 << 16 };

// Memory whose ordinary accesses a proxy fence makes known to asynchronous operations.
enum Proxy : unsigned { shared_proxy, all_proxies };

// What an asynchronous copy does at its target.
enum class Combine : unsigned { replace, add_f32, add_f16, add_bf16, add_u32 };

// One contiguous piece of an asynchronous operation. Without a source zeros are written; without a target the source is only read, by a
// matrix unit, say.
struct Segment {
    void* target;
    const void* source;
    unsigned bytes;
};

// Asynchronous operations of a thread are counted in groups, separately for each of these.
// Those of `thread_queue` are ordinary accesses of the thread, at a time of their own: they need no proxy fence.
enum Queue : unsigned { bulk_queue, matrix_queue, remote_queue, thread_queue };
constexpr unsigned queues = 4;

constexpr unsigned multicast_ranks = 64;

struct Uint3 {
    unsigned x, y, z;
};

// Changes the value at `address` in one step; returns whether it stored anything.
using Change = bool (*)(void* address, void* context);

extern "C" {

// ---- who and when
Uint3 peerlane_thread_index() noexcept __attribute__((const));
Uint3 peerlane_block_index() noexcept __attribute__((const));
Uint3 peerlane_block_size() noexcept __attribute__((const));
Uint3 peerlane_grid_size() noexcept __attribute__((const));
unsigned long long peerlane_time();  // nanoseconds; goes on only as the schedule does
void peerlane_pause();               // lets other threads run
[[noreturn]] void peerlane_trap();

// ---- single accesses; `bytes` is 1, 2, 4, 8 or 16
void peerlane_load(const void* address, void* value, unsigned bytes, unsigned scope, unsigned order);
void peerlane_store(void* address, const void* value, unsigned bytes, unsigned scope, unsigned order);
void peerlane_update(void* address, unsigned bytes, unsigned scope, unsigned order, Change change, void* context);
// Where the ranks have what a multicast address stands for; returns how many there are, at most `multicast_ranks`.
unsigned peerlane_multicast(const void* address, unsigned bytes, void** parts);
void peerlane_fence(unsigned scope, unsigned order = acquire_release);
// Comes before a load that promises that nobody writes the bytes during the launch (ld.global.nc).
void peerlane_read_only(const void* address, unsigned bytes);
// An ordinary store whose value the emulator sees.
void peerlane_put(void* address, const void* value, unsigned bytes);
// A store of 16 bytes as two of 8, in any order.
void peerlane_store_halves(void* address, const void* value, unsigned scope, unsigned order);
// A load of 16 bytes as two of 8.
void peerlane_load_halves(const void* address, void* value, unsigned scope, unsigned order);
// Waits for the launch before, with which this one may overlap (griddepcontrol.wait).
void peerlane_wait_for_launch();
// The caller is host code: it may read what nobody has written.
void peerlane_is_host();
void peerlane_proxy_fence(unsigned proxy);

// ---- threads of a block
// threads 0: all of the block. `place` tells barriers of the source apart that a compiler may have put into the program several times.
void peerlane_barrier(unsigned number, unsigned threads, bool wait, unsigned place = 0);
// Waits, and returns how many threads came, times 65536, plus those whose predicate was true.
unsigned peerlane_barrier_votes(unsigned number, unsigned threads, bool predicate, unsigned place);
void peerlane_warp_barrier(unsigned mask);
// Every thread of the mask puts one value in and sees all; valid until the warp's next exchange. Orders nothing.
const unsigned long long* peerlane_warp_exchange(unsigned mask, unsigned long long value);
unsigned peerlane_active_mask();

// ---- shared memory
char* peerlane_dynamic_shared();
unsigned peerlane_shared_address(const void* pointer);
void* peerlane_shared_pointer(unsigned address);

// ---- clusters
unsigned peerlane_cluster_rank();
unsigned peerlane_cluster_size();
// All threads of the cluster's blocks meet. Orders what came before the arrival, or only what came before an mbarrier_init_fence.
void peerlane_cluster_arrive(bool orders);
void peerlane_cluster_wait();
// Where block `rank` of the cluster has what lies at `pointer` in this block's shared memory.
void* peerlane_cluster_pointer(const void* pointer, unsigned rank);

// ---- asynchronous operations: they read and write at a time of their own between issue and wait
void peerlane_mbarrier_init(unsigned long long* barrier, unsigned arrivals);
void peerlane_mbarrier_init_fence();
// Returns the number of the phase. Without arrivals only bytes are expected; `drop`: so many fewer are expected in later phases.
unsigned peerlane_mbarrier_arrive(unsigned long long* barrier, unsigned expected_bytes, unsigned arrivals = 1, bool drop = false);
bool peerlane_mbarrier_try_wait(unsigned long long* barrier, unsigned parity);
// With an mbarrier the operation counts its bytes there, without one it belongs to the open group of the thread's queue.
void peerlane_async(const Segment* segments, unsigned count, Combine combine, unsigned long long* barrier, unsigned queue);
// A GPU stops if the address that such a copy gets is not a multiple of `alignment`.
void peerlane_async_aligned(const void* address, unsigned alignment);
// A bulk copy of plain bytes: both addresses and the size are multiples of 16.
void peerlane_async_bulk(void* target, const void* source, unsigned bytes, Combine combine, unsigned long long* barrier);
void peerlane_async_commit(unsigned queue);
void peerlane_async_wait(unsigned queue, unsigned pending, bool sources_only);
// A message to memory of another node: bytes are read and written at times of their own, and then `add` is added to the counter there. Either
// part may be missing: no bytes, or no counter. Belongs to the open group of the thread's remote queue.
void peerlane_remote(void* target, const void* source, unsigned bytes, unsigned long long* counter, unsigned long long add);

}  // extern "C"

template <class T>
PEERLANE_INLINE T load(const T* address, Scope scope, Order order = relaxed) {
    T value;
    peerlane_load(address, &value, sizeof(T), scope, order);
    return value;
}

template <class T>
PEERLANE_INLINE void store(T* address, const T& value, Scope scope, Order order = relaxed) {
    peerlane_store(address, &value, sizeof(T), scope, order);
}

// Replaces the value by change(value) and returns what it was.
template <class T, class F>
PEERLANE_INLINE T update(T* address, Scope scope, const F& change, Order order = relaxed) {
    struct Context {
        const F& change;
        T before;
    } context{change, T{}};
    peerlane_update(
        address,
        sizeof(T),
        scope,
        order,
        [](void* place, void* data) {
            Context& inner = *static_cast<Context*>(data);
            inner.before = *static_cast<T*>(place);
            *static_cast<T*>(place) = inner.change(inner.before);
            return true;
        },
        &context);
    return context.before;
}

// Stores `value` if the value is `compare`; returns what it was.
template <class T>
PEERLANE_INLINE T compare_exchange(T* address, const T& compare, const T& value, Scope scope, Order order = relaxed) {
    struct Context {
        T compare, value, before;
    } context{compare, value, T{}};
    peerlane_update(
        address,
        sizeof(T),
        scope,
        order,
        [](void* place, void* data) {
            Context& inner = *static_cast<Context*>(data);
            inner.before = *static_cast<T*>(place);
            if (!(inner.before == inner.compare)) return false;
            *static_cast<T*>(place) = inner.value;
            return true;
        },
        &context);
    return context.before;
}

}  // namespace peerlane::emulator
