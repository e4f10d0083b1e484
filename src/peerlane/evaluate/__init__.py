"""The evaluator: see :func:`evaluate`. Names are loaded on first use, because rank processes import this package and must stay slim."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peerlane.evaluate.candidates import CandidateFile as CandidateFile
    from peerlane.evaluate.candidates import discover as discover
    from peerlane.evaluate.evaluator import EvaluationPlan as EvaluationPlan
    from peerlane.evaluate.evaluator import Progress as Progress
    from peerlane.evaluate.evaluator import evaluate as evaluate
    from peerlane.evaluate.results.speed_record import ModeSpeed as ModeSpeed
    from peerlane.evaluate.results.speed_record import NotMeasured as NotMeasured
    from peerlane.evaluate.results.store import ResultsStore as ResultsStore
    from peerlane.evaluate.results.verdict import Result as Result
    from peerlane.evaluate.results.verdict import Verdict as Verdict

_HOMES = {
    "CandidateFile": "candidates",
    "discover": "candidates",
    "EvaluationPlan": "evaluator",
    "Progress": "evaluator",
    "evaluate": "evaluator",
    "ResultsStore": "results.store",
    "ModeSpeed": "results.speed_record",
    "NotMeasured": "results.speed_record",
    "Result": "results.verdict",
    "Verdict": "results.verdict",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
