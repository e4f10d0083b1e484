"""Emulated ranks: threads of this process with host code of their own, whose kernels run in the emulator. No GPU is needed.

Host code asks ``peerlane.device.group_of`` for its group, or uses what ``distributed.py`` has of torch.distributed. ``team.py`` says how
launches are run. ``solution_run.py`` runs the solution of a file so.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from peerlane.device.host.group import Group, entered
from peerlane.emulator.check import Report
from peerlane.emulator.cuda_runtime import thread_of
from peerlane.emulator.gpu_code import EmulatedGpu, KernelNeeds, compiler_is_here, default_gpu
from peerlane.emulator.host_libraries import emulated_libraries
from peerlane.emulator.host_memory import empty_noted
from peerlane.emulator.sequence import Code
from peerlane.emulator.team import World
from peerlane.emulator.torch_cuda import candidate_code
from peerlane.emulator.triton_launches import compiled_not_interpreted

Arguments = tuple[Any, ...]
SM_COUNT = 2


class RankFailure(Exception):
    """A rank of an :class:`EmulatedRanks` raised ``error``. Nothing more can be asked of these ranks."""

    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(f"rank {rank} raised {type(error).__name__}: {error}")
        self.rank, self.error = rank, error


class EmulatedRanks:
    """The ranks of one solution, which stay from call to call. Every call may raise :class:`RankFailure`."""

    def __init__(
        self,
        size: int,
        *,
        schedules: int = 4,
        seed: int = 0,
        sm_count: int | None = None,
        gpu: EmulatedGpu | None = None,
        from_ptx: bool = False,
        nodes: int = 1,
        limit_s: float = math.inf,
    ) -> None:
        """``gpu``: a rank has as many SMs as this one, and code is compiled for it; None: two SMs of an H100. ``from_ptx``: kernels run as
        the PTX that the GPU's compiler makes of them. ``nodes``: how many the ranks are in; an arena of ranks of different nodes raises
        UsageError."""
        sm_count = sm_count or (gpu.sm_count if gpu else SM_COUNT)
        self._world = World(size, schedules, seed, sm_count, gpu or default_gpu(), from_ptx, nodes, limit_s)
        self._everyone = self._world.team(range(size))
        self._solutions: list[Callable[..., Any]] = []
        self._calls = 0

    def groups(self, layouts: Mapping[str, Sequence[Sequence[int]]]) -> list[dict[str, Group]]:
        """Returns for every rank its group of each named set of groups, which are lists of ranks."""
        named: list[dict[str, Group]] = [{} for _ in range(self._world.size)]
        for name, sets in layouts.items():
            for members in sets:
                for rank in members:
                    named[rank][name] = self._world.team(members).group(rank)
        return named

    def load(self, load: Callable[[int], Callable[..., Any]]) -> None:
        """Makes ``load(rank)`` the solution that each rank calls from now on."""

        def act(rank: int) -> Callable[..., Any]:
            with candidate_code():
                return load(rank)

        with compiled_not_interpreted():
            self._solutions = self._each(act)

    def call(self, arguments: Sequence[Arguments], keep: Callable[[int, Any], Any]) -> list[Any]:
        """Calls every rank's solution; returns the results of ``keep(rank, output)``, which runs when the rank's call has returned."""
        number, self._calls = self._calls, self._calls + 1

        def act(rank: int) -> Any:
            with candidate_code():
                output = self._solutions[rank](*arguments[rank])
            parts = {self._world.space.part_of(tensor) for tensor in tensors_of(output)}
            returned = [part for part in parts if part is not None and not part.read_by_caller]
            for part in returned:
                part.read_by_caller = True
            kept = keep(rank, output)
            self._everyone.meeting.meet(rank, f"the end of call {number}", None, self._world.end_of_call)
            for part in returned:  # it lasts until the next call
                part.read_by_caller = False
            return kept

        return self._each(act)

    def reports(self) -> list[Report]:
        """Returns the reports of all launches so far, under many schedules. Those whose turn has not come are run now."""
        for team in self._world.teams:
            team.sequence.check()
        return [report for team in self._world.teams for report in team.sequence.reports]

    def run_under(self, schedules: int) -> None:
        """Makes ``schedules`` the number of schedules of later launches; with 0 they are run for their results alone."""
        self._world.schedules = schedules
        for team in self._world.teams:
            team.sequence.schedules = schedules

    @property
    def kernels(self) -> list[KernelNeeds] | None:
        """The launched kernels' needs of a GPU; None where no compiler is here that knows."""
        known = compiler_is_here() if not self._world.kernels else not self._world.not_compiled
        return list(self._world.kernels.values()) if known else None

    @property
    def codes(self) -> list[Code]:
        """The sources of the launched kernels."""
        return list(self._world.builds.done)

    @property
    def sources(self) -> set[str]:
        """The hashes of the tokens of all launched kernels' sources."""
        return set[str]().union(*(team.sources for team in self._world.teams))

    @property
    def collectives(self) -> Counter[str]:
        """The number of calls of each collective of torch.distributed, by all ranks together."""
        return self._world.collectives

    @property
    def launches(self) -> Counter[str]:
        """The number of launches of each kernel, by all ranks together."""
        return sum((team.launches for team in self._world.teams), Counter())

    def _each(self, act: Callable[[int], Any]) -> list[Any]:
        """Returns ``act(rank)`` of every rank, each called in a thread of its own."""
        turns, results = self._world.turns, [None] * self._world.size
        turns.restart()

        def main(rank: int) -> None:
            error: BaseException | None = None
            try:
                turns.begin(rank)
                with entered(self._everyone.group(rank)), thread_of(rank):
                    results[rank] = act(rank)
            except BaseException as caught:
                error = caught
            turns.end(rank, error)

        threads = [threading.Thread(target=main, args=(rank,), name=f"rank {rank}") for rank in range(self._world.size)]
        with emulated_libraries(self._world.gpu), empty_noted(self._world.space):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if turns.failure is not None:
            raise RankFailure(*turns.failure) from turns.failure[1]
        return results


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Returns the tensors of an output."""
    if isinstance(output, torch.Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_of(item)]
