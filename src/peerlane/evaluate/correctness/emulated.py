"""A solution on emulated ranks, judged by its problem's oracle. It runs in this process: for trusted files only."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from peerlane.device.emulator.ranks import Outcome, run, wants_distributed
from peerlane.device.host.group import Group
from peerlane.problems import RANDOM, Case, Draw, GroupRef, Problem
from peerlane.problems.contract.judge import same_bits, score, type_mismatch

CALLS = 3
_MOST_LINES = 20


@dataclass
class EmulatedJudgement:
    """What a case showed: a failure, a wrong result, findings of the emulator, or nothing."""

    file: Path
    outcome: Outcome
    mismatch: str
    """why an output's structure, shape or dtype is wrong, or which argument was changed; empty if all is right"""
    worst: float
    """the largest error as a share of what is allowed"""
    place: str = ""
    """of the first wrong output: its name, rank, call and worst element"""

    @property
    def correct(self) -> bool:
        return self.outcome.failure is None and not self.mismatch and self.worst <= 1 and not self.outcome.findings

    def __str__(self) -> str:
        if self.outcome.failure is not None:
            return self._failure(*self.outcome.failure)
        if self.mismatch:
            return self.mismatch
        wrong = [f"wrong result: {self.place}; the largest error is {self.worst:.3g} times what is allowed"] if not self.worst <= 1 else []
        return "\n".join([*wrong, *map(str, self.outcome.findings)]) or "correct, nothing found"

    def _failure(self, rank: int, error: BaseException) -> str:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == self.file.name]
        told = str(error).splitlines()
        if len(told) > _MOST_LINES:  # of a compiler
            told[_MOST_LINES:] = [f"... and {len(told) - _MOST_LINES} more lines"]
        if wants_distributed(str(error)):
            told.append("emulated ranks do not have torch.distributed")
        return f"rank {rank} raised {type(error).__name__}{f' in line {lines[-1]}' if lines else ''}: " + "\n".join(told)


def judge_emulated(file: Path, problem: Problem, case: Case, *, schedules: int = 4, seed: int = 0) -> EmulatedJudgement:
    """Three calls in a row, with inputs of their own, whose launches are run under ``schedules`` schedules."""
    ranks = range(case.world_size)
    drawn = [
        [problem.inputs(case, rank, Draw(secret=f"emulated {seed}", case_key=case.key, slot=0, block=call, rank=rank)) for rank in ranks]
        for call in range(CALLS)
    ]

    def resolve(arguments: tuple[Any, ...], groups: Mapping[str, Group]) -> tuple[Any, ...]:
        return tuple(groups[value.name] if isinstance(value, GroupRef) else value for value in arguments)

    calls = tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, drawn)
    outcome = run(file, calls, layouts=problem.process_groups(case), resolve=resolve, schedules=schedules, seed=seed)
    if outcome.failure is not None:
        return EmulatedJudgement(file, outcome, "", math.inf)
    worst, place = 0.0, ""
    for call, (inputs, own, outputs) in enumerate(zip(drawn, calls, outcome.outputs, strict=True)):
        for rank, returned in enumerate(outputs):
            output, expected = problem.answer(returned, own[rank]), problem.oracle(case, inputs, rank)
            if mismatch := type_mismatch(output, expected):
                return EmulatedJudgement(file, outcome, f"wrong type: {mismatch}", math.inf)
            for name, before, after in zip(problem.parameters, inputs[rank], own[rank], strict=False):
                if name not in problem.changeable and not _same(before, after):
                    refused = f"wrong result: argument `{name}` was changed on rank {rank}, which the problem does not allow"
                    return EmulatedJudgement(file, outcome, refused, math.inf)
            for item in score(problem, case, output, expected, RANDOM):
                worst = max(worst, item.ratio)
                if not item.passed and not place:
                    element = (
                        ""
                        if item.index is None or item.got is None
                        else f" at {list(item.index)}: got {item.got:g}, expected {item.want:g}"
                    )
                    place = f"{item.output} on rank {rank} in call {call}{element}"
    return EmulatedJudgement(file, outcome, "", worst, place)


def _same(before: Any, after: Any) -> bool:
    """Whether all dense tensors in an argument have the same bits as before the call."""
    leaves = zip(tree_leaves(before), tree_leaves(after), strict=True)
    return all(same_bits(a, b) for a, b in leaves if isinstance(a, torch.Tensor) and a.layout == torch.strided)
