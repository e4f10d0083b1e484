"""Results of version 1 as results of version 2. What has no successor goes to ``diagnostics``; nothing is made up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from peerlane.results.result import Result
from peerlane.results.speed_record import ModeSpeed

VERDICT_KINDS = {"tampered": "integrity_failure", "policy": "track_violation"}
"""kinds of version 1 -> kinds of version 2"""
RENAMED = {"phases_s": "stage_seconds"}
"""fields of version 1 that records of every kind had"""
_CASE_FIELDS = {"worst_ratio": "max_error_over_tolerance"}
_VERDICT_FIELDS = {"error_ratio": "error_over_tolerance"}
_SPEED_FIELDS = {"placement": "group_offset", "reference_drift": "reference_slowdown", "slots_per_block": "calls_per_block"}
_BLOCKS = ("reference_blocks_us", "candidate_blocks_us")


def migrate_result(old: Mapping[str, Any]) -> Result:
    """The result in a line of version 1; raises pydantic's ValidationError if it is none."""
    record = renamed(old, RENAMED)
    environment = dict(record.get("environment", {}))
    if measures := record.pop("isolation_measures", ()):
        environment["isolation_measures"] = measures
    left: dict[str, Any] = {}
    known = {name: value for name, value in record.items() if name in Result.model_fields}
    if unknown := {name: value for name, value in record.items() if name not in known}:
        left["result"] = unknown
    speeds = [_migrate_speed(speed, left) for speed in record.get("speed", ())]
    return Result.model_validate(
        {
            **known,
            "schema_version": 2,
            "verdict": migrate_verdict(record["verdict"]),
            "correctness": [_number_fields(renamed(item, _CASE_FIELDS), "max_error_over_tolerance") for item in record["correctness"]],
            "speed": speeds,
            "environment": environment,
            "diagnostics": {"version_1": left} if left else {},
        }
    )


def migrate_verdict(old: Mapping[str, Any]) -> dict[str, Any]:
    """A verdict of version 1 with the names of version 2."""
    verdict = _number_fields(renamed(old, _VERDICT_FIELDS), "error_over_tolerance", "got", "expected")
    return {**verdict, "kind": VERDICT_KINDS.get(verdict["kind"], verdict["kind"])}


def renamed(record: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in record.items()}


def ratio(value: float | str | None) -> float:
    """A ratio of version 1, which wrote ``"Infinity"`` for those that are infinite."""
    return math.inf if value is None else float(value)


def _number_fields(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {**record, **{name: float(record[name]) for name in names if isinstance(record.get(name), str)}}


def _migrate_speed(old: Mapping[str, Any], left: dict[str, Any]) -> dict[str, Any]:
    """A speed in the fields of version 2: its block times are those of whole blocks. Other fields are added to ``left``."""
    if old["status"] != "measured" or "calls_per_block" in old:
        return dict(old)
    speed = {name: value for name, value in renamed(old, _SPEED_FIELDS).items() if value is not None}
    calls = speed["calls_per_block"]
    kept = {name: value for name, value in speed.items() if name in ModeSpeed.model_fields}
    blocks = {name: [round(us * calls, 3) for us in speed[name]] for name in _BLOCKS}
    left.setdefault("speed", {})[speed["mode"]] = {name: value for name, value in speed.items() if name not in kept}
    return kept | blocks
