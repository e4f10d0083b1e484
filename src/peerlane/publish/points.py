"""Points of a board's plots that belong to one candidate: its speedup, and the size of what its ranks must exchange."""

from __future__ import annotations

import functools
from typing import NamedTuple

from peerlane import problems
from peerlane.errors import PeerlaneError
from peerlane.publish.boards import Board
from peerlane.publish.gather import Sample
from peerlane.results.speed_record import ModeSpeed


class SpeedPoint(NamedTuple):
    """The speed of one correct sample in one launch mode."""

    sample: Sample
    speed: ModeSpeed


def speed_points(board: Board) -> list[SpeedPoint]:
    """Returns every measured speed of the board's correct samples; references are left out."""
    return [
        SpeedPoint(sample, speed)
        for sample in board.samples
        if sample.result is not None and sample.attempt.correct
        for mode in board.modes
        if (speed := sample.result.speed_in(mode)) is not None
    ]


@functools.cache
def message_bytes(problem: int, preset: str, world_size: int, variant: str) -> float | None:
    """Returns the bytes that one rank must send or receive in the preset's timed case, whichever is more, on the busiest rank.

    None if this installation does not know the case, or if no rank must exchange anything.
    """
    try:
        known = problems.get(problem)
        case = known.cases(preset, world_size, variant)[0]
        costs = [known.cost(case, rank) for rank in range(world_size)]
    except PeerlaneError:
        return None
    return max(max(cost.egress_bytes, cost.ingress_bytes) for cost in costs) or None
