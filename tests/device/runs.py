"""Runs in the emulator, of scenarios and of functions on emulated ranks, and what came of them."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from peerlane.emulator import Finding, Scenario, check
from peerlane.emulator.ranks import EmulatedRanks, RankFailure
from peerlane.emulator.sequence import findings


def require_clean(scenario: Scenario, *, schedules: int) -> None:
    report = check(scenario, schedules=schedules)
    assert report.clean, str(report)


@dataclass(frozen=True)
class Run:
    """What came of calls on emulated ranks."""

    outputs: list[list[Any]]
    """by call, then by rank; of the calls that all ranks returned from"""
    findings: list[Finding]
    failure: BaseException | None
    """what a rank raised"""

    @property
    def kinds(self) -> set[str]:
        """The kinds of the findings. Raises what a rank raised that no finding explains."""
        if self.failure is not None and not self.findings:
            raise self.failure
        return {finding.kind for finding in self.findings}

    @property
    def races(self) -> list[str]:
        """What the emulator says of races. Raises what a rank raised."""
        if self.failure is not None:
            raise self.failure
        return [str(finding) for finding in self.findings if finding.kind == "race"]

    def faults(self, right: bool) -> set[str]:
        """The kinds of the findings, and ``wrong_result`` unless the outputs are ``right``."""
        return self.kinds if right else self.kinds | {"wrong_result"}

    def clean(self, right: bool = True) -> list[list[Any]]:
        """The outputs, which must be ``right``. Raises what a rank raised; nothing may be found."""
        assert not self.faults(right), "\n".join(map(str, self.findings))
        return self.outputs


def run_calls(
    make: Callable[[int], Callable[..., Any]],
    calls: Sequence[Sequence[tuple[Any, ...]]],
    *,
    schedules: int = 1,
    sm_count: int | None = None,
) -> Run:
    """Makes a function on every rank, and calls it with ``calls[i][rank]``, one call behind the other. Outputs are copies."""
    ranks, outputs, failure = EmulatedRanks(len(calls[0]), schedules=schedules, sm_count=sm_count), list[list[Any]](), None
    try:
        ranks.load(make)
        for arguments in calls:
            outputs.append(ranks.call(arguments, lambda rank, output: tree_map(_copied, output)))
    except RankFailure as failed:
        failure = failed.error
    return Run(outputs, findings(ranks.reports()), failure)


def run_call(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, schedules: int = 1) -> list[Any]:
    """Calls a function on every rank; nothing may be found. Returns every rank's output."""
    return run_calls(lambda rank: function, [arguments], schedules=schedules).clean()[0]


def equal(got: Any, wanted: Any) -> bool:
    """Tells whether tensors, or lists of them, are the same to the bit."""
    if isinstance(wanted, torch.Tensor):
        return torch.equal(got, wanted)
    return len(got) == len(wanted) and all(map(equal, got, wanted))


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
