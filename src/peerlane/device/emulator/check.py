"""Run a scenario under many schedules and say what was found."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peerlane.device.emulator import build
from peerlane.device.emulator.gpu_code import EmulatedGpu, GpuBuild, KernelNeeds, default_gpu, needs, resident_blocks
from peerlane.device.emulator.job import TIMEOUT_NS, Answer, Job, Launch, run_job
from peerlane.device.emulator.scenario import Scenario
from peerlane.device.host.arena import describe_fault
from peerlane.errors import UsageError

_OWN_CODE = (str(build.STAND_INS), str(build.RUNTIME.parent))

MEANINGS = {
    "race": "nothing orders the two: release after the first and acquire before the second, in a scope that spans both threads",
    "lost_update": "both write the same flag, nothing orders them and one is lost: let flags only grow, each with one writer or by adding",
    "proxy_fence": "the asynchronous copy may miss the write: fence_proxy_async after what orders the two, before the copy is started",
    "deadlock": "nobody can go on",
    "trap": "a kernel stopped itself",
    "illegal_address": "memory that this thread may not use",
    "unfinished_copy": "the block ended while a copy may still use its shared memory: wait for it first",
    "wrong_result": "the memory does not hold what was expected",
    "misuse": "an mbarrier is used against its rules",
    "crash": "the device code crashed: look for a null pointer or an index out of range",
    "endless": "the launches do not end: look for a loop without an end, or one that polls memory without ptx:: loads or volatile",
}


@dataclass(frozen=True)
class Frame:
    """A source line; several make the chain of calls that ends there, innermost first."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Side:
    """One thread's part in a finding."""

    rank: int
    launch: int
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    action: str
    frames: tuple[Frame, ...]
    at: str
    """the memory that a stuck thread looks at, in words"""

    def __str__(self) -> str:
        where = f"rank {self.rank}, launch {self.launch}, block {_short(self.block)}, thread {_short(self.thread)}"
        chain = " <- ".join(f"{frame.file}:{frame.line}" for frame in self.frames) or "unknown line"
        return f"{where} {self.action}{' at ' + self.at if self.at else ''}: {chain}"


@dataclass(frozen=True)
class Finding:
    """An error, and in how many of the schedules it was seen."""

    kind: str
    detail: str
    memory: str
    """the bytes concerned, in words; empty if there are none"""
    sides: tuple[Side, ...]
    schedule: int
    """the first that showed it; run it alone with ``check(scenario, schedules=1, first_schedule=...)``"""
    schedules: int

    @property
    def summary(self) -> str:
        """One line: what every side does, and in which line of the kernel."""
        acts = [
            f"rank {side.rank} {side.action}{f' in {side.frames[-1].file}:{side.frames[-1].line}' if side.frames else ''}"
            for side in self.sides
        ]
        return f"{', '.join(acts) or self.detail}: {MEANINGS[self.kind]}"

    def __str__(self) -> str:
        head = f"{self.kind}{': ' + self.memory if self.memory else ''} (in {self.schedules} schedules, first in {self.schedule})"
        return "\n".join(
            [head, *(f"  {side}" for side in self.sides), *([f"  {self.detail}"] if self.detail else []), f"  {MEANINGS[self.kind]}"]
        )


@dataclass(frozen=True)
class Report:
    """The findings of some schedules of a scenario."""

    scenario: str
    world_size: int
    schedules: int
    seed: int
    caught: int
    """in how many schedules there was a finding"""
    findings: tuple[Finding, ...]
    seconds: float
    kernels: tuple[KernelNeeds, ...] | None = None
    """what the launched kernels need of a GPU; None: there was no compiler for it"""

    @property
    def clean(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        head = f"{self.scenario}, {self.world_size} ranks: {self.schedules} schedules, seed {self.seed}"
        if self.clean:
            return f"{head}: nothing found"
        return "\n".join([f"{head}: {len(self.findings)} findings", *(str(finding) for finding in self.findings)])


def check(
    scenario: Scenario,
    *,
    schedules: int = 300,
    seed: int = 0,
    first_schedule: int = 0,
    timeout_s: float = 300.0,
    gpu: EmulatedGpu | None = None,
) -> Report:
    """Runs the scenario under ``schedules`` schedules, the same for the same seed.

    As many blocks run at a time as ``gpu`` (default: an H100) holds, unless the scenario says a number. Raises UsageError for a scenario
    that cannot be run, CompileError where g++ or the GPU's compiler refuses the source, LaunchError for a block that no SM can hold,
    MissingDependency where there is no g++, and DeviceError if the emulator itself dies or does not end in time.
    """
    gpu = gpu or default_gpu()
    for_gpu = GpuBuild(scenario.source, arch=gpu.arch, defines=scenario.defines, include_dirs=scenario.include_dirs)
    program = for_gpu.beside(lambda: build.compile_program(scenario.source, defines=scenario.defines, include_dirs=scenario.include_dirs))
    if not scenario.launches or schedules < 1:
        raise UsageError(
            f"scenario {scenario.name!r}: {schedules} schedules of {len(scenario.launches)} launches; expected one or more of each"
        )
    check_kernels(scenario.name, scenario.launches, program)
    job, kernels = scenario.job(program.globals), for_gpu.kernels()
    job.launches = [
        replace(launch, resident_blocks=scenario.resident_blocks or resident_blocks(launch, kernels, gpu.sm_count))
        for launch in job.launches
    ]
    started = time.monotonic()
    answer = run_job(job, program, schedules=schedules, seed=seed, first_schedule=first_schedule, timeout_s=timeout_s)
    said = report(job, program, answer, schedules=schedules, seed=seed, seconds=time.monotonic() - started)
    return replace(said, kernels=needs(job.launches, kernels, gpu.arch))


def check_kernels(name: str, launches: Sequence[Launch], program: build.Program) -> None:
    """Raises UsageError where a launch is of a kernel that the program does not have."""
    if unknown := {launch.kernel for launch in launches} - set(program.kernels):
        raise UsageError(f"scenario {name!r} launches {', '.join(sorted(unknown))}; the source has {', '.join(program.kernels)}")


def report(job: Job, program: build.Program, answer: Answer, *, schedules: int, seed: int, seconds: float) -> Report:
    """Returns the answer in words, with the source lines of the program."""
    frames = _frames(program.path, sorted({side["site"] for finding in answer.findings for side in finding["sides"]}))
    findings = tuple(_finding(job, finding, frames) for finding in answer.findings)
    return Report(job.name, job.world_size, schedules, seed, answer.caught, findings, seconds)


def _finding(job: Job, raw: Any, frames: dict[int, tuple[Frame, ...]]) -> Finding:
    fault = describe_fault(raw["fault"], TIMEOUT_NS) if raw["fault"] else ""
    detail = "; ".join(part for part in (raw["detail"], fault) if part)
    if raw["kind"] == "wrong_result":
        region = job.regions[raw["buffer"] - 1]
        start = raw["offset"] // 8 * 8
        expected = (region.expected or b"")[start : start + 8].hex()
        detail = f"bytes {start} to {start + 8}: expected {expected}, got {detail[: len(expected)]} ({region.dtype})"
    sides = tuple(
        Side(
            rank=side["rank"],
            launch=side["launch"],
            block=tuple(side["block"]),
            thread=tuple(side["thread"]),
            action=side["action"],
            frames=frames.get(side["site"], ()),
            at=_memory(job, side["buffer"], side["offset"]),
        )
        for side in raw["sides"]
    )
    return Finding(raw["kind"], detail, _memory(job, raw["buffer"], raw["offset"]), sides, raw["schedule"], raw["schedules"])


def _memory(job: Job, number: int, offset: int) -> str:
    if number < 0:
        return ""
    if number == 0:
        return "outside all buffers"
    if number > len(job.regions):
        return f"shared memory+{offset}"
    return job.describe(number, offset)


def _frames(program: Path, sites: Sequence[int]) -> dict[int, tuple[Frame, ...]]:
    """Returns the source lines of places in the program, without those of the emulator's own headers."""
    if not sites:
        return {}
    places = [hex(site) for site in sites]
    try:
        done = subprocess.run(
            ["addr2line", "-e", str(program), "-a", "-f", "-C", "-i", *places], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return {}
    return dict(zip(sites, _chains(done.stdout), strict=True))


def _chains(text: str) -> Iterator[tuple[Frame, ...]]:
    """Parses addr2line's answer: an address, then pairs of lines, function and file:line."""
    for part in re.split(r"^0x[0-9a-f]+\n", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        chain = []
        for function, place in zip(lines[::2], lines[1::2], strict=False):
            file, _, line = place.partition(" (")[0].rpartition(":")
            if not file.startswith((*_OWN_CODE, "??")) and line.isdecimal():
                chain.append(Frame(Path(file).name, int(line), function))
        yield tuple(chain)


def _short(three: tuple[int, int, int]) -> str:
    x, y, z = three
    return str(x) if y == z == 0 else f"({x}, {y}, {z})"
