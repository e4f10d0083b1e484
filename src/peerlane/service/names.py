"""Results under the name that was asked for: equal candidates share one evaluation, and keep their names."""

from __future__ import annotations

from peerlane.evaluate.candidates import CandidateFile
from peerlane.evaluate.results.result import Result


def named_as(result: Result, candidate: CandidateFile) -> Result:
    """The result under the name, labels and path of the candidate that was asked for."""
    path = None if candidate.text is not None or candidate.path is None else str(candidate.path)
    info = result.candidate.model_copy(update={"name": candidate.name, "labels": dict(candidate.labels), "path": path})
    return result.model_copy(update={"candidate": info})
