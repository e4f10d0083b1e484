"""The evaluator: see :class:`Evaluator`. The package can be called, as ``peerlane.evaluate(plan)``: see :func:`evaluate`.

Names are loaded on first use, because rank processes import this package and must stay slim.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peerlane.evaluate.candidates import CandidateFile as CandidateFile
    from peerlane.evaluate.candidates import candidate_file as candidate_file
    from peerlane.evaluate.candidates import candidate_text as candidate_text
    from peerlane.evaluate.candidates import discover as discover
    from peerlane.evaluate.evaluator import Evaluator as Evaluator
    from peerlane.evaluate.evaluator import Progress as Progress
    from peerlane.evaluate.evaluator import evaluate as evaluate
    from peerlane.evaluate.plan import EvaluationPlan as EvaluationPlan
    from peerlane.results.result import Result as Result
    from peerlane.results.speed_record import ModeSpeed as ModeSpeed
    from peerlane.results.speed_record import NotMeasured as NotMeasured
    from peerlane.results.store import ResultsStore as ResultsStore
    from peerlane.results.verdict import Verdict as Verdict

_HOMES = {
    "CandidateFile": "peerlane.evaluate.candidates",
    "candidate_file": "peerlane.evaluate.candidates",
    "candidate_text": "peerlane.evaluate.candidates",
    "discover": "peerlane.evaluate.candidates",
    "EvaluationPlan": "peerlane.evaluate.plan",
    "Evaluator": "peerlane.evaluate.evaluator",
    "Progress": "peerlane.evaluate.evaluator",
    "evaluate": "peerlane.evaluate.evaluator",
    "ResultsStore": "peerlane.results.store",
    "ModeSpeed": "peerlane.results.speed_record",
    "NotMeasured": "peerlane.results.speed_record",
    "Result": "peerlane.results.result",
    "Verdict": "peerlane.results.verdict",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


class _Callable(ModuleType):
    """A package that stands for its function of the same name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from peerlane.evaluate.evaluator import evaluate

        return evaluate(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
