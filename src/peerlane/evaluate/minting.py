"""New contents for the slots of a case, block after block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peerlane.evaluate.captures import Captures
from peerlane.evaluate.slots import ArgumentSlots
from peerlane.problems._draw import RANDOM, BlockGenerators, Draw
from peerlane.problems._spec import Case, Problem

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


class Minter:
    """Draws the contents of slots.

    Inputs are drawn by many small kernels, which take the host several times as long to launch as the device to run. Where as many slots
    are drawn once more, on a GPU, drawing them is captured into a CUDA graph, and replayed from then on, with seeds of its own for every
    block: timed blocks are minted so. Inputs that the host has a part in cannot be captured and are drawn call by call.
    """

    def __init__(self, inputs: Inputs, slots: ArgumentSlots) -> None:
        self._inputs, self._slots = inputs, slots
        self._drawn: set[int] = set()  # numbers of slots
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._generators: BlockGenerators | None = None
        self.captures = inputs.device.type == "cuda"
        """False once it is known that these inputs cannot be captured"""

    def mint(self, block: int, kinds: Sequence[str]) -> None:
        """New contents for the first ``len(kinds)`` slots, in stream order; ``kinds`` says which of them are integer draws."""
        count = len(kinds)
        repeats = count in self._drawn and self._slots.end(count) <= _CAPTURED_BYTES * count and all(kind == RANDOM for kind in kinds)
        self._drawn.add(count)
        if not (repeats and self.captures and self._replay(block, count)):
            self._draw(block, kinds)

    def _draw(self, block: int, kinds: Sequence[str], generators: BlockGenerators | None = None) -> None:
        self._slots.fill(self._inputs.of(slot, block, kind, generators).args for slot, kind in enumerate(kinds))

    def _replay(self, block: int, count: int) -> bool:
        """Draws so many slots by their graph, or, where there is none yet, as one would, and captures it. False if that cannot be."""
        inputs = self._inputs
        generators = self._generators = self._generators or BlockGenerators(inputs.device)
        generators.begin(secret=inputs.secret, case_key=inputs.case.key, block=block, rank=inputs.rank)
        if count in self._graphs:
            self._graphs[count].replay()
            return True
        kinds = [RANDOM] * count
        try:
            with _no_waiting():
                self._draw(block, kinds, generators)
            self._graphs[count] = self._captured(block, kinds, generators)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            self.captures = False
        return self.captures

    def _captured(self, block: int, kinds: Sequence[str], generators: BlockGenerators) -> torch.cuda.CUDAGraph:
        with Captures() as captures, captures.graph(generators.private, generators.shared) as graph:
            self._draw(block, kinds, generators)
        return graph


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """In here torch raises RuntimeError where the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
