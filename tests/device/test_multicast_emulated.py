"""NVLink multicast on emulated ranks: a right kernel is clean, lacking barriers are told, other uses of the addresses are errors."""

import ctypes
from pathlib import Path

import pytest
import torch

from device import multicast_kernels as kernels
from device.runs import Run, equal, run_calls
from peerlane.device import compile_cubin
from peerlane.emulator import Ptx, Report, Scenario, check


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")


def raced(broken: int) -> Run:
    """Two calls on three ranks."""
    return run_calls(lambda rank: kernels.solution(broken), [kernels.inputs(3)] * 2, schedules=8)


def test_a_right_all_reduce_by_multicast_is_clean() -> None:
    wanted = torch.stack([x for (x,) in kernels.inputs(3)]).sum(0)
    assert equal(raced(0).clean()[-1], [wanted] * 3)


@pytest.mark.parametrize("broken", [1, 2])
def test_a_lacking_barrier_is_told_with_both_lines(broken: int) -> None:
    file = Path(kernels.__file__)
    lines = file.read_text().splitlines()
    write, read = (1 + next(i for i, line in enumerate(lines) if text in line) for text in ("[i] = x[i]", '"=f"(sum.x)'))
    told = raced(broken).races
    assert any(f"{file.name}:{write}\n" in text and f"{file.name}:{read}\n" in text for text in told), "\n".join(told)


def test_without_permission_there_is_no_multicast_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    run = raced(0)
    assert not run.outputs and run.kinds == {"illegal_address"}
    (found,) = map(str, run.findings)
    assert "not a multicast address of this rank" in found and "TORCH_SYMM_MEM_DISABLE_MULTICAST=0 allows" in found


# One thread of each rank: words of all types, read on all ranks, then stored and changed on all ranks.
OPERATIONS = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
typedef unsigned u32;
typedef unsigned long long u64;
extern "C" __global__ void operations(char* own, char* cast, u32* flag, u32* cast_flag, u32 rank, u32 ranks, u32* out) {
    auto meet = [&](u32 wanted) {
        asm volatile("multimem.red.release.sys.global.add.u32 [%0], 1;" ::"l"(cast_flag) : "memory");
        u32 seen;
        do asm volatile("multimem.ld_reduce.acquire.sys.global.min.u32 %0, [%1];" : "=r"(seen) : "l"(cast_flag) : "memory");
        while (seen < wanted * ranks);
    };
    reinterpret_cast<u32*>(own)[0] = 10 * (rank + 1);
    reinterpret_cast<int*>(own)[1] = -int(rank) - 1;
    reinterpret_cast<u64*>(own)[1] = 1ull << (40 + rank);
    for (int i = 0; i < 4; ++i) reinterpret_cast<u32*>(own + 16)[i] = (rank ? 0x3f80u : 0x4380u) | 0x40000000u;  // bf16: 1 or 256; 2
    reinterpret_cast<double*>(own)[4] = 0.5 * (rank + 1);
    reinterpret_cast<u32*>(own)[10] = 0x3c004000u + (rank << 10);  // fp16: 2, 4, 8, ..; 1
    meet(1);
    u32 a, b, e[8];
    int c;
    u64 d;
    double f;
    asm volatile("multimem.ld_reduce.weak.global.add.u32 %0, [%1];" : "=r"(a) : "l"(cast) : "memory");
    asm volatile("multimem.ld_reduce.relaxed.gpu.global.max.u32 %0, [%1];" : "=r"(b) : "l"(cast) : "memory");
    asm volatile("multimem.ld_reduce.weak.global.min.s32 %0, [%1];" : "=r"(c) : "l"(cast + 4) : "memory");
    asm volatile("multimem.ld_reduce.weak.global.or.b64 %0, [%1];" : "=l"(d) : "l"(cast + 8) : "memory");
    asm volatile("multimem.ld_reduce.weak.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
                 : "=r"(e[0]), "=r"(e[1]), "=r"(e[2]), "=r"(e[3]) : "l"(cast + 16) : "memory");
    asm volatile("multimem.ld_reduce.weak.global.add.v2.bf16x2 {%0, %1}, [%2];" : "=r"(e[4]), "=r"(e[5]) : "l"(cast + 16) : "memory");
    asm volatile("multimem.ld_reduce.weak.global.max.f16x2 %0, [%1];" : "=r"(e[6]) : "l"(cast + 40) : "memory");
    asm volatile("multimem.ld_reduce.weak.global.add.f64 %0, [%1];" : "=d"(f) : "l"(cast + 32) : "memory");
    meet(2);
    if (rank == 0) asm volatile("multimem.st.weak.global.v2.f32 [%0], {%1, %2};" ::"l"(cast + 64), "f"(1.5f), "f"(2.5f) : "memory");
    asm volatile("multimem.red.relaxed.sys.global.add.f16x2 [%0], %1;" ::"l"(cast + 72), "r"(0x3c004000u) : "memory");
    asm volatile("multimem.red.relaxed.sys.global.max.u32 [%0], %1;" ::"l"(cast + 76), "r"(rank + 7) : "memory");
    meet(3);
    const u32 row[] = {a, b, u32(c), u32(d >> 40), e[0], e[3], e[4], e[6], u32(f * 2),
        reinterpret_cast<u32*>(own)[16], reinterpret_cast<u32*>(own)[17], reinterpret_cast<u32*>(own)[18], reinterpret_cast<u32*>(own)[19]};
    for (int i = 0; i < 13; ++i) out[i] = row[i];
}
"""


def run(source: Ptx, kernel: str, out: list[int], ranks: int, number: int, nodes: int = 1) -> Report:
    """Runs a kernel on an arena that has multicast addresses."""
    scenario = Scenario("multicast", source, ranks, nodes=nodes)
    arena = scenario.arena(4096)
    cast, data, flag = scenario.multicast(arena), arena.take(128), arena.take(128)
    words = torch.tensor(out, dtype=torch.int64).to(torch.int32)
    result = scenario.buffer("out", [torch.zeros(max(len(out), 1), dtype=torch.int32)] * ranks, [words] * ranks if out else None)

    def at(addresses: list[int], offset: int):  # type: ignore[no-untyped-def]
        return lambda rank: ctypes.c_uint64(addresses[rank] + offset)

    places = [at(addresses, offset) for offset in (data, flag) for addresses in (arena.memory.addresses, cast.addresses)]
    scenario.launch(kernel, 1, 1, [*places, lambda rank: ctypes.c_uint32(rank), ctypes.c_uint32(number), result])
    return check(scenario, schedules=20)


def test_operations_join_the_words_of_all_ranks() -> None:
    # In bf16, 256 + 1 rounds to 256 each time; in fp32, 258 is the sum. 6 is the sum of three times 2.
    wanted = [60, 30, -3, 0b111, 0x40C04381, 0x40C04381, 0x40C04380, 0x3C004800, 6, 0x3FC00000, 0x40200000, 0x42004600, 9]
    report = run(Ptx(compile_cubin(OPERATIONS).ptx()), "operations", wanted, 3, 3)
    assert report.clean, str(report)


USES = r"""
typedef unsigned u32;
#define STORE(at) asm volatile("multimem.st.weak.global.u32 [%0], %1;" ::"l"(at), "r"(1) : "memory")
extern "C" __global__ void wrong(u32* own, u32* cast, u32* flag, u32* cast_flag, u32 rank, u32 which, u32* out) {
    if (which == 0) cast[0] = 1;
    if (which == 1) STORE(own);
    if (which == 2) STORE(reinterpret_cast<char*>(cast) + 2);
    if (which == 3) STORE(cast + 64);  // behind what was taken
}
extern "C" __global__ void of_a_node(u32* own, u32* cast, u32* flag, u32* cast_flag, u32 rank, u32 per_node, u32* out) {
    asm volatile("multimem.red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(cast), "r"(1u << rank) : "memory");
    u32 seen;
    do asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(own) : "memory");
    while (seen != ((1u << per_node) - 1) << rank / per_node * per_node);
}
"""
WORDS = ("writes 4 bytes: source.cu:5", "not a multicast address of this rank", "not aligned", "writes 4 bytes: source.cu:8")


@pytest.mark.parametrize("which", range(4))
def test_another_use_of_the_address_is_an_error(which: int) -> None:
    report = run(Ptx(compile_cubin(USES).ptx()), "wrong", [], 2, which)
    assert {finding.kind for finding in report.findings} == {"illegal_address"} and WORDS[which] in str(report), str(report)


def test_a_multicast_address_stands_for_the_ranks_of_a_node() -> None:
    report = run(Ptx(compile_cubin(USES).ptx()), "of_a_node", [], 4, 2, nodes=2)
    assert report.clean, str(report)
