"""Tensor copies run from PTX as they do from C++: the same bytes, the same findings, one to five dimensions."""

import functools

import pytest
import torch

from device.runs import require_clean
from peerlane.device import compile_cubin
from peerlane.device.host.tensor_map import TensorMapSpec
from peerlane.emulator import Ptx, Report, Scenario, check

SOURCE = r"""
#include <peerlane/ptx/ptx_tensor.cuh>
using namespace peerlane;
extern "C" __global__ void through(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to, u32* out) {
    __shared__ alignas(1024) u32 box[256];
    __shared__ u64 full;
    const u32 t = threadIdx.x;
    if (t == 0) ptx::mbarrier_init(&full, 1), ptx::mbarrier_init_fence();
    __syncthreads();
    if (t == 0) {
        ptx::mbarrier_arrive_expect(&full, sizeof box);
        ptx::tensor_load(box, &from, &full, 16, 7, 1);
    }
    while (BROKEN != 1 && !ptx::mbarrier_try_wait(&full, 0)) {}
    for (u32 i = t; i < 256; i += 32) {
        u32& word = box[i ^ (i >> 5 & 7) << 2];  // where the swizzle has put it
        out[i] = word;
        word += 1000;
    }
    if (BROKEN != 2) ptx::fence_proxy_async_shared();
    __syncthreads();
    if (t == 0) {
        ptx::tensor_store(&to, box, 24, -1);
        ptx::bulk_commit();
        ptx::bulk_wait<0>();
    }
}
"""


def spec(address: int, tensor: torch.Tensor, box: tuple[int, ...], swizzled: bool = True) -> TensorMapSpec:
    return TensorMapSpec(address, tensor.dtype, tuple(tensor.shape), tensor.stride(), box, swizzled)


@functools.cache
def through(broken: int, *, from_ptx: bool) -> Report:
    """Loads a box of a tensor that ends within it, adds to it, and stores it at the edge of another tensor."""
    given, target = torch.arange(3 * 9 * 40, dtype=torch.int32).view(3, 9, 40) + 1, torch.zeros(8, 40, dtype=torch.int32)
    box, stored = torch.zeros(2, 4, 32, dtype=torch.int32), target.clone()
    box[:, :2, :24] = given[1:, 7:, 16:]
    stored[:7, 24:] = box.view(8, 32)[1:, :16] + 1000
    defines = {"BROKEN": broken}
    source = Ptx(compile_cubin(SOURCE, defines=defines).ptx()) if from_ptx else SOURCE
    scenario = Scenario("through", source, 1, {} if from_ptx else defines)
    right = broken == 0
    read = scenario.buffer("read", [given])
    written = scenario.buffer("written", [target], [stored] if right else None)
    out = scenario.buffer("out", [torch.zeros(256, dtype=torch.int32)], [box.flatten()] if right else None)
    maps = [spec(read.addresses[0], given, (2, 4, 32)).emulated(), spec(written.addresses[0], target, (8, 32)).emulated()]
    scenario.launch("through", 1, 32, [*maps, out])
    return check(scenario, schedules=20)


def test_a_box_from_ptx_has_the_same_bytes() -> None:
    for from_ptx in (False, True):
        report = through(0, from_ptx=from_ptx)
        assert report.clean, f"{from_ptx}: {report}"


@pytest.mark.parametrize(("broken", "kind"), [(1, "race"), (2, "proxy_fence")])
def test_faults_of_tensor_copies_are_found_from_ptx(broken: int, kind: str) -> None:
    from_source, from_ptx = through(broken, from_ptx=False), through(broken, from_ptx=True)
    assert kind in {finding.kind for finding in from_ptx.findings}, str(from_ptx)
    told = [{(finding.kind, finding.lines) for finding in report.findings} for report in (from_source, from_ptx)]
    assert told[0] == told[1]


EDGES = r"""
#include <peerlane/ptx/ptx_tensor.cuh>
using namespace peerlane;
#define LOAD(to, map, dimensions, place)                                                                                          \
    asm volatile("cp.async.bulk.tensor." dimensions ".shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, " place \
                 "], [%2];" ::"r"(ptx::shared_address(to)), "l"(map), "r"(ptx::shared_address(&full)), "r"(1), "r"(-1) : "memory")
extern "C" __global__ void edges(const __grid_constant__ TensorMap line, const __grid_constant__ TensorMap five, u32* out) {
    __shared__ alignas(128) u32 first[32];
    __shared__ alignas(128) u32 second[4 * 16];
    __shared__ u64 full;
    const u32 t = threadIdx.x;
    if (t == 0) {
        ptx::mbarrier_init(&full, 1), ptx::mbarrier_init_fence();
        ptx::mbarrier_arrive_expect(&full, sizeof first + sizeof second);
        LOAD(first, &line, "1d", "{%4}");
        LOAD(second, &five, "5d", "{%3, %4, %3, %4, %3}");
    }
    __syncthreads();
    while (!ptx::mbarrier_try_wait(&full, 0)) {}
    out[t] = first[t];
    for (u32 i = t; i < 64; i += 32) out[32 + i] = second[i];
}
"""


def test_boxes_have_one_to_five_dimensions() -> None:
    line, five = torch.arange(1, 21, dtype=torch.int32), torch.arange(3 * 2 * 3 * 2 * 4, dtype=torch.int32).view(3, 2, 3, 2, 4) + 1
    first, second = torch.zeros(32, dtype=torch.int32), torch.zeros(2, 2, 2, 2, 4, dtype=torch.int32)
    first[1:21] = line
    second[:, 1:, :, 1:, :3] = five[1:, :1, 1:, :1, 1:]
    scenario = Scenario("edges", Ptx(compile_cubin(EDGES).ptx()), 1)
    places = [scenario.buffer("line", [line]).addresses[0], scenario.buffer("five", [five]).addresses[0]]
    out = scenario.buffer("out", [torch.zeros(96, dtype=torch.int32)], [torch.cat([first, second.flatten()])])
    maps = [spec(places[0], line, (32,), False).emulated(), spec(places[1], five, (2, 2, 2, 2, 4), False).emulated()]
    scenario.launch("edges", 1, 32, [*maps, out])
    require_clean(scenario, schedules=5)
