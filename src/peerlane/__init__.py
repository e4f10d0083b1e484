"""peerlane: benchmark, evaluator, device kit and expert kernels for multi-GPU kernels.

Names are imported when they are first used: ``import peerlane`` takes no time, and no torch.
"""

from typing import TYPE_CHECKING, Any

from peerlane.common.version import __version__ as __version__

if TYPE_CHECKING:
    from peerlane import evaluate as evaluate
    from peerlane import problems as problems
    from peerlane import solutions as solutions
    from peerlane.errors import UsageError as UsageError
    from peerlane.evaluate.candidates import CandidateFile as CandidateFile
    from peerlane.evaluate.candidates import discover as discover
    from peerlane.evaluate.evaluator import Evaluator as Evaluator
    from peerlane.evaluate.plan import EvaluationPlan as EvaluationPlan
    from peerlane.results.result import Result as Result
    from peerlane.results.verdict import Verdict as Verdict
    from peerlane.service.client import Client as Client
    from peerlane.testing import race as race

    problem = problems.get

_HOMES = {
    "CandidateFile": "evaluate.candidates",
    "Client": "service.client",
    "EvaluationPlan": "evaluate.plan",
    "Evaluator": "evaluate.evaluator",
    "Result": "results.result",
    "UsageError": "errors",
    "Verdict": "results.verdict",
    "discover": "evaluate.candidates",
    "evaluate": "",
    "problem": "problems:get",
    "problems": "",
    "race": "testing",
    "solutions": "",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, _, attribute = _HOMES[name].partition(":")
    if not module:
        return importlib.import_module(f"{__name__}.{name}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
