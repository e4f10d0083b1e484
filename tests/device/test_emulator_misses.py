"""Faults that a GPU may forgive or that show late: each broken kernel beside its right twin, from C++ and from PTX."""

import ctypes

import pytest
import torch

from peerlane.emulator import Report, Scenario, check

SOURCE = r"""
#include <peerlane/comm.cuh>
using namespace peerlane;
#define KERNEL(name) extern "C" __global__ void name(const __grid_constant__ Arena a, u64 data, u64 flags, u32* y, u32 epoch)
__device__ u32* there(const Arena& a, u64 at) { return reinterpret_cast<u32*>(a.peer(a.rank ^ 1, at)); }
__device__ u32* here(const Arena& a, u64 at) { return reinterpret_cast<u32*>(a.local(at)); }
__device__ void signal(const Arena& a, u64 flags, u32 value, bool fenced) {
    if (fenced) ptx::fence_system();
    ptx::store_relaxed_system(there(a, flags), value);
}
__device__ void await(const Arena& a, u64 flags, u32 value, bool fenced) {
    while (ptx::load_relaxed_system(here(a, flags)) < value) {}
    if (fenced) ptx::fence_system();
}
// One thread of each rank meets the other's.
__device__ void meet(const Arena& a, u64 flags, u32 value, bool releases, bool acquires) {
    __syncthreads();
    if (threadIdx.x == 0) signal(a, flags, value, releases), await(a, flags, value, acquires);
    __syncthreads();
}

// ---- addresses
KERNEL(vector_at_4) { *reinterpret_cast<float4*>(reinterpret_cast<char*>(y) + 4 + 16 * threadIdx.x) = make_float4(1, 2, 3, 4); }
KERNEL(vector_at_16) { *reinterpret_cast<float4*>(reinterpret_cast<char*>(y) + 16 * threadIdx.x) = make_float4(1, 2, 3, 4); }
KERNEL(double_at_4) { y[threadIdx.x] = u32(*reinterpret_cast<double*>(y + 65 + 2 * threadIdx.x)); }
KERNEL(double_at_8) { y[threadIdx.x] = u32(*reinterpret_cast<double*>(y + 64 + 2 * threadIdx.x)); }
template <u32 from, u32 to, u32 bytes> __device__ void copy_in_bulk(const Arena& a, u64 data) {
    alignas(16) __shared__ u32 words[32];
    words[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (threadIdx.x) return;
    ptx::fence_proxy_async();
    ptx::bulk_store(a.local(data) + to, reinterpret_cast<char*>(words) + from, bytes);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
}
KERNEL(bulk_from_8) { copy_in_bulk<8, 0, 64>(a, data); }
KERNEL(bulk_to_8) { copy_in_bulk<0, 8, 64>(a, data); }
KERNEL(bulk_of_24) { copy_in_bulk<0, 0, 24>(a, data); }
KERNEL(bulk_of_16s) { copy_in_bulk<16, 32, 64>(a, data); }
KERNEL(atomic_at_2) { atomicAdd(reinterpret_cast<u32*>(reinterpret_cast<char*>(y) + 2), 1u); }

// ---- loads that promise that nobody writes
template <bool promised> __device__ void read_after_put(const Arena& a, u64 data, u64 flags, u32* y, u32 epoch) {
    there(a, data)[threadIdx.x] = epoch;
    meet(a, flags, 2 * epoch, true, true);
    const u32* from = here(a, data) + threadIdx.x;
    y[threadIdx.x] = promised ? __ldg(from) : *from;
    meet(a, flags, 2 * epoch + 1, true, true);
}
KERNEL(read_only) { read_after_put<true>(a, data, flags, y, epoch); }
KERNEL(read_and_written) { read_after_put<false>(a, data, flags, y, epoch); }
KERNEL(put) { there(a, data)[threadIdx.x] = epoch; meet(a, flags, 2 * epoch, true, true); }
KERNEL(read_only_later) { y[threadIdx.x] = __ldg(here(a, data) + threadIdx.x); meet(a, flags, 2 * epoch + 1, true, true); }

// ---- shared memory that nobody has written
template <bool whole> __device__ void through_shared(u32* y) {
    __shared__ u32 words[64];
    if (whole || threadIdx.x < 16) words[threadIdx.x] = threadIdx.x;
    __syncthreads();
    y[threadIdx.x] = words[31 - threadIdx.x];
}
KERNEL(half_written) { through_shared<false>(y); }
KERNEL(all_written) { through_shared<true>(y); }

// ---- barriers in two branches of one line
KERNEL(two_branches) {
    if (threadIdx.x < 16) { y[threadIdx.x] = 1; __syncthreads(); y[threadIdx.x + 64] = 2; } else { __syncthreads(); y[threadIdx.x] = 3; }
}
KERNEL(half_a_warp) { if (threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync(~0u, epoch, 1); else { __syncwarp(); y[threadIdx.x] = 3; } }
KERNEL(one_branch) { for (u32 i = 0; i < epoch + 2; ++i) { __syncthreads(); if (threadIdx.x == i) y[i] = 1; } }

// ---- the end of a launch
KERNEL(fill) { here(a, data)[threadIdx.x] = epoch + threadIdx.x; }
template <bool r0, bool a0, bool r1, bool a1> __device__ void sum_both(const Arena& a, u64 data, u64 flags, u32* y, u32 epoch) {
    meet(a, flags, 2 * epoch, r0, a0);
    y[threadIdx.x] = here(a, data)[threadIdx.x] + there(a, data)[threadIdx.x];
    meet(a, flags, 2 * epoch + 1, r1, a1);
}
KERNEL(both_relaxed) { sum_both<false, false, false, false>(a, data, flags, y, epoch); }
KERNEL(relaxed_start) { sum_both<false, true, true, true>(a, data, flags, y, epoch); }
KERNEL(relaxed_end) { sum_both<true, true, false, false>(a, data, flags, y, epoch); }
KERNEL(release_at_end) { sum_both<true, true, true, false>(a, data, flags, y, epoch); }
KERNEL(ordered) { sum_both<true, true, true, true>(a, data, flags, y, epoch); }
// Data of this launch behind a relaxed flag, and data that is overwritten in this launch behind one.
KERNEL(put_relaxed) {
    there(a, data)[threadIdx.x] = epoch;
    meet(a, flags, 2 * epoch, false, true);
    y[threadIdx.x] = here(a, data)[threadIdx.x];
    meet(a, flags, 2 * epoch + 1, true, true);
}
KERNEL(overwrite_relaxed) {
    y[threadIdx.x] = there(a, data)[threadIdx.x];
    meet(a, flags, 2 * epoch, false, true);
    here(a, data)[threadIdx.x] = epoch;
    meet(a, flags, 2 * epoch + 1, true, true);
}
KERNEL(narrow_wait) {
    there(a, data)[threadIdx.x] = epoch;
    __syncthreads();
    if (threadIdx.x == 0) {
        signal(a, flags, 2 * epoch, true);
        while (ptx::load_relaxed_gpu(here(a, flags)) < 2 * epoch) {}
        ptx::fence_system();
    }
    __syncthreads();
    y[threadIdx.x] = here(a, data)[threadIdx.x];
    meet(a, flags, 2 * epoch + 1, true, true);
}
// Slots that are their own flags, cleared one launch later: three of them are enough, two are not.
template <u32 slots> __device__ void lamport(const Arena& a, u64 data, u32* y, u32 epoch) {
    const u32 now = epoch % slots * 32 + threadIdx.x, old = (epoch + slots - 1) % slots * 32 + threadIdx.x;
    ptx::store_relaxed_system(there(a, data) + now, epoch);
    ptx::store_relaxed_system(here(a, data) + old, 0);
    u32 seen;
    while ((seen = ptx::load_relaxed_system(here(a, data) + now)) == 0) {}
    y[threadIdx.x] = seen;
}
KERNEL(three_slots) { lamport<3>(a, data, y, epoch); }
KERNEL(two_slots) { lamport<2>(a, data, y, epoch); }

// ---- a fence that does not count
template <bool one> __device__ void fence_then_signal(const Arena& a, u64 data, u64 flags, u32* y, u32 epoch) {
    there(a, data)[threadIdx.x] = 1;
    ptx::fence_system();
    meet(a, flags, 2 * epoch, one, true);
    y[threadIdx.x] = here(a, data)[threadIdx.x];
    meet(a, flags, 2 * epoch + 1, true, true);
}
KERNEL(all_fence) { fence_then_signal<false>(a, data, flags, y, epoch); }
KERNEL(one_fences) { fence_then_signal<true>(a, data, flags, y, epoch); }

// ---- fences that all have one order
template <bool all, bool reader> __device__ void in_order(const Arena& a, u64 data, u64 flags, u32* y, u32 epoch) {
    there(a, data)[threadIdx.x] = 1;
    if (all || threadIdx.x == 0) __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        signal(a, flags, 2 * epoch, false);
        await(a, flags, 2 * epoch, !reader);
        if (reader) __threadfence_system();
    }
    __syncthreads();
    y[threadIdx.x] = here(a, data)[threadIdx.x];
    meet(a, flags, 2 * epoch + 1, true, true);
}
KERNEL(in_order_all) { in_order<true, true>(a, data, flags, y, epoch); }
KERNEL(in_order_one) { in_order<false, true>(a, data, flags, y, epoch); }
KERNEL(in_order_writers) { in_order<true, false>(a, data, flags, y, epoch); }
KERNEL(in_order_never_read) {
    there(a, data)[threadIdx.x] = 1;
    __threadfence_system();
    y[threadIdx.x] = here(a, data)[threadIdx.x];
}

"""

PTX_SOURCE = (
    SOURCE.partition("// ---- addresses")[0]
    + r"""
__device__ void store4(u32* p, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ uint4 load4(u32* p) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
// A flag for sixteen bytes, or one for each eight.
template <bool each> __device__ void packet(const Arena& a, u64 data, u32* y, u32 epoch) {
    const u32 i = 4 * threadIdx.x;
    store4(there(a, data) + i, 6 + epoch, each ? epoch : 8, 8 + epoch, epoch);
    uint4 got;
    do got = load4(here(a, data) + i);
    while (got.w < epoch || (each && got.y < epoch));
    y[threadIdx.x] = got.x + got.z;
}
KERNEL(one_flag) { packet<false>(a, data, y, epoch); }
KERNEL(two_flags) { packet<true>(a, data, y, epoch); }
KERNEL(first) { if (epoch == 1) y[threadIdx.x + 32] = threadIdx.x; asm volatile("griddepcontrol.launch_dependents;"); }
KERNEL(never_waits) { y[threadIdx.x] = y[threadIdx.x + 32]; }
KERNEL(waits) { asm volatile("griddepcontrol.wait;" ::: "memory"); y[threadIdx.x] = y[threadIdx.x + 32]; }
__device__ u32 add(u32* p, u32 value) {
    u32 before;
    asm volatile("atom.acq_rel.sys.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(value) : "memory");
    return before;
}
KERNEL(meet_by_atomics) {
    for (u32 round = 0; round < 2; ++round) {
        if (round == 0) there(a, data)[threadIdx.x] = epoch;
        __syncthreads();
        if (threadIdx.x == 0) {
            add(there(a, flags), 1);
            while (add(here(a, flags), 0) < 2 * epoch - 1 + round) {}
        }
        __syncthreads();
        if (round == 0) y[threadIdx.x] = here(a, data)[threadIdx.x];
    }
}
KERNEL(largest) { atomicMax(y, threadIdx.x + 5); }
KERNEL(same_values) { y[threadIdx.x % 16] = threadIdx.x % 16; }
KERNEL(other_values) { y[threadIdx.x % 16] = threadIdx.x; }
"""
)
EITHER = "#ifdef __CUDA_ARCH__\n#define GPU 1\n#else\n#define GPU 0\n#endif\n" + SOURCE.partition("// ---- addresses")[0]
EITHER += "KERNEL(on_gpu) { if (GPU && threadIdx.x > 15) return; y[GPU ? threadIdx.x / 2 : threadIdx.x] = threadIdx.x; }\n"
EITHER += "KERNEL(on_both) { y[threadIdx.x] = GPU; }\n"


def run(*kernels: str, from_ptx: bool, source: str = SOURCE, dependent: bool = False, expected: list[int] | None = None) -> Report:
    """Two rounds of the kernels, on two ranks."""
    scenario = Scenario(kernels[-1], source, 2)
    arena = scenario.arena(4096)
    places = [ctypes.c_uint64(arena.take(1024)), ctypes.c_uint64(arena.take(128))]
    wanted = None if expected is None else [torch.tensor(expected, dtype=torch.int32)] * 2
    y = scenario.buffer("y", [torch.zeros(512 if wanted is None else len(expected or ()), dtype=torch.int32)] * 2, wanted)
    for epoch in range(1, 6 if "slots" in kernels[-1] else 3):
        for kernel in kernels:
            overlaps = dependent and kernel != "first"
            scenario.launch(kernel, 1, 32, [arena, *places, y, ctypes.c_uint32(epoch)], dependent=overlaps)
    return check(scenario, schedules=12, from_ptx=from_ptx, for_gpu=from_ptx or source == EITHER)


def kinds(report: Report) -> set[str]:
    """Returns the kinds of the findings, and those of notes with a sign behind."""
    return {finding.kind for finding in report.findings} | {f"{note.kind}?" for note in report.notes}


@pytest.mark.two_compilers
@pytest.mark.parametrize("from_ptx", [False, True], ids=["c++", "ptx"])
@pytest.mark.parametrize(
    ("kernels", "found"),
    [
        ("vector_at_4", {"misaligned_address"}),
        ("vector_at_16", set()),
        ("double_at_4", {"misaligned_address"}),
        ("double_at_8", set()),
        ("atomic_at_2", {"misaligned_address"}),
        ("bulk_from_8", {"misaligned_address"}),
        ("bulk_to_8", {"misaligned_address"}),
        ("bulk_of_24", {"misaligned_address"}),
        ("bulk_of_16s", set()),
        ("read_only", {"race"}),
        ("read_and_written", set()),
        ("put read_only_later", set()),
        ("half_written", {"uninitialised_read"}),
        ("all_written", set()),
        ("two_branches", {"barrier"}),
        ("half_a_warp", {"barrier"}),
        ("one_branch", set()),
        ("fill both_relaxed", {"launch_boundary?"}),
        ("fill relaxed_start", {"launch_boundary?"}),
        ("fill relaxed_end", {"launch_boundary?"}),
        ("fill release_at_end", {"launch_boundary?"}),
        ("fill ordered", set()),
        ("put_relaxed", {"race"}),
        ("overwrite_relaxed", {"race"}),
        ("three_slots", {"launch_boundary?"}),
        ("all_fence", {"race"}),
        ("one_fences", set()),
        ("in_order_all", set()),
        ("in_order_one", {"race"}),
        ("in_order_writers", {"race"}),
        ("in_order_never_read", {"race"}),
    ],
)
def test_a_fault_is_told_and_its_twin_is_not(kernels: str, found: set[str], from_ptx: bool) -> None:
    report = run(*kernels.split(), from_ptx=from_ptx)
    assert kinds(report) - (found and {"launch_boundary?"} - found) == found, str(report)
    if kernels == "read_only":
        assert "drop const __restrict__ or __ldg" in str(report)
    if kernels == "all_fence":
        assert str(report).count(" <- ") >= 2, str(report)  # of the helper and of the kernel
        assert "does not count for the flag of thread 0: fence in the thread that signals" in str(report)
    if "launch_boundary?" in found:
        assert kinds(report.strictly()) == {"race"} and "PTX does not promise it" in str(report.strictly())


def test_a_slot_that_is_used_again_too_early_is_lost() -> None:
    assert "lost_update" in kinds(run("two_slots", from_ptx=False))


@pytest.mark.two_compilers
@pytest.mark.parametrize(
    ("kernels", "found"),
    [
        ("first never_waits", {"race"}),
        ("first waits", set()),
        ("meet_by_atomics", set()),
        ("same_values", {"same_value?"}),
        ("other_values", {"race"}),
    ],
)
def test_what_ptx_alone_shows(kernels: str, found: set[str]) -> None:
    report = run(*kernels.split(), from_ptx=True, source=PTX_SOURCE, dependent="first" in kernels)
    assert kinds(report) == found, str(report)


@pytest.mark.two_compilers
def test_an_atomic_maximum_is_one() -> None:
    assert run("largest", from_ptx=True, source=PTX_SOURCE, expected=[36]).clean


def test_a_flag_that_is_seen_in_a_narrow_scope_hands_nothing_on() -> None:
    memory = " ".join(finding.memory for finding in run("narrow_wait", from_ptx=False).findings)
    assert "arena allocation 0" in memory and "arena allocation 1" in memory  # the data and the flag


@pytest.mark.two_compilers
def test_sixteen_bytes_with_one_flag_are_seen_half() -> None:
    expected = [18] * 32 + [0] * 96
    broken = run("one_flag", from_ptx=True, source=PTX_SOURCE, expected=expected)
    assert kinds(broken) == {"wrong_result"} and "half of a store of 16 bytes" in str(broken)
    assert "wrong_result" not in kinds(run("two_flags", from_ptx=True, source=PTX_SOURCE, expected=expected))


@pytest.mark.two_compilers
def test_code_for_the_gpu_s_compiler_alone_is_run() -> None:
    assert kinds(run("on_gpu", from_ptx=False, source=EITHER)) == {"race"}
    assert not kinds(run("on_both", from_ptx=False, source=EITHER, expected=[1] * 32))
