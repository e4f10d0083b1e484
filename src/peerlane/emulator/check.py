"""Run a scenario under many schedules and say what was found."""

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peerlane.device.host.waits import describe_fault
from peerlane.emulator import build
from peerlane.emulator.findings import LAUNCH_BOUNDARY, MEANINGS, NOTES, ORDER, Finding, Frame, Place, Side, as_races, merged
from peerlane.emulator.gpu_code import EmulatedGpu, GpuBuild, KernelNeeds, default_gpu, needs, resident_blocks
from peerlane.emulator.job import Answer, Job, Launch, fitted, require_all, run_job
from peerlane.emulator.ptx_text import CALLED_FROM
from peerlane.emulator.scenario import Scenario
from peerlane.errors import UsageError

_OWN_CODE = (str(build.STAND_INS), str(build.RUNTIME.parent))
_WRAPPERS = "/peerlane/ptx/"
"""The folder of the kit's headers that hold one instruction a function."""


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
    notes: tuple[Finding, ...] = ()
    """what is right on GPUs of today, though PTX does not promise it"""
    kernels: tuple[KernelNeeds, ...] | None = None
    """what the launched kernels need of a GPU; None: there was no compiler for it"""

    @property
    def clean(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        head = f"{self.scenario}, {self.world_size} ranks: {self.schedules} schedules, seed {self.seed}"
        notes = f", {len(self.notes)} notes" if self.notes else ""
        said = "nothing found" if self.clean else f"{len(self.findings)} findings"
        return "\n".join([f"{head}: {said}{notes}", *map(str, self.findings), *(f"note: {note}" for note in self.notes)])

    def strictly(self) -> "Report":
        """Returns the report with its notes about the ends of launches as races."""
        races = as_races(self.notes)
        return replace(self, findings=(*self.findings, *races), notes=tuple(note for note in self.notes if note.kind != LAUNCH_BOUNDARY))


def check(
    scenario: Scenario,
    *,
    schedules: int = 300,
    seed: int = 0,
    first_schedule: int = 0,
    timeout_s: float = 300.0,
    gpu: EmulatedGpu | None = None,
    from_ptx: bool = False,
    for_gpu: bool = True,
) -> Report:
    """Runs the scenario under ``schedules`` schedules, the same for the same seed.

    As many blocks run at a time as ``gpu`` (default: an H100) holds, unless the scenario says a number. ``from_ptx``: what the GPU's
    compiler made of the source runs. ``for_gpu``: the GPU's compiler compiles the source too, where it is installed. Raises UsageError for
    a scenario that cannot be run, CompileError where g++ or the GPU's compiler refuses the source, LaunchError for a block that no SM can
    hold, MissingDependency where there is no g++, and DeviceError if the emulator itself dies or does not end in time.
    """
    gpu = gpu or default_gpu()
    gpu_build = GpuBuild(scenario.source, arch=gpu.arch, defines=scenario.defines, include_dirs=scenario.include_dirs, wanted=for_gpu)
    program = gpu_build.program(
        lambda: build.compile_program(scenario.source, defines=scenario.defines, include_dirs=scenario.include_dirs),
        build.compile_program,
        want_ptx=from_ptx,
    )
    if not scenario.launches or schedules < 1:
        raise UsageError(
            f"scenario {scenario.name!r}: {schedules} schedules of {len(scenario.launches)} launches; expected one or more of each"
        )
    check_kernels(scenario.name, scenario.launches, program)
    job, kernels = scenario.job(program.globals), gpu_build.kernels()
    asked = [
        replace(launch, resident_blocks=scenario.resident_blocks or resident_blocks(launch, kernels, gpu.sm_count))
        for launch in job.launches
    ]
    job.launches = fitted(scenario.name, asked)
    started = time.monotonic()
    answer = run_job(job, program, schedules=schedules, seed=seed, first_schedule=first_schedule, timeout_s=timeout_s)
    require_all(scenario.name, asked, job.launches, answer)
    said = report(job, program, answer, schedules=schedules, seed=seed, seconds=time.monotonic() - started)
    return replace(said, kernels=needs(job.launches, kernels, gpu.arch))


def check_kernels(name: str, launches: Sequence[Launch], program: build.Program) -> None:
    """Raises UsageError where a launch is of a kernel that the program does not have."""
    if unknown := {launch.kernel for launch in launches} - set(program.kernels):
        raise UsageError(f"scenario {name!r} launches {', '.join(sorted(unknown))}; the source has {', '.join(program.kernels)}")


def report(job: Job, program: build.Program, answer: Answer, *, schedules: int, seed: int, seconds: float) -> Report:
    """Returns the answer in words, with the source lines of the program."""
    frames = _frames(program.path, sorted({side["site"] for finding in answer.findings for side in finding["sides"]}))
    told = merged(_finding(job, finding, frames) for finding in answer.findings if not _is_told(finding, answer.findings, frames))
    findings, notes = (tuple(item for item in told if (item.kind in NOTES) == is_note) for is_note in (False, True))
    return Report(job.name, job.world_size, schedules, seed, answer.caught if findings else 0, findings, seconds, notes)


def _is_told(raw: Any, findings: Sequence[Any], frames: dict[int, tuple[Frame, ...]]) -> bool:
    """Tells whether two places of the program are one barrier in the source, which the compiler has put there twice; or whether a read of
    what nobody has written is one side of a race."""
    if raw["kind"] == "uninitialised_read":
        return any(side["site"] == raw["sides"][0]["site"] for item in findings if item["kind"] == "race" for side in item["sides"])
    if raw["kind"] != "barrier" or len(raw["sides"]) < 2 or raw["offset"]:
        return False
    first, second = (frames.get(side["site"], ()) for side in raw["sides"][:2])
    return raw["sides"][0]["site"] != raw["sides"][1]["site"] and first == second


def _finding(job: Job, raw: Any, frames: dict[int, tuple[Frame, ...]]) -> Finding:
    fault = describe_fault(raw["fault"]) if raw["fault"] else ""
    detail = "; ".join(part for part in (raw["detail"], fault) if part)
    if raw["kind"] in ("wrong_result", ORDER):
        region = job.regions[raw["buffer"] - 1]
        start = raw["offset"] // 8 * 8
        expected = (region.expected or b"")[start : start + 8].hex()
        detail = f"bytes {start} to {start + 8}: expected {expected}, got {detail[: len(expected)]} ({region.dtype or 'of C++'})"
    sides = tuple(
        Side(
            rank=side["rank"],
            launch=side["launch"],
            block=tuple(side["block"]),
            thread=tuple(side["thread"]),
            action=side["action"] + (f" by {operator}" if operator else ""),
            frames=chain,
            at=_memory(job, side["buffer"], side["offset"]),
        )
        for side in raw["sides"]
        for operator, chain in [_of_host(job, side, frames.get(side["site"], ()))]
    )
    places = tuple(_place(job, *place) for place in raw["places"])
    memory = _memory(job, raw["buffer"], raw["offset"])
    kind = raw["kind"].partition(":")[0]
    if kind == "uninitialised_read" and 1 <= raw["buffer"] <= len(job.regions) and job.regions[raw["buffer"] - 1].symmetric:
        kind = "uninitialised_symmetric"
    why = raw["kind"] if raw["kind"] in MEANINGS and ":" in raw["kind"] else ""
    return Finding(kind, detail, memory, sides, raw["schedule"], raw["schedules"], places, why)


def _of_host(job: Job, side: Any, chain: tuple[Frame, ...]) -> tuple[str, tuple[Frame, ...]]:
    """Returns the operator of torch that a side is, and where host code calls it; of a kernel nothing, and the chain as it is."""
    own = [launch.operator for launch in job.launches if launch.rank == side["rank"]]
    place, _, name = own[side["launch"]].rpartition(" ") if side["launch"] < len(own) else ("", "", "")
    file, _, line = place.rpartition(":")
    return (f"{name} of host code", (Frame(file, int(line), name),)) if place else ("", chain)


def _place(job: Job, number: int, begin: int, end: int) -> Place:
    if 1 <= number <= len(job.regions):
        region = job.regions[number - 1]
        return Place(region.name, region.rank, begin, end)
    return Place("shared memory" if number else "outside all buffers", -1, begin, end)


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
            file, *callers = file.split(CALLED_FROM)
            for at in (f"{file}:{line}", *callers):
                file, _, line = at.rpartition(":")
                if not file.startswith((*_OWN_CODE, "??")) and _WRAPPERS not in file and line.isdecimal():
                    chain.append(Frame("source.cu" if file.endswith("<stdin>") else Path(file).name, int(line), function))
        yield tuple(chain)
