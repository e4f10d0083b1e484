"""Groups of processes whose waits end: when one runs out of time, and when a rank dies. On memory files instead of GPUs."""

import ctypes
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from device.host_driver import host_driver
from peerlane.device import Arena
from peerlane.device.host import ipc, shared_page, waits, watch
from peerlane.device.host.ipc import ProcessGroupRanks
from peerlane.device.host.waits import OUT_OF_TIME, TOLD_TO_STOP
from peerlane.errors import DeviceTimeout, UsageError

RANKS, SOON_S = 3, 10.0


def until(condition: Callable[[], bool], seconds: float = SOON_S) -> float:
    """How long it took."""
    begin = time.monotonic()
    while not condition() and time.monotonic() - begin < seconds:
        time.sleep(0.02)
    return time.monotonic() - begin


def rank_main(rank: int, act: Callable[[ProcessGroupRanks], Any], folder: Path, answers: Any, page: str) -> None:
    torch.set_num_threads(1)  # a fork has none of its parent's
    properties = SimpleNamespace(uuid="one", multi_processor_count=8)
    with ExitStack() as patches, host_driver():
        for target, name, value in (
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "get_device_properties", lambda device: properties),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch._C, "_cuda_isCurrentStreamCapturing", lambda: False),
            (ipc, "pinned_word", lambda: torch.zeros(1, dtype=torch.int32)),
            (shared_page, "FOLDER", page),
            (watch, "PERIOD_S", 0.05),
            (watch, "GRACE_S", 0.2),
            (watch, "SILENCE_S", 1.5),
        ):
            patches.enter_context(mock.patch.object(target, name, value, create=True))
        dist.init_process_group(
            "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=70)
        )
        answers.put((rank, act(ProcessGroupRanks(dist.group.WORLD))))
        answers.close()
        answers.join_thread()
    os._exit(0)


def play(act: Callable[[ProcessGroupRanks], Any], folder: Path, *, killed: int | None = None, page: str = "/dev/shm") -> dict[int, Any]:
    """What ``act`` returns on every rank that lives to tell; rank ``killed`` gets no chance."""
    context = mp.get_context("fork")
    answers = context.Queue()
    processes = [context.Process(target=rank_main, args=(rank, act, folder, answers, page)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        if killed is not None:
            until((folder / "ready").exists, 30.0)
            os.kill(processes[killed].pid or 0, signal.SIGKILL)
        while len(found) < RANKS - (killed is not None):
            rank, answer = answers.get(timeout=40.0)
            found[rank] = answer
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def broken(group: ProcessGroupRanks) -> str:
    try:
        group.waits.check()
    except DeviceTimeout as error:
        return str(error)
    return ""


@pytest.mark.parametrize("page", ["/dev/shm", "/nowhere"])
def test_a_wait_that_runs_out_of_time_stops_all_ranks(page: str, tmp_path: Path) -> None:
    def act(group: ProcessGroupRanks) -> tuple[bool, float, str]:
        arena = Arena(100, group, name="some_kernel")
        group.exchange(None)
        if group.rank == 0:  # what give_up does
            for name, value in {"rank": 0, "role": 2, "source": 1, "slot": 7, "expected": 5, "seen": 4, "set": OUT_OF_TIME}.items():
                setattr(arena.record, name, value)
            ctypes.c_uint32.from_address(arena.view.stop).value = 1
        seconds = until(lambda: group.waits.stopped)
        return ctypes.c_uint32.from_address(arena.view.stop).value == 1, seconds, broken(group)

    for stops, seconds, said in play(act, tmp_path, page=page).values():
        assert stops and seconds < SOON_S
        assert "some_kernel: rank 0 (consumer) waited for rank 1 longer than 70 s (block 0, slot 7, expected 5, seen 4)" in said
        assert "this group can not be used any more" in said


@pytest.mark.parametrize("namespace", ["same", "others"])
def test_a_dead_rank_stops_the_others(namespace: str, tmp_path: Path) -> None:
    def act(group: ProcessGroupRanks) -> tuple[float, str, str]:
        arena = Arena(100, group, name="some_kernel")
        if group.rank == 0:
            (tmp_path / "ready").touch()
        until((tmp_path / "ready").exists)
        seconds = until(lambda: group.waits.stopped)
        for name, value in {"rank": group.rank, "role": 1, "source": 1, "slot": 3, "expected": 9, "seen": 8, "set": TOLD_TO_STOP}.items():
            setattr(arena.record, name, value)  # as a kernel leaves it that waited for the dead rank
        try:
            group.exchange(None)
        except DeviceTimeout as error:
            return seconds, broken(group), str(error)
        return seconds, broken(group), ""

    with mock.patch.object(watch.Life, "ended", return_value=None) if namespace == "others" else ExitStack():
        found = play(act, tmp_path, killed=1)
    assert sorted(found) == [0, 2]
    for seconds, said, exchanged in found.values():
        assert seconds < SOON_S and "rank 1 (process " in said and exchanged == said
        assert "some_kernel: rank " in said and "(loader) waited for rank 1 (block 0, slot 3, expected 9, seen 8)" in said
        assert ("has died" if namespace == "same" else "gave no sign of life for") in said


def test_a_rank_that_has_destroyed_its_group_is_not_missed(tmp_path: Path) -> None:
    def act(group: ProcessGroupRanks) -> str:
        if group.rank == 1:
            dist.destroy_process_group()
            until(lambda: not group.watch._thread.is_alive())  # type: ignore[union-attr]
            return ""
        until(lambda: group.waits.stopped, 2.0)
        return broken(group)

    assert set(play(act, tmp_path).values()) == {""}


def test_waits_follow_the_timeout_of_the_group(tmp_path: Path) -> None:
    def act(group: ProcessGroupRanks) -> list[float]:
        arena, own = Arena(100, group), Arena(100, group, timeout_s=3.0)
        limits = [arena.record.limit_ns / 1e9]
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=50), dist.group.WORLD)
        until(lambda: group.waits.limit_s == 50.0)
        limits.append(arena.record.limit_ns / 1e9)
        group.waits.set_limit(2.5)
        return [*limits, arena.record.limit_ns / 1e9, own.record.limit_ns / 1e9]

    for limits in play(act, tmp_path).values():
        assert limits == [70.0, 50.0, 2.5, 9.0]  # where ranks take turns on a GPU, a limit of its own is longer


def test_limits_that_can_not_be_are_refused() -> None:
    for seconds in (0.0, -1.0, waits.LONGEST_LIMIT_S + 1):
        with pytest.raises(UsageError, match="expected more than 0 and at most 43200 s"):
            waits.Waits().set_limit(seconds)
