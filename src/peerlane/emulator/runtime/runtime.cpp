// Where the compiler's hooks, the stand-in headers and the host enter the machine.
//
// Device code is compiled with -fsanitize=thread, which calls __tsan_* before every access to memory that other threads could see; this
// file gives these functions another meaning than the sanitizer's own library, which is not linked. Shared variables are thread_local to
// the compiler, so their addresses come from __tls_get_addr, which is ours too: a "thread" is a block.
#include <link.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>

#include "run.h"

using namespace peerlane::emulator;

// The linker's names for the section of the device code's variables, see build.py.
extern "C" {
extern char __start_peerlane_globals[] __attribute__((weak, visibility("hidden")));
extern char __stop_peerlane_globals[] __attribute__((weak, visibility("hidden")));
}

namespace {

struct Program {
    std::uint64_t base = 0, data_begin = 0, data_end = 0;
    std::uint64_t static_shared_bytes = 0;
} program;

// Fills in `program` from the loaded file that this code is part of.
int find_program(dl_phdr_info* info, std::size_t, void* here) {
    const auto address = reinterpret_cast<std::uint64_t>(here);
    bool found = false;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& header = info->dlpi_phdr[i];
        const std::uint64_t begin = info->dlpi_addr + header.p_vaddr;
        found |= header.p_type == PT_LOAD && address >= begin && address < begin + header.p_memsz;
    }
    if (!found) return 0;
    program.base = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& header = info->dlpi_phdr[i];
        if (header.p_type == PT_TLS) program.static_shared_bytes = header.p_memsz;
        if (header.p_type == PT_LOAD && header.p_flags & PF_W) {
            program.data_begin = info->dlpi_addr + header.p_vaddr;
            program.data_end = program.data_begin + header.p_memsz;
        }
    }
    return 1;
}

// One byte before the return address, so that it lies within the calling line.
#define SITE (static_cast<std::uint32_t>(reinterpret_cast<std::uint64_t>(__builtin_return_address(0)) - program.base - 1))

inline void ordinary(const void* address, std::uint32_t bytes, std::uint8_t flags, std::uint32_t site) {
    if (machine->current) machine->plain(address, bytes, flags, site);
}

// Variables of templates lie outside the section that every rank has a copy of.
[[noreturn]] void shared_variable(std::uint32_t site) {
    machine->crash("a write to a variable of a template, of which there is one for all ranks here: use a plain __device__ variable", site);
}

inline void refuse_shared_variable(const void* address, std::uint32_t site) {
    const auto number = reinterpret_cast<std::uint64_t>(address);
    const bool in_program = number >= program.data_begin && number < program.data_end;
    if (machine->current && in_program && !machine->globals.holds(address)) shared_variable(site);
}

inline void ordinary_write(const void* address, std::uint32_t bytes, std::uint32_t site) {
    refuse_shared_variable(address, site);
    ordinary(address, bytes, writes, site);
}

// Volatile accesses are relaxed ones in system scope. The hook comes before the access, and nobody else runs in between.
inline void volatile_read(const void* address, std::uint32_t bytes, std::uint32_t site) {
    char value[16];
    if (machine->current) machine->load(address, value, bytes, system_scope, relaxed, site);
}

inline void volatile_write(void* address, std::uint32_t bytes, std::uint32_t site) {
    if (!machine->current || !machine->memory.holds(machine->offset(address))) return;
    char value[16];
    std::memcpy(value, address, bytes);
    value[0] ^= 1;  // not known here; differs from what is there
    machine->store(address, value, bytes, system_scope, relaxed, site);
}

sigjmp_buf crashed;
std::uint32_t trap_site = 0;  // of the instruction that the compiler put behind a failed test of an address

std::uint64_t program_counter(void* context) {
    const mcontext_t& machine_context = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    return static_cast<std::uint64_t>(machine_context.gregs[REG_RIP]);
#else
    return machine_context.pc;
#endif
}

void on_crash(int number, siginfo_t* info, void* context) {
    if (!machine || !machine->current) {
        signal(number, SIG_DFL);
        return;
    }
    trap_site = static_cast<std::uint32_t>(program_counter(context) - program.base);
    siglongjmp(crashed, machine->is_stack_guard(info->si_addr) ? -1 : number);
}

// Comes every `tick_s` of CPU time. A thread that never lets others run is in a loop without an end that they can influence.
constexpr int tick_s = 5, most_ticks = 2;

void on_tick(int number) {
    static std::uint64_t switches_at_last_tick = 0;
    static int ticks = 0;
    if (!machine || !machine->current) return;
    ticks = machine->switches_so_far() == switches_at_last_tick ? ticks + 1 : 0;
    switches_at_last_tick = machine->switches_so_far();
    if (ticks >= most_ticks) siglongjmp(crashed, number);
}

// Whether further schedules make sense.
bool run_or_crash(int schedule, std::uint64_t seed) {
    switch (sigsetjmp(crashed, 0)) {
        case 0: machine->run(schedule, seed); break;
        case SIGVTALRM: machine->abandon("endless", "a thread ran for 10 s and never let others run"); return false;
        case -1: machine->abandon("crash", "the stack of a thread is full"); break;
        case SIGFPE: machine->abandon("crash", "division by zero"); break;
        case SIGILL: case SIGTRAP: machine->current->site = trap_site; machine->abandon("misaligned_address", ""); break;
        default: machine->abandon("crash", "an access to memory that is nobody's");
    }
    return true;
}

}  // namespace

extern "C" {

// ---- the compiler's hooks ---------------------------------------------------------------------------------------------------------------

#define ACCESS(bytes)                                                                                          \
    void __tsan_read##bytes(void* p) { ordinary(p, bytes, 0, SITE); }                                          \
    void __tsan_write##bytes(void* p) { ordinary_write(p, bytes, SITE); }                                      \
    void __tsan_unaligned_read##bytes(void* p) { ordinary(p, bytes, 0, SITE); }                                \
    void __tsan_unaligned_write##bytes(void* p) { ordinary_write(p, bytes, SITE); }                            \
    void __tsan_volatile_read##bytes(void* p) { volatile_read(p, bytes, SITE); }                               \
    void __tsan_volatile_write##bytes(void* p) { volatile_write(p, bytes, SITE); }                             \
    void __tsan_unaligned_volatile_read##bytes(void* p) { volatile_read(p, bytes, SITE); }                     \
    void __tsan_unaligned_volatile_write##bytes(void* p) { volatile_write(p, bytes, SITE); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
#undef ACCESS
void __tsan_read_range(void* p, unsigned long bytes) { ordinary(p, static_cast<std::uint32_t>(bytes), 0, SITE); }
void __tsan_write_range(void* p, unsigned long bytes) { ordinary_write(p, static_cast<std::uint32_t>(bytes), SITE); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

struct TlsIndex {
    unsigned long module, offset;
};
__attribute__((visibility("hidden"))) void* __tls_get_addr(TlsIndex* index) { return machine->static_shared_base() + index->offset; }

// ---- the stand-in headers' hooks (hooks.h) ----------------------------------------------------------------------------------------------

Uint3 peerlane_thread_index() noexcept { return machine->current->thread; }
Uint3 peerlane_block_index() noexcept { return machine->current->block->index; }
Uint3 peerlane_block_size() noexcept { return machine->current->block->launch->block; }
Uint3 peerlane_grid_size() noexcept { return machine->current->block->launch->grid; }
unsigned long long peerlane_time() { return machine->time(SITE); }
void peerlane_pause() { machine->pause(); }
void peerlane_trap() { machine->trap(SITE); }

void peerlane_load(const void* address, void* value, unsigned bytes, unsigned scope, unsigned order) {
    machine->load(address, value, bytes, scope, order, SITE);
}
void peerlane_store(void* address, const void* value, unsigned bytes, unsigned scope, unsigned order) {
    machine->store(address, value, bytes, scope, order, SITE);
}
void peerlane_update(void* address, unsigned bytes, unsigned scope, unsigned order, Change change, void* context) {
    machine->update(address, bytes, scope, order, change, context, SITE);
}
unsigned peerlane_multicast(const void* address, unsigned bytes, void** parts) {
    return machine->multicast(address, bytes, parts, SITE);
}
void peerlane_load_halves(const void* address, void* value, unsigned scope, unsigned order) {
    machine->load_halves(address, value, scope, order, SITE);
}
void peerlane_store_halves(void* address, const void* value, unsigned scope, unsigned order) {
    machine->store_halves(address, value, scope, order, SITE);
}
void peerlane_read_only(const void* address, unsigned bytes) { machine->read_only(address, bytes, SITE); }
void peerlane_put(void* address, const void* value, unsigned bytes) {
    refuse_shared_variable(address, SITE);
    machine->put(address, value, bytes, SITE);
}
void peerlane_wait_for_launch() { machine->wait_for_launch(); }
void peerlane_is_host() { machine->current->host = true; }
void peerlane_fence(unsigned scope, unsigned order) { machine->fence(scope, order); }
void peerlane_proxy_fence(unsigned proxy) { machine->proxy_fence(proxy); }

void peerlane_barrier(unsigned number, unsigned threads, bool wait, unsigned place) { machine->barrier(number, threads, wait, place, SITE); }
unsigned peerlane_barrier_votes(unsigned number, unsigned threads, bool predicate, unsigned place) {
    unsigned& votes = machine->current->block->votes[number % 16];
    const unsigned own = 0x10000 + predicate;
    votes += own;
    machine->barrier(number, threads, true, place, SITE);
    const unsigned all = votes;
    machine->barrier(number, threads, true, place, SITE);
    votes -= own;  // the next barrier comes behind everybody's
    return all;
}
void peerlane_warp_barrier(unsigned mask) { machine->warp_barrier(mask, SITE); }
const unsigned long long* peerlane_warp_exchange(unsigned mask, unsigned long long value) {
    return machine->warp_exchange(mask, value, SITE);
}
unsigned peerlane_active_mask() { return machine->active_mask(SITE); }

char* peerlane_dynamic_shared() { return machine->shared_base(); }
unsigned peerlane_shared_address(const void* pointer) {
    return static_cast<unsigned>(static_cast<const char*>(pointer) - machine->shared_base());
}
// Shared memory of other blocks of the cluster lies before or behind the block's own.
void* peerlane_shared_pointer(unsigned address) { return machine->shared_base() + static_cast<int>(address); }

unsigned peerlane_cluster_rank() { return machine->cluster_rank(); }
unsigned peerlane_cluster_size() { return machine->cluster_size(); }
void peerlane_cluster_arrive(bool orders) { machine->cluster_arrive(orders); }
void peerlane_cluster_wait() { machine->cluster_wait(SITE); }
void* peerlane_cluster_pointer(const void* pointer, unsigned rank) { return machine->cluster_pointer(pointer, rank, SITE); }

void peerlane_mbarrier_init(unsigned long long* barrier, unsigned arrivals) {
    machine->mbarrier_init(reinterpret_cast<std::uint64_t*>(barrier), arrivals, SITE);
}
void peerlane_mbarrier_init_fence() { machine->mbarrier_init_fence(); }
unsigned peerlane_mbarrier_arrive(unsigned long long* barrier, unsigned expected_bytes, unsigned arrivals, bool drop) {
    return machine->mbarrier_arrive(reinterpret_cast<std::uint64_t*>(barrier), expected_bytes, arrivals, drop, SITE);
}
bool peerlane_mbarrier_try_wait(unsigned long long* barrier, unsigned parity) {
    return machine->mbarrier_try_wait(reinterpret_cast<std::uint64_t*>(barrier), parity, SITE);
}
void peerlane_async(const Segment* segments, unsigned count, Combine combine, unsigned long long* barrier, unsigned queue) {
    machine->async(segments, count, combine, reinterpret_cast<std::uint64_t*>(barrier), queue, SITE);
}
void peerlane_async_aligned(const void* address, unsigned alignment) { machine->async_aligned(address, alignment, SITE); }
void peerlane_async_bulk(void* target, const void* source, unsigned bytes, Combine combine, unsigned long long* barrier) {
    machine->async_bulk({target, source, bytes}, combine, reinterpret_cast<std::uint64_t*>(barrier), SITE);
}
void peerlane_async_commit(unsigned queue) { machine->async_commit(queue); }
void peerlane_async_wait(unsigned queue, unsigned pending, bool sources_only) { machine->async_wait(queue, pending, sources_only, SITE); }
void peerlane_remote(void* target, const void* source, unsigned bytes, unsigned long long* counter, unsigned long long add) {
    machine->remote(target, source, bytes, reinterpret_cast<std::uint64_t*>(counter), add, SITE);
}

// ---- the host (emulator/_child.py) ------------------------------------------------------------------------------------------------------

struct HostBuffer {
    std::uint64_t begin, end;
    std::int64_t rank;
    const char* expected;
    std::uint32_t unwritten, any_order;  // as memory.h has them
    const std::uint64_t* multicast;
    std::uint64_t multicast_count;
};
struct HostContent {
    std::uint64_t begin, bytes;
    const char* data;
};
struct HostLaunch {
    void (*kernel)(void**);
    void** arguments;
    std::uint32_t argument_count, rank, stream, shared_bytes, cluster, resident_blocks;
    Uint3 grid, block;
    std::uint32_t dependent, in_order;
};
struct HostRun {
    std::uint64_t base, seed;
    const HostBuffer* buffers;
    const HostContent* contents;
    const HostLaunch* launches;
    const std::int32_t* fault_buffers;
    const std::int32_t* global_buffers;
    std::uint32_t buffer_count, content_count, launch_count, fault_count, global_count, first_schedule, schedules;
    std::uint32_t* progress;  // how many schedules are over
};

// Runs all schedules and returns what was found as JSON, which the caller does not free.
const char* peerlane_emulator_run(const HostRun* run) {
    static Machine the_machine;
    machine = &the_machine;
    dl_iterate_phdr(find_program, reinterpret_cast<void*>(&peerlane_emulator_run));
    std::vector<Buffer> buffers(1);
    for (std::uint32_t i = 0; i < run->buffer_count; ++i) {
        const HostBuffer& from = run->buffers[i];
        std::vector<std::uint64_t> multicast(from.multicast, from.multicast + from.multicast_count);
        buffers.push_back({from.begin, from.end, static_cast<int>(from.rank), -1, from.expected, std::move(multicast), from.unwritten != 0, from.any_order != 0});
    }
    std::vector<Content> contents;
    for (std::uint32_t i = 0; i < run->content_count; ++i) {
        contents.push_back({run->contents[i].begin, run->contents[i].bytes, run->contents[i].data});
    }
    for (std::uint32_t i = 0; i < run->launch_count; ++i) {
        const HostLaunch& from = run->launches[i];
        std::vector<void*> arguments(from.arguments, from.arguments + from.argument_count);
        machine->launches.push_back(
            {from.kernel, from.rank, from.stream, from.grid, from.block, from.shared_bytes, from.cluster, from.resident_blocks, from.dependent != 0, from.in_order != 0, std::move(arguments)});
    }
    machine->fault_buffers.assign(run->fault_buffers, run->fault_buffers + run->fault_count);
    if (__start_peerlane_globals) {
        machine->globals.section = __start_peerlane_globals;
        machine->globals.bytes = static_cast<std::uint64_t>(__stop_peerlane_globals - __start_peerlane_globals);
        machine->globals.buffers.assign(run->global_buffers, run->global_buffers + run->global_count);
    }
    machine->prepare(run->base, std::move(buffers), contents, program.static_shared_bytes);

    static char signal_stack[64 << 10];
    const stack_t alternate{signal_stack, 0, sizeof signal_stack};
    sigaltstack(&alternate, nullptr);
    struct sigaction action {};
    action.sa_sigaction = on_crash;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigaction(number, &action, nullptr);
    struct sigaction tick {};
    tick.sa_handler = on_tick;
    tick.sa_flags = SA_ONSTACK | SA_NODEFER;
    sigaction(SIGVTALRM, &tick, nullptr);
    const itimerval every{{tick_s, 0}, {tick_s, 0}};
    setitimer(ITIMER_VIRTUAL, &every, nullptr);

    for (std::uint32_t i = 0; i < run->schedules && run_or_crash(static_cast<int>(run->first_schedule + i), run->seed); ++i) {
        *run->progress = i + 1;
    }
    setitimer(ITIMER_VIRTUAL, nullptr, nullptr);
    static std::string text;
    text = "{\"findings\":" + machine->findings.json() + ",\"caught\":" + std::to_string(machine->findings.schedules()) + ",\"switches\":" +
           std::to_string(machine->switches) + ",\"dirty\":[";
    for (const std::uint64_t page : machine->memory.dirty_pages()) text += (text.back() == '[' ? "" : ",") + std::to_string(page);
    text += "]}";
    return text.c_str();
}

}  // extern "C"
