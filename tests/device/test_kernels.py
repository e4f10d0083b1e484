"""Every kernel of the repository compiles, stays within its registers and obeys the rules of memory order; broken samples do not."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from peerlane.device import compile_cubin
from peerlane.device.collectives.kernels import KERNELS, ROUNDS, compile_kernel
from peerlane.device.host.element_types import ELEMENT_TYPES
from peerlane.device.host.resources import resources
from peerlane.device.products import gemm
from peerlane.device.products.all_gather_gemm import ALL_GATHER_GEMM
from peerlane.device.tools.lint import RULES, lint
from peerlane.errors import UsageError

REGISTER_BUDGET = {
    "all_reduce_one_shot": 96,
    "all_reduce_two_shot": 104,
    "reduce_two_shot": 112,
    "all_reduce_staged": 128,
    "broadcast_two_shot": 96,
    "all_reduce_relay": 204,
    "reduce_relay": 204,
    "reduce_packets": 104,
    "reduce_ring": 192,
    **{name: 128 for name in KERNELS if name.endswith(ROUNDS)},
    "broadcast_relay": 224,
    "exchange_packets": 96,
    "exchange_ring": 128,
}
"""Registers a thread may take at most, at any world size: a block of 512 threads has 128 for each, those with rings have at most
320 threads, with 204 for each, and that of broadcast has 64. None may spill."""


def test_the_budget_covers_all_kernels() -> None:
    assert set(REGISTER_BUDGET) == set(KERNELS)


MOST_REGISTERS = (8, torch.float16, "sm_90a")
FURTHER = [
    (8, torch.bfloat16, "sm_100a"),
    (2, torch.float8_e4m3fn, "sm_90a"),
    (3, torch.float8_e5m2, "sm_90a"),
    (4, torch.int32, "sm_90a"),
    (2, torch.float32, "sm_100a"),
]
"""World sizes, dtypes and architectures; kernels that differ from others by rounds alone are compiled where they take most registers."""


def targets() -> Iterator[Any]:
    """Every kernel where it takes most registers, and for one further target in turn; for the others in the long tests."""
    for number, kernel in enumerate(KERNELS):
        yield pytest.param(kernel, *MOST_REGISTERS)
        for turn, target in enumerate(FURTHER[:1] if kernel.endswith(ROUNDS) else FURTHER):
            yield pytest.param(kernel, *target, marks=() if turn == number % len(FURTHER) else pytest.mark.long)


@pytest.mark.parametrize(("kernel", "world_size", "dtype", "arch"), [*targets()])
def test_a_kernel_fits_its_budget_and_obeys_the_rules(kernel: str, world_size: int, dtype: torch.dtype, arch: str) -> None:
    cubin = compile_kernel(kernel, world_size, dtype, arch)
    assert lint(cubin.ptx()) == []
    taken = resources(cubin)
    assert set(taken) == {kernel}
    assert 16 <= taken[kernel].registers <= REGISTER_BUDGET[kernel]
    assert taken[kernel].frame_bytes == 0
    assert taken[kernel].shared_bytes <= 2048


def test_a_dtype_without_a_sum_is_refused() -> None:
    assert len(ELEMENT_TYPES) == 6
    with pytest.raises(UsageError, match=r"a reduction of torch\.float64; the kit reduces bfloat16"):
        compile_kernel("all_reduce_relay", 2, torch.float64, "sm_90a")


@pytest.mark.parametrize("defines", [{"PEERLANE_FUZZ": 1}, {"PEERLANE_TIMELINE": 1}], ids=lambda defines: next(iter(defines)))
def test_kernels_compile_with_delays_and_with_a_timeline(defines: dict[str, int]) -> None:
    source = """
    #include <peerlane/comm.cuh>
    using namespace peerlane;
    extern "C" __global__ void step(const __grid_constant__ Arena arena, u32 number) {
        const Peers<4> peers(arena, 4096);
        peers.barrier(blockIdx.x, number);
        peers.all_reduce<Float32>(1 << 20, 4096);
        peers.barrier(blockIdx.x, number + 1);
    }
    """
    usual, watched = compile_cubin(source), compile_cubin(source, defines=defines)
    mark = {"PEERLANE_FUZZ": "nanosleep.u32", "PEERLANE_TIMELINE": "atom.relaxed.gpu.global.add.u32"}[next(iter(defines))]
    assert watched.ptx().count(mark) > usual.ptx().count(mark)


def test_roles_of_a_fused_kernel_are_stamped_only_on_demand() -> None:
    defines = {**gemm.TILINGS[0].defines(torch.bfloat16, "k", "mn", gemm.PLAIN), "WORLD_SIZE": 4, "SCATTERS": 0}
    cubins = [compile_cubin(ALL_GATHER_GEMM.source, defines={**defines, **more}) for more in ({}, {"PEERLANE_TIMELINE": 1})]
    made = [cubin.ptx().count("atom.relaxed.gpu") for cubin in cubins]
    assert made[0] == 0 and made[1] >= 10


BROKEN = {
    "signal after a .read wait": """
        ptx::bulk_store(data, ptx::dynamic_shared(), 1024);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
        ptx::fence_system();
        ptx::store_relaxed_system(flag, 1);
    """,
    "acquire in a poll loop": """
        u32 seen;
        do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory"); while (seen == 0);
        *data = seen;
    """,
    "read-only load": "*data = __ldg(flag);",
    "packet that may be split": """
        asm volatile("{\\n.reg .b128 whole; .reg .b64 low, high;\\n ld.relaxed.sys.global.b128 whole, [%1];\\n mov.b128 {low, high}, whole;"
                     "cvt.u32.u64 %0, high;\\n}" : "=r"(*data) : "l"(flag) : "memory");
    """,
    "multicast": 'asm volatile("multimem.red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(flag), "r"(1) : "memory");',
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_sample_is_found(rule: str) -> None:
    source = '#include <peerlane/ptx/ptx_async.cuh>\nusing namespace peerlane;\nextern "C" __global__ void broken(u32* flag, u32* data) {'
    findings = lint(compile_cubin(source + BROKEN[rule] + "}").ptx())
    assert [(finding.rule, finding.function) for finding in findings] == [(rule, "broken")]
    assert RULES[rule].reason in str(findings[0])


def test_a_full_wait_makes_the_signal_right() -> None:
    body = BROKEN["signal after a .read wait"].replace("ptx::fence_system();", "ptx::bulk_wait<0>(); ptx::fence_system();")
    source = '#include <peerlane/ptx/ptx_async.cuh>\nusing namespace peerlane;\nextern "C" __global__ void k(u32* flag, u32* data) {'
    assert lint(compile_cubin(source + body + "}").ptx()) == []
