"""Barriers that not all of their threads reach, grids that a GPU does not hold, and device variables of several ranks."""

import ctypes

import pytest
import torch

from peerlane.emulator import Report, Scenario, check
from peerlane.emulator.gpu_code import gpu_named
from peerlane.emulator.job import TooManyThreads

SOURCE = r"""
#include <peerlane/comm.cuh>
using namespace peerlane;
#define KERNEL extern "C" __global__ void

KERNEL two_barriers(u32* out) {
    if (threadIdx.x < 32) {
        __syncthreads();  // first
    } else {
        __syncthreads();  // second
    }
    out[threadIdx.x] = 1;
}
KERNEL some_skip(u32* out) {
    if (threadIdx.x < 32) __syncthreads();  // in a branch
    out[threadIdx.x] = 1;
    __syncthreads();  // for all
}
KERNEL same_barrier(u32* out) {
#pragma unroll
    for (int i = 0; i < 3; ++i) __syncthreads();
    if (blockIdx.x == 0) __syncthreads();  // the same for the whole block
    out[threadIdx.x] = 1;
}
KERNEL counts_differ(u32* out) {
    ptx::barrier_sync(1, threadIdx.x < 32 ? 64 : 32);
    out[threadIdx.x] = 1;
}
KERNEL odd_count(u32* out) {
    ptx::barrier_sync(1, 40);
    out[threadIdx.x] = 1;
}
KERNEL foreign_mask(u32* out) {
    __syncwarp(0x0000ffffu);  // lanes 16 to 31 are not in it
    out[threadIdx.x] = 1;
}
KERNEL masks_differ(u32* out) {
    if (threadIdx.x % 32 < 16) {
        __syncwarp();  // all
    } else {
        out[threadIdx.x] = __shfl_sync(0xffffffffu, threadIdx.x, 0);  // all
    }
}
KERNEL halves(u32* out) {
    const u32 half = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
    __syncwarp(half);
    out[threadIdx.x] = __shfl_sync(half, 1, 0, 16);
}
__device__ u32 arrived;
KERNEL meet_in_grid(u32* out) {
    if (threadIdx.x == 0) {
        atomicAdd(&arrived, 1u);
        while (ptx::load_relaxed_gpu(&arrived) < gridDim.x) {}
    }
    __syncthreads();
    if (blockIdx.x == 0) out[threadIdx.x] = 1;
}
KERNEL in_turn(u32* out) {
    __shared__ u32 words[32];
    if (threadIdx.x < 32) words[threadIdx.x] = blockIdx.x;
    __syncthreads();
    if (threadIdx.x < 32) out[blockIdx.x * 32 + threadIdx.x] = words[31 - threadIdx.x] + 1;
}
KERNEL one_place(u32* out) { out[threadIdx.x] = blockIdx.x; }
KERNEL narrow_sum(u32* out) { if (threadIdx.x == 0) atomicAdd_block(out, 1u); }
extern "C" __global__ void in_pairs(u32* mine, u32* there) {
    if (threadIdx.x == 0) {
        ptx::store_relaxed_system(there + blockIdx.x, 1);
        while (ptx::load_relaxed_system(mine + blockIdx.x) == 0) {}
    }
}
KERNEL chain(u32* out) {
    if (threadIdx.x == 0) {
        while (ptx::load_relaxed_gpu(&arrived) < blockIdx.x) {}
        atomicAdd(&arrived, 1u);
    }
}
KERNEL count_calls(u32* out) {
    if (threadIdx.x == 0) arrived += blockIdx.y + 1;
    out[threadIdx.x] = 1;
}
KERNEL read_calls(u32* out) { out[threadIdx.x] = arrived == 2 && threadIdx.x < 64; }
"""


def run(kernel: str, *, grid: int = 1, block: int = 64, schedules: int = 6, then: str | None = None, times: int = 1) -> Report:
    scenario = Scenario(kernel, SOURCE, 2)
    ones = torch.ones(block, dtype=torch.int32)
    out = scenario.buffer("out", [torch.zeros_like(ones)] * 2, [ones] * 2)
    for name in [kernel] * times + ([then] if then else []):
        scenario.launch(name, grid, block, [out])
    return check(scenario, schedules=schedules)


@pytest.mark.parametrize(
    ("kernel", "kind", "comments"),
    [
        ("two_barriers", "barrier", ("first", "second")),
        ("some_skip", "barrier", ("in a branch", "for all")),
        ("counts_differ", "barrier", ()),
        ("odd_count", "misuse", ()),
        ("foreign_mask", "misuse", ("lanes 16 to 31",)),
        ("masks_differ", "barrier", ("__syncwarp();  // all", "0);  // all")),
    ],
)
def test_threads_that_miss_a_barrier_are_told_with_lines(kernel: str, kind: str, comments: tuple[str, ...]) -> None:
    (finding,) = [finding for finding in run(kernel).findings if finding.kind == kind]
    lines = {SOURCE.splitlines()[frame.line - 1] for side in finding.sides for frame in side.frames[-1:]}
    assert all(any(comment in line for line in lines) for comment in comments), str(finding)
    assert str(finding).count("\n") < 20


@pytest.mark.parametrize("kernel", ["same_barrier", "halves"])
def test_a_barrier_that_all_reach_is_not_told(kernel: str) -> None:
    report = run(kernel)
    assert report.clean, str(report)


@pytest.mark.parametrize(("gpu", "grid", "kinds"), [("h100", 132, set()), ("h100", 133, {"deadlock"}), ("b200", 133, set())])
def test_a_grid_that_the_gpu_does_not_hold_deadlocks(gpu: str, grid: int, kinds: set[str]) -> None:
    scenario = Scenario("meet in grid", SOURCE, 1)
    out = scenario.buffer("out", [torch.zeros(32, dtype=torch.int32)])
    scenario.launch("meet_in_grid", grid, 32, [out], shared_bytes=200_000)  # one block an SM
    report = check(scenario, schedules=2, gpu=gpu_named(gpu))
    assert {finding.kind for finding in report.findings} == kinds
    assert all(f"1 blocks of rank 0 have not started: only {grid - 1} are" in finding.detail for finding in report.findings)


def test_a_kernel_that_relies_on_the_order_of_blocks_deadlocks() -> None:
    """Each block waits for the one before it; started in another order, those that are waited for have no room."""
    scenario = Scenario("chain", SOURCE, 1, resident_blocks=4)
    out = scenario.buffer("out", [torch.zeros(32, dtype=torch.int32)])
    scenario.launch("chain", 40, 32, [out])
    report = check(scenario, schedules=8)
    assert {finding.kind for finding in report.findings} == {"deadlock"} and 0 < report.caught < 8


@pytest.mark.parametrize(
    ("kernel", "kinds"), [("in_turn", set()), ("one_place", {"race"}), ("narrow_sum", {"race"})], ids=["in_turn", "one_place", "narrow_sum"]
)
def test_blocks_that_run_in_turn_are_different_blocks(kernel: str, kinds: set[str]) -> None:
    scenario = Scenario(kernel, SOURCE, 1, resident_blocks=1)
    expected = [torch.arange(1, 9, dtype=torch.int32).repeat_interleave(32)] if kernel == "in_turn" else None
    out = scenario.buffer("out", [torch.zeros(256, dtype=torch.int32)], expected)
    scenario.launch(kernel, 8, 32, [out])
    report = check(scenario, schedules=6)
    assert {finding.kind for finding in report.findings} == kinds, str(report)
    blocks = {side.block for finding in report.findings for side in finding.sides}
    assert not kinds or len(blocks) == 2


def test_a_large_grid_runs_in_turn_unless_its_blocks_wait() -> None:
    def large(kernel: str) -> Scenario:
        scenario = Scenario(kernel, SOURCE, 1)
        scenario.launch(kernel, 61, 1024, [scenario.buffer("out", [torch.zeros(61 * 32, dtype=torch.int32)])])
        return scenario

    assert check(large("in_turn"), schedules=1).clean
    with pytest.raises(TooManyThreads, match="launches 62464 threads at a time"):
        check(large("meet_in_grid"), schedules=1)


def test_blocks_of_a_large_grid_start_in_order() -> None:
    scenario = Scenario("in pairs", SOURCE, 2)
    arena = scenario.arena(1024)
    at = arena.take(256)
    places = [lambda rank, other=other: ctypes.c_uint64(arena.memory.addresses[rank ^ other] + at) for other in (0, 1)]
    scenario.launch("in_pairs", 61, 1024, places)
    report = check(scenario, schedules=1, first_schedule=1)  # in which one rank would start at the other end
    assert report.clean, str(report)


def test_device_variables_are_a_rank_s_own_and_stay() -> None:
    report = run("count_calls", then="read_calls", times=2)
    assert report.clean, str(report)


def test_a_race_on_a_device_variable_is_told() -> None:
    races = [finding.memory for finding in run("count_calls", grid=2, schedules=2).findings if finding.kind == "race"]
    assert "device variables+0 to +4 of ranks 0, 1" in races
