"""Run a scenario under many schedules and say what was found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerlane.device.arena import describe_fault
from peerlane.device.emulator import build
from peerlane.device.emulator.scenario import BASE, TIMEOUT_NS, Scenario
from peerlane.errors import DeviceError, UsageError

_CHILD = Path(__file__).with_name("_child.py")
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
    "crash": "the device code crashed",
    "endless": "the launches do not end",
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
    """Something wrong, and in how many of the schedules it was seen."""

    kind: str
    detail: str
    memory: str
    """the bytes concerned, in words; empty if there are none"""
    sides: tuple[Side, ...]
    schedule: int
    """the first that showed it; run it alone with ``check(scenario, schedules=1, first_schedule=...)``"""
    schedules: int

    def __str__(self) -> str:
        head = f"{self.kind}{': ' + self.memory if self.memory else ''} (in {self.schedules} schedules, first in {self.schedule})"
        return "\n".join(
            [head, *(f"  {side}" for side in self.sides), *([f"  {self.detail}"] if self.detail else []), f"  {MEANINGS[self.kind]}"]
        )


@dataclass(frozen=True)
class Report:
    """What some schedules of a scenario showed."""

    scenario: str
    world_size: int
    schedules: int
    seed: int
    caught: int
    """in how many schedules there was a finding"""
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def clean(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        head = f"{self.scenario}, {self.world_size} ranks: {self.schedules} schedules, seed {self.seed}"
        if self.clean:
            return f"{head}: nothing found"
        return "\n".join([f"{head}: {len(self.findings)} findings", *(str(finding) for finding in self.findings)])


def check(scenario: Scenario, *, schedules: int = 300, seed: int = 0, first_schedule: int = 0, timeout_s: float = 300.0) -> Report:
    """Run the scenario under ``schedules`` schedules, the same for the same seed.

    Raises UsageError for a scenario that cannot be run, CompileError, MissingDependency where there is no g++, and DeviceError if the
    emulator itself dies or does not end in time.
    """
    program = build.compile_program(scenario.source, defines=scenario.defines, include_dirs=scenario.include_dirs)
    if schedules < 1 or not scenario.launches:
        raise UsageError(
            f"scenario {scenario.name!r}: {schedules} schedules of {len(scenario.launches)} launches; expected one or more of each"
        )
    unknown = {launch.kernel for launch in scenario.launches} - set(program.kernels)
    if unknown:
        raise UsageError(f"scenario {scenario.name!r} launches {', '.join(sorted(unknown))}; the source has {', '.join(program.kernels)}")
    started = time.monotonic()
    answer = _run(scenario, program, schedules, seed, first_schedule, timeout_s)
    seconds = time.monotonic() - started
    frames = _frames(program.path, sorted({side["site"] for finding in answer["findings"] for side in finding["sides"]}))
    findings = tuple(_finding(scenario, finding, frames) for finding in answer["findings"])
    return Report(scenario.name, scenario.world_size, schedules, seed, answer["caught"], findings, seconds)


def _run(scenario: Scenario, program: build.Program, schedules: int, seed: int, first_schedule: int, timeout_s: float) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        data, job = Path(folder) / "data", Path(folder) / "job.json"
        with data.open("wb") as file:

            def put(content: bytes | None) -> int | None:
                if content is None:
                    return None
                file.write(bytes(-file.tell() % 16))
                place = file.tell()
                file.write(content)
                return place

            put(bytes(16))
            buffers = [
                {
                    "begin": address - BASE,
                    "end": address - BASE + buffer.nbytes,
                    "rank": -1 if buffer.symmetric else rank,
                    "initial": put(buffer.initial[rank] if buffer.initial else None),
                    "expected": put(buffer.expected[rank] if buffer.expected else None),
                }
                for buffer in scenario.buffers
                for rank, address in enumerate(buffer.addresses)
            ]
            launches = [
                {
                    "kernel": launch.kernel,
                    "rank": launch.rank,
                    "stream": launch.stream,
                    "grid": launch.grid,
                    "block": launch.block,
                    "shared_bytes": launch.shared_bytes,
                    "cluster": launch.cluster,
                    "arguments": [put(argument) for argument in launch.arguments],
                }
                for launch in scenario.launches
            ]
        faults = [scenario.buffers.index(arena.faults) * scenario.world_size + 1 for arena in scenario.arenas[:1]]
        job.write_text(
            json.dumps(
                {
                    "program": str(program.path),
                    "data": str(data),
                    "base": BASE,
                    "seed": seed,
                    "first_schedule": first_schedule,
                    "schedules": schedules,
                    "resident_blocks": scenario.resident_blocks,
                    "buffers": buffers,
                    "launches": launches,
                    "fault_buffers": [first + rank for first in faults for rank in range(scenario.world_size)],
                }
            )
        )
        try:
            done = subprocess.run([sys.executable, "-I", "-S", str(_CHILD), str(job)], capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise DeviceError(
                f"scenario {scenario.name!r} did not end in {timeout_s:g} s; expected less: use fewer schedules or a smaller case, and see "
                "whether a loop waits on memory that it reads without ptx:: loads or volatile"
            ) from error
    if done.returncode:
        raise DeviceError(f"the emulator ended with status {done.returncode} in scenario {scenario.name!r}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)


def _finding(scenario: Scenario, raw: Any, frames: dict[int, tuple[Frame, ...]]) -> Finding:
    fault = describe_fault(raw["fault"], TIMEOUT_NS) if raw["fault"] else ""
    detail = "; ".join(part for part in (raw["detail"], fault) if part)
    if raw["kind"] == "wrong_result":
        buffer, rank = scenario.place(raw["buffer"])
        start = raw["offset"] // 8 * 8
        expected = (buffer.expected or [])[rank][start : start + 8].hex()
        detail = f"bytes {start} to {start + 8}: expected {expected}, got {detail[: len(expected)]} ({buffer.dtype})"
    sides = tuple(
        Side(
            rank=side["rank"],
            launch=side["launch"],
            block=tuple(side["block"]),
            thread=tuple(side["thread"]),
            action=side["action"],
            frames=frames.get(side["site"], ()),
            at=_memory(scenario, side["buffer"], side["offset"]),
        )
        for side in raw["sides"]
    )
    return Finding(raw["kind"], detail, _memory(scenario, raw["buffer"], raw["offset"]), sides, raw["schedule"], raw["schedules"])


def _memory(scenario: Scenario, number: int, offset: int) -> str:
    if number < 0:
        return ""
    if number == 0:
        return "outside all buffers"
    if number > len(scenario.buffers) * scenario.world_size:
        return f"shared memory+{offset}"
    return scenario.describe(number, offset)


def _frames(program: Path, sites: Sequence[int]) -> dict[int, tuple[Frame, ...]]:
    """The source lines of places in the program, without those of the emulator's own headers."""
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
    """addr2line's answer: an address, then pairs of lines, function and file:line."""
    for part in re.split(r"^0x[0-9a-f]+\n", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        chain = []
        for function, place in zip(lines[::2], lines[1::2], strict=False):
            file, _, line = place.partition(" (")[0].rpartition(":")
            if not file.startswith(_OWN_CODE) and line.isdecimal():
                chain.append(Frame(Path(file).name, int(line), function))
        yield tuple(chain)


def _short(three: tuple[int, int, int]) -> str:
    x, y, z = three
    return str(x) if y == z == 0 else f"({x}, {y}, {z})"
