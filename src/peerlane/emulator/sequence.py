"""Launches of emulated ranks: each is run once for its result, then some in a row under many schedules for what they race about."""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from peerlane.device.host.resources import Resources
from peerlane.device.host.source_tokens import token_hash
from peerlane.emulator.build import HOST_READ, HOST_WRITE, Program, compile_modules, compile_program
from peerlane.emulator.check import Report, check_kernels, report
from peerlane.emulator.findings import NOTES, ORDER, Finding, merged
from peerlane.emulator.gpu_code import EmulatedGpu, GpuBuild, needs_of
from peerlane.emulator.host_memory import Part, Runs
from peerlane.emulator.job import PAGE_BYTES, VARIABLES, Job, Launch, Region, fitted, require_all, run_job
from peerlane.emulator.ptx_front_end import Ptx
from peerlane.emulator.stream_kernels import SIGNALS
from peerlane.errors import EmulatedFault

FATAL = frozenset({"deadlock", "trap", "crash", "illegal_address", "misaligned_address", "misuse", "endless"})
"""Findings behind which there is no result."""
MOST_LAUNCHES = 3
"""Launches of a sequence: faults of reuse show from the second or third launch on."""

MOST_KERNELS = 4
"""Different kernels of one sequence. More end it sooner than from their second or third launch on."""
_ALONE_SCHEDULES = 32
"""The most schedules of launches alone, to see whether they depend on the order of atomics."""
_GAP_BYTES, _MOST_RANGES = 4, 16
_MOST_NOTED = 64

Contents = list[tuple[int, bytes]]


@functools.lru_cache(maxsize=1024)
def _token_hash(source: str | Path) -> str:
    return token_hash(source if isinstance(source, str) else source.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Code:
    """The code that all ranks of a launch run."""

    source: str | Path | Ptx
    defines: tuple[tuple[str, str | int], ...] = ()

    @property
    def token_hash(self) -> str:
        """The hash of the source's tokens, or of its PTX."""
        return self.source.digest if isinstance(self.source, Ptx) else _token_hash(self.source)

    def symbol(self, kernel: str) -> str:
        """Returns the name of a kernel in the program that is made of this."""
        return self.source.symbol(kernel) if isinstance(self.source, Ptx) else kernel


@dataclass(eq=False)
class Compiled:
    """Code for the emulator, and what its kernels need of a GPU, if that is known."""

    program: Program
    kernels: Mapping[str, Resources] | None
    modules: frozenset[Ptx] = frozenset()
    """what it consists of, if that is PTX: then it can be joined with others"""

    def joined(self, other: "Compiled") -> "Compiled | None":
        """Returns both in one program; None if there is none, as where both have device variables."""
        if other is self or (self.modules and other.modules <= self.modules):
            return self
        if not self.modules or not other.modules or (self.program.globals and other.program.globals):
            return None
        both = compile_ptx(self.modules | other.modules)
        return both if both.program.globals == self.program.globals + other.program.globals else None


@functools.lru_cache(maxsize=256)
def compile_ptx(modules: frozenset[Ptx]) -> Compiled:
    """Compiles PTX modules into one program."""
    ordered = sorted(modules, key=lambda module: module.digest)
    kernels = {name: found for module in ordered for name, found in needs_of(module).items()}
    return Compiled(compile_modules(ordered), kernels, modules)


class Builds:
    """The code of a run, compiled once for the emulator, and meanwhile for a GPU."""

    def __init__(self, gpu: EmulatedGpu, from_ptx: bool = False) -> None:
        self.gpu, self.from_ptx = gpu, from_ptx
        self._for_gpu: dict[Code, GpuBuild] = {}
        self.done: dict[Code, Compiled] = {}
        """by code; PTX that a launch brought is not among it"""

    def begin(self, code: Code) -> None:
        """Starts the GPU's compiler, which takes its time while others do something else."""
        if code not in self._for_gpu:
            self._for_gpu[code] = GpuBuild(code.source, arch=self.gpu.arch, defines=dict(code.defines))

    def compiled(self, code: Code) -> Compiled:
        """Returns the code compiled. Raises CompileError where one of the two compilers refuses it."""
        if isinstance(code.source, Ptx):
            return compile_ptx(frozenset([code.source]))
        if code not in self.done:
            self.begin(code)
            build = self._for_gpu[code]
            program = build.program(
                lambda: compile_program(code.source, defines=dict(code.defines)), compile_program, want_ptx=self.from_ptx
            )
            self.done[code] = Compiled(program, build.kernels())
        return self.done[code]

    def of_ranks(self, codes: Sequence[Code]) -> Compiled | None:
        """Returns the code that the ranks of a launch run, compiled; None if it differs between them and cannot be one program."""
        compiled: Compiled | None = self.compiled(codes[0])
        for code in dict.fromkeys(codes[1:]):
            if code != codes[0]:
                both_ptx = isinstance(code.source, Ptx) and isinstance(codes[0].source, Ptx)
                compiled = compiled.joined(self.compiled(code)) if compiled is not None and both_ptx else None
        return compiled


@dataclass
class Step:
    """One launch of all ranks, the memory that they can reach, and what lay there before."""

    launches: list[Launch]
    before: dict[Part, Contents]
    name: str = ""
    """The name of the kernel."""
    unwritten: Mapping[Part, bool] = field(default_factory=dict)
    """the parts of ``before`` that host code had not written, and whether no kernel had, either"""
    used: Sequence[tuple[int, Part, bool]] = ()
    """What host code uses, where the launches stand for it: a rank among all, the part, and whether it writes."""


class LaunchSequence:
    """The launches of one group's ranks since the host last changed memory that they use."""

    def __init__(self, members: Sequence[int], schedules: int, seed: int, time_left: Callable[[], float] = lambda: 300.0) -> None:
        self.members, self.schedules, self.seed, self._time_left = members, schedules, seed, time_left
        self.reports: list[Report] = []
        self._runs = 0
        """of single launches; each has a schedule of its own"""
        self._in_any_order: set[str] = set()
        """names of kernels of which this is known"""
        self._code: Compiled | None = None
        self._steps: list[Step] = []
        self._known: dict[Part, Contents] = {}
        self._written: set[Part] = set()
        self._latest: dict[Part, Contents] = {}
        """what symmetric memory that the host can see held behind the last launch"""
        self._noted: dict[tuple[int, bool, str], dict[Part, list[Runs]]] = {}
        """what hosts have used since the last step: by rank, whether it is written, and operator"""
        self.launched: set[Part] = set()
        """all parts that launches could reach"""

    def run(self, name: str, code: Compiled, step: Step, faults: Sequence[Part], may_wait: bool = False) -> bool:
        """Runs a launch once and keeps what it writes. Raises EmulatedFault where it does not come to its end.

        If it ``may_wait`` for launches of other ranks and does, nothing of it is kept, and this returns False.
        """
        self._add_noted()
        program = code.program
        check_kernels(name, step.launches, program)
        asked, step.launches = step.launches, fitted(name, step.launches)
        joined = code if self._code is None else self._code.joined(code)
        changed = self._changed(step)
        if joined is None or (not code.modules and any(part in self._known for part in changed)):
            self.check()
            joined = code
        self._code = joined
        job = self._job(name, [step], {})
        started = time.monotonic()
        fault_regions = [region for region in job.regions if region.address in {part.address for part in faults}]
        job.faults = sorted(fault_regions, key=lambda region: region.rank)
        answer = run_job(job, program, schedules=1, seed=self.seed, first_schedule=self._runs, keep=True, timeout_s=self._time_left())
        self._runs += 1
        require_all(name, asked, step.launches, answer)
        said = report(job, program, answer, schedules=1, seed=self.seed, seconds=time.monotonic() - started)
        fatal = [finding for finding in said.findings if finding.kind in FATAL]
        if may_wait and fatal and all(finding.kind == "deadlock" for finding in fatal):
            return False
        by_address = {part.address: part for part in step.before}
        for region, pages in answer.written.items():
            by_address[region.address].update(pages)
            self._written.add(by_address[region.address])
        if fatal:
            self.reports.append(said)
            self._forget()
            first = fatal[0]
            at = f" at {first.memory}" if first.memory else ""
            raise EmulatedFault(f"the emulator stopped {name}: {first}\n{first.kind}{at} in {name}: {first.summary}")
        if said.findings or said.notes:
            self.reports.append(said)
        if code.modules and changed:
            self._steps.append(self._host_writes(step, changed))
        self._steps.append(step)
        self.launched |= step.before.keys()
        now = {part: part.contents() for part in step.before if part.shown}
        self._known |= now
        self._latest |= {part: contents for part, contents in now.items() if part.symmetric}
        names = [item.name for item in self._steps if item.name]
        if len(names) >= MOST_LAUNCHES * min(len(set(names)), MOST_KERNELS):
            self.check()
        return True

    def _changed(self, step: Step) -> dict[Part, Contents]:
        """Returns the parts that the host has changed since the last launch, with what they held."""
        before: dict[Part, Contents] = {}
        for part, now in step.before.items():
            held = self._known.get(part, self._latest.get(part, []) if part.symmetric else now)
            if part.shown and held != now and part.rank in self.members:
                before[part] = held
        return before

    def _host_writes(self, step: Step, before: dict[Part, Contents]) -> Step:
        """Returns what the host wrote, as launches of the rank whose memory it is: only synchronisation orders them for other ranks."""
        launches = []
        for part, held in before.items():
            old, new = dict(held), dict(step.before[part])
            for page in sorted(old | new):
                for begin, content in _differences(old.get(page, b""), new.get(page, b"")):
                    values = (_u64(part.address + page + begin), _u64(len(content)), content)
                    launches.append(Launch(HOST_WRITE, self.members.index(part.rank), 0, (1, 1, 1), (1, 1, 1), 0, 1, values))
        return Step(launches, before, used=[(part.rank, part, True) for part in before])

    def note(self, member: int, part: Part, runs: Runs, writes: bool, operator: str) -> None:
        """Records that a host reads or writes pieces of a part, between the launches before and those behind. ``member``: its rank among
        all."""
        given = self._noted.setdefault((member, writes, operator), {}).setdefault(part, [])
        given.append(runs)
        if len(given) >= _MOST_NOTED:
            given[:] = [_joined(given)]

    def _add_noted(self) -> None:
        """Adds what hosts have used since the last step. What they wrote is what lies there now: no kernel has run."""
        noted, self._noted = self._noted, {}
        for (member, writes, operator), by_part in noted.items():
            launches, kernel = [], HOST_WRITE if writes else HOST_READ
            for part, given in by_part.items():
                runs = _joined(given).tolist()
                for begin, nbytes in _by_words(runs):
                    values = (_u64(part.address + begin), _u64(nbytes), *([part.content(begin, nbytes)] if writes else []))
                    launches.append(Launch(kernel, self.members.index(member), 0, (1, 1, 1), (1, 1, 1), 0, 1, values, operator=operator))
                if writes:
                    held = self._latest[part] = _with(part, self._known.get(part, self._latest.get(part, [])), runs)
                    if part in self._known:
                        self._known[part] = held
            self._steps.append(Step(launches, {}, used=[(member, part, writes) for part in by_part]))

    def barrier(self, parts: Iterable[Part]) -> None:
        """Orders what all ranks have done before what they do from now on. ``parts``: memory whose changes by the host are known."""
        self._add_noted()
        step = Step([], {part: part.contents() for part in parts if part.symmetric and part.shown})
        if self._code is not None and self._code.modules and (changed := self._changed(step)):
            self._steps.append(self._host_writes(step, changed))
        self.check()
        self._latest |= step.before

    def signal(self, module: Ptx, signals: Step, parts: Iterable[Part]) -> None:
        """Adds launches of a module that order others, and leave memory as it is. ``parts``: as of a barrier."""
        if self._code is not None and not self._code.modules:
            return self.barrier(parts)
        self._add_noted()
        now = Step([], {part: part.contents() for part in parts if part.symmetric and part.shown})
        changed = self._changed(now)
        if not self._steps and not changed:
            return
        code = compile_ptx(frozenset([module]))
        joined = code if self._code is None else self._code.joined(code)
        if joined is None:
            self.check()
        self._code = joined or code
        if changed:
            self._steps.append(self._host_writes(now, changed))
        self._steps.append(signals)
        self._latest |= now.before
        self._known |= {part: contents for part, contents in now.before.items() if part in self._known}

    def check(self) -> None:
        """Runs the launches so far in a row under many schedules, and begins anew."""
        self._add_noted()
        steps, code, written, known = self._steps, self._code, self._written, self._known
        self._forget()
        launches = sum(bool(step.name) for step in steps)
        if not launches and _hosts_meet(steps):
            code = code or compile_ptx(frozenset([SIGNALS]))
        elif not launches:
            return
        if code is None or self.schedules < 1:
            return
        # Behind the last launch the host may have gone on with it.
        expected = {part: _bytes_of(part, known[part]) for part in written if not part.symmetric}
        names = ", ".join(dict.fromkeys(step.name for step in steps if step.name)) or "operators of torch"
        name = f"{names}{f', {launches} launches in a row' if launches > 1 else ''}"
        job, program, started = self._job(name, steps, expected), code.program, time.monotonic()
        answer = run_job(job, program, schedules=self.schedules, seed=self.seed, timeout_s=self._time_left())
        unexplained = [finding for finding in answer.findings if finding["kind"] == ORDER]
        errors = {finding["kind"] for finding in answer.findings} - NOTES - {"uninitialised_read"}
        if unexplained and not errors and not self._differ_alone(steps, program):
            for finding in unexplained:
                finding["kind"] = "wrong_result"
        self.reports.append(report(job, program, answer, schedules=self.schedules, seed=self.seed, seconds=time.monotonic() - started))

    def _differ_alone(self, steps: Sequence[Step], program: Program) -> bool:
        """Tells whether a launch writes something else in another order of atomics, though nothing overlaps with it."""

        def written(job: Job, schedule: int) -> dict[Region, Contents]:
            answer = run_job(job, program, schedules=1, seed=self.seed, first_schedule=schedule, keep=True, timeout_s=self._time_left())
            return {region: sorted(pages) for region, pages in answer.written.items()}

        names = {step.name for step in steps if step.name}
        if names & self._in_any_order:
            return True
        jobs = [self._job(step.name, [step], {}) for step in steps if step.name]
        first = [written(job, 0) for job in jobs]
        pairs = ((job, schedule, before) for schedule in range(1, _ALONE_SCHEDULES) for job, before in zip(jobs, first, strict=True))
        self._in_any_order |= {next((job.name for job, schedule, before in pairs if written(job, schedule) != before), "")} - {""}
        return bool(names & self._in_any_order)

    def _forget(self) -> None:
        self._steps, self._known, self._written = [], {}, set()

    def _job(self, name: str, steps: Sequence[Step], expected: dict[Part, bytes]) -> Job:
        first: dict[Part, Contents] = {}
        for step in steps:
            for part, contents in step.before.items():
                first.setdefault(part, contents)
        for part in (part for step in steps for _, part, _ in step.used):
            if part not in first:
                first[part] = part.contents()
        # What host code wrote between two launches, however it wrote, is written.
        latest = {part: step for step in steps if step.name for part in step.before}
        began = {part: step for step in reversed(steps) if step.name for part in step.before}
        unwritten = {part for part in latest if began[part].unwritten.get(part) and part in latest[part].unwritten}
        regions = [
            part.region(self._number(part.rank), contents, expected.get(part), part in unwritten) for part, contents in first.items()
        ]
        launches = [launch for step in steps for launch in step.launches]
        kept = sorted((region for region in regions if region.name == VARIABLES), key=lambda region: region.rank)
        return Job(name, len(self.members), regions, launches, globals=kept)

    def _number(self, rank: int) -> int:
        return self.members.index(rank) if rank in self.members else len(self.members)


def findings(reports: Iterable[Report]) -> list[Finding]:
    """Returns all findings, those of one kind and the same lines as one."""
    return merged(finding for item in reports for finding in item.findings)


def candidate_findings(reports: Sequence[Report]) -> tuple[list[Finding], list[Finding]]:
    """Returns the findings that show an error of a candidate, and notes. A kernel may copy what torch.empty holds, if nobody uses the copy;
    a use shows in the result, for torch.empty holds NaN on emulated ranks."""
    every = findings(reports)
    copies = [item for item in every if item.kind == "uninitialised_read" and not item.memory.startswith("shared memory")]
    return [item for item in every if item not in copies], merged([*(note for report in reports for note in report.notes), *copies])


def _bytes_of(part: Part, contents: Contents) -> bytes:
    held = bytearray(part.nbytes)
    for offset, page in contents:
        held[offset : offset + len(page)] = page
    return bytes(held)


def _with(part: Part, held: Contents, runs: Iterable[tuple[int, int]]) -> Contents:
    """Returns what a part held, and in these pieces what it holds."""
    content = bytearray(_bytes_of(part, held))
    for begin, nbytes in runs:
        content[begin : begin + nbytes] = part.content(begin, nbytes)
    pages = ((at, bytes(content[at : at + PAGE_BYTES])) for at in range(0, len(content), PAGE_BYTES))
    return [(at, page) for at, page in pages if any(page)]


def _joined(given: Sequence[Runs]) -> Runs:
    """Returns pieces of one part as such that do not touch."""
    runs = np.concatenate(given)
    begins, ends = (runs := runs[np.argsort(runs[:, 0], kind="stable")])[:, 0], np.maximum.accumulate(runs.sum(axis=1))
    firsts = np.flatnonzero(np.concatenate([[True], begins[1:] > ends[:-1]]))
    begins, ends = begins[firsts], ends[np.append(firsts[1:], len(runs)) - 1]
    return np.stack([begins, ends - begins], axis=1)


def _by_words(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields the pieces, cut where the first word begins: the kernels use words, then bytes. A part begins with a word."""
    for begin, nbytes in runs:
        head = min(-begin % 8, nbytes)
        if head:
            yield begin, head
        if nbytes > head:
            yield begin + head, nbytes - head


def _hosts_meet(steps: Iterable[Step]) -> bool:
    """Tells whether host code of one rank writes a part that host code of another uses, too."""
    used = {use for step in steps for use in step.used}
    return any(writes and any(other != member and part is same for other, same, _ in used) for member, part, writes in used)


def _differences(old: bytes, new: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields where a page changed, and to what; a page of zeros may be empty. Changes close to each other are one, and so are very many."""
    length = max(len(old), len(new))
    after = new.ljust(length, b"\0")
    places = [i for i, (a, b) in enumerate(zip(old.ljust(length, b"\0"), after, strict=True)) if a != b]
    if sum(b - a > _GAP_BYTES for a, b in itertools.pairwise(places)) > _MOST_RANGES:
        places = list(range(places[0], places[-1] + 1))
    begin = 0
    for i, place in enumerate(places):
        if i + 1 == len(places) or places[i + 1] - place > _GAP_BYTES:
            yield places[begin], after[places[begin] : place + 1]
            begin = i + 1


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")
