"""The evaluator: see :class:`Evaluator`, and :func:`evaluate` for all candidates of a plan.

Names are loaded on first use, because rank processes import this package and must stay slim.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peerlane.evaluate.candidates import CandidateFile as CandidateFile
    from peerlane.evaluate.candidates import discover as discover
    from peerlane.evaluate.evaluator import Evaluator as Evaluator
    from peerlane.evaluate.evaluator import evaluate as evaluate
    from peerlane.evaluate.plan import EvaluationPlan as EvaluationPlan
    from peerlane.results.result import Result as Result

_HOMES = {
    "CandidateFile": "peerlane.evaluate.candidates",
    "discover": "peerlane.evaluate.candidates",
    "EvaluationPlan": "peerlane.evaluate.plan",
    "Evaluator": "peerlane.evaluate.evaluator",
    "evaluate": "peerlane.evaluate.evaluator",
    "Result": "peerlane.results.result",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
