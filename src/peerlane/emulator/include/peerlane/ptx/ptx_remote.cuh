// The kit's <peerlane/ptx/ptx_remote.cuh> for the CPU: messages that arrive at a time of their own, in any order.
#pragma once

#include <peerlane/ptx/ptx.cuh>

namespace peerlane {
namespace ptx {

PEERLANE_INLINE void remote_put(void*, void* peers, int, const void* source, u64 bytes) {
    emulator::peerlane_remote(peers, source, static_cast<unsigned>(bytes), nullptr, 0);
}
PEERLANE_INLINE void remote_signal(u64*, u64* peers, int, u64 add) { emulator::peerlane_remote(nullptr, nullptr, 0, peers, add); }
PEERLANE_INLINE void remote_put_signal(void*, void* peers, int, const void* source, u64 bytes, u64*, u64* counter_of_peer, u64 add) {
    emulator::peerlane_remote(peers, source, static_cast<unsigned>(bytes), counter_of_peer, add);
}
PEERLANE_INLINE void remote_flush() {
    emulator::peerlane_async_commit(emulator::remote_queue);
    emulator::peerlane_async_wait(emulator::remote_queue, 0, false);
}
PEERLANE_INLINE u64 remote_counter(u64* counter) { return emulator::load(counter, emulator::system_scope, emulator::acquire); }

}  // namespace ptx
}  // namespace peerlane
