"""The corpus' kernels with a broken protocol, which a GPU may well call right: the emulator finds them in every schedule."""

import ctypes
import runpy

import pytest
import torch

from peerlane.emulator import Scenario, check
from peerlane.evaluate.selftest.table import load

CORPUS = load().folder
RANKS, BLOCKS, COUNT = 2, 2, 200
ROOM = 256  # elements of a rank's terms, in the one kernel that keeps those of all ranks
NAMES = (
    "b01_no_entry_barrier", "b02_no_exit_barrier", "b03_stale_epoch", "b04_flag_without_release", "b04_wait_without_acquire",
    "b05_one_buffer",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_of_the_corpus_is_caught_in_every_schedule(name: str) -> None:
    source = runpy.run_path(str(CORPUS / f"1_{name}_cuda.py"))["SOURCE"]
    scenario = Scenario(name, f"#define room {ROOM}ull\n{source}", RANKS)
    arena = scenario.arena(1 << 16)
    places = [ctypes.c_uint64(arena.take(nbytes)) for nbytes in (BLOCKS * 8 * 4, 256 * 4, RANKS * ROOM * 4)]  # flags, epochs, terms
    generator = torch.Generator().manual_seed(1)
    for call in range(3):
        terms = [torch.randint(-8, 9, (COUNT,), generator=generator).float() for _ in range(RANKS)]
        given = scenario.buffer(f"in {call}", terms)
        target = scenario.buffer(f"out {call}", [torch.zeros(COUNT)] * RANKS, [torch.stack(terms).sum(0)] * RANKS)
        scenario.launch("all_reduce", BLOCKS, 32, (arena, *places, given, target, ctypes.c_uint64(COUNT)))
    report = check(scenario, schedules=300)
    assert report.caught == 300, report
    assert "race" in {finding.kind for finding in report.findings}
