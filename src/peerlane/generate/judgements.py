"""Joins a run's samples with the evaluator's results: by the hash of the candidate, so that equal candidates share one result."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerlane.errors import UsageError
from peerlane.generate.attempts import NO_CODE, NO_REPLY, NOT_JUDGED, Attempt, Setting, Speedup
from peerlane.generate.run_folder import RunFolder, SampleKey, StepRecord

RESULTS_FILE = "results.jsonl"


@dataclass(frozen=True)
class Judgement:
    """What metrics need of one result."""

    sha256: str
    problem: int
    setting: Setting
    verdict: str
    speedups: Mapping[str, Speedup]
    mechanisms: tuple[str, ...]


def read_judgements(paths: Iterable[Path]) -> list[Judgement]:
    """The results in these files, in order; a line that is cut, by a kill, is passed over. Raises UsageError for a file of another kind."""
    found = []
    for path in paths:
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise UsageError(f"cannot read the results {path}: {error.strerror or error}") from None
        records = list(_records(lines))
        if lines and not records:
            raise UsageError(f"{path} holds no results: expected lines of JSON as `peerlane eval` writes them")
        found += [judgement(record) for record in records if "verdict" in record]
    return found


def judgement(record: Mapping[str, Any]) -> Judgement:
    """From a line of ``results.jsonl``, of any version of the record; raises UsageError if it lacks what a result must have."""
    try:
        setting = Setting(
            track=record["track"],
            node_class=_node_class(record),
            preset=record["preset"],
            world_size=record["world_size"],
            variant=record["problem"]["variant"],
            cases=record.get("cases", "all"),
        )
        speeds = [speed for speed in record.get("speed", []) if speed["status"] == "measured"]
        return Judgement(
            sha256=record["candidate"]["sha256"],
            problem=record["problem"]["id"],
            setting=setting,
            verdict=record["verdict"]["kind"],
            speedups={speed["mode"]: Speedup(*(speed["speedup"][name] for name in ("low", "median", "high"))) for speed in speeds},
            mechanisms=tuple(item["name"] for item in record.get("mechanisms", []) if item["confidence"] == "seen"),
        )
    except (KeyError, TypeError) as error:
        raise UsageError(f"a result lacks {error}: expected a record of `peerlane eval`") from None


def settings_of(run: RunFolder, judgements: Iterable[Judgement]) -> list[Setting]:
    """The settings under which candidates of the run were judged, the most frequent first."""
    hashes = {record.sha256 for key in run.sample_keys() if (record := run.sample(key)).sha256}
    counts: dict[Setting, int] = {}
    for item in judgements:
        if item.sha256 in hashes:
            counts[item.setting] = counts.get(item.setting, 0) + 1
    return sorted(counts, key=lambda setting: -counts[setting])


def attempts_of(run: RunFolder, judgements: Iterable[Judgement], setting: Setting | None) -> list[Attempt]:
    """Every sample of the run as it was judged under one setting; with None, as if nothing had been judged."""
    chosen = sorted((item for item in judgements if item.setting == setting), key=lambda item: len(item.speedups))
    known = {(item.problem, item.sha256): item for item in chosen}  # of several results that with most speeds counts, then the last
    return [_attempt(run, key, known) for key in run.sample_keys()]


def _attempt(run: RunFolder, key: SampleKey, known: Mapping[tuple[int, str], Judgement]) -> Attempt:
    record = run.sample(key)
    judged = known.get((key.problem, record.sha256)) if record.sha256 is not None else None
    if record.error is not None and record.sha256 is None:
        verdict = NO_REPLY
    else:
        verdict = NO_CODE if record.sha256 is None else judged.verdict if judged is not None else NOT_JUDGED
    return Attempt(
        problem=key.problem,
        sample=key.sample,
        verdict=verdict,
        speedups=judged.speedups if judged is not None else {},
        mechanisms=judged.mechanisms if judged is not None else (),
        usage=record.usage,
        steps=tuple(_step(key, step) for step in run.steps(key)),
    )


def _step(key: SampleKey, step: StepRecord) -> Attempt:
    speedups = {mode: Speedup(*values) for mode, values in step.speedups.items()}
    return Attempt(key.problem, key.sample, step.verdict, speedups)


def _records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def _node_class(record: Mapping[str, Any]) -> str:
    """The class of machine in words: ``4x NVIDIA H200, NVLink, driver 580``."""
    from peerlane.hardware.environment import node_class

    if record.get("device") == "cpu":
        return "CPU ranks"
    node, environment = record.get("node"), record.get("environment")
    if not isinstance(node, Mapping):
        return node_class(environment) if isinstance(environment, Mapping) else "unknown node"
    driver = node.get("driver")
    parts = [f"{node.get('gpus')}x {node.get('gpu')}", node.get("link"), f"driver {driver}" if driver else "unknown driver"]
    if node.get("kind") == "virtual":
        parts.append(f"virtual: {node.get('ranks_per_gpu')} ranks per GPU by {node.get('sharing')}")
    elif node.get("kind") == "emulated":
        parts = ["emulated"]
    return ", ".join(part for part in parts if part)
