"""Groups, memory, kernels and launches of emulated ranks, which they have together.

Each launch is run once, for its result, then up to three in a row are run under ``schedules`` schedules. Behind each call every rank reads
the arena memory that host code has asked for, as a caller does.
"""

from __future__ import annotations

import math
import resource
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from peerlane.common.cluster import Cluster
from peerlane.device.host.group import Small, one_host
from peerlane.device.host.launch import argument, three
from peerlane.device.host.layout import LINE_BYTES, Layout
from peerlane.device.host.memory_report import MemoryReport
from peerlane.device.host.pool import check_sizes
from peerlane.device.host.resources import Resources
from peerlane.device.host.tensor_map import TensorMap, TensorMapSpec
from peerlane.device.host.waits import RECORD_WORDS, WaitRecord, Waits, record_in
from peerlane.emulator.build import Program, variable_offset
from peerlane.emulator.cuda_graphs import recorded
from peerlane.emulator.emulated_rank import EmulatedRank, PtxLaunch
from peerlane.emulator.gpu_code import EmulatedGpu, KernelNeeds, needs, resident_blocks
from peerlane.emulator.host_memory import AddressSpace, Part, Runs
from peerlane.emulator.job import PAGE_BYTES, TIMEOUT_NS, VARIABLES, Launch
from peerlane.emulator.nccl_windows import EmulatedWorld
from peerlane.emulator.ptx_front_end import NOT_KNOWN, Ptx, UnknownPtx, kernel_of
from peerlane.emulator.scenario import GUARDED_TAKES
from peerlane.emulator.sequence import Builds, Code, LaunchSequence, Step
from peerlane.emulator.turns import Meeting, Turns
from peerlane.errors import EmulatedFault, UsageError

MAX_THREADS = 128
FITTING_THREADS = 31 << 10
"""Threads of all ranks, if host code asks how many it may launch. More are possible, and slow."""


@dataclass
class World:
    """The emulated ranks of one run."""

    size: int
    schedules: int
    seed: int
    sm_count: int
    gpu: EmulatedGpu
    from_ptx: bool
    nodes: int = 1
    limit_s: float = math.inf
    """processor seconds of all launches, and of compiling them"""
    turns: Turns = field(init=False)
    space: AddressSpace = field(default_factory=AddressSpace)
    teams: list[Team] = field(default_factory=list)
    process_groups: dict[str, Any] = field(default_factory=lambda: {"0": None})
    """The process groups of torch.distributed, by name."""
    builds: Builds = field(init=False)
    cluster: Cluster = field(init=False)
    kernels: dict[tuple[str, int], KernelNeeds] = field(default_factory=dict)
    """by name and threads of a block, if there is a compiler for GPUs"""
    not_compiled: bool = False
    """whether a kernel was launched that nothing has compiled for a GPU"""
    collectives: Counter[str] = field(default_factory=Counter)
    """The number of calls of torch.distributed, by name, of all ranks together."""

    def __post_init__(self) -> None:
        self.turns, self.builds = Turns(self.size), Builds(self.gpu, self.from_ptx)
        self.cluster = Cluster(self.nodes, self.size)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self._used_s = used.ru_utime + used.ru_stime

    def end_of_call(self, _: object) -> None:
        """Ends a call, once all ranks have returned from it."""
        for team in self.teams:
            team.end_of_call()

    def time_left(self) -> float:
        """Returns the processor seconds that launches may still take."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return min(300.0, max(0.1, self.limit_s - (used.ru_utime + used.ru_stime - self._used_s)))

    def note(self, member: int, part: Part, runs: Runs, writes: bool, operator: str) -> None:
        """Records that host code of a rank reads or writes pieces of a part, between its launches before and those behind."""
        teams = [team for team in self.teams if member in team.members and part in team.sequence.launched]
        for team in teams or [self.team(range(self.size))]:
            team.sequence.note(member, part, runs, writes, operator)

    def team(self, members: Sequence[int]) -> Team:
        """Returns the group of these ranks."""
        found = next((team for team in self.teams if team.members == tuple(members)), None)
        if found is None:
            self.teams.append(found := Team(self, members))
        return found


class Team:
    """The state that the ranks of one group share."""

    def __init__(self, world: World, members: Sequence[int]) -> None:
        self.world, self.members = world, tuple(members)
        self.meeting = Meeting(world.turns, members)
        self.sequence = LaunchSequence(self.members, world.schedules, world.seed, world.time_left)
        self.parts: list[Part] = []
        """The parts of all arenas of the group, on all its ranks."""
        self.faults: list[Part] = []
        self.handles: WeakValueDictionary[Any, Any] = WeakValueDictionary()
        """The handles of symmetric memory, by rank and tensor, as long as they are in use."""
        self.workspaces: dict[int, Any] = {}
        """handles, by rank"""
        self.launches: Counter[str] = Counter()
        """by kernel"""
        self.sources: set[str] = set()
        """hashes of the tokens of the launched kernels' sources"""
        self.order: list[Part] = []
        """memory of signals, and where each rank finds it, once collectives of the group have needed it"""
        self._groups: dict[int, EmulatedGroup] = {}
        self._variables: dict[Path, list[Part]] = {}

    def group(self, member: int) -> EmulatedGroup:
        """Returns the group as the rank with number ``member`` among all ranks sees it."""
        if member not in self._groups:
            self._groups[member] = EmulatedGroup(self, member)
        return self._groups[member]

    def allocate(self, sizes: Sequence[int]) -> tuple[list[int], list[Part]]:
        """Returns addresses of an arena on every rank, and the fault records that belong to it."""
        length = sizes[0] + LINE_BYTES + 2 * PAGE_BYTES * GUARDED_TAKES
        bases = [self.world.space.reserve(length) for _ in self.members]
        faults = []
        for rank in self.members:
            memory = torch.zeros(4 * RECORD_WORDS, dtype=torch.uint8)
            faults.append(Part("wait record", rank, self.world.space.reserve(memory.nbytes), memory))
            self.world.space.place(faults[-1])
        self.faults += faults
        self.parts += faults
        return bases, faults

    def run_some(self, launches: Mapping[int, EmulatedLaunch]) -> Mapping[int, EmulatedLaunch]:
        """Runs launches of some ranks, where no rank can go on: those of one kernel if they need no other, or all. Returns which it ran."""
        kernels: dict[str, dict[int, EmulatedLaunch]] = {}
        for member, launch in launches.items():
            kernels.setdefault(launch.kernel.name, {})[member] = launch
        together = [launches] if len(kernels) > 1 else []
        return next((some for some in (*kernels.values(), *together) if self.run(some, may_wait=True)), {})

    def run(self, by_rank: Mapping[int, EmulatedLaunch], may_wait: bool = False) -> bool:
        """Runs one launch of each of these ranks. Returns False, and changes nothing, if they ``may_wait`` for others, and do."""
        launches, names = list(by_rank.values()), dict.fromkeys(kernel_of(launch.kernel.name) for launch in by_rank.values())
        compiled = self.world.builds.of_ranks([launch.kernel.code for launch in launches])
        if compiled is None:
            kernels = ", ".join(f"rank {rank}: {kernel_of(launch.kernel.name)}" for rank, launch in by_rank.items())
            raise UsageError(f"the ranks launch kernels of different sources or macros ({kernels}); they must be the same on all ranks")
        # Host code asks the kit how many SMs there are. That of others is written for the whole GPU.
        sm_count = self.world.gpu.sm_count if compiled.modules else self.world.sm_count
        # Code that is not the kit's runs among the launches of all ranks, whatever group launches it.
        home = self.world.team(range(self.world.size)) if compiled.modules else self
        made = [launch.made(home.members.index(member)) for member, launch in by_rank.items()]
        made = [replace(item, resident_blocks=resident_blocks(item, compiled.kernels, sm_count)) for item in made]
        found_needs = needs(made, compiled.kernels, self.world.gpu.arch)
        self.world.not_compiled |= found_needs is None
        for found in found_needs or ():
            self.world.kernels[found.name, found.threads] = found
        parts = dict.fromkeys([*home.parts, *self.parts, *self.variables(compiled.program)])
        parts |= dict.fromkeys(self.world.space.reached(argument for item in made for argument in item.arguments))
        for member, item in zip(by_rank, made, strict=True):
            if freed := next((part for part in self.world.space.reached(item.arguments) if part.freed_on(member)), None):
                raise EmulatedFault(
                    f"illegal_address in {next(iter(names))}: rank {member} uses {freed.name} of rank {freed.rank}, which is freed; "
                    "keep the tensor, or its handle, as long as kernels use the memory"
                )
        unwritten = {part: not part.written for part in parts if part.unwritten}
        step = Step(made, {part: part.contents() for part in parts}, ", ".join(names), unwritten)
        self.launches.update(launch.kernel.name for launch in launches)
        self.sources |= {launch.kernel.code.token_hash for launch in launches}
        faults = self.faults[: len(self.members)] if home is self else []
        return home.sequence.run(step.name, compiled, step, faults, may_wait)

    def variables(self, program: Program) -> list[Part]:
        """Returns every rank's device variables of a program, which stay from launch to launch."""
        if program.globals and program.path not in self._variables:
            self._variables[program.path] = []
            for rank in self.members:
                memory = torch.frombuffer(bytearray(program.globals), dtype=torch.uint8).clone()
                part = Part(VARIABLES, rank, self.world.space.address_of_new(memory), memory)
                self.world.space.place(part)
                self._variables[program.path].append(part)
        return self._variables.get(program.path, [])

    def variable(self, module: Ptx, name: str, rank: int) -> int:
        """Returns the address of a device variable of a PTX module on the rank of this number in the group."""
        program = self.world.builds.compiled(Code(module)).program
        offset = variable_offset(program, module, name)
        if offset is None:
            raise UnknownPtx(f"the address of variable {name}, which no kernel uses, {NOT_KNOWN}")
        return self.variables(program)[rank].address + offset

    def end_of_call(self) -> None:
        """Ends a call, once the callers have read their results."""
        for part in self.parts:
            if part.symmetric and part.shown and part.read_by_caller:
                self.world.note(part.rank, part, np.array([[0, part.nbytes]]), False, "")


class EmulatedGroup(EmulatedRank):
    """A group of emulated ranks, as one of them sees it. ``member`` is its number among all ranks."""

    team: Team

    def __init__(self, team: Team, member: int) -> None:
        super().__init__(team.members.index(member), len(team.members), torch.device("cpu"))
        self.team, self.member = team, member
        world = team.world
        fitting = FITTING_THREADS // (world.size * world.sm_count)  # if every SM has a block
        self.sm_count, self.max_threads = world.sm_count, max(32, min(MAX_THREADS, 1 << max(fitting.bit_length() - 1, 0)))
        self.waits = Waits(TIMEOUT_NS / 1e9, traps=True)  # a trap is what the emulator reports
        self._arenas: list[tuple[str, EmulatedMemory]] = []
        self._nccl: EmulatedWorld | None = None
        self.announced = ""
        """what the next launch is for"""

    @property
    def group_name(self) -> str:
        """The name by which functions of torch.distributed take the group."""
        return f"ranks {' '.join(map(str, self.team.members))}"

    def size(self) -> int:
        """As torch's process group says it."""
        return self.world_size

    def announce(self, call: tuple[Any, ...]) -> None:
        name, nbytes, *more = call
        self.announced = f"{name} of {nbytes} bytes{''.join(f', {item}' for item in more)}"

    def exchange(self, value: Small) -> list[Small]:
        self.cache.exchanged()
        return list(self.team.meeting.meet(self.member, "an exchange", value))

    def allocate(self, nbytes: int, name: str = "") -> EmulatedMemory:
        one_host([self.team.world.cluster.node_of(member) for member in self.team.members])
        check_sizes(self.exchange(nbytes))
        bases, faults = self.team.meeting.meet(self.member, f"an allocation of {nbytes} bytes", nbytes, self.team.allocate)
        self._arenas.append((name, EmulatedMemory(self, nbytes, bases, faults[self.rank])))
        return self._arenas[-1][1]

    def memory_report(self) -> MemoryReport:
        leases = [(name, memory.layout.nbytes) for name, memory in self._arenas if not memory.closed]
        return MemoryReport.of("emulated", leases, sum(nbytes for _, nbytes in leases), len(self._arenas))

    def kernel(
        self, source: str | Path, name: str, *, defines: Mapping[str, str | int], on_failure: Callable[[], None] | None = None
    ) -> EmulatedKernel:
        code = Code(source, tuple(sorted(defines.items())))
        self.team.world.builds.begin(code)
        return EmulatedKernel(self, code, name)

    def launch_ptx(self, launch: PtxLaunch) -> None:
        kernel = EmulatedKernel(self, Code(launch.module), launch.kernel)
        bound = kernel.bind(launch.grid, launch.block, launch.args, shared_bytes=launch.shared_bytes, cluster=launch.cluster)
        replace(bound, dependent=launch.dependent)()

    def nccl_world(self) -> EmulatedWorld:
        if self._nccl is None or self._nccl.closed:
            self._nccl = EmulatedWorld(self)
        return self._nccl

    def address(self, tensor: torch.Tensor) -> int:
        return self.team.world.space.address(tensor, self.member)

    def copy(self, target: int, source: torch.Tensor) -> None:
        def run() -> None:
            if (part := self.team.world.space.at(target)) is None:
                raise EmulatedFault(f"illegal_address: rank {self.member} copies to {target:#x}, where no rank has memory")
            part.show()
            part.memory[target - part.address :][: source.nbytes] = source.view(-1).view(torch.uint8)

        if not recorded(run):
            run()

    def encode(self, spec: TensorMapSpec) -> TensorMap:
        return spec.emulated()


class EmulatedMemory:
    """An arena of emulated ranks: guard pages lie around each of its parts."""

    def __init__(self, group: EmulatedGroup, nbytes: int, bases: Sequence[int], fault: Part) -> None:
        self.group, self.bases, self._fault, self.closed = group, bases, fault, False
        self.layout = _PartLayout(self, nbytes + LINE_BYTES)
        self._parts: dict[int, Part] = {}
        self.add(0, LINE_BYTES, "first line of the arena")

    @property
    def fault(self) -> int:
        return self._fault.address

    def add(self, offset: int, nbytes: int, name: str) -> None:
        """Adds a part that has been taken."""
        team, memory = self.group.team, torch.zeros(nbytes, dtype=torch.uint8)
        part = Part(name, self.group.member, self.bases[self.group.rank] + offset, memory, symmetric=True)
        self._parts[offset] = part
        if nbytes:
            team.world.space.place(part)
            team.parts.append(part)

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        start = max(start for start in self._parts if start <= offset)
        self._parts[start].show()
        return self._parts[start].memory[offset - start : offset - start + nbytes]

    @property
    def record(self) -> WaitRecord:
        return record_in(self._fault.memory)

    def close(self) -> None:
        """Memory of emulated ranks is given back at the end of the run."""
        self.closed = True
        for part in self._parts.values():
            part.closed = True


class _PartLayout(Layout):
    def __init__(self, memory: EmulatedMemory, nbytes: int) -> None:
        super().__init__(nbytes, reserved=LINE_BYTES, guard_bytes=PAGE_BYTES)
        self._memory = memory

    def take(self, nbytes: int, *, align: int = LINE_BYTES, name: str = "") -> int:
        offset = super().take(nbytes, align=align)
        if self.takes > GUARDED_TAKES:
            raise UsageError(f"an emulated arena has more than {GUARDED_TAKES} parts; take fewer and larger ones")
        self._memory.add(offset, nbytes, name or f"arena allocation {self.takes - 2}")
        return offset


@dataclass(frozen=True)
class EmulatedKernel:
    """A kernel of an emulated rank."""

    group: EmulatedGroup
    code: Code
    name: str

    def attributes(self) -> dict[str, int]:
        """Returns what the GPU's compiler says; zeros where there is none."""
        known = (self.group.team.world.builds.compiled(self.code).kernels or {}).get(self.name, Resources())
        return {"registers": known.registers, "local_bytes": known.frame_bytes, "shared_bytes": known.static_bytes}

    def bind(
        self, grid: int | Sequence[int], block: int | Sequence[int], args: Sequence[Any], *, shared_bytes: int = 0, cluster: int = 1
    ) -> EmulatedLaunch:
        if three(grid)[0] % cluster:
            raise UsageError(f"{self.name!r} has a grid of {three(grid)} and clusters of {cluster}; expected a multiple of that")
        values = tuple(argument(i, value) for i, value in enumerate(args))
        return EmulatedLaunch(self, three(grid), three(block), values, shared_bytes, cluster)


@dataclass(frozen=True)
class EmulatedLaunch:
    """A launch of an emulated rank: calling it waits until every rank of the group has launched, and runs all of them."""

    kernel: EmulatedKernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[Any, ...]
    shared_bytes: int
    cluster: int
    dependent: bool = False

    def __call__(self) -> None:
        for value in self.args:
            if (check := getattr(value, "before_launch", None)) is not None:
                check()
        if not recorded(replace(self, args=tuple(map(bytes, self.args)))._run):
            self._run()

    def _run(self) -> None:
        group = self.kernel.group
        purpose, group.announced = group.announced, ""
        what = f"a launch of {kernel_of(self.kernel.name)}{' for ' if purpose else ''}{purpose}"
        team = group.team
        alone = team.run_some if isinstance(self.kernel.code.source, Ptx) else None
        team.meeting.meet(group.member, what, self, lambda launches: team.run(dict(zip(team.members, launches, strict=True))), alone)

    def made(self, number: int) -> Launch:
        """Returns the launch as the emulator has it, with the arguments' present values."""
        arguments = tuple(bytes(value) for value in self.args)
        symbol = self.kernel.code.symbol(self.kernel.name)
        made = Launch(symbol, number, 0, self.grid, self.block, self.shared_bytes, self.cluster, arguments)
        return replace(made, dependent=self.dependent)
