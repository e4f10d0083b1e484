"""Reading recorded results."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from peerlane.errors import UsageError
from peerlane.evaluate.results.store import torn
from peerlane.evaluate.results.verdict import Result

_EXPECTED = "a results.jsonl that `peerlane eval` wrote"


def read_results(path: Path) -> list[Result]:
    """The results in a file of one JSON object a line, without one at its end that a killed run left unfinished.

    Raises UsageError, naming the file and line that cannot be read.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}: expected {_EXPECTED}")
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; expected {_EXPECTED}") from None
    results = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            results.append(Result.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            if number == len(lines) and first["type"] == "json_invalid" and torn(line):
                break
            place = ".".join(map(str, first["loc"])) or "the line"
            raise UsageError(f"{path}, line {number} is not a result ({place}: {first['msg']}): expected {_EXPECTED}") from None
    return results
