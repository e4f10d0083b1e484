"""Joins a run's samples with the evaluator's results: by the hash of the candidate, so that equal candidates share one result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from peerlane.generate.attempts import NO_REPLY, NOT_JUDGED, Attempt, Setting
from peerlane.generate.judging import speedups_of
from peerlane.generate.run_folder import RunFolder, SampleKey
from peerlane.results.result import NEEDS_MULTICAST, Result
from peerlane.results.verdict import SAYS_NOTHING


def setting_of(result: Result) -> Setting:
    """Returns the setting under which a candidate was judged."""
    variant, cases = result.problem.variant, result.cases
    return Setting(result.track, str(result.node), result.preset, result.world_size, variant, cases, result.superseded_protocol)


def settings_of(run: RunFolder, results: Iterable[Result]) -> list[Setting]:
    """Returns the settings under which candidates of the run were judged, the most frequent first."""
    own = {(key.problem, run.sample(key).sha256) for key in run.sample_keys()}
    counts = Counter(setting_of(result) for result in results if (result.problem.id, result.candidate.sha256) in own)
    return [setting for setting, _ in counts.most_common()]


def attempts_of(run: RunFolder, results: Iterable[Result], setting: Setting | None) -> list[Attempt]:
    """Returns every sample of the run as it was judged under one setting; with None, as if nothing had been judged."""
    return [attempt for attempt, _ in judged_samples(run, results, setting)]


def judged_samples(run: RunFolder, results: Iterable[Result], setting: Setting | None) -> list[tuple[Attempt, Result | None]]:
    """Returns the attempts of :func:`attempts_of`, each with the result that judged it, or None."""
    of_setting = sorted((result for result in results if setting_of(result) == setting), key=lambda result: len(speedups_of(result)))
    known = {
        (result.problem.id, result.candidate.sha256): result for result in of_setting
    }  # of several results the one with most speeds counts, then the last
    return [_judged_sample(run, key, known) for key in run.sample_keys()]


def attempt_of(result: Result, sample: int) -> Attempt:
    """Returns a candidate's result as the sample of that number."""
    seen = tuple(item.name for item in result.mechanisms if item.confidence == "seen")
    needs_multicast = NEEDS_MULTICAST in result.flags
    verdict = NOT_JUDGED if result.says_nothing and result.verdict.kind not in SAYS_NOTHING else result.verdict.kind
    return Attempt(result.problem.id, sample, verdict, speedups_of(result), seen, needs_multicast=needs_multicast)


def _judged_sample(run: RunFolder, key: SampleKey, known: Mapping[tuple[int, str], Result]) -> tuple[Attempt, Result | None]:
    record = run.sample(key)
    judged = known.get((key.problem, record.sha256)) if record.sha256 is not None else None
    if judged is not None:
        attempt = attempt_of(judged, key.sample)
    elif record.sha256 is not None:
        attempt = Attempt(key.problem, key.sample, NOT_JUDGED)
    else:
        attempt = Attempt(key.problem, key.sample, record.status if record.error is None else NO_REPLY)
    return replace(attempt, usage=record.usage, seconds=record.seconds, steps=tuple(step.attempt(key) for step in run.steps(key))), judged
