// The machine that runs the threads of all ranks on one CPU thread. Its parts:
// races.h (every access), order.h (atomic accesses and fences), groups.h (barriers and warps), copies.h (asynchronous operations),
// schedule.h (who runs next), run.h (from start to end).
#pragma once

#include "parts.h"

namespace peerlane::emulator {

struct Copy {
    Fiber* issuer;
    Stream* stream;
    Block* block;
    Actor actor;
    std::size_t slot;  // of the issuer
    Clock clock;  // of its reads; its writes have the next one
    View view;    // of the issuer when it was issued
    std::vector<Segment> segments;
    Combine combine;
    bool generic = false;   // of the proxy of ordinary accesses
    std::uint64_t barrier;  // offset, or ~0
    Block* barrier_block;   // where it lies: this block, or another of its cluster
    std::uint32_t site;
    bool remote = false;            // a message to another node, of no proxy
    std::uint64_t counter = ~0ull;  // offset of what it adds to when its bytes have been written, or ~0
    std::uint64_t add = 0;
    enum Stage { issued, read, written } stage = issued;
    std::vector<char> data;
};

// How one schedule treats its threads. Drawn anew for each.
struct Style {
    std::uint32_t accesses;     // ordinary accesses between two preemptions, on average
    std::uint32_t pause_one_in;  // of the atomic accesses and fences
    std::uint32_t copy_one_in;   // of the switches, a copy goes on; 0: only when no thread can
    bool newest_first;           // the thread that became runnable last runs on
    std::uint32_t slow_ranks;    // a bit each; rarely run while others can
    std::uint32_t slow_parity;   // 0: no block is slow; else those whose number has this bit
};

class Machine {
  public:
    // What the host says before the run.
    std::vector<Launch> launches;
    std::uint64_t max_switches = 50'000'000;
    std::uint64_t max_idle_switches = 4'000'000;  // during which nobody writes anything
    std::vector<int> fault_buffers;  // by rank
    struct Globals {
        char* section = nullptr;  // where the device code has its variables: those of one rank at a time
        std::uint64_t bytes = 0;
        std::vector<int> buffers{};  // by rank: where the others' are kept
        int rank = -1;               // whose are in the section
        std::uint64_t within(const void* address) const { return static_cast<std::uint64_t>(static_cast<const char*>(address) - section); }
        bool holds(const void* address) const { return within(address) < bytes; }
    } globals;

    void prepare(std::uint64_t base, std::vector<Buffer> buffers, const std::vector<Content>& contents, std::uint64_t static_shared_bytes);
    void run(int schedule, std::uint64_t seed);
    // Ends a schedule whose current thread has crashed; the caller is on the scheduler's stack.
    void abandon(const char* kind, const char* what);

    Memory memory;
    Findings findings;
    Fiber* current = nullptr;  // none while the machine itself works
    std::uint64_t switches = 0;
    std::uint64_t switches_so_far() const { return switches + schedule_switches_; }

    // races.h
    void plain(const void* address, std::uint32_t bytes, std::uint8_t flags, std::uint32_t site);
    void put(void* address, const void* value, std::uint32_t bytes, std::uint32_t site);
    void read_only(const void* address, std::uint32_t bytes, std::uint32_t site);
    [[noreturn]] void crash(const char* what, std::uint32_t site);

    // order.h
    void load(const void* address, void* value, std::uint32_t bytes, unsigned scope, unsigned order, std::uint32_t site);
    void store(void* address, const void* value, std::uint32_t bytes, unsigned scope, unsigned order, std::uint32_t site);
    void update(void* address, std::uint32_t bytes, unsigned scope, unsigned order, Change change, void* context, std::uint32_t site);
    void load_halves(const void* address, void* value, unsigned scope, unsigned order, std::uint32_t site);
    void store_halves(void* address, const void* value, unsigned scope, unsigned order, std::uint32_t site);
    void wait_for_launch();
    std::uint32_t multicast(const void* address, std::uint32_t bytes, void** parts, std::uint32_t site);
    void fence(unsigned scope, unsigned order);
    void proxy_fence(unsigned proxy);
    std::uint64_t time(std::uint32_t site);
    void pause();
    [[noreturn]] void trap(std::uint32_t site);

    // groups.h
    void barrier(std::uint32_t number, std::uint32_t threads, bool wait, std::uint32_t place, std::uint32_t site);
    void warp_barrier(std::uint32_t mask, std::uint32_t site);
    std::uint32_t active_mask(std::uint32_t site);
    const unsigned long long* warp_exchange(std::uint32_t mask, unsigned long long value, std::uint32_t site);
    std::uint32_t cluster_rank() const;
    std::uint32_t cluster_size() const { return current->block->launch->cluster; }
    void cluster_arrive(bool orders);
    void cluster_wait(std::uint32_t site);
    void* cluster_pointer(const void* pointer, std::uint32_t rank, std::uint32_t site);

    // copies.h
    void mbarrier_init(std::uint64_t* barrier, std::uint32_t arrivals, std::uint32_t site);
    void mbarrier_init_fence();
    std::uint32_t mbarrier_arrive(std::uint64_t* barrier, std::uint32_t bytes, std::uint32_t arrivals, bool drop, std::uint32_t site);
    bool mbarrier_try_wait(std::uint64_t* barrier, std::uint32_t parity, std::uint32_t site);
    void async_aligned(const void* address, std::uint32_t alignment, std::uint32_t site);
    void async_bulk(const Segment& whole, Combine combine, std::uint64_t* barrier, std::uint32_t site);
    void async(const Segment* segments, std::uint32_t count, Combine combine, std::uint64_t* barrier, unsigned queue, std::uint32_t site);
    void remote(void* target, const void* source, std::uint32_t bytes, std::uint64_t* counter, std::uint64_t add, std::uint32_t site);
    void async_commit(unsigned queue);
    void async_wait(unsigned queue, std::uint32_t pending, bool sources_only, std::uint32_t site);

    // Where an address lies in the ranks' memory; device variables have a place of each rank's own.
    std::uint64_t offset(const void* address) const {
        if (!globals.holds(address) || !current) return memory.offset(address);
        return memory.buffers()[globals.buffers[current->block->launch->rank]].begin + globals.within(address);
    }

    char* shared_base() const { return memory.address(current->block->dynamic_shared); }
    char* static_shared_base() const { return memory.address(current->block->static_shared); }
    bool is_stack_guard(const void* address) const { return stacks_->is_guard(address); }

  private:
    struct Identity {
        Fiber* fiber;
        int rank, block;
        bool asynchronous;
    };

    // races.h
    enum class Odds { none, race, narrow_scope, torn, lost_update, proxy_fence, boundary, same_value, read_only };
    void preempt();
    void touch(std::uint64_t offset, std::uint32_t bytes, std::uint8_t flags, std::uint32_t site);
    bool allowed(const Fiber& fiber, std::uint64_t offset, std::uint32_t bytes) const;
    bool happened(const Record& record, std::uint16_t part, const Access& access, std::uint64_t offset, std::uint32_t bytes);
    Odds odds(const Record& record, std::uint16_t part, const Access& access) const;
    Scope relation(Actor a, Clock when, Actor b) const;
    void report_pair(Odds odds, const Record& record, const Access& access, std::uint64_t offset, std::uint32_t bytes);
    void report(Finding finding);
    [[noreturn]] void fatal(Finding finding);
    void locate(Finding& finding, std::uint64_t offset) const;
    Side side(Actor actor, Clock clock, std::uint8_t flags, std::uint32_t bytes, std::uint32_t site) const;
    Side side(const Fiber& fiber, std::string action) const;

    // order.h
    bool outside(const void* address, std::uint32_t bytes, std::uint32_t site);
    Handover* handover(std::uint64_t offset);
    Handover& make_handover(std::uint64_t offset, Actor writer);
    Ref<Snapshot> snapshot(Fiber& fiber);
    static void hear(Fiber& fiber, const Handover& found);
    bool seen(const Handover& handed, const Fiber& fiber) const;
    std::string unheard_fence(const Record& record) const;
    static void learn(Fiber& fiber, Scope needed, const Ref<Snapshot>& known, unsigned order);
    void take_over(Fiber& fiber, unsigned scope);

    // groups.h
    static void contribute(Meeting& meeting, Fiber& fiber);
    void conclude(Meeting& meeting);
    void check_barrier(const Meeting& meeting, std::uint32_t number, std::uint32_t threads, std::uint32_t place, std::uint32_t site);
    void check_warp(const Warp& warp, const Warp::Exchange& own, const char* name, std::uint32_t site);
    Finding mismatch(std::string detail, const Fiber& other, std::uint32_t other_site, std::uint32_t site) const;
    void meet(Warp::Exchange& exchange, bool orders, const char* name, std::uint32_t site);
    void warp_concludes(Warp::Exchange& exchange, bool orders);
    static Warp::Exchange& exchange(std::vector<std::unique_ptr<Warp::Exchange>>& exchanges, std::uint32_t mask);
    static std::uint32_t live_in_cluster(const Block& block);
    void cluster_concludes(Block& first);
    void thread_ends(Fiber& fiber);
    void block_ends(Block& block);

    // copies.h
    Block& owner(std::uint64_t offset, std::uint32_t site);
    Mbarrier& find_mbarrier(const std::uint64_t* barrier, std::uint32_t site);
    void end_phase(Mbarrier& barrier);
    Slot& free_slot(Fiber& fiber);
    std::shared_ptr<Copy> issue(const Segment* segments, std::uint32_t count, bool reads_shared, bool writes_shared, Block* uses);
    void check_remote(const void* end, std::uint32_t bytes, const char* action);
    void signal(Copy& copy);
    void copy_goes_on(std::size_t index);
    void copy_access(Copy& copy, std::uint64_t offset, std::uint32_t bytes, std::uint8_t flags, Clock clock);
    bool copy_judges(Copy& copy, const Record& record, std::uint16_t part, const Access& access, std::uint64_t offset, std::uint32_t bytes);
    bool is_shared(std::uint64_t offset) const { return memory.buffers()[memory.number_at(offset)].block >= 0; }

    // schedule.h
    void draw_style();
    Fiber* next();
    bool is_slow(const Fiber& fiber) const;
    void resume(Fiber& fiber);
    void enlist(Fiber& fiber, State state);
    void delist(Fiber& fiber);
    void leave(State state);
    void wait(const char* what, std::uint32_t site, bool for_copies = false);
    void poll(std::uint64_t offset, std::uint32_t bytes, std::uint32_t site);
    void maybe_pause();
    void start_blocks();
    void draw_order(Stream& stream);
    void bring_globals(int rank);
    Block& start_block(Stream& stream);
    static std::uint32_t places(const Launch& launch);
    void stream_goes_on(Stream& stream);
    static void thread_main();
    void no_progress();
    void deadlock();
    std::string unstarted() const;
    std::vector<std::uint32_t> fault(std::uint32_t rank) const;

    // run.h
    bool done() const;
    void compare();
    void clear();

    Shadow shadow_;
    std::uint32_t* handover_of_ = nullptr;  // by word of memory
    std::vector<Handover> handovers_;
    std::vector<Stream> streams_;
    std::vector<Fiber> fibers_;
    std::vector<Identity> actors_;
    std::vector<Warp::Exchange*> asking_;
    std::deque<Block> blocks_;
    std::vector<std::shared_ptr<Copy>> copies_;  // under way
    std::unique_ptr<Stacks> stacks_;
    std::uint64_t static_shared_bytes_ = 0;

    Random random_{0};
    Style style_{};
    int schedule_ = 0;
    void* scheduler_ = nullptr;  // its stack pointer
    std::vector<Fiber*> halfway_;  // threads in the midst of a store of 16 bytes
    bool ordered_ = false;         // atomic updates came in an order that the schedule chose
    std::vector<Fiber*> lists_[2];  // runnable, polling
    std::vector<std::uint32_t> resident_;  // blocks by rank
    std::uint64_t version_ = 1;  // of all that a thread could wait for
    std::uint64_t time_ = 0, time_step_ = 0;
    std::uint32_t patience_ = 0;  // polls left to a thread that was asked to go on alone
    bool desperate_ = false;      // nothing goes on: time is made to run out
    bool idle_ = false;           // nobody has written anything for long: the same
    bool wrote_ = false;
    bool aborted_ = false;
    std::uint32_t budget_ = 1;  // ordinary accesses until the next preemption
    std::uint64_t schedule_switches_ = 0, last_write_ = 0;
};

inline Machine* machine = nullptr;

}  // namespace peerlane::emulator
