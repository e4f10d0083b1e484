"""Protocols that are right run clean under every schedule; broken twins are caught under every one: by order, not by luck."""

import ctypes
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from device.twins import write_header
from peerlane.emulator import Report, Scenario, check

FOLDER = Path(__file__).parent / "protocols"
SCHEDULES = 300
THREADS = 32
LAUNCHES = 3
QUEUE_STEPS = 5


class Places(ctypes.Structure):
    """Mirrors Places of protocol.cuh."""

    _fields_ = (("data", ctypes.c_uint64), ("flags", ctypes.c_uint64), ("epochs", ctypes.c_uint64))


@cache
def twins(protocol: str) -> dict[str, int]:
    """The names in the source's enumeration, and their numbers."""
    body = re.search(r"enum Twin : u32 \{(.*?)\};", (FOLDER / f"{protocol}.cu").read_text(), re.DOTALL)
    assert body is not None
    return {name: number for number, name in enumerate(re.findall(r"^\s*(\w+),", body.group(1), re.MULTILINE))}


def message(rank: int, epoch: int, place: int) -> int:
    return rank << 24 | epoch << 16 | place


def expected_word(protocol: str, world_size: int, grid: int, rank: int, epoch: int, block: int, thread: int) -> int:
    """What each kernel leaves in its output."""
    if protocol == "push":
        return sum(message(q, epoch, thread) for q in range(world_size))
    if protocol == "counter":
        return message((rank * grid + block + 1) % (world_size * grid), epoch, 0)
    if protocol == "queue_push":
        return sum(message(1 - rank, epoch, step * THREADS + thread) for step in range(QUEUE_STEPS))
    return message((rank + 1) % world_size, epoch, thread)


def scenario(
    protocol: str,
    twin: str = "honest",
    *,
    world_size: int = 2,
    grid: int = 2,
    launches: int = LAUNCHES,
    grid_of: Callable[[int], int] | None = None,
    resident_blocks: int = 132,
) -> Scenario:
    """Some launches in a row, each with an output of its own."""
    made = Scenario(f"{protocol}: {twin}", FOLDER / f"{protocol}.cu", world_size, resident_blocks=resident_blocks)
    arena = made.arena(1 << 16)
    at = Places(arena.take(3 * grid * max(world_size, QUEUE_STEPS) * THREADS * 4), arena.take(grid * 8 * 128), arena.take(grid * 4))
    words = 1 if protocol == "counter" else THREADS
    for epoch in range(1, launches + 1):
        values = [
            [expected_word(protocol, world_size, grid, rank, epoch, block, thread) for block in range(grid) for thread in range(words)]
            for rank in range(world_size)
        ]
        out = made.buffer(
            f"out {epoch}",
            [torch.zeros(grid * words, dtype=torch.int32)] * world_size,
            expected=[torch.tensor(value, dtype=torch.int32) for value in values],
        )
        from_host = [ctypes.c_uint32(1)] if protocol == "push" else []
        args = [arena, at, out, *from_host, ctypes.c_uint32(twins(protocol)[twin])]
        made.launch(protocol, grid_of or grid, THREADS, args, shared_bytes=3 * THREADS * 4)
    return made


def run(made: Scenario, schedules: int = SCHEDULES) -> Report:
    return check(made, schedules=schedules, timeout_s=240)


@pytest.mark.parametrize(
    ("protocol", "world_size"),
    [("push", 2), ("push", 4), ("bulk_push", 2), ("queue_push", 2), ("bulk_pull", 2), ("bulk_pull", 3), ("counter", 2), ("counter", 3)],
)
def test_an_honest_protocol_is_clean(protocol: str, world_size: int) -> None:
    report = run(scenario(protocol, world_size=world_size))
    assert report.clean, str(report)
    assert report.schedules == SCHEDULES


# What each twin is found to be. A schedule may show more than one of these, and in a few it shows as another one.
CAUGHT = {
    "push": {
        "no_release": {"race"},
        "no_acquire": {"race"},
        "narrow_fence": {"race"},
        "narrow_flag": {"race"},
        "no_barrier": {"race"},
        "early_signal": {"race"},
        "one_buffer": {"race"},
        "wrong_slot": {"wrong_result"},
        "wrong_flag": {"deadlock"},
        "host_epoch": {"race"},
        "plain_flag": {"race"},
    },
    "bulk_push": {
        "no_proxy_fence": {"proxy_fence"},
        "late_fence": {"proxy_fence"},
        "partial_wait": {"race"},
        "no_wait": {"race"},
        "not_committed": {"race"},
        "reused_source": {"race"},
    },
    "queue_push": {"reused_tile": {"race"}, "foreign_store": {"race"}, "no_flush": {"deadlock"}},
    "bulk_pull": {
        "no_proxy_fence": {"proxy_fence"},
        "shared_proxy_fence": {"proxy_fence"},
        "no_landing": {"race"},
        "no_exit_barrier": {"race"},
        "leaves_copy": {"unfinished_copy"},
    },
    "counter": {"counter_reset": {"lost_update"}, "equality_poll": {"deadlock"}, "narrow_counter": {"race"}},
}


def test_every_twin_is_tried() -> None:
    for protocol, caught in CAUGHT.items():
        assert {"honest", *caught} == set(twins(protocol)) - {"too_few"}
    assert sum(map(len, CAUGHT.values())) >= 12


@pytest.mark.parametrize(("protocol", "twin"), [(protocol, twin) for protocol, caught in CAUGHT.items() for twin in caught])
def test_a_broken_twin_is_caught_in_every_schedule(protocol: str, twin: str) -> None:
    report = run(scenario(protocol, twin))
    assert report.caught == SCHEDULES, str(report)
    assert CAUGHT[protocol][twin] <= {finding.kind for finding in report.findings}, str(report)


# Of the queue itself, by what is changed in its header.
QUEUE_TWINS = {
    "signal_a_step_early": ("ptx::bulk_wait<in_flight>()", "ptx::bulk_wait<in_flight + 1>()"),
    "signal_when_the_tile_was_read": ("ptx::bulk_wait<in_flight>()", "ptx::bulk_wait_read<in_flight>()"),
    "signal_without_release": ("                if constexpr (News::needs_release) this->release();\n", ""),
    "tiles_free_before_the_wait": ("newest;\n        }\n        this->team_.sync();", "newest;\n        }"),
}


@pytest.mark.parametrize("twin", QUEUE_TWINS)
def test_a_broken_queue_is_caught_in_every_schedule(twin: str, tmp_path: Path) -> None:
    made = scenario("queue_push")
    made.include_dirs = (write_header(tmp_path, "peers/store_queue.cuh", *QUEUE_TWINS[twin]),)
    report = run(made)
    assert report.caught == SCHEDULES, str(report)
    assert "race" in {finding.kind for finding in report.findings}, str(report)


def test_a_grid_beyond_the_gpu_deadlocks_in_every_schedule() -> None:
    report = run(scenario("counter", resident_blocks=1))
    assert report.caught == SCHEDULES, str(report)
    (finding,) = {finding.kind: finding for finding in report.findings}.values()
    assert finding.kind == "deadlock"
    assert "1 blocks of rank 0 have not started: only 1 are resident at a time" in finding.detail


def test_ranks_with_different_grids_deadlock_in_every_schedule() -> None:
    report = run(scenario("push", grid_of=lambda rank: 2 - rank))
    assert report.caught == SCHEDULES, str(report)
    assert {finding.kind for finding in report.findings} == {"deadlock"}
    assert re.search(r"rank 0 .* waited for rank 1 .*\(block 1, slot 1, expected 1, seen 0\)", str(report)), str(report)


WARPS_KEEP_EACH_OTHER_AWAKE = """
#include <peerlane/peers/arena.cuh>
using namespace peerlane;

extern "C" __global__ void wait_for_nobody(Arena arena, u32* flag) {
    Deadline deadline;
    while (!__any_sync(0xffffffffu, ptx::load_relaxed_gpu(flag) != 0)) {
        if (deadline.expired(arena)) fail(arena, Awaited{consumer, arena.rank, 3, 1}, 0);
    }
}
"""


def test_warps_that_vote_in_vain_are_a_deadlock() -> None:
    """Every vote lets somebody go on, so that there is always somebody who can."""
    made = Scenario("votes", WARPS_KEEP_EACH_OTHER_AWAKE, 2)
    arena = made.arena(1 << 16)
    flags = made.buffer("flags", [torch.zeros(1, dtype=torch.uint32)] * 2)
    made.launch("wait_for_nobody", 1, 64, (arena, flags))
    report = check(made, schedules=1)
    assert report.caught == 1 and {finding.kind for finding in report.findings} == {"deadlock"}, str(report)
    assert "source.cu:8" in str(report), str(report)


def test_what_depends_on_luck_is_found_by_some_schedules() -> None:
    """A counter that is one arrival short: wrong only if the missing block is the neighbour."""
    report = run(scenario("counter", "too_few", grid=1, launches=1))
    assert 0 < report.caught < SCHEDULES
