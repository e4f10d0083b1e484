"""Processes stand still if they only wait or spin; whoever works, waits in steps or is kept from running does not."""

import os
import signal
import subprocess
import sys
import time

import pytest

import peerlane as pl
from peerlane.sandbox.stillness import Stillness, is_ending
from peerlane.settings import Deadlines

WATCHED_S = 2.0
PROGRAMS = {
    "waits": ("import time; time.sleep(100)", True),
    "spins": ("while True: pass", True),
    "waits_in_steps": ("import time\nwhile True: time.sleep(0.01)", False),
    "touches_new_memory": ("import mmap, time\nwhile True: mmap.mmap(-1, 1 << 20)[::4096]", False),
    "reads": ("while True: open('/proc/self/stat').read()", False),
}


def test_only_who_waits_or_spins_stands_still() -> None:
    """Seconds count as far as a process had a core, so on a busy machine they take longer."""
    running = {name: subprocess.Popen([sys.executable, "-S", "-c", source]) for name, (source, _) in PROGRAMS.items()}
    try:
        time.sleep(0.3)
        watches, begin = {name: Stillness() for name in running}, time.monotonic()
        still = {name for name, (_, still) in PROGRAMS.items() if still}
        while (passed := time.monotonic() - begin) < WATCHED_S or (passed < 60 and any(watches[name].seconds < 0.5 for name in still)):
            for name, watch in watches.items():
                watch.look([running[name].pid])
            time.sleep(0.05)
        assert {name for name, watch in watches.items() if watch.seconds > 0.3} == still
        assert watches["waits"].seconds > 1.0
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def test_a_process_that_gets_no_core_is_not_stuck() -> None:
    """It may run for a tenth of the time."""
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as process:
        try:
            time.sleep(0.3)
            watch, end = Stillness(), time.monotonic() + WATCHED_S
            while time.monotonic() < end:
                process.send_signal(signal.SIGSTOP)
                time.sleep(0.19)
                process.send_signal(signal.SIGCONT)
                time.sleep(0.02)
                watch.look([process.pid])
            assert watch.seconds < 0.8
        finally:
            process.kill()


def test_a_process_that_is_gone_tells_nothing() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        process.wait()
    assert Stillness().look([process.pid, os.getpid()]) is None


RIGHT = """import time
import torch.distributed as dist

def solution(tensor):
{wait}    dist.all_reduce(tensor := tensor.clone())
    return tensor
"""
WAITS = "    global waited\n    if 'waited' not in globals():\n        waited = [time.sleep(0.05) for _ in range(40)]\n"
SPINS = "    while True:\n        pass\n"


@pytest.mark.slow
def test_only_a_call_without_progress_hangs_early() -> None:
    with pl.Evaluator(2, "cpu", presets=("small",), modes=(), cases="timed", deadlines=Deadlines(quiet=1.0)) as evaluator:
        slow = evaluator.evaluate(1, RIGHT.format(wait=WAITS), timeout=12)
        assert slow.correct and slow.stage_seconds["first_call"] > 2.0
        spins = evaluator.evaluate(1, RIGHT.format(wait=SPINS), timeout=12)
        assert spins.verdict.kind == "hang" and spins.verdict.deadline_s < 12 and not spins.flags


HALF_GONE = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(100,)).start()
ctypes.CDLL(None).syscall(60, 0)
"""


def test_a_process_that_ends_shows_it_while_some_of_it_is_left() -> None:
    """Its main thread has ended, and it can not be waited for yet: so it is where a driver keeps a thread from ending."""
    process = subprocess.Popen([sys.executable, "-S", "-c", HALF_GONE])
    waits = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
    try:
        end = time.monotonic() + 10
        while not is_ending(process.pid) and time.monotonic() < end:
            time.sleep(0.01)
        assert is_ending(process.pid) and process.poll() is None and not is_ending(waits.pid)
    finally:
        for one in (process, waits):
            one.kill()
            one.wait()
    assert not is_ending(process.pid)
