// Threads of one CPU thread: a stack each, and a switch that saves what a function call must preserve.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

extern "C" void peerlane_switch(void** save, void* load);

// clang-format off
#if defined(__x86_64__)
asm(R"(
.text
.globl peerlane_switch
.hidden peerlane_switch
.type peerlane_switch, @function
peerlane_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size peerlane_switch, .-peerlane_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl peerlane_switch
.hidden peerlane_switch
.type peerlane_switch, %function
peerlane_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size peerlane_switch, .-peerlane_switch
)");
#else
#error "the emulator switches stacks on x86-64 and aarch64 only"
#endif
// clang-format on

namespace peerlane::emulator {

// Equal stacks side by side, each with a page below it that nobody may touch. Where there are very many, some go without: Linux allows a
// process 65530 mappings, and every page set apart makes two.
class Stacks {
  public:
    static constexpr std::size_t bytes = 256 << 10;
    static constexpr std::size_t guard_bytes = 4096, most_guards = 31 << 10;

    explicit Stacks(std::size_t count) : count_(count) {
        void* mapped = mmap(nullptr, count * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) {
            std::perror("peerlane emulator: no address space for the stacks");
            std::exit(1);
        }
        base_ = static_cast<char*>(mapped);
        for (std::size_t i = 0; i < count; i += 1 + count / (most_guards + 1)) mprotect(base_ + i * bytes, guard_bytes, PROT_NONE);
    }
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;

    // A stack pointer for peerlane_switch that begins `entry`, which must not return.
    void* prepare(std::size_t index, void (*entry)()) const {
        auto* top = reinterpret_cast<std::uint64_t*>(base_ + (index + 1) * bytes);
#if defined(__x86_64__)
        constexpr int words = 8, return_at = 6;  // six registers, the return address, and one word for the alignment at a function's entry
#else
        constexpr int words = 20, return_at = 11;
#endif
        std::uint64_t* frame = top - words;
        for (int i = 0; i < words; ++i) frame[i] = 0;
        frame[return_at] = reinterpret_cast<std::uint64_t>(entry);
        return frame;
    }

    bool is_guard(const void* address) const {
        const std::size_t offset = static_cast<const char*>(address) - base_;
        return address >= base_ && offset < count_ * bytes && offset % bytes < guard_bytes;
    }

  private:
    char* base_;
    std::size_t count_;
};

}  // namespace peerlane::emulator
