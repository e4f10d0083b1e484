"""All ranks of a candidate as threads of one process, whose kernels run in the emulator. Everything it reports is untrusted."""

import functools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from peerlane import problems
from peerlane.emulator import build
from peerlane.emulator.check import Report
from peerlane.emulator.host_libraries import prepare
from peerlane.emulator.ranks import EmulatedRanks
from peerlane.emulator.sequence import candidate_findings
from peerlane.evaluate import wire
from peerlane.evaluate.audit import monkeypatch_check
from peerlane.evaluate.memory.arena import extent, view
from peerlane.evaluate.memory.slots import updates_of
from peerlane.evaluate.messages import PerRank
from peerlane.evaluate.rank_interface import EmulatedInterface
from peerlane.evaluate.ranks import extensions, out_of_reach
from peerlane.evaluate.ranks.candidate import AttachedCase, import_candidate, poison_freed_memory, solution_of
from peerlane.evaluate.ranks.rank import RankProcess
from peerlane.evaluate.ranks.timed_block import Solution
from peerlane.evaluate.wire import FINDING_CHARACTERS, MOST_FINDINGS, MOST_NAMES, NAME_CHARACTERS
from peerlane.problems.contract.tree import rebuild, tensor_descriptions


class _RankCase(AttachedCase):
    @contextmanager
    def own_arguments(self, slot: int) -> Iterator[tuple[Any, ...]]:
        """The arguments of a slot, each tensor in memory of its own, as the emulator wants them; what becomes of them is copied back."""
        data, layout = self.arena.data, self.arguments.layout[slot]
        places = [extent(placed) for placed in tensor_descriptions(layout)]
        copies = [data[begin:end].clone() for begin, end in places]
        tensors = [view(copy, {**placed, "offset": 0}) for copy, placed in zip(copies, tensor_descriptions(layout), strict=True)]
        yield self.outputs.fresh(rebuild(layout, iter(tensors), self.groups.__getitem__))
        for (begin, end), copy in zip(places, copies, strict=True):
            data[begin:end].copy_(copy)


class EmulatedCandidate(RankProcess, EmulatedInterface):
    """Serves the requests of a candidate's ranks for all of them at once."""

    def __init__(self, config: dict[str, Any], rank: int, memory_fd: int) -> None:
        super().__init__(config, rank, memory_fd)
        self._size: int = config["emulated_ranks"]
        seed = int.from_bytes(os.urandom(4), "big")
        self._schedules: int = config["schedules"]
        self._ranks = EmulatedRanks(self._size, schedules=self._schedules, seed=seed, nodes=self.cluster.nodes)
        self._spaces: dict[str, list[_RankCase]] = {}
        self._reported: list[Report] = []

    def initialize(self) -> int:
        """Has what all candidates need from the emulator before a candidate's own cache takes the place of the shared one."""
        torch.set_num_threads(1)
        build.use_as_library(build.folder())
        return super().initialize()

    def detach_case(self, space: str) -> None:
        for attached in self._spaces.pop(space, []):
            attached.latest = list
            attached.arena.close()

    def attach_case(self, space: str, problem: int, variant: str, layout: wire.CaseLayout) -> None:
        """Attaches the case, as declared, for the rank that follows those whose case is attached in this space."""
        self._ranks.run_under(self._schedules)
        attached = self._spaces.setdefault(space, [])
        if len(attached) == self._size:
            attached.clear()
        groups = self._ranks.groups(layout.groups)[len(attached)]
        attached.append(_RankCase.attach(self, layout, groups, updates_of(problems.get(problem))))
        self.freeze_objects()

    def load_candidate(self, path: str, source: str, cache: str | None, problem: int, variant: str, granted: dict[str, str]) -> None:
        extensions.use_cache(cache)
        out_of_reach.refuse_answers(granted)
        monkeypatch_check.remember_originals()
        prepare(source)

        def load(rank: int) -> Solution:
            return solution_of(import_candidate(Path(path), source.encode("latin-1"), f"_rank_{rank}"), Path(path))

        self._ranks.load(load)

    def call(
        self, space: str, side: wire.Side, slots: list[int], marker: str | None = None, timeline: bool = False
    ) -> PerRank[wire.Called]:
        """Has every rank call the solution on ``slots``, one after the other; poisons freed memory before each, and takes snapshots."""
        cases = self._spaces[space]
        for slot in slots:
            self._call(cases, slot)
        answers = PerRank[wire.Called]()
        for attached in cases:
            aliased = attached.outputs.aliased([*attached.called, *slots])
            attached.called = slots[-1:]
            answers.append(wire.Called([attached.outputs.descriptions[slot] for slot in slots], aliased, [], 0))
        return answers

    def _call(self, cases: list[_RankCase], slot: int) -> None:
        for attached in cases:
            poison_freed_memory(attached.outputs.layout[slot], self.device)
        with ExitStack() as stack:
            arguments = [stack.enter_context(attached.own_arguments(slot)) for attached in cases]

            def keep(rank: int, output: Any) -> None:
                taken = cases[rank].outputs.take(slot, output, arguments[rank])
                cases[rank].latest = functools.partial(list, taken)  # kept until the next call is over: the same storage again is reuse

            self._ranks.call(arguments, keep)

    def report_races(self) -> wire.RaceReport:
        before, self._reported = self._reported, self._ranks.reports()
        findings, notes = candidate_findings([item for item in self._reported if item not in before])
        self._ranks.run_under(0)
        reported = [
            wire.RaceFinding(
                kind=finding.kind,
                memory=finding.memory,
                rank=max(0, min((side.rank for side in finding.sides), default=0)),
                schedules=finding.schedules,
                summary=finding.summary,
                text=str(finding)[:FINDING_CHARACTERS],
            )
            for finding in findings[:MOST_FINDINGS]
        ]
        needs = None if self._ranks.kernels is None else [str(item)[:NAME_CHARACTERS] for item in self._ranks.kernels[:MOST_NAMES]]
        sources = sorted(self._ranks.sources)[:MOST_NAMES]
        return wire.RaceReport(
            reported, dict(self._ranks.launches), sources, needs, dict(self._ranks.collectives), sorted({note.kind for note in notes})
        )
