"""All ranks of a candidate as threads of one process, whose kernels run in the emulator. Everything it reports is untrusted."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from peerlane import problems
from peerlane.emulator import build
from peerlane.emulator.host_libraries import prepare
from peerlane.emulator.ranks import EmulatedRanks
from peerlane.emulator.sequence import findings
from peerlane.evaluate import wire
from peerlane.evaluate.audit import monkeypatch_check
from peerlane.evaluate.memory.arena import extent, view
from peerlane.evaluate.memory.slots import updates_of
from peerlane.evaluate.ranks import extensions, out_of_reach
from peerlane.evaluate.ranks.candidate import AttachedCase, import_candidate, poison_freed_memory, solution_of
from peerlane.evaluate.ranks.rank import Rank
from peerlane.evaluate.ranks.timed_block import Solution
from peerlane.evaluate.wire_records import FINDING_CHARACTERS, MOST_FINDINGS, MOST_NAMES, NAME_CHARACTERS
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


class EmulatedCandidate(Rank):
    """Serves the requests of a candidate's ranks for all of them at once."""

    def __init__(self, config: dict[str, Any], rank: int, memory_fd: int) -> None:
        super().__init__(config, rank, memory_fd)
        self._size: int = config["emulated_ranks"]
        seed = int.from_bytes(os.urandom(4), "big")
        self._ranks = EmulatedRanks(self._size, schedules=config["schedules"], seed=seed, nodes=self.cluster.nodes)
        self._spaces: dict[str, list[_RankCase]] = {}
        self.handlers = {
            wire.Initialize: self.initialize,
            wire.AttachCase: self.attach_case,
            wire.DetachCase: self.detach_case,
            wire.LoadCandidate: self.load_candidate,
            wire.Call: self.call,
            wire.ReportRaces: self.report_races,
            wire.Exit: self.exit,
        }

    def initialize(self, request: wire.Initialize) -> wire.Initialized:
        """Has what all candidates need from the emulator before a candidate's own cache takes the place of the shared one."""
        torch.set_num_threads(1)
        build.use_as_library(build.folder())
        return wire.Initialized(os.getpid())

    def detach_case(self, request: wire.DetachCase) -> wire.Done:
        """Lets go of a space."""
        for attached in self._spaces.pop(request.space, []):
            attached.latest = list
            attached.arena.close()
        return wire.Done()

    def attach_case(self, requests: list[wire.AttachCase]) -> wire.Done:
        """Maps a case as the trusted rank of each rank has laid it out."""
        first = requests[0]
        updates = updates_of(problems.get(first.problem))
        each = zip(requests, self._ranks.groups(first.layout.groups), strict=True)
        self._spaces[first.space] = [_RankCase.attach(self, request.layout, groups, updates) for request, groups in each]
        self.freeze_objects()
        return wire.Done()

    def load_candidate(self, request: wire.LoadCandidate) -> wire.Done:
        """Imports the candidate's ``source``, which was at ``path``, once for every rank."""
        extensions.use_cache(request.cache)
        out_of_reach.refuse_answers(request.granted)
        monkeypatch_check.remember_originals()
        path, source = Path(request.path), request.source.encode("latin-1")

        prepare(request.source)

        def load(rank: int) -> Solution:
            return solution_of(import_candidate(path, source, f"_rank_{rank}"), path)

        self._ranks.load(load)
        return wire.Done()

    def call(self, request: wire.Call) -> list[wire.Answer]:
        """Every rank calls the solution on ``slots``, one after the other, with freed memory poisoned before each, and takes snapshots."""
        cases, slots = self._spaces[request.space], request.slots
        for slot in slots:
            self._call(cases, slot)
        answers: list[wire.Answer] = []
        for attached in cases:
            aliased = attached.outputs.aliased([*attached.called, *slots])
            attached.called = slots[-1:]
            answers.append(wire.Called([attached.outputs.descriptions[slot] for slot in slots], aliased, [], 0))
        return answers

    def _call(self, cases: list[_RankCase], slot: int) -> None:
        for attached in cases:
            poison_freed_memory(attached.outputs.layout[slot], self.device)
        own = [attached.own_arguments(slot) for attached in cases]
        arguments = [context.__enter__() for context in own]

        def keep(rank: int, output: Any) -> None:
            found = cases[rank].outputs.take(slot, output, arguments[rank])
            cases[rank].latest = functools.partial(list, found)  # kept until the next call is over: the same storage again is reuse

        self._ranks.call(arguments, keep)
        for context in own:
            context.__exit__(None, None, None)

    def report_races(self, request: wire.ReportRaces) -> wire.RaceReport:
        """Reports what the emulator has found in the launches so far, under many schedules, and how often each kernel was launched."""
        found = [
            wire.RaceFinding(
                kind=finding.kind,
                memory=finding.memory,
                rank=max(0, min((side.rank for side in finding.sides), default=0)),
                schedules=finding.schedules,
                summary=finding.summary,
                text=str(finding)[:FINDING_CHARACTERS],
            )
            for finding in findings(self._ranks.reports())[:MOST_FINDINGS]
        ]
        needs = None if self._ranks.kernels is None else [str(item)[:NAME_CHARACTERS] for item in self._ranks.kernels[:MOST_NAMES]]
        sources = sorted(self._ranks.sources)[:MOST_NAMES]
        return wire.RaceReport(found, dict(self._ranks.launches), sources, needs, dict(self._ranks.collectives))
