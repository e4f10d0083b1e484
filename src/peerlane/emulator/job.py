"""One run of the emulator in a process of its own: memory and launches go in, findings and memory come out."""

import bisect
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from peerlane.emulator.build import Program
from peerlane.errors import DeviceError, EmulatedFault, LaunchError, UsageError

BASE = 0x2000_0000_0000
"""Where the ranks' memory begins. Fixed, so that arguments can be made before there is a process to hold it."""
PAGE_BYTES = 4096
TIMEOUT_NS = 2_000_000_000
VARIABLES = "device variables"
"""The name of the region of a rank's ``__device__`` variables."""
MOST_THREADS = 60 << 10
"""Threads and copies under way have numbers of 16 bits."""
_MAX_BLOCK = 1024
_MOST_IN_TURN = 1 << 19
"""Threads of a launch on a rank, if not all of them are there at a time: more take hours."""
_CHILD = Path(__file__).with_name("_child.py")


AT_MOST = "emulated ranks have at most"
"""Part of the message of every TooManyThreads."""


class TooManyThreads(UsageError):
    """Launches that are larger than what the emulator can hold."""


@dataclass(eq=False)
class Region:
    """Memory at ``address``, a multiple of PAGE_BYTES, which belongs to ``rank``; others may use it where it is ``symmetric``."""

    name: str
    rank: int
    address: int
    nbytes: int
    symmetric: bool
    dtype: torch.dtype | None = torch.uint8
    """None where C++ code has taken the memory"""
    contents: Sequence[tuple[int, bytes]] = ()
    """offset, a multiple of PAGE_BYTES, and what lies there at first; elsewhere there are zeros"""
    expected: bytes | None = None
    multicast: Sequence[int] = ()
    """Where the memory lies that a multicast address stands for, on each rank."""
    unwritten: bool = False
    """whether nobody has written it, so that reading it is an error"""
    any_order: bool = False
    """whether what is expected is of one order of atomic accesses, which another schedule may change"""


@dataclass(frozen=True)
class Launch:
    """One kernel launch of one rank."""

    kernel: str
    rank: int
    stream: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    cluster: int
    arguments: tuple[bytes, ...]
    resident_blocks: int = 1
    """how many blocks of its rank can run at a time; more are started as others end"""
    dependent: bool = False
    """whether it may begin before the launch before it has ended (programmatic dependent launch)"""
    in_order: bool = False
    """whether its blocks start by their numbers, because a GPU would hold more of them than the emulator does"""
    operator: str = ""
    """The line and the name of the operator of torch that it stands for."""

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return _product(self.block)


@dataclass
class Job:
    """Launches of one program on the ranks' memory."""

    name: str
    world_size: int
    regions: list[Region]
    launches: list[Launch]
    faults: Sequence[Region] = ()
    """the regions of the ranks' fault records"""
    globals: Sequence[Region] = ()
    """the regions of the ranks' device variables, if the program has any"""

    def describe(self, number: int, offset: int) -> str:
        """Describes a byte of region ``number`` (as the answer counts them, from 1) in words."""
        region = self.regions[number - 1]
        return f"{region.name}+{offset} of rank {region.rank}"


@dataclass
class Answer:
    """The answer of a job's process."""

    findings: list[dict[str, Any]]
    caught: int
    written: dict[Region, list[tuple[int, bytes]]] = field(default_factory=dict)
    """the pages that the last schedule has written, by region: offset and content"""


def whole_pages(nbytes: int) -> int:
    """Returns the room that ``nbytes`` take in the ranks' memory: whole pages, and a guard page behind them."""
    return (-(-nbytes // PAGE_BYTES) + 1) * PAGE_BYTES


def fitted(name: str, launches: Sequence[Launch]) -> list[Launch]:
    """Returns the launches with as many blocks at a time as the emulator can hold. Raises LaunchError for blocks that no GPU runs, and
    TooManyThreads where not even some of the blocks fit."""
    if large := [launch for launch in launches if _product(launch.block) > _MAX_BLOCK]:
        raise LaunchError(f"{name!r} has blocks of {large[0].block} threads; expected at most {_MAX_BLOCK} in all, which is a GPU's limit")
    blocks: dict[tuple[int, int], int] = {}
    widest: dict[tuple[int, int], int] = {}
    for launch in launches:
        stream = launch.rank, launch.stream
        blocks[stream] = max(blocks.get(stream, 0), min(_product(launch.grid), launch.resident_blocks))
        widest[stream] = max(widest.get(stream, 0), launch.threads)
    threads = sum(blocks[stream] * widest[stream] for stream in blocks)
    if threads <= MOST_THREADS:
        return list(launches)
    if (whole := max(_product(launch.grid) * launch.threads for launch in launches)) > _MOST_IN_TURN:
        raise _too_many(name, whole)
    room = {stream: MOST_THREADS // len(blocks) // widest[stream] for stream in blocks}
    if any(room[launch.rank, launch.stream] < launch.cluster for launch in launches):
        raise _too_many(name, threads)
    fewer = [min(launch.resident_blocks, room[launch.rank, launch.stream]) for launch in launches]
    return [
        replace(launch, resident_blocks=blocks, in_order=blocks < launch.resident_blocks)
        for launch, blocks in zip(launches, fewer, strict=True)
    ]


def require_all(name: str, asked: Sequence[Launch], launches: Sequence[Launch], answer: Answer) -> None:
    """Raises TooManyThreads where threads waited for blocks that a GPU would have started, and the emulator cannot hold."""
    if any(launch.in_order for launch in launches) and any("have not started" in finding["detail"] for finding in answer.findings):
        raise _too_many(name, sum(min(_product(launch.grid), launch.resident_blocks) * launch.threads for launch in asked))


def _too_many(name: str, threads: int) -> TooManyThreads:
    return TooManyThreads(
        f"{name!r} launches {threads} threads at a time; {AT_MOST} {MOST_THREADS}: "
        "use fewer or smaller blocks (group.sm_count of them, as a rule); a protocol shows its faults with two"
    )


def run_job(
    job: Job, program: Program, *, schedules: int, seed: int = 0, first_schedule: int = 0, timeout_s: float = 300.0, keep: bool = False
) -> Answer:
    """Runs a job under ``schedules`` schedules; with ``keep`` the answer holds the memory that the last one left.

    ``timeout_s``: of processor time, so that a busy machine makes nothing fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        description, data, memory = (Path(folder) / name for name in ("job.json", "data", "memory"))
        with data.open("wb") as file:
            described = _described(job, file)
        described |= {
            "program": str(program.path),
            "data": str(data),
            "memory": str(memory) if keep else None,
            "seed": seed,
            "first_schedule": first_schedule,
            "schedules": schedules,
            "progress": str(Path(folder) / "progress"),
        }
        description.write_text(json.dumps(described))
        command = [sys.executable, "-I", "-S", str(_CHILD), str(description), str(timeout_s)]
        done = _run(command, job.name, schedules, Path(folder) / "progress")
        if done.returncode == -signal.SIGPROF:
            raise DeviceError(
                f"scenario {job.name!r} did not end in {timeout_s:.3g} s of processor time; expected less: use fewer schedules or a "
                "smaller case, and see whether a loop waits on memory that it reads without ptx:: loads or volatile"
            )
        if done.returncode and "Traceback" in done.stderr:
            raise DeviceError(f"the emulator ended with status {done.returncode} in scenario {job.name!r}: {done.stderr.strip()[-2000:]}")
        if schedules == 1:  # what device code printed; once, not in every schedule
            sys.stderr.write(done.stderr)
        try:
            said = json.loads(done.stdout)
        except ValueError:  # nothing but the kernel itself can have ended the process before its answer
            raise EmulatedFault(
                f"{job.name!r} ended the process that ran it, with status {done.returncode}; expected device code that returns: "
                f"it must call nothing of the host, such as exit(){done.stderr.strip()[-2000:] and ': '}{done.stderr.strip()[-2000:]}"
            ) from None
        return Answer(said["findings"], said["caught"], _written(job, said["dirty"], memory.read_bytes()) if keep else {})


on_progress: Callable[[str], None] | None = None
"""Is told after ten seconds, and ever more rarely, how far a run is, in words."""
_PROGRESS_S = 10.0


def _run(command: Sequence[str], name: str, schedules: int, progress: Path) -> subprocess.CompletedProcess[str]:
    """Runs a job's process to its end, which writes to the file ``progress`` how many schedules are over."""
    progress.write_bytes(bytes(4))
    began, wait_s = time.monotonic(), _PROGRESS_S
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while True:
            try:
                out, err = process.communicate(timeout=wait_s)
                return subprocess.CompletedProcess(command, process.returncode, out, err)
            except subprocess.TimeoutExpired:
                wait_s *= 2
                over = int.from_bytes(progress.read_bytes(), "little")
                if on_progress is not None:
                    on_progress(f"{name}: {over} of {schedules} schedules after {time.monotonic() - began:.0f} s")
            except BaseException:
                process.kill()
                raise


_LAUNCH_FIELDS = tuple(each.name for each in fields(Launch) if each.name not in ("arguments", "operator"))


def _described(job: Job, file: Any) -> dict[str, Any]:
    """Returns the job as its process reads it; bytes go to ``file``."""

    def put(content: bytes) -> int:
        file.write(bytes(-file.tell() % 128))
        place: int = file.tell()
        file.write(content)
        return place

    put(bytes(128))
    regions = [
        {
            "begin": region.address - BASE,
            "end": region.address - BASE + region.nbytes,
            "rank": -1 if region.symmetric else region.rank,
            "expected": None if region.expected is None else put(region.expected),
            "unwritten": region.unwritten,
            "any_order": region.any_order,
            "multicast": [address - BASE for address in region.multicast],
        }
        for region in job.regions
    ]
    contents = [
        {"begin": region.address - BASE + offset, "bytes": len(content), "data": put(content)}
        for region in job.regions
        for offset, content in region.contents
    ]
    launches = [
        {name: getattr(launch, name) for name in _LAUNCH_FIELDS} | {"arguments": [put(argument) for argument in launch.arguments]}
        for launch in job.launches
    ]
    return {
        "base": BASE,
        "regions": regions,
        "contents": contents,
        "launches": launches,
        "faults": [job.regions.index(region) + 1 for region in job.faults],
        "globals": [job.regions.index(region) + 1 for region in job.globals],
    }


def _written(job: Job, dirty: Sequence[int], memory: bytes) -> dict[Region, list[tuple[int, bytes]]]:
    """Returns the pages in ``memory``, one behind the other, by region."""
    regions = sorted((region for region in job.regions if region.nbytes), key=lambda region: region.address)
    by_region: dict[Region, list[tuple[int, bytes]]] = {}
    for index, page in enumerate(dirty):
        address = BASE + page * PAGE_BYTES
        owner = bisect.bisect_right(regions, address, key=lambda region: region.address) - 1
        offset = address - regions[owner].address
        if owner >= 0 and offset < regions[owner].nbytes:
            content = memory[index * PAGE_BYTES : index * PAGE_BYTES + min(PAGE_BYTES, regions[owner].nbytes - offset)]
            by_region.setdefault(regions[owner], []).append((offset, content))
    return by_region


def _product(size: tuple[int, int, int]) -> int:
    return size[0] * size[1] * size[2]
