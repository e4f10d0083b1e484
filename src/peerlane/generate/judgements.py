"""Joins a run's samples with the evaluator's results: by the hash of the candidate, so that equal candidates share one result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from peerlane.evaluate.results.result import Result
from peerlane.generate.attempts import NO_CODE, NO_REPLY, NOT_JUDGED, Attempt, Setting
from peerlane.generate.judging import speedups_of
from peerlane.generate.run_folder import RunFolder, SampleKey


def setting_of(result: Result) -> Setting:
    """The setting under which a candidate was judged."""
    return Setting(result.track, str(result.node), result.preset, result.world_size, result.problem.variant, result.cases)


def settings_of(run: RunFolder, results: Iterable[Result]) -> list[Setting]:
    """The settings under which candidates of the run were judged, the most frequent first."""
    hashes = {record.sha256 for key in run.sample_keys() if (record := run.sample(key)).sha256}
    counts = Counter(setting_of(result) for result in results if result.candidate.sha256 in hashes)
    return [setting for setting, _ in counts.most_common()]


def attempts_of(run: RunFolder, results: Iterable[Result], setting: Setting | None) -> list[Attempt]:
    """Every sample of the run as it was judged under one setting; with None, as if nothing had been judged."""
    chosen = sorted((result for result in results if setting_of(result) == setting), key=lambda result: len(speedups_of(result)))
    known = {(result.problem.id, result.candidate.sha256): result for result in chosen}  # that with most speeds counts, then the last
    return [_attempt(run, key, known) for key in run.sample_keys()]


def _attempt(run: RunFolder, key: SampleKey, known: Mapping[tuple[int, str], Result]) -> Attempt:
    record = run.sample(key)
    judged = known.get((key.problem, record.sha256)) if record.sha256 is not None else None
    if record.error is not None and record.sha256 is None:
        verdict = NO_REPLY
    else:
        verdict = NO_CODE if record.sha256 is None else judged.verdict.kind if judged is not None else NOT_JUDGED
    return Attempt(
        problem=key.problem,
        sample=key.sample,
        verdict=verdict,
        speedups=speedups_of(judged) if judged is not None else {},
        mechanisms=tuple(item.name for item in judged.mechanisms if item.confidence == "seen") if judged is not None else (),
        usage=record.usage,
        steps=tuple(step.attempt(key) for step in run.steps(key)),
    )
