"""Run device code of several ranks on the CPU, under many schedules, and find races and deadlocks without a GPU.

scenario = Scenario("mine", SOURCE, world_size=2)
arena = scenario.arena(1 << 16)
out = scenario.buffer("out", [torch.zeros(64)] * 2, expected=[...])
scenario.launch("kernel", grid=2, block=64, args=(arena, out))
print(check(scenario, schedules=300))
"""

from peerlane.emulator.build import Program, compile_program
from peerlane.emulator.check import Report, check
from peerlane.emulator.findings import Finding, Frame, Place, Side
from peerlane.emulator.job import Launch
from peerlane.emulator.ptx_front_end import Ptx, UnknownPtx
from peerlane.emulator.scenario import Buffer, EmulatedArena, Scenario

__all__ = [
    "Buffer", "EmulatedArena", "Finding", "Frame", "Launch", "Place", "Program", "Ptx", "Report", "Scenario", "Side", "UnknownPtx", "check",
    "compile_program",
]  # fmt: skip
