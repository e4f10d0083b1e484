"""Problem 1, all-reduce (sum), in CUDA C++: one launch per call, no NCCL, no barrier.

The data goes straight from the caller's tensor into the peers' memory, so inputs may lie anywhere and change from call to call. Small
tensors are sent as packets (data and flag in one store), once to everybody; medium ones as packets in two shots; large ones in two shots
through rings of tiles. The device code is ``all_reduce.cuh``, ``two_shot.cuh`` and ``relay.cuh`` in
``peerlane/collectives``.

``peerlane.device.communicator().all_reduce`` does the same in one line; here every step is in sight: source, arena, workspace, launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from peerlane.device import Arena, Group, element_type, group_of, per_group
from peerlane.device.collectives import plans
from peerlane.device.collectives.workspace import RINGS, Rings, Workspace, workspace_bytes
from peerlane.device.host.group import DeviceLaunch
from peerlane.emulator import Scenario

SOURCE = r"""
#include <peerlane/collectives/all_reduce.cuh>
#include <peerlane/collectives/relay.cuh>
#include <peerlane/collectives/two_shot.cuh>

using namespace peerlane;

#define KERNEL extern "C" __global__ void
#define PARAMETERS \
    const __grid_constant__ Arena arena, const __grid_constant__ CollectiveWorkspace space, const char* in, char* out, u64 bytes

KERNEL all_reduce_one_shot(PARAMETERS) { one_shot<ELEMENT, WORLD_SIZE>(arena, space, in, out, bytes); }
KERNEL all_reduce_two_shot(PARAMETERS) { two_shot<ELEMENT, WORLD_SIZE>(arena, space, AllReduceRoute<WORLD_SIZE>{}, in, out, bytes); }
KERNEL all_reduce_two_shot_rounds(PARAMETERS) {
    two_shot<ELEMENT, WORLD_SIZE, true>(arena, space, AllReduceRoute<WORLD_SIZE>{}, in, out, bytes);
}
KERNEL all_reduce_relay(PARAMETERS) { relay<ELEMENT, WORLD_SIZE>(arena, space, AllReduceRoute<WORLD_SIZE>{}, in, out, bytes); }
"""
IN, OUT = 2, 3  # places of the arguments that change from call to call


def macros(dtype: torch.dtype, world_size: int, rings: Rings = RINGS) -> dict[str, str | int]:
    return {"ELEMENT": element_type(dtype), "WORLD_SIZE": world_size, **rings.defines()}


@per_group
class AllReduce:
    """The arena, and one bound launch per (size, dtype). Created by the first call, which is collective."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.arena = Arena(workspace_bytes(group.world_size), group, timeout_s=10.0)
        self.workspace = Workspace.take(self.arena, self.arena.world_size)
        self.arena.seal()
        self.launches: dict[tuple[int, torch.dtype], DeviceLaunch] = {}

    def bind(self, numel: int, dtype: torch.dtype) -> DeviceLaunch:
        nbytes = numel * dtype.itemsize
        chosen = plans.all_reduce(nbytes, plans.Machine(self.arena.world_size, self.arena.sm_count), staged=False)
        defines = macros(dtype, self.arena.world_size)
        kernel = self.group.kernel(SOURCE, chosen.kernel, defines=defines, on_failure=self.arena.raise_fault)
        pointers = (ctypes.c_void_p(), ctypes.c_void_p())
        args = (self.arena.view, self.workspace, *pointers, ctypes.c_uint64(nbytes))
        return kernel.bind(chosen.grid, chosen.block, args, shared_bytes=chosen.shared_bytes)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.numel(), tensor.dtype)
        launch = self.launches.get(key)
        if launch is None:
            launch = self.launches[key] = self.bind(*key)
        tensor = tensor.contiguous()
        out = torch.empty_like(tensor)
        launch.args[IN].value = self.group.address(tensor)
        launch.args[OUT].value = self.group.address(out)
        launch()
        return out


def solution(tensor: torch.Tensor) -> torch.Tensor:
    group = group_of()
    if tensor.numel() == 0 or group.world_size == 1:
        return tensor.clone()
    return AllReduce(group)(tensor)


def race(world_size: int) -> Iterator[Scenario]:
    """What ``peerlane race`` checks: two calls of each kernel in a row, of a size that leaves a part of the last packet or tile over."""
    rings = Rings(tile_bytes=256, summing_warps=1)  # so that little data goes round them
    large = rings.relay_threads, rings.relay_shared_bytes
    cases = {"all_reduce_one_shot": (401, 32, 0), "all_reduce_two_shot": (801, 32, 0), "all_reduce_relay": (803, *large)}
    for kernel, (numel, block, shared_bytes) in cases.items():
        scenario = Scenario(kernel, SOURCE, world_size, macros(torch.bfloat16, world_size, rings))
        arena = scenario.arena(workspace_bytes(world_size, rings))
        workspace = Workspace.take(arena, world_size, rings)
        for call in range(2):
            # Small integers, so that every sum is exact.
            tensors = [((torch.arange(numel) * (rank + 3) + call) % 13 - 6).to(torch.bfloat16) for rank in range(world_size)]
            total = torch.stack(tensors).sum(dim=0)
            data = scenario.buffer(f"in {call}", tensors)
            out = scenario.buffer(f"out {call}", [torch.zeros_like(total)] * world_size, expected=[total] * world_size)
            args = (arena, workspace, data, out, ctypes.c_uint64(total.nbytes))
            scenario.launch(kernel, grid=1 if shared_bytes else 2, block=block, args=args, shared_bytes=shared_bytes)
        yield scenario
