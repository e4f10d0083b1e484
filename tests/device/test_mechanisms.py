"""Kernels of ``peerlane bench mechanisms`` compile, obey the rules, and do what they are measured at; the timeline's trace."""

import ctypes
import json
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from device.runs import require_clean
from peerlane.cli.bench import print_mechanisms
from peerlane.device.host.resources import resources
from peerlane.device.host.timeline import Event, decode
from peerlane.device.tools.lint import lint
from peerlane.device.tools.mechanisms import (
    _SOURCE,
    KERNELS,
    SIZES,
    TILE_BYTES,
    Bandwidth,
    Latency,
    Mechanisms,
    cases,
    cases_of_all,
    compile_mechanisms,
    launches_between_events,
    samples,
)
from peerlane.device.tools.trace import observed_spans, trace, write_trace
from peerlane.emulator import Scenario
from peerlane.errors import DeviceError, UsageError

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
    require_clean(scenario, schedules=4)


def _loaded(kernel: str) -> torch.Tensor:
    return torch.full((NBYTES,), 0 if kernel == "sm_load" else 1, dtype=torch.uint8)


def test_stores_by_all_ranks_at_once_are_clean() -> None:
    scenario = Scenario("bulk_add", _SOURCE, RANKS, defines={"WORLD_SIZE": RANKS})
    for kernel in ("bulk_store", "bulk_add", "sm_store"):
        arena = scenario.arena(1 << 18)
        flags, data = arena.take(2 * RANKS * 128), arena.take(NBYTES)
        local = scenario.buffer(kernel, [torch.zeros(NBYTES, dtype=torch.uint8)] * RANKS)
        _launch(scenario, kernel, (arena, flags, data, local))
    require_clean(scenario, schedules=4)


def test_round_trips_end() -> None:
    scenario = Scenario("turns", _SOURCE, RANKS, defines={"WORLD_SIZE": RANKS})
    arena = scenario.arena(1 << 14)
    places = [ctypes.c_uint64(arena.take(size)) for size in (2 * RANKS * 128, 16)]
    for number, what in enumerate(("flag", "packet", "barrier", "flag", "packet")):
        scenario.launch(what, 1, 32, (arena, *places, ctypes.c_uint32(10 * number), ctypes.c_uint32(10)))
    require_clean(scenario, schedules=40)


def _launch(scenario: Scenario, kernel: str, places: tuple[object, int, int, object]) -> None:
    arena, flags, data, local = places
    threads, shared_bytes = KERNELS[kernel]
    count = ctypes.c_uint32(RANKS - 1)
    scenario.launch(
        kernel,
        2,
        min(threads, 64),
        (arena, ctypes.c_uint64(flags), ctypes.c_uint64(data), local, ctypes.c_uint64(NBYTES), count),
        shared_bytes=shared_bytes,
    )


@pytest.mark.parametrize(("world_size", "peers"), [(2, {1}), (4, {1, 3}), (8, {1, 7})])
def test_every_peer_gets_whole_vectors_and_every_block_work(world_size: int, peers: set[int]) -> None:
    found = list(cases(world_size, 132))
    assert {move.peers for move in found} == peers and len(set(found)) == len(found)
    for move in found:
        assert move.nbytes % (16 * move.peers) == 0 and 0 < move.nbytes <= SIZES[-1]
        assert (move.blocks == 0) == move.mechanism.startswith("copy_engine") and move.blocks <= 132 and move.movers == 1


def test_all_gpus_move_the_largest_size_with_the_best_grid() -> None:
    def rate(mechanism: str, nbytes: int, blocks: int, peers: int, gbps: float) -> Bandwidth:
        return Bandwidth(mechanism, nbytes, blocks, peers, 1, gbps, gbps, gbps, 7)

    alone = [
        rate("sm_store", 1 << 24, 8, 3, 400.0),
        rate("sm_store", 1 << 26, 8, 3, 300.0),
        rate("sm_store", 1 << 26, 16, 3, 340.0),
        rate("sm_store", 1 << 26, 32, 3, 330.0),
        rate("sm_store", 1 << 26, 64, 1, 500.0),
        rate("copy_engine_push", 1 << 26, 0, 3, 390.0),
    ]
    found = [(move.mechanism, move.nbytes, move.blocks, move.peers, move.movers) for move in cases_of_all(4, alone)]
    assert found == [("sm_store", 1 << 26, 16, 3, 4), ("copy_engine_push", 1 << 26, 0, 3, 4)]


def test_small_sizes_are_moved_several_times_between_events() -> None:
    assert [launches_between_events(size) for size in SIZES] == [16, 16, 16, 4, 1, 1, 1]


def test_a_sample_with_a_late_host_is_repeated_with_more_lead() -> None:
    starts: list[float] = []

    def take(head_start_us: float) -> float | None:
        starts.append(head_start_us)
        return None if head_start_us < 800 else float(len(starts))

    assert samples(take) == [5, 6, 7, 8, 9, 10, 11]
    assert starts == [200, 400, *[800] * 9]
    with pytest.raises(DeviceError, match="to enqueue a few launches"):
        samples(lambda _: None)


def test_tables_have_a_row_for_every_mechanism_and_grid(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (
        Bandwidth("sm_store", 1 << 20, 8, 1, 1, 300.0, 290.0, 310.0, 7),
        Bandwidth("copy_engine_push", 1 << 24, 0, 1, 1, 390.0, 380.0, 395.0, 7),
        Bandwidth("sm_store", 1 << 24, 8, 1, 2, 280.0, 270.0, 285.0, 7),
    )
    print_mechanisms(Mechanisms(2, rows, (Latency("flag", 2.5, 2.4, 2.7, 7),)))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["sm_store", "8", "300", "-"] in lines and ["copy_engine_push", "-", "-", "390"] in lines
    assert ["sm_store", "8", "16", "MiB", "280", "270", "285"] in lines
    assert ["flag", "2.50", "2.40", "2.70", "7"] in lines


def ring(events: list[tuple[int, int, int]], capacity: int) -> bytes:
    """As the device leaves it: a count, then the events, each in the place of its number."""
    places = [bytes(16)] * capacity
    for number, event in enumerate(events):
        places[number % capacity] = struct.pack("<QII", *event)
    return struct.pack("<I12x", len(events)) + b"".join(places)


WAIT, STORE = 4, 0
CONSUMER = 2 << 24


def test_a_ring_gives_its_events_in_the_order_of_time() -> None:
    decoded = decode(ring([(50, CONSUMER | 3, WAIT << 1), (90, CONSUMER | 3, WAIT << 1 | 1), (70, 0, STORE << 1)], capacity=8))
    assert decoded == [Event(50, 2, 3, WAIT, False), Event(70, 0, 0, STORE, False), Event(90, 2, 3, WAIT, True)]


def test_an_overwritten_start_leaves_its_span_out() -> None:
    events = [(10, 0, WAIT << 1), (20, 0, WAIT << 1 | 1), (30, 0, STORE << 1), (40, 0, STORE << 1 | 1)]
    spans = [item for item in trace([decode(ring(events, capacity=3))])["traceEvents"] if item["ph"] == "X"]
    assert [(span["name"], span["ts"], span["dur"]) for span in spans] == [("store", 0.01, 0.01)]


def test_groups_of_one_role_have_tracks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    second_consumer = (2 + 16) << 24
    events = [
        (5, second_consumer | 3, 5 << 1),
        (9, second_consumer | 3, 5 << 1 | 1),
        (7, CONSUMER | 3, 5 << 1),
        (8, CONSUMER | 3, 5 << 1 | 1),
    ]
    observed = SimpleNamespace(read=lambda: decode(ring(events, capacity=8)))
    monkeypatch.setattr("peerlane.device.tools.trace.observed", [observed])
    assert observed_spans(9) == [["compute", "consumer", 3, 7, 8], ["compute", "consumer 1", 3, 5, 9]]
    assert observed_spans(1) == [["compute", "consumer 1", 3, 5, 9]]


def test_all_ranks_are_in_one_trace_on_one_clock(tmp_path: Path) -> None:
    first = [Event(1000, 2, 3, WAIT, False), Event(4000, 2, 3, WAIT, True)]
    second = [Event(500_000, 0, 0, 16, False), Event(501_500, 0, 0, 16, True)]
    write_trace(tmp_path / "trace.json", [first, second], names={16: "dequantise"}, offsets_ns=[0, -498_000])
    written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [(item["pid"], item["name"], item["ts"], item["dur"]) for item in written if item["ph"] == "X"]
    assert spans == [(0, "wait", 0.0, 3.0), (1, "dequantise", 1.0, 1.5)]
    assert {item["args"]["name"] for item in written if item["ph"] == "M"} == {"rank 0", "rank 1", "block 3 consumer", "block 0 block"}
    with pytest.raises(UsageError, match="1 clock offsets for 2 ranks"):
        trace([first, second], offsets_ns=[0])
