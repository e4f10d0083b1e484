"""Reading recorded results."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from peerlane.errors import UsageError
from peerlane.evaluate.verdict import Result


def read_results(path: Path) -> list[Result]:
    """The results in a file of one JSON object a line; raises UsageError, naming the file and line that cannot be read."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}: expected a results.jsonl that `peerlane eval` wrote")
    results = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            results.append(Result.model_validate_json(line))
        except ValidationError as error:
            raise UsageError(f"{path}, line {number} is not a result: {error}") from None
    return results
