"""The kernels of ``peerlane bench mechanisms``: they compile, obey the rules, and do what they are measured at."""

from __future__ import annotations

import ctypes

import pytest
import torch

from peerlane.cli.bench import print_mechanisms
from peerlane.device.emulator import Scenario, check
from peerlane.device.lint import lint
from peerlane.device.mechanisms import _SOURCE, KERNELS, SIZES, TILE_BYTES, Bandwidth, Latency, Mechanisms, cases, compile_mechanisms
from peerlane.device.resources import resources

RANKS, NBYTES = 3, 2 * (2 * TILE_BYTES + 48)


@pytest.mark.parametrize(("world_size", "arch"), [(2, "sm_100a"), (4, "sm_90a"), (8, "sm_90a")])
def test_the_kernels_compile_and_obey_the_rules(world_size: int, arch: str) -> None:
    cubin = compile_mechanisms(world_size, arch)
    assert lint(cubin.ptx()) == []
    taken = resources(cubin)
    assert set(taken) == {*KERNELS, "flag", "packet", "barrier"}
    assert all(found.frame_bytes == 0 for found in taken.values())


@pytest.mark.parametrize("kernel", ["sm_load", "bulk_load"])
def test_loads_take_what_peers_hold(kernel: str) -> None:
    """And touch nothing else: what is loaded by bulk copies ends in shared memory, so only its protocol is seen."""
    scenario = Scenario(kernel, _SOURCE, RANKS, defines={"WORLD_SIZE": RANKS})
    arena = scenario.arena(1 << 18)
    flags, data = arena.take(2 * RANKS * 128), arena.take(NBYTES)
    local = scenario.buffer("local", [torch.ones(NBYTES, dtype=torch.uint8)] * RANKS, [_loaded(kernel)] * RANKS)
    _launch(scenario, kernel, (arena, flags, data, local))
    report = check(scenario, schedules=4)
    assert report.clean, report


def _loaded(kernel: str) -> torch.Tensor:
    return torch.full((NBYTES,), 0 if kernel == "sm_load" else 1, dtype=torch.uint8)


def test_a_store_by_one_rank_at_a_time_is_clean() -> None:
    scenario = Scenario("bulk_add", _SOURCE, RANKS, defines={"WORLD_SIZE": RANKS})
    for kernel in ("bulk_store", "bulk_add", "sm_store"):
        arena = scenario.arena(1 << 18)
        flags, data = arena.take(2 * RANKS * 128), arena.take(NBYTES)
        local = scenario.buffer(kernel, [torch.zeros(NBYTES, dtype=torch.uint8)] * RANKS)
        # Only rank 0 moves data, as when it is measured.
        _launch(scenario, kernel, (arena, flags, data, local), ranks=1)
    report = check(scenario, schedules=4)
    assert report.clean, report


def test_round_trips_end() -> None:
    scenario = Scenario("turns", _SOURCE, RANKS, defines={"WORLD_SIZE": RANKS})
    arena = scenario.arena(1 << 14)
    places = [ctypes.c_uint64(arena.take(size)) for size in (2 * RANKS * 128, 16)]
    for number, what in enumerate(("flag", "packet", "barrier", "flag", "packet")):
        scenario.launch(what, 1, 32, (arena, *places, ctypes.c_uint32(10 * number), ctypes.c_uint32(10)))
    report = check(scenario, schedules=40)
    assert report.clean, report


def _launch(scenario: Scenario, kernel: str, places: tuple[object, int, int, object], ranks: int = RANKS) -> None:
    arena, flags, data, local = places
    threads, shared_bytes = KERNELS[kernel]
    count = ctypes.c_uint32(RANKS - 1)
    scenario.launch(
        kernel,
        2,
        min(threads, 64),
        (arena, ctypes.c_uint64(flags), ctypes.c_uint64(data), local, lambda rank: ctypes.c_uint64(NBYTES if rank < ranks else 0), count),
        shared_bytes=shared_bytes,
    )


def test_cases_give_every_peer_whole_vectors_and_every_block_work() -> None:
    found = list(cases(4, 132))
    assert {peers for _, _, _, peers in found} == {1, 3}
    for mechanism, nbytes, blocks, peers in found:
        assert nbytes % (16 * peers) == 0 and 0 < nbytes <= SIZES[-1]
        assert (blocks == 0) == mechanism.startswith("copy_engine") and blocks <= 132
    assert {peers for _, _, _, peers in cases(2, 132)} == {1}


def test_the_table_has_a_row_for_every_mechanism_and_block_count(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (
        Bandwidth("sm_store", 1 << 20, 8, 1, 300.0, 290.0, 310.0, 7),
        Bandwidth("copy_engine_push", 1 << 24, 0, 1, 390.0, 380.0, 395.0, 7),
    )
    print_mechanisms(Mechanisms(2, rows, (Latency("flag", 2.5, 2.4, 2.7, 7),)))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["sm_store", "8", "300", "-"] in lines and ["copy_engine_push", "-", "-", "390"] in lines
    assert ["flag", "2.50", "2.40", "2.70", "7"] in lines
