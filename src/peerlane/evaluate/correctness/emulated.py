"""A solution on emulated ranks, judged as trusted ranks judge. It runs in this process: for trusted files only."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from peerlane.device.host.group import Group
from peerlane.emulator.findings import ORDER
from peerlane.emulator.gpu_code import EmulatedGpu
from peerlane.emulator.host_libraries import DIFFERENT_LAUNCHES, launches_differ
from peerlane.emulator.job import TooManyThreads
from peerlane.emulator.ptx_front_end import NOT_KNOWN, UnknownPtx
from peerlane.emulator.solution_run import Outcome, run, wants_distributed
from peerlane.emulator.torch_cuda import NOT_EMULATED
from peerlane.emulator.turns import RankMismatch
from peerlane.errors import CompileError, MissingDependency
from peerlane.evaluate.correctness.judge import changed_names, compare_arguments, judge_output
from peerlane.problems import RANDOM, Case, Draw, GroupRef, Problem
from peerlane.problems.contract.judge import plainly, type_mismatch
from peerlane.problems.contract.spec import Score
from peerlane.results.verdict import ARGUMENT, CHANGED, WrongResult, WrongType

CALLS = 3
_MOST_LINES = 20


@dataclass
class EmulatedJudgement:
    """The outcome of a case: a failure, a wrong result, findings of the emulator, or nothing."""

    file: Path
    outcome: Outcome
    wrong: WrongResult | WrongType | None = None

    @property
    def correct(self) -> bool:
        return self.outcome.failure is None and self.wrong is None and not self.outcome.findings

    def __str__(self) -> str:
        if self.outcome.failure is not None:
            return self._failure(*self.outcome.failure)
        if isinstance(self.wrong, WrongType):
            return f"wrong type: {self.wrong.detail}"
        wrong = [f"wrong result: {self.wrong.reason}"] if self.wrong is not None else []
        found = [*wrong, *map(str, self.outcome.findings)] or ["correct, nothing found"]
        return "\n".join([*found, *(f"note: {note}" for note in self.outcome.notes)])

    def _failure(self, rank: int, error: BaseException) -> str:
        if isinstance(error, UnknownPtx | MissingDependency | TooManyThreads) or any(
            said in str(error) for said in (NOT_EMULATED, NOT_KNOWN)
        ):
            return f"not run: {error}"
        if isinstance(error, RankMismatch) and launches_differ(str(error), self.file.read_text(encoding="utf-8", errors="replace")):
            return f"not run: {error}; {DIFFERENT_LAUNCHES}"
        if isinstance(error, CompileError):
            return f"build error: {_cut(str(error).splitlines())}"
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == self.file.name]
        told = _cut(str(error).splitlines()).splitlines()
        if wants_distributed(str(error)):
            told.append("emulated ranks have only a part of torch.distributed: docs/device/emulator-code.md lists it")
        return f"rank {rank} raised {type(error).__name__}{f' in line {lines[-1]}' if lines else ''}: " + "\n".join(told)


def _cut(lines: list[str]) -> str:
    """Joins the lines, the first of them if they are many."""
    return "\n".join([*lines[:_MOST_LINES], *([f"... and {len(lines) - _MOST_LINES} more lines"] if len(lines) > _MOST_LINES else [])])


def judge_emulated(
    file: Path,
    problem: Problem,
    case: Case,
    *,
    schedules: int = 4,
    seed: int = 0,
    gpu: EmulatedGpu | None = None,
    from_ptx: bool = False,
    strict: bool = False,
) -> EmulatedJudgement:
    """Three calls in a row, with inputs of their own, whose launches are run under ``schedules`` schedules on two SMs a rank, or on those
    of ``gpu``; ``from_ptx``: as the PTX that the GPU's compiler makes; ``strict``: notes about the ends of launches are races.

    If what they write depends on the order of atomics, the calls are made and judged once for each schedule."""
    ranks = range(case.world_size)
    drawn = [
        [problem.inputs(case, rank, Draw(secret=f"emulated {seed}", case_key=case.key, slot=0, block=call, rank=rank)) for rank in ranks]
        for call in range(CALLS)
    ]

    def resolve(arguments: tuple[Any, ...], groups: Mapping[str, Group]) -> tuple[Any, ...]:
        return tuple(groups[value.name] if isinstance(value, GroupRef) else value for value in arguments)

    def judge(schedules: int, seed: int) -> EmulatedJudgement:
        calls = tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, drawn)
        outcome = run(
            file,
            calls,
            layouts=problem.process_groups(case),
            resolve=resolve,
            schedules=schedules,
            seed=seed,
            gpu=gpu,
            from_ptx=from_ptx,
            nodes=case.nodes,
        )
        if strict:
            outcome.reports = [report.strictly() for report in outcome.reports]
        if outcome.failure is not None:
            return EmulatedJudgement(file, outcome)
        for call, (inputs, own, outputs) in enumerate(zip(drawn, calls, outcome.outputs, strict=True)):
            if (wrong := _judge_call(problem, case, call, inputs, own, outputs)) is not None:
                return EmulatedJudgement(file, outcome, wrong)
        return EmulatedJudgement(file, outcome)

    judged = judge(schedules, seed)
    if judged.correct and any(note.kind == ORDER for note in judged.outcome.notes):
        others = (judge(0, seed + other) for other in range(1, schedules))  # each launch under one schedule
        judged = next((other for other in others if not other.correct), judged)
    return judged


def _judge_call(
    problem: Problem, case: Case, call: int, inputs: Sequence[Any], own: Sequence[Any], outputs: Sequence[Any]
) -> WrongResult | WrongType | None:
    """Returns what is wrong with a call, by rank its ``inputs``, the arguments that it left behind and what it returned."""
    answers = []
    for rank, returned in enumerate(outputs):
        got, expected = problem.answer(returned, own[rank]), problem.oracle(case, inputs, rank)
        if mismatch := type_mismatch(got, expected):
            return WrongType(case=case.key, rank=rank, detail=plainly(problem, mismatch))
        answers.append(judge_output(problem, case, got, expected, RANDOM))
    wrong = [(rank, answer.worst) for rank, answer in enumerate(answers) if not answer.worst.passed]
    if wrong:
        return _wrong_result(case, call, [rank for rank, _ in wrong], wrong[0][1])
    for rank, (before, after) in enumerate(zip(inputs, own, strict=True)):
        if names := changed_names(compare_arguments(problem, before, after)):
            return _wrong_result(case, call, [rank], Score(f"{ARGUMENT}{', '.join(f'`{name}`' for name in names)}", torch.inf, CHANGED))
    return None


def _wrong_result(case: Case, call: int, ranks: Sequence[int], worst: Score) -> WrongResult:
    """``worst``: of the first of these ranks."""
    return WrongResult(
        case=case.key,
        phase="correctness",
        rank=ranks[0],
        slot=call,
        output=worst.output,
        error_over_tolerance=worst.ratio,
        detail=worst.detail,
        index=worst.index,
        got=worst.got,
        expected=worst.want,
        wrong_ranks=tuple(ranks),
    )
