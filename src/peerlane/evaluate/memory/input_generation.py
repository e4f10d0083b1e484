"""New contents for the slots of a case, block after block."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peerlane.evaluate.memory.slots import ArgumentSlots
from peerlane.problems.contract.draw import RANDOM, BlockGenerators, Draw
from peerlane.problems.contract.spec import Case, Problem

_register = getattr(torch.cuda.CUDAGraph, "register_generator_state", lambda *_: None)  # later versions of torch do it themselves
_CAPTURED_BYTES = 64 << 20  # of a slot's inputs: drawing more keeps the device busy for longer than launching it keeps the host


@dataclass(frozen=True)
class Drawn:
    """The arguments of one call, and whether those of every other slot have the same shapes, strides and host-side numbers for certain."""

    args: tuple[Any, ...]
    fixed: bool


@dataclass(frozen=True)
class Inputs:
    """What one rank draws for the calls of a case; ``secret`` seeds it."""

    problem: Problem
    case: Case
    rank: int
    secret: str
    device: torch.device

    def of(self, slot: int, block: int, kind: str = RANDOM, generators: BlockGenerators | None = None) -> Drawn:
        """The arguments of a slot's call in a block."""
        draw = Draw(
            secret=self.secret,
            case_key=self.case.key,
            slot=slot,
            block=block,
            rank=self.rank,
            kind=kind,
            device=self.device,
            generators=generators,
        )
        return Drawn(self.problem.inputs(self.case, self.rank, draw), draw.fixed)


class InputGenerator:
    """Draws the contents of slots, one behind the other, from generators that begin anew with every block.

    Inputs are drawn by many small kernels, which take the host several times as long to launch as the device to run. Where as many slots
    are drawn once more, on a GPU, drawing them is captured into a CUDA graph, and replayed for further blocks: timed blocks are
    generated so.
    Inputs that the host has a part in are drawn call by call. The contents are the same.

    Tensors that a problem keeps from one drawing to the next must be kept for as long as the case is open: a replay reads them.
    """

    def __init__(self, inputs: Inputs, slots: ArgumentSlots) -> None:
        self._inputs, self._slots = inputs, slots
        self._generators = BlockGenerators(inputs.device)
        self._counts: set[int] = set()  # of slots that have been drawn
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.captures = inputs.device.type == "cuda"
        """False once it is known that these inputs cannot be captured"""

    def generate_inputs(self, block: int, kinds: Sequence[str]) -> None:
        """New contents for the first ``len(kinds)`` slots, in stream order; ``kinds`` says which of them are integer draws."""
        count = len(kinds)
        again = count in self._counts and self._slots.end(count) <= _CAPTURED_BYTES * count and all(kind == RANDOM for kind in kinds)
        self._counts.add(count)
        self._begin(block)
        if not (again and self.captures):
            self._draw(block, kinds)
        elif count in self._graphs:
            self._graphs[count].replay()
        else:
            self._draw_and_capture(block, kinds)

    def _begin(self, block: int) -> None:
        inputs = self._inputs
        self._generators.begin(secret=inputs.secret, case_key=inputs.case.key, block=block, rank=inputs.rank)

    def _draw(self, block: int, kinds: Sequence[str]) -> None:
        self._slots.fill(self._inputs.of(slot, block, kind, self._generators).args for slot, kind in enumerate(kinds))

    def _draw_and_capture(self, block: int, kinds: Sequence[str]) -> None:
        try:
            with _no_waiting():
                self._draw(block, kinds)
            self._graphs[len(kinds)] = self._captured(block, kinds)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            self.captures, self._generators = False, BlockGenerators(self._inputs.device)  # the old ones may believe to be captured
            self._begin(block)
            self._draw(block, kinds)

    def _captured(self, block: int, kinds: Sequence[str]) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        for generator in (self._generators.private, self._generators.shared):
            _register(graph, generator)
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._draw(block, kinds)
        except BaseException:
            torch.cuda.set_stream(stream)  # torch.cuda.graph stays on its own stream when a broken capture cannot be ended
            raise
        return graph


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """In here torch raises RuntimeError where the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this does not see every wait: those that it does not see cannot be captured either
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
