"""Tests of multi-GPU kernels on machines without a GPU.

    @peerlane.race(world_size=4, schedules=50)
    def test_gather():
        group = peerlane.device.group_of()
        ...                                     launches kernels, and asserts what they wrote

The function runs once on every emulated rank, each in a thread of its own. Then its launches run under many schedules. The test fails if a
rank raises, or if the emulator finds a race, a deadlock, or anything else.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec

if TYPE_CHECKING:
    from peerlane.emulator.findings import Finding

Parameters = ParamSpec("Parameters")


class RaceFound(AssertionError):
    """Findings of the emulator in the launches of a test; ``findings`` has them as objects."""

    def __init__(self, world_size: int, findings: Sequence[Finding]) -> None:
        super().__init__("\n".join([f"{len(findings)} findings on {world_size} emulated ranks", *map(str, findings)]))
        self.findings = list(findings)


@dataclass
class Settings:
    """Settings of a run of tests: the plug-in of pytest fills them from its options."""

    schedules: int | None = None
    seed: int = 0
    gpu: str | None = None
    kernels: dict[str, None] = field(default_factory=dict)
    """in words, what the kernels of all tests so far need of a GPU"""
    not_compiled: bool = False
    """whether a kernel ran that no compiler for GPUs has seen"""


settings = Settings()


def race(
    world_size: int | Sequence[int] = 2, schedules: int = 50, *, seed: int | None = None, gpu: str | None = None, limit_s: float = 300.0
) -> Callable[[Callable[Parameters, Any]], Callable[Parameters, None]]:
    """Returns a decorator that runs a function on emulated ranks, and its launches under ``schedules`` schedules.

    ``world_size`` is a number of ranks, or several, one after the other. ``gpu`` ("h100", "h200", "b200"): each rank has as many SMs as
    this GPU; else it has two. ``limit_s``: processor seconds that launches and their compilation may take. The function's arguments,
    fixtures of pytest among them, are the same objects on all ranks. It raises what a rank raised, and :class:`RaceFound`.
    """
    sizes = [world_size] if isinstance(world_size, int) else list(world_size)

    def decorate(function: Callable[Parameters, Any]) -> Callable[Parameters, None]:
        @functools.wraps(function)
        def raced(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
            for size in sizes:
                act = functools.partial(function, *args, **kwargs)
                _run(act, size, settings.schedules or schedules, seed, gpu or settings.gpu, limit_s)

        return raced

    return decorate


def _run(act: Callable[[], Any], world_size: int, schedules: int, seed: int | None, gpu: str | None, limit_s: float) -> None:
    from peerlane.emulator.findings import RaceNote, merged
    from peerlane.emulator.gpu_code import gpu_named
    from peerlane.emulator.ranks import EmulatedRanks, RankFailure
    from peerlane.emulator.sequence import findings
    from peerlane.errors import EmulatedFault, PeerlaneError

    ranks = EmulatedRanks(
        world_size,
        schedules=schedules,
        seed=settings.seed if seed is None else seed,
        gpu=None if gpu is None else gpu_named(gpu),
        limit_s=limit_s,
    )
    try:
        ranks.load(lambda rank: act)
        ranks.call([()] * world_size, lambda rank, output: None)
    except RankFailure as failed:
        failed.error.add_note(f"on rank {failed.rank} of {world_size} emulated ranks")
        if not isinstance(failed.error, EmulatedFault):  # which says it already
            with contextlib.suppress(PeerlaneError):
                for finding in findings(ranks.reports()):  # of the launches before
                    failed.error.add_note(str(finding))
        raise failed.error from None
    reports = ranks.reports()
    found = findings(reports)
    for note in merged(note for report in reports for note in report.notes):
        warnings.warn(RaceNote(str(note)), stacklevel=3)
    if ranks.kernels is None:
        settings.not_compiled |= bool(ranks.codes)
    else:
        settings.kernels |= dict.fromkeys(map(str, ranks.kernels))
    if found:
        raise RaceFound(world_size, found)
