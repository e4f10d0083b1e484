// Two ways to look at a running protocol, both compiled away unless asked for by a macro.
//
//   PEERLANE_FUZZ=<seed>   random delays before primitives: orders of events that a quiet machine never shows
//   PEERLANE_TIMELINE      stamps at the start and end of spans, kept in arena.timeline; `peerlane.device.tools.trace` makes a trace of them
#pragma once

#include <peerlane/peers/arena.cuh>

namespace peerlane {

// What a span is about; mirrors `peerlane.device.tools.trace.SPANS`. Numbers from `first_own_span` on are the kernel's own.
enum SpanKind : u32 { span_store, span_load, span_reduce, span_signal, span_wait, span_compute, span_send, first_own_span = 16 };

constexpr u32 roles_per_group = 16;  // the g-th group of one role stamps as role + 16 g

#ifdef PEERLANE_FUZZ
constexpr u32 fuzz_longest_ns = 4000;

__device__ inline u32 mix(u32 value) {
    value = (value ^ (value >> 16)) * 0x7feb352du;
    value = (value ^ (value >> 15)) * 0x846ca68bu;
    return value ^ (value >> 16);
}

// Half of the calls go through at once, the others after up to fuzz_longest_ns. A rank, block, role and place have their own sequence,
// driven by the clock as well: replays differ, which is what they are for.
__device__ inline void fuzz(const Arena& arena, u32 role, u32 place) {
    const u32 draw = mix(PEERLANE_FUZZ ^ mix(arena.rank ^ mix(blockIdx.x ^ mix(role * 64 + place)) ^ static_cast<u32>(ptx::globaltimer() >> 10)));
    if (draw & 1) ptx::sleep((draw >> 1) % fuzz_longest_ns);
}
#else
__device__ inline void fuzz(const Arena&, u32, u32) {}
#endif

// Stamps its construction and its destruction, in one thread per team.
class Span {
  public:
#ifdef PEERLANE_TIMELINE
    __device__ Span(const Arena& arena, u32 role, u32 kind, bool stamps) : arena_(arena), who_(role << 24 | blockIdx.x), kind_(kind), stamps_(stamps) {
        stamp(0);
    }
    __device__ ~Span() { stamp(1); }

  private:
    __device__ void stamp(u32 end) {
        if (!stamps_ || arena_.timeline == nullptr) return;
        const u32 number = ptx::add_relaxed_gpu(reinterpret_cast<u32*>(arena_.timeline), 1);
        arena_.timeline[1 + number % arena_.timeline_events] = TimelineEvent{ptx::globaltimer(), who_, kind_ << 1 | end};
    }

    const Arena& arena_;
    u32 who_, kind_;
    bool stamps_;
#else
    __device__ Span(const Arena&, u32, u32, bool) {}
#endif
};

}  // namespace peerlane
