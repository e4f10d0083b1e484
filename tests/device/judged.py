"""A solution on emulated ranks, judged by its problem's oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peerlane import problems
from peerlane.device.emulator.ranks import Outcome, run
from peerlane.device.group import Group
from peerlane.problems import Case, Draw, GroupRef, Problem
from peerlane.problems.contract.judge import score

CALLS = 3


@dataclass
class Judged:
    """The largest error as a share of what is allowed, and everything else that was seen."""

    worst: float
    outcome: Outcome

    def require_correct(self) -> None:
        if self.outcome.failure is not None:
            raise self.outcome.failure[1]
        assert not self.outcome.findings, "\n".join(map(str, self.outcome.findings))
        assert self.worst <= 1


def cases(problem: Problem, world_size: int) -> list[Case]:
    return list(problem.cases("small", world_size))


def judge(file: Path, number: int, case: Case, *, schedules: int = 4) -> Judged:
    """Three calls in a row with inputs of their own."""
    problem = problems.get(number)
    ranks = range(case.world_size)
    drawn = [
        [problem.inputs(case, rank, Draw(secret="kit", case_key=case.key, slot=0, block=call, rank=rank)) for rank in ranks]
        for call in range(CALLS)
    ]

    def resolve(arguments: tuple[Any, ...], groups: Mapping[str, Group]) -> tuple[Any, ...]:
        return tuple(groups[value.name] if isinstance(value, GroupRef) else value for value in arguments)

    calls = [[tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in own) for own in call] for call in drawn]
    outcome = run(file, calls, layouts=problem.process_groups(case) if problem.process_groups else {}, resolve=resolve, schedules=schedules)
    if outcome.failure is not None:
        return Judged(float("inf"), outcome)
    scores = [
        item.ratio
        for call, inputs in enumerate(drawn)
        for rank in ranks
        for item in score(problem, case, outcome.outputs[call][rank], problem.oracle(case, inputs, rank), "random")
    ]
    return Judged(max(scores, default=0.0), outcome)
