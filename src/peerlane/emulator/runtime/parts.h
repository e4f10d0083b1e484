// What a run is made of: launches, blocks, warps, threads, and the things that threads meet at.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <unordered_map>

#include "clock.h"
#include "fiber.h"
#include "findings.h"
#include "memory.h"
#include "shadow.h"

namespace peerlane::emulator {

struct Block;
struct Copy;

enum class State : std::uint8_t { runnable, polling, blocked, running, ended };  // the first two have a list each

constexpr int scopes = 3;

// An asynchronous operation acts under a number of its own, which its thread uses again once it knows that the operation is over.
struct Slot {
    Actor actor;
    Clock clock = 0;      // of the last operation's writes; its reads have the clock before
    Clock must_know = 0;  // what `block` must know at its end: its shared memory is not in use any more
    std::uint32_t site = 0;
    const Block* block = nullptr;  // whose shared memory the operation uses
    bool remote = false;           // a message to another node, which the end of its launch does not wait for
};

// The groups of one queue of a thread: closed ones in order, and the open one at the end.
struct Groups {
    std::deque<std::vector<std::shared_ptr<Copy>>> closed;
    std::vector<std::shared_ptr<Copy>> open;
};

struct Poll {
    std::uint64_t offset, version;
    Clock clock;
    bool operator==(const Poll&) const = default;
};

struct Fiber {
    // The same for the whole run: who this is, its clock and stack.
    Actor id = 0;
    Clock clock = 0;
    std::vector<Slot> slots;
    struct Begin {
        Clock clock;
        const Block* block;
    };
    std::vector<Begin> begins;  // of the blocks of this schedule that it was part of
    Clock start = 0;            // the last of them

    // New in every launch.
    Block* block = nullptr;
    Uint3 thread{};
    std::uint32_t index = 0;  // within the block
    void* stack_pointer = nullptr;
    View view;
    Ref<Snapshot> released[scopes];              // by the last fence of at least this scope
    Ref<Snapshot> initialised;                   // what came before the last mbarrier_init_fence
    std::vector<Ref<Snapshot>> pending[scopes];  // seen by relaxed loads, taken over by the next fence of at least this scope
    Groups groups[queues];
    std::uint32_t cluster_phase = 0;   // of the cluster's barrier, at which it has arrived
    bool host = false;                 // it is host code, between two launches
    std::uint64_t halfway = ~0ull;     // the offset of 16 bytes of which it has stored half
    std::pair<std::uint32_t, std::uint32_t> torn{};  // sites of a load that saw half of such a store, and of the store; 0: the last load did not
    Ref<Vector> heard_boundary, heard_reads;  // what came with that
    Ref<Vector> heard_fenced;                 // what came before fences of others, known from its next one on

    // For the scheduler.
    State state = State::ended;
    std::uint32_t place = 0;  // in the list of its state
    std::uint64_t poll_version = 0;
    std::uint32_t polls = 0;
    Poll noted{};

    // What it waits for, for a report.
    const char* waits_for = "";
    bool waits_for_copies = false;
    std::uint32_t site = 0;
    std::uint64_t polled = ~0ull;  // offset
    std::uint32_t polled_bytes = 0;
};

// Threads that meet: those who wait go on when enough have come, knowing what all of them knew.
struct Meeting {
    std::uint32_t expected = 0, arrived = 0;
    View sum;
    View last;  // what was added last, to add it once
    std::vector<Fiber*> waiting;
    const Fiber* first = nullptr;  // who came first, and where: at a barrier
    std::uint32_t site = 0, place = 0;
};

struct Warp {
    struct Exchange {
        std::uint32_t mask = 0, arrived = 0;
        unsigned long long values[2][33];  // of the lanes, and which of them take part
        int turn = 0;
        Meeting meeting;
    };
    std::uint32_t live = 0;
    std::vector<std::unique_ptr<Exchange>> barriers, exchanges;  // by mask
    std::vector<std::unique_ptr<Exchange>> asking;  // by place: lanes that ask which of them are active
};

struct Mbarrier {
    std::uint64_t offset;
    std::uint32_t expected, pending;
    std::int64_t bytes = 0;
    std::uint32_t phase = 0;
    Meeting meeting;
    View ended;  // what was known at the end of the last phase
};

// As the host describes it. Launches of one stream of a rank run one after the other.
struct Launch {
    void (*kernel)(void**);
    std::uint32_t rank, stream;
    Uint3 grid, block;
    std::uint32_t shared_bytes;
    std::uint32_t cluster;  // blocks of a cluster: neighbours in the grid
    std::uint32_t resident_blocks;  // of its rank, at a time
    bool dependent;  // may begin before the launch before has ended (programmatic dependent launch)
    bool in_order;   // its blocks start by their numbers
    std::vector<void*> arguments;
    std::uint32_t number = 0;  // in its stream
};

struct Stream;

struct Block {
    const Launch* launch;
    Stream* stream;
    View start;  // what is known at its start
    Uint3 index;
    int key;  // its number in the whole run: the same for the blocks of this place in all launches
    std::uint64_t dynamic_shared, static_shared;  // offsets
    Block* cluster = nullptr;  // the first block of its cluster
    Block* next = nullptr;     // the one behind it in its cluster
    Fiber* first;
    std::uint32_t threads, live;
    Meeting barriers[16];
    std::vector<Warp> warps;
    std::deque<Mbarrier> mbarriers;
    Meeting end;
    Actor heard_from = 0xffff;  // who sent the last flag that one of its threads saw
    Meeting cluster_barrier;  // of the cluster, in its first block
    View cluster_ended;       // what was known at the end of its last phase
    std::uint32_t cluster_phase = 0;
    std::uint32_t votes[16] = {};  // at its barriers: threads that came, times 65536, and true predicates
    std::unordered_map<Actor, std::pair<Clock, std::uint32_t>> arrivals;  // of other blocks' threads at its mbarriers and memory: the last of each, and its site

    Mbarrier* mbarrier(std::uint64_t offset) {
        for (Mbarrier& barrier : mbarriers) {
            if (barrier.offset == offset) return &barrier;
        }
        return nullptr;
    }
};

struct Stream {
    std::uint32_t rank;
    std::vector<Launch> launches;
    std::uint32_t max_blocks = 0, max_threads = 0, max_shared_bytes = 0;
    Fiber* first_fiber = nullptr;
    int first_block = 0;
    // Shared memory of its blocks: where the first's lies, how far apart they are, and where in each the static variables are.
    std::uint64_t shared = 0, shared_stride = 0, static_shared = 0;

    // New in every schedule.
    std::size_t next_launch = 0;
    std::uint32_t next_block = 0, live_blocks = 0;
    std::vector<std::uint32_t> free;   // places for clusters of the current launch, if it has more blocks than places
    bool scarce = false;               // that it has
    std::vector<std::uint32_t> order;  // in which clusters of the current launch start, where not all are resident; empty: by their numbers
    View view;       // what is known at the start of the current launch
    View before;     // what is known when the launch before has ended: the same, unless they may overlap
    View end;        // what its blocks knew that have ended
    int copies = 0;  // that it has started, still under way
};

// Seeded, the same on every machine.
class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull) {}
    std::uint32_t operator()() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return static_cast<std::uint32_t>((state_ * 0x2545f4914f6cdd1dull) >> 32);
    }
    std::uint32_t below(std::uint32_t limit) { return static_cast<std::uint32_t>((std::uint64_t((*this)()) * limit) >> 32); }
    bool one_in(std::uint32_t n) { return below(n) == 0; }

  private:
    std::uint64_t state_;
};

// What a relaxed store hands to those who load its value, by scope of the fence before it.
struct Handover {
    std::uint64_t offset;
    Actor writer;
    Ref<Snapshot> released[scopes];
    Ref<Vector> fenced{}, boundary{}, reads{};  // see View; they come with every store
    Clock written = 0;      // when the writer did it
    Actor reader = 0xffff;  // the last thread that has seen the value, and when
    Clock read = 0;
};

}  // namespace peerlane::emulator
