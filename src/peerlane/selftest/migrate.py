"""Files of version 1 as files of version 2: results, outcomes of the selftest, calibrations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from peerlane.errors import UsageError
from peerlane.files import write_atomically
from peerlane.results.migrate import RENAMED, VERDICT_KINDS, migrate_result, ratio, renamed
from peerlane.results.record import Record
from peerlane.results.result import EnvironmentLine
from peerlane.selftest.calibrate import Calibration
from peerlane.selftest.outcome import Outcome

BACKUP = ".v1"
"""added to the name of a file that is replaced"""


@dataclass
class Migration:
    """What a migration did: records of version 1 that it rewrote, lines that it kept, and what it could not read."""

    migrated: int = 0
    kept: int = 0
    left_out: list[str] = field(default_factory=list)


def migrate_file(old: Path, new: Path | None = None) -> Migration:
    """Writes the file's records as version 2 to ``new``; None: in its place, and ``OLD.v1`` keeps what was there.

    Raises UsageError if the file cannot be read, holds nothing of version 1, or would replace another file.
    """
    backup = old.with_name(old.name + BACKUP)
    target = old if new is None else new
    if (new or backup).exists():
        raise UsageError(f"{new or backup} exists: expected a name of no file; move it away or choose another with --out")
    done = Migration()
    try:
        data = old.read_bytes()
        lines = list(_migrated(data, done))
        if not done.migrated:
            raise UsageError("\n".join([f"{old} holds no records of version 1 that can be read: nothing is written", *done.left_out]))
        if new is None:
            write_atomically(backup, data)
        write_atomically(target, b"".join(line + b"\n" for line in lines))
    except OSError as error:
        raise UsageError(f"cannot migrate {error.filename or old}: {error.strerror}") from None
    return done


def _migrated(data: bytes, done: Migration) -> Iterator[bytes]:
    environments: set[str] = set()
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            version = record["schema_version"]
            found = _records(record, environments) if version == 1 else None
        except ValidationError as error:
            first = error.errors()[0]
            done.left_out.append(f"line {number} is left out: {'.'.join(map(str, first['loc']))}: {first['msg']}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            done.left_out.append(f"line {number} is left out: {type(error).__name__}: {error}")
        else:
            done.kept += found is None
            done.migrated += found is not None
            yield from [line] if found is None else (item.model_dump_json().encode() for item in found)


def _records(old: Mapping[str, Any], environments: set[str]) -> list[Record]:
    """The records that stand for one of version 1: a result's environment comes before the first result that was taken there."""
    if "row" in old:
        stages = {"stage_seconds": {"total": old["seconds"]}}  # where stages were not recorded
        verdict = VERDICT_KINDS.get(old["verdict"], old["verdict"])
        return [Outcome.model_validate({**stages, **renamed(old, RENAMED), "schema_version": 2, "verdict": verdict})]
    if "torch_version" in old:
        record = renamed(old, {"nulls": "wrong_answers"})
        wrong = {name: {**item, "ratio": ratio(item["ratio"])} for name, item in record["wrong_answers"].items()}
        variants = {name: _ratios(item) for name, item in record["variants"].items()}
        reference = _ratios(record["reference"])
        changed = {"schema_version": 2, "wrong_answers": wrong, "variants": variants, "reference": reference}
        return [Calibration.model_validate({**record, **changed})]
    result = migrate_result(old)
    if result.environment_hash in environments:
        return [result]
    environments.add(result.environment_hash)
    return [EnvironmentLine(environment_hash=result.environment_hash, environment=result.environment), result]


def _ratios(found: Mapping[str, float | str]) -> dict[str, float]:
    return {name: ratio(value) for name, value in found.items()}
