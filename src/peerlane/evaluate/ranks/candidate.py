"""The candidate's rank: runs candidate code on what the trusted side publishes. Everything it reports is untrusted.

Before any candidate code is loaded the same process times the reference (:class:`wire.PrepareBlock` with ``side="reference"``), so that
both sides of the comparison ran in the same place; after :class:`wire.LoadCandidate` that is refused.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib.util
import linecache
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Self

import torch

from peerlane import problems, settings
from peerlane.evaluate import messages, wire
from peerlane.evaluate.audit import monkeypatch_check
from peerlane.evaluate.audit.loaded_code import loaded_code, mapped_libraries
from peerlane.evaluate.audit.recorder import collectives, recording
from peerlane.evaluate.correctness.jitter import Jitter
from peerlane.evaluate.memory.arena import POISON, Arena
from peerlane.evaluate.memory.slots import ArgumentSlots, OutputRegions, updates_of
from peerlane.evaluate.ranks import extensions, out_of_reach
from peerlane.evaluate.ranks.connections import tcp_connections
from peerlane.evaluate.ranks.rank import Rank
from peerlane.evaluate.ranks.timed_block import Solution
from peerlane.evaluate.ranks.triton_bounds import check_bounds
from peerlane.problems.contract.tree import Description, dtype_of, tensor_descriptions

_KEPT_MEMORY = 0.08  # of a GPU, for contexts and for the trusted ranks
_data_ptr = torch.Tensor.data_ptr


class _Given(SourceFileLoader):
    """Loads a module from bytes that are given, whatever its file or a compiled copy of it holds by now."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_data(self, path: str) -> bytes:
        return self._source if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source, self.path)


def import_candidate(path: Path, source: bytes, ending: str = "") -> ModuleType:
    """Runs a candidate as a module of its own, with ``utils.cuda_helpers`` importable, and its folder not on the path.

    ``source``: what its file held when it was hashed. Nothing is read from ``path``, which may be out of sight. ``ending`` of its name, for
    another module of the same source.
    """
    extensions.install_public_helpers()
    extensions.use_own_build_folder(source)
    name = f"peerlane_candidate_{path.stem}{ending}"
    loader = _Given(name, str(path), source)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None, "a loader was given"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with contextlib.suppress(SyntaxError, UnicodeError):  # which are raised in a moment
        text = loader.get_source(name) or ""
        # Triton compiles what inspect finds here; without a time of change it is never compared with the file.
        linecache.cache[str(path)] = (len(source), None, text.splitlines(keepends=True), str(path))
    loader.exec_module(module)
    return module


def memory_share(ranks: int) -> float:
    """Returns the share of a GPU's memory that PyTorch may take in each of so many ranks there.

    A candidate that takes all it gets then leaves room for the evaluator's ranks, and for those that start for the next one.
    """
    return (1 - _KEPT_MEMORY) / ranks


def solution_of(module: ModuleType, path: Path) -> Solution:
    """The candidate's function; raises ImportError if it has none."""
    solution = getattr(module, "solution", None)
    if not callable(solution):
        raise ImportError(f"{path} has no function named solution: expected `def solution(...)` with the problem's parameters")
    return solution  # type: ignore[no-any-return]


@dataclass
class AttachedCase:
    """A space that is mapped: its arguments and its output regions."""

    arena: Arena
    arguments: ArgumentSlots
    outputs: OutputRegions
    latest: Callable[[], list[torch.Tensor]] = list
    """what the latest call returned, which is good until the next one"""
    called: list[int] = field(default_factory=list)
    """the slot that was called last, at rest"""
    groups: Mapping[str, Any] = field(default_factory=dict)
    """those that arguments name"""

    @classmethod
    def attach(cls, rank: Rank, layout: wire.CaseLayout, groups: Mapping[str, Any], updates: Mapping[str, int]) -> Self:
        """Maps the arena that a trusted rank has laid out, and builds the views of all slots."""
        arena = Arena.attach(layout.arena, rank.device, rank.memory_fd)
        base, data = layout.input_bytes, arena.data
        arguments = ArgumentSlots(data[: max(base, 1)], layout.arguments, groups.__getitem__)
        outputs = OutputRegions(data[base : base + max(layout.output_bytes, 1)], layout.outputs, rank.device, updates)
        return cls(arena, arguments, outputs, groups=groups)

    def holds_any(self, tensors: list[torch.Tensor]) -> bool:
        begin = self.arena.data.data_ptr()
        return any(begin <= _data_ptr(tensor) < begin + self.arena.data.numel() for tensor in tensors)


class CandidateRank(Rank):
    """Calls the candidate, and the reference before the candidate is loaded."""

    def __init__(self, config: dict[str, Any], rank: int, memory_fd: int) -> None:
        super().__init__(config, rank, memory_fd)
        self._loaded = False
        self._own_libraries: frozenset[str] = frozenset()
        self._solution: Solution | None = None
        self._reference: Solution | None = None
        self._spaces: dict[str, AttachedCase] = {}
        self._jitter = Jitter(self.device)
        self.handlers |= {
            wire.LoadSmHolder: self.load_sm_holder,
            wire.AttachCase: self.attach_case,
            wire.DetachCase: self.detach_case,
            wire.LoadReference: self.load_reference,
            wire.LoadCandidate: self.load_candidate,
            wire.Call: self.call,
            wire.CallUnderStress: self.call_under_stress,
            wire.PrepareBlock: self.prepare_block,
            wire.DescribeOutputs: self.describe_outputs,
            wire.RecopyOutput: self.recopy_output,
            wire.ProfileBlock: self.profile_block,
            wire.ListLoadedCode: self.list_loaded_code,
            wire.ProbeProfiler: self.probe_profiler,
            wire.ListConnections: self.list_connections,
        }

    def initialize(self, request: wire.Initialize) -> wire.Initialized:
        """As every rank's; and what :meth:`load_sm_holder` needs is imported, while nobody waits for it."""
        if self.place.has_gpus:
            importlib.import_module("peerlane.device")
        answer = super().initialize(request)
        if self.place.has_gpus:
            torch.cuda.set_per_process_memory_fraction(memory_share(settings.ranks_per_gpu()), self.device)
        return answer

    def detach_case(self, request: wire.DetachCase) -> wire.Done:
        """Lets go of a space, because the trusted side is about to lay it out anew."""
        attached = self._spaces.pop(request.space, None)
        if attached is not None:
            self._drop_block()
            attached.latest, attached.called = list, []
            attached.arena.close()
            self.give_back()
        return wire.Done()

    def attach_case(self, request: wire.AttachCase) -> wire.Done:
        """Maps a case that the trusted ranks have laid out."""
        problem, layout = problems.get(request.problem), request.layout
        self._spaces[request.space] = AttachedCase.attach(self, layout, self.groups(layout.groups), updates_of(problem))
        if not self._loaded:
            self._reference = problem.reference_of(request.variant)
        self.freeze_objects()
        return wire.Done()

    def load_sm_holder(self, request: wire.LoadSmHolder) -> wire.Done:
        """Loads the kernel that holds SMs under stress, on GPUs, before candidate code is there."""
        self._jitter.load_sm_holder(base64.b64decode(request.code))
        return wire.Done()

    def load_reference(self, request: wire.LoadReference) -> wire.Done:
        """Takes the reference for the candidate."""
        self._drop_block()
        self._solution = problems.get(request.problem).reference_of(request.variant)
        return wire.Done()

    def load_candidate(self, request: wire.LoadCandidate) -> wire.Done:
        """Imports the candidate's ``source``, which was at ``path``."""
        self._drop_block()
        self.give_back()  # what the reference has left
        self._loaded, self._reference = True, None
        self._own_libraries = mapped_libraries()
        extensions.use_cache(request.cache)
        extensions.report_builds(lambda building: self.send(messages.building_message(building)))
        if not self.place.has_gpus:
            os.environ["TRITON_INTERPRET"] = "1"
        out_of_reach.refuse_answers(request.granted)
        monkeypatch_check.remember_originals()
        path = Path(request.path)
        solution = solution_of(import_candidate(path, request.source.encode("latin-1")), path)
        if not self.place.has_gpus:
            check_bounds()
        self._solution = problems.get(request.problem).accepting(request.variant, solution)
        return wire.Done()

    def _solution_of(self, side: wire.Side) -> Solution:
        solution = self._reference if side == "reference" else self._solution
        if solution is None:
            raise RuntimeError(f"the {side} cannot run now")
        return solution

    def _drop_block(self) -> None:
        self.block = None
        for attached in self._spaces.values():
            attached.latest, attached.called = list, []

    def prepare_block(self, request: wire.PrepareBlock) -> wire.PreparedBlock:
        """Builds the timed block of a side."""
        attached = self._spaces[request.space]
        self._drop_block()
        if request.mode == "graph":
            self.freeze_objects()
        answer = self.build_block(request, self._solution_of(request.side), attached.arguments, attached.outputs)
        if self.block is not None:
            attached.latest = self.block.latest
        return answer

    def describe_outputs(self, request: wire.DescribeOutputs) -> wire.DescribedOutputs:
        """Describes what the calls of the latest block returned."""
        return wire.DescribedOutputs(self._spaces[request.space].outputs.descriptions[: request.slots])

    def call(self, request: wire.Call) -> wire.Called:
        """Calls the solution on ``slots`` one after the other, with freed memory poisoned before each, and takes snapshots.

        ``aliased`` in the answer: a call returned the same storage as the one before it. With a ``marker`` the calls are recorded;
        ``collectives`` is what the process groups counted in them, recorded or not.
        """
        attached = self._spaces[request.space]
        solution, outputs, slots = self._solution_of(request.side), attached.outputs, request.slots
        marker, timeline = request.marker, request.timeline
        recordings, before = list[wire.Recording](), collectives()
        for slot in slots:
            poison_freed_memory(outputs.layout[slot], self.device)
            args = outputs.fresh(attached.arguments.args[slot])
            with recording(self.device, marker, timeline=timeline) if marker else contextlib.nullcontext() as record:
                output = solution(*args)
            if record is not None:
                recordings.append(record.result())
            found = outputs.take(slot, output, args)
            # Kept until the next call is over, so that the same storage again means the candidate's own reuse.
            attached.latest = functools.partial(list, found)
            del output
            self.synchronize()
        aliased = outputs.aliased([*attached.called, *slots])
        attached.called = slots[-1:]
        return wire.Called([outputs.descriptions[slot] for slot in slots], aliased, recordings, collectives() - before)

    def call_under_stress(self, request: wire.CallUnderStress) -> wire.DescribedOutputs:
        """Calls the solution on the slots in ``order`` with no wait between them, and lets nothing rest.

        ``jitter`` lists (position, way, us): what happens before which call; ``poisoned`` the positions before which freed memory is
        filled with NaN; ``swaps`` are the steps of :class:`SlotSwaps`. A call's inputs are overwritten in stream order behind its
        snapshot, for what a peer reads then, it reads too late. Those of the calls at the positions ``kept`` stay, to be looked at, and the
        last call's, so that what it returned, which may be its inputs, can be looked at again. When this rank has been held up behind a
        call, what that returned is copied once more: it has to last until the next one, however far the peers are by then.
        """
        attached = self._spaces[request.space]
        solution, outputs, order = self._solution_of("candidate"), attached.outputs, request.order
        before: dict[int, list[tuple[str, float]]] = {}
        for position, way, us in request.jitter:
            before.setdefault(position, []).append((way, us))
        poisoned, kept = set(request.poisoned), {*request.kept, len(order) - 1}
        first = attached.arguments.swappers(request.swaps)

        def hold_up(position: int) -> bool:
            for way, us in before.get(position, ()):
                self._jitter(way, us)
            return position in before

        attached.latest, attached.called = list, []
        for position, slot in enumerate(order):
            if position in first:
                first[position]()
            if position in poisoned:
                poison_freed_memory(outputs.layout[slot], self.device)
            if position == 0:
                hold_up(0)
            args = outputs.fresh(attached.arguments.args[slot])
            found = outputs.take(slot, solution(*args), args)
            if position not in kept:
                attached.arguments.poison(slot)
            if hold_up(position + 1) and (position in kept or not attached.holds_any(found)):
                outputs.copy(slot, found)  # but not inputs that are no more
            if position < len(order) - 1:
                del found
        attached.latest = functools.partial(list, found)
        self.synchronize()
        return wire.DescribedOutputs(outputs.descriptions[: len(order)])

    def recopy_output(self, request: wire.RecopyOutput) -> wire.Done:
        """Copies what the latest call returned into its region once more: it may not have changed since."""
        attached = self._spaces[request.space]
        attached.outputs.copy(request.slot, attached.latest())
        self.synchronize()
        return wire.Done()

    def profile_block(self, request: wire.ProfileBlock) -> wire.ProfiledBlock:
        """Runs the block that was prepared, recorded and without clocks. Ranks begin a ``timeline`` together."""
        attached, timeline = self._spaces[request.space], request.timeline
        with recording(self.device, request.marker, timeline=timeline) as record:
            self.prepared.profile(record.mark_calls() if timeline else None)
        return wire.ProfiledBlock(record.result(), attached.outputs.descriptions[: request.slots])

    def list_loaded_code(self, request: wire.ListLoadedCode) -> wire.LoadedCode:
        """Lists the device code that was loaded since the candidate was."""
        return loaded_code(self._own_libraries, libraries=request.libraries)

    def list_connections(self, request: wire.ListConnections) -> wire.Connections:
        """Lists the process's TCP connections, with the bytes that they have received."""
        return wire.Connections(tcp_connections())

    def probe_profiler(self, request: wire.ProbeProfiler) -> wire.ProbedProfiler:
        """Records a kernel of PyTorch's, to see whether the profiler works here."""
        with recording(self.device, request.marker) as record:
            torch.zeros(1, device=self.device)
        return wire.ProbedProfiler(record.result())


def poison_freed_memory(layout: Description, device: torch.device) -> None:
    """Fills memory that the next allocations are likely to get, so that what is never written shows."""
    blocks = []
    for description in tensor_descriptions(layout):
        size = max(1, torch.Size(description["shape"]).numel() * dtype_of(description["dtype"]).itemsize)
        blocks += [torch.empty(size, dtype=torch.uint8, device=device).fill_(POISON) for _ in range(2)]
