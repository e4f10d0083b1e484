"""The corpus's CUDA protocols in the emulator: honest ones hold under many schedules, and every race is found, those too that GPUs hide."""

import ast
import ctypes

import pytest
import torch

from peerlane.emulator import Scenario, check
from peerlane.evaluate.selftest.table import load

CORPUS = load()
WORLD_SIZE, GRID, BLOCK, COUNT, LAUNCHES = 2, 2, 4, 11, 3
ROOM = 64
SCHEDULES = 60

HONEST = ("1_a04_persistent_workspace_cuda", "1_a07_double_buffered_push_cuda")
RACES = (
    "1_b01_no_entry_barrier_cuda", "1_b02_no_exit_barrier_cuda", "1_b03_stale_epoch_cuda", "1_b04_flag_without_release_cuda",
    "1_b04_wait_without_acquire_cuda", "1_b05_one_buffer_cuda",
)  # fmt: skip


def source_of(file: str) -> str:
    """The device code of a candidate, which is not imported: that would compile it for a GPU."""
    tree = ast.parse((CORPUS.folder / f"{file}.py").read_text(encoding="utf-8"))
    values = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SOURCE"]
    assert len(values) == 1
    text: str = ast.literal_eval(values[0])
    return text


def scenario_of(file: str) -> Scenario:
    """Some launches one after the other on every rank, each on other contents."""
    scenario = Scenario(file, source_of(file), WORLD_SIZE, defines={"room": f"{ROOM}ull"})
    arena = scenario.arena(1 << 16)
    sizes = (4 * 8 * GRID, 4 * 256, 2 * 8 * 4 * ROOM)  # flags, epochs, terms
    places = [ctypes.c_uint64(arena.take(size)) for size in sizes]
    for launch in range(LAUNCHES):
        terms = [torch.arange(COUNT, dtype=torch.float32) + 100 * launch + 10_000 * rank for rank in range(WORLD_SIZE)]
        given = scenario.buffer(f"in {launch}", terms)
        out = scenario.buffer(f"out {launch}", [torch.zeros(COUNT)] * WORLD_SIZE, expected=[sum(terms)] * WORLD_SIZE)
        scenario.launch("all_reduce", GRID, BLOCK, (arena, *places, given, out, ctypes.c_uint64(COUNT)))
    return scenario


@pytest.mark.parametrize("file", HONEST)
def test_an_honest_protocol_holds(file: str) -> None:
    report = check(scenario_of(file), schedules=SCHEDULES)
    assert report.clean, str(report)


@pytest.mark.parametrize("file", RACES)
def test_a_race_is_found(file: str) -> None:
    report = check(scenario_of(file), schedules=SCHEDULES)
    assert {finding.kind for finding in report.findings} & {"race", "wrong_result", "lost_update"}, str(report)
