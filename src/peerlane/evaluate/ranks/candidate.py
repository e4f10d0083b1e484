"""The candidate's rank: runs candidate code on what the trusted side publishes. Everything it reports is untrusted.

Before any candidate code is loaded the same process times the reference (``prepare_block`` with ``side="reference"``), so that both sides
of the comparison ran in the same place; after ``load_candidate`` that is refused."""

import base64
import contextlib
import functools
import importlib.util
import linecache
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Self

import torch

from peerlane import problems, settings
from peerlane.evaluate import wire
from peerlane.evaluate.audit import monkeypatch_check
from peerlane.evaluate.audit.loaded_code import loaded_code, mapped_libraries
from peerlane.evaluate.audit.recorder import collectives, recording
from peerlane.evaluate.correctness.jitter import Jitter
from peerlane.evaluate.memory.arena import POISON, Arena
from peerlane.evaluate.memory.slots import ArgumentSlots, OutputRegions, updates_of
from peerlane.evaluate.rank_interface import CandidateInterface
from peerlane.evaluate.ranks import extensions, out_of_reach
from peerlane.evaluate.ranks.connections import tcp_connections
from peerlane.evaluate.ranks.rank import Rank, RankProcess
from peerlane.evaluate.ranks.timed_block import Solution
from peerlane.evaluate.ranks.triton_bounds import check_bounds, compute_bfloat16, skip_autotuning
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
    def attach(cls, rank: RankProcess, layout: wire.CaseLayout, groups: Mapping[str, Any], updates: Mapping[str, int]) -> Self:
        """Maps the arena that a trusted rank has laid out, and builds the views of all slots."""
        arena = Arena.attach(layout.arena, rank.device, rank.memory_fd)
        base, data = layout.input_bytes, arena.data
        arguments = ArgumentSlots(data[: max(base, 1)], layout.arguments, groups.__getitem__)
        outputs = OutputRegions(data[base : base + max(layout.output_bytes, 1)], layout.outputs, rank.device, updates)
        return cls(arena, arguments, outputs, groups=groups)

    def holds_any(self, tensors: list[torch.Tensor]) -> bool:
        begin = self.arena.data.data_ptr()
        return any(begin <= _data_ptr(tensor) < begin + self.arena.data.numel() for tensor in tensors)


class CandidateRank(Rank, CandidateInterface):
    """Calls the candidate, and the reference before the candidate is loaded."""

    def __init__(self, config: dict[str, Any], rank: int, memory_fd: int) -> None:
        super().__init__(config, rank, memory_fd)
        self._loaded = False
        self._own_libraries: frozenset[str] = frozenset()
        self._solution: Solution | None = None
        self._reference: Solution | None = None
        self._spaces: dict[str, AttachedCase] = {}
        self._parameters: Sequence[str] = ()
        self._jitter = Jitter(self.device)

    def initialize(self) -> int:
        """Initialises the rank, and imports what :meth:`load_sm_holder` needs while nobody waits for it."""
        if self.place.has_gpus:
            importlib.import_module("peerlane.device")
        pid = super().initialize()
        if self.place.has_gpus:
            torch.cuda.set_per_process_memory_fraction(memory_share(settings.ranks_per_gpu()), self.device)
        return pid

    def detach_case(self, space: str) -> None:
        attached = self._spaces.pop(space, None)
        if attached is not None:
            self._drop_block()
            attached.latest, attached.called = list, []
            attached.arena.close()
            self.give_back()

    def attach_case(self, space: str, problem: int, variant: str, layout: wire.CaseLayout) -> None:
        spec = problems.get(problem)
        self._parameters = spec.parameters
        self._spaces[space] = AttachedCase.attach(self, layout, self.groups(layout.groups), updates_of(spec))
        if not self._loaded:
            self._reference = spec.reference_of(variant)
        self.freeze_objects()

    def load_sm_holder(self, code: str) -> None:
        self._jitter.load_sm_holder(base64.b64decode(code))

    def load_reference(self, problem: int, variant: str) -> None:
        self._drop_block()
        self._solution = problems.get(problem).reference_of(variant)

    def load_candidate(self, path: str, source: str, cache: str | None, problem: int, variant: str, granted: dict[str, str]) -> None:
        self._drop_block()
        self.give_back()  # what the reference has left
        self._loaded, self._reference = True, None
        self._own_libraries = mapped_libraries()
        extensions.use_cache(cache)
        extensions.report_builds(self.report_building)
        if not self.place.has_gpus:
            os.environ["TRITON_INTERPRET"] = "1"
        out_of_reach.refuse_answers(granted)
        monkeypatch_check.remember_originals()
        solution = solution_of(import_candidate(Path(path), source.encode("latin-1")), Path(path))
        if not self.place.has_gpus:
            check_bounds()
            compute_bfloat16()
            skip_autotuning()
        self._solution = problems.get(problem).accepting(variant, solution)

    def _solution_of(self, side: wire.Side) -> Solution:
        solution = self._reference if side == "reference" else self._solution
        if solution is None:
            raise RuntimeError(f"the {side} cannot run now")
        return solution

    def _drop_block(self) -> None:
        self.block = None
        for attached in self._spaces.values():
            attached.latest, attached.called = list, []

    def prepare_block(self, space: str, mode: wire.LaunchMode, side: wire.Side, plan: wire.BlockPlan) -> str | None:
        attached = self._spaces[space]
        self._drop_block()
        if mode == "graph":
            self.freeze_objects()
        failure = self.build_block(mode, plan, self._solution_of(side), attached.arguments, attached.outputs)
        if self.block is not None:
            attached.latest = self.block.latest
        return failure

    def describe_outputs(self, space: str, slots: int) -> wire.Outputs:
        return self._spaces[space].outputs.descriptions[:slots]

    def call(self, space: str, side: wire.Side, slots: list[int], marker: str | None = None, timeline: bool = False) -> wire.Called:
        """Calls the candidate, as declared. Poisons freed memory before each call, and takes snapshots.

        ``collectives`` in the answer is what the process groups counted in the calls, recorded or not.
        """
        attached = self._spaces[space]
        solution, outputs = self._solution_of(side), attached.outputs
        recordings, before = list[wire.Recording](), collectives()
        for slot in slots:
            poison_freed_memory(outputs.layout[slot], self.device)
            args = outputs.fresh(attached.arguments.args[slot])
            with recording(self.device, marker, timeline=timeline) if marker else contextlib.nullcontext() as record:
                try:
                    output = solution(*args)
                except TypeError as error:
                    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                        raise
                    raise TypeError(f"{error}; it is called by position, as solution({', '.join(self._parameters)})") from None
            if record is not None:
                recordings.append(record.result())
            taken = outputs.take(slot, output, args)
            # Kept until the next call is over, so that the same storage again means the candidate's own reuse.
            attached.latest = functools.partial(list, taken)
            del output
            self.synchronize()
        aliased = outputs.aliased([*attached.called, *slots])
        attached.called = slots[-1:]
        return wire.Called([outputs.descriptions[slot] for slot in slots], aliased, recordings, collectives() - before)

    def call_under_stress(
        self,
        space: str,
        order: list[int],
        jitter: list[tuple[int, str, float]],
        poisoned: list[int],
        kept: list[int],
        swaps: tuple[tuple[int, int, int], ...],
    ) -> wire.Outputs:
        """Calls the candidate under stress. Inputs are overwritten behind a call's snapshot, so a peer that reads them later is caught.

        Inputs of the calls at the positions ``kept`` stay, to be looked at, and the last call's, so that what it returned, which may be its
        inputs, can be looked at again. When this rank has been held up after a call, what that returned is copied once more: it has to last
        until the next one, however far the peers are by then.
        """
        attached = self._spaces[space]
        solution, outputs = self._solution_of("candidate"), attached.outputs
        before: dict[int, list[tuple[str, float]]] = {}
        for position, way, us in jitter:
            before.setdefault(position, []).append((way, us))
        keeps = {*kept, len(order) - 1}
        first = attached.arguments.swappers(swaps)

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
            taken = outputs.take(slot, solution(*args), args)
            if position not in keeps:
                attached.arguments.poison(slot)
            if hold_up(position + 1) and (position in keeps or not attached.holds_any(taken)):
                outputs.copy(slot, taken)  # but not inputs that are no more
            if position < len(order) - 1:
                del taken
        attached.latest = functools.partial(list, taken)
        self.synchronize()
        return outputs.descriptions[: len(order)]

    def recopy_output(self, space: str, slot: int) -> None:
        attached = self._spaces[space]
        attached.outputs.copy(slot, attached.latest())
        self.synchronize()

    def profile_block(self, space: str, slots: int, marker: str, timeline: bool) -> wire.ProfiledBlock:
        with recording(self.device, marker, timeline=timeline) as record:
            self.prepared.profile(record.mark_calls() if timeline else None)
        return wire.ProfiledBlock(record.result(), self._spaces[space].outputs.descriptions[:slots])

    def list_loaded_code(self, libraries: bool) -> wire.LoadedCode:
        return loaded_code(self._own_libraries, libraries=libraries)

    def list_connections(self) -> list[wire.Connection]:
        return tcp_connections()

    def probe_profiler(self, marker: str) -> wire.Recording:
        with recording(self.device, marker) as record:
            torch.zeros(1, device=self.device)
        return record.result()


def poison_freed_memory(layout: Description, device: torch.device) -> None:
    """Fills memory that the next allocations are likely to get, so that what is never written shows."""
    blocks = []
    for description in tensor_descriptions(layout):
        size = max(1, torch.Size(description["shape"]).numel() * dtype_of(description["dtype"]).itemsize)
        blocks += [torch.empty(size, dtype=torch.uint8, device=device).fill_(POISON) for _ in range(2)]
