"""Makes known wrong answers and alternative solutions, so that a problem's file says each in a line; and lists those to be rejected."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from peerlane.problems.contract.faults import TRANSPORT_FAULTS
from peerlane.problems.contract.spec import AlternativeSolution, AnswerContext, Case, Inputs, KnownWrongAnswer, Preset, Problem, Where
from peerlane.problems.contract.standard import STANDARD_WRONG_ANSWERS
from peerlane.problems.contract.tree import Tree


def wrong(name: str, why: str, answer: Callable[[AnswerContext], Tree], cases: Where | None = None) -> KnownWrongAnswer:
    """A :class:`KnownWrongAnswer`; ``cases``: all, those named, or those that pass a test."""
    return KnownWrongAnswer(name, why, answer, cases)


def alternatives(**answers: Callable[[Case, Inputs, int], Tree]) -> tuple[AlternativeSolution, ...]:
    """Other right ways to compute the answer, by their names; see :class:`AlternativeSolution`."""
    return tuple(AlternativeSolution(name, answer) for name, answer in answers.items())


def where(test: Callable[[Case], bool]) -> Callable[[Case], bool]:
    """The test, so that a module can give it a name in one line."""
    return test


def except_for(*names: str) -> Callable[[Case], bool]:
    """All cases but those of the preset and label ``small/empty_bf16``, or with a label ``empty_bf16`` in any preset."""
    return lambda case: {case.label, f"{case.preset}/{case.label}"}.isdisjoint(names)


def small_cases(*labels: str) -> tuple[str, ...]:
    """The names of these cases of the preset ``small``."""
    return tuple(f"small/{label}" for label in labels)


def grouped(case: Case) -> bool:
    """Whether the case names a process group."""
    return "group" in case.params


def names_of(presets: Iterable[Preset], test: Callable[[Case], bool], world_sizes: Sequence[int] = (2, 4, 8)) -> tuple[str, ...]:
    """``preset/label/wN`` of the cases that pass the test."""
    cases = (
        Case(0, preset.name, spec.label, size, spec.dtype, spec.variant, spec.params)
        for preset in presets
        for spec in preset.cases
        for size in spec.world_sizes or world_sizes
    )
    return tuple(case.name for case in cases if test(case))


def case_names(problem: Problem, item: KnownWrongAnswer) -> list[str] | None:
    """The cases for which it is wrong: ``preset/label``, or ``preset/label/wN`` if other world sizes differ; None: all."""
    if item.cases is None or not callable(item.cases):
        return None if item.cases is None else list(item.cases)
    by_label: dict[str, list[Case]] = {}
    for preset, variant, size in itertools.product(problem.presets, problem.variants, problem.world_sizes):
        for case in problem.cases(preset.name, size, variant):
            by_label.setdefault(f"{preset.name}/{case.label}", []).append(case)
    names: list[str] = []
    for label, cases in by_label.items():
        held = [case.name for case in cases if item.applies(case)]
        names += [label] if len(held) == len(cases) else held
    return names


def known_wrong_answers(problem: Problem) -> tuple[KnownWrongAnswer, ...]:
    """The standard wrong answers that are not excused altogether, and the problem's own."""
    unknown = {re.split("[/@]", key)[0] for key in problem.excused} - {item.name for item in (*STANDARD_WRONG_ANSWERS, *TRANSPORT_FAULTS)}
    if unknown:
        raise ValueError(f"problem {problem.id} excuses unknown known wrong answers: {sorted(unknown)}")
    standard = tuple(item for item in STANDARD_WRONG_ANSWERS if item.name not in problem.excused)
    return (*standard, *problem.known_wrong_answers)


def transport_faults(problem: Problem) -> tuple[KnownWrongAnswer, ...]:
    """The transport faults that are neither excused altogether nor written by hand, under their name, for this problem."""
    left_out = {*problem.excused, *(item.name for item in problem.known_wrong_answers)}
    return tuple(item for item in TRANSPORT_FAULTS if item.name not in left_out)


def any_order(reason: str) -> Mapping[str, str]:
    """Excuses the faults that only change the order of ranks."""
    return dict.fromkeys(("neighbours_exchanged", "ranks_reversed", "ring_order"), reason)


def is_excused(problem: Problem, null: KnownWrongAnswer, case: Case, output: str) -> bool:
    """Whether this wrong answer is declared to be right for this output of this case."""
    places = ("", f"@{case.preset}/{case.label}", f"@{case.name}")
    return any(f"{name}{place}" in problem.excused for name in (null.name, f"{null.name}/{output}") for place in places)
