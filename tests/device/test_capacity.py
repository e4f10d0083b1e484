"""Fused products of many sizes take memory for a few capacities, and launches of other sizes behind each other do not meet in it."""

import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from device import emulated
from device.runs import equal, run_calls
from peerlane import solutions
from peerlane.device import group_of
from peerlane.device.host.tensor_map import TensorMapSpec
from peerlane.device.products import all_gather_gemm, gathering, gemm
from peerlane.device.products.capacity import capacity
from peerlane.device.products.gathering import Workspace
from peerlane.device.products.gemm_reduce_scatter import gemm_reduce_scatter
from peerlane.device.products.owner_sum import SumMemory, SumPlan
from peerlane.emulator.ranks import EmulatedRanks
from peerlane.emulator.team import EmulatedGroup, EmulatedLaunch
from representatives import first

WORLD, N, K = 2, 16, 8


def test_capacities_are_few_and_below_twice_the_need() -> None:
    assert len({capacity(rows) for rows in range(1, 8 * 8192 + 1)}) <= 14
    assert all(rows <= capacity(rows) < 2 * max(rows, 64) for rows in (1, 63, 64, 65, 128, 129, 8191, 8192))


@pytest.mark.parametrize("communicator_blocks", [0, 8, 16])
@pytest.mark.parametrize("local_k", [8, 136, 2048])
def test_no_smaller_size_has_more_pieces_than_there_are_flags(local_k: int, communicator_blocks: int) -> None:
    for room in (64, 128, 1024, 8192):
        most = gathering.most_pieces(room, local_k, 4, communicator_blocks)
        counts = [gathering.choose_pieces(m, local_k, 4, communicator_blocks).count for m in range(1, room + 1)]
        assert max(counts) <= most


def test_a_thousand_sizes_take_memory_for_a_few_capacities(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    allocate = EmulatedGroup.allocate

    def counted(group: EmulatedGroup, nbytes: int, *others: Any) -> Any:
        if group.rank == 0:
            taken.append(nbytes)
        return allocate(group, nbytes, *others)

    monkeypatch.setattr(EmulatedGroup, "allocate", counted)
    monkeypatch.setattr(EmulatedLaunch, "__call__", lambda launch: None)
    draw = random.Random(0)
    sizes = [WORLD * draw.randint(1, 8192) for _ in range(1000)]
    a, b, wide = torch.zeros(WORLD * 8192, K).bfloat16(), torch.zeros(K, N).bfloat16(), torch.zeros(WORLD * K, N).bfloat16()

    def call() -> None:
        for m in sizes:
            group = group_of()
            gemm_reduce_scatter(group, m, N, a.dtype)(a[:m], b)
            all_gather_gemm.all_gather_gemm(group, m, K, a.dtype, n=N)(a[:m], wide)

    made = EmulatedRanks(WORLD, schedules=1, sm_count=8)
    made.load(lambda rank: call)
    made.call([()] * WORLD, lambda rank, result: None)
    # What the first sizes take serves all smaller ones: at most one arena for each capacity that is larger than all before.
    assert len(taken) <= sum(len(set(accumulate(map(capacity, rows), max))) for rows in ([m // WORLD for m in sizes], sizes))
    # Of each product: two buffers of every rank's part, for powers of two of rows; and flags.
    largest = 2 * WORLD * 8192 * N * gemm.ELEMENT_BYTES, 2 * WORLD * 2 * 8192 * K * gemm.ELEMENT_BYTES
    assert sum(taken) < 2 * sum(largest) + len(taken) * (1 << 18)


def drawn(number: int, world_size: int, m: int, call: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """Every rank's arguments of a problem's solution, and what it is to return."""
    n, k = 24, 16
    if number == 12:
        a, _ = emulated.products(m, [k] * world_size, n, call)
        _, b = emulated.products(m, [world_size * k] * world_size, n, call)
        expected = [(torch.cat(a, 1).float() @ own.float()).bfloat16() for own in b]
    else:
        a, b = emulated.products(m, [k] * world_size, n, call)
        each = [left.float() @ right.float() for left, right in zip(a, b, strict=True)]
        total = torch.stack(each).sum(0).bfloat16()
        whole = {13: total, 14: torch.cat(each, 1).bfloat16()}
        expected = list(total.chunk(world_size)) if number == 16 else [whole[number]] * world_size
    return list(zip(a, b, strict=True)), expected


def findings(number: int, world_size: int, sizes: list[int], schedules: int = 2) -> set[str]:
    """Kinds of the emulator's findings in calls of these sizes behind each other, and ``wrong_result`` if a result is not exact."""
    calls = [drawn(number, world_size, m, call) for call, m in enumerate(sizes)]
    run = run_calls(lambda rank: solutions.load(number), [arguments for arguments, _ in calls], schedules=schedules)
    if run.failure is not None:
        raise run.failure
    return run.faults(equal(run.outputs, [expected for _, expected in calls]))


@pytest.mark.parametrize("number", first([12, 16, 13, 14], 2))
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ten_sizes_behind_each_other_are_right(number: int, world_size: int) -> None:
    draw = random.Random(number)
    assert findings(number, world_size, [world_size * draw.randint(1, 40) for _ in range(10)]) == set()


@pytest.mark.parametrize("number", first([12, 16]))
def test_slots_that_follow_the_size_of_a_launch_are_caught(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_size(memory: SumMemory, address: int, plan: SumPlan, box_rows: int) -> TensorMapSpec:
        spec = given(memory, address, plan, box_rows)
        return replace(spec, strides=(plan.slot_bytes // gemm.ELEMENT_BYTES, *spec.strides[1:]))

    given = SumMemory.slot_map
    monkeypatch.setattr(SumMemory, "slot_map", by_size)
    monkeypatch.setattr(Workspace, "slot_bytes", property(lambda space: space.m * space.row_elements * gemm.ELEMENT_BYTES))
    assert findings(number, 2, [128, 80, 128, 72], schedules=8) & {"race", "wrong_result"}
