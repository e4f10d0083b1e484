"""Scores of a judged run as a file of ``.eval_results/``, from which the Hugging Face Hub fills a model's page and a leaderboard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peerlane.common.version import __version__
from peerlane.errors import UsageError
from peerlane.generate import metrics
from peerlane.generate.judgements import attempts_of, setting_of, settings_of
from peerlane.generate.run_folder import RunFolder
from peerlane.problems import suite
from peerlane.publish.dataset import CORRECT, FASTER
from peerlane.results.result import Result


def eval_results(run: RunFolder, results: Sequence[Result], dataset: str, source_url: str | None = None) -> list[dict[str, Any]]:
    """Returns an entry for each score of the run, in per cent of all problems of the suite: those not tried count as not solved.

    ``dataset``: the benchmark's repository, such as ``owner/peerlane``. The score for speed is left out unless candidates were
    timed as graphs on a node.
    Raises UsageError for a run that was not judged, or under several settings.
    """
    settings = [setting for setting in settings_of(run, results) if setting.track == run.settings.track]
    if len(settings) != 1:
        listed = "; ".join(map(str, settings)) or "none"
        raise UsageError(
            f"{run.path} was judged under {len(settings)} settings: {listed}. Expected one; judge a fresh folder with one preset"
        )
    (setting,) = settings
    counted = [result for result in results if setting_of(result) == setting]
    attempts = attempts_of(run, counted, setting)
    if unjudged := metrics.unjudged(attempts):
        raise UsageError(f"{unjudged} of {len(attempts)} samples of {run.path} are not judged: run `peerlane eval {run.path}` first")
    numbers = [problem.id for problem in suite()]
    tests: list[tuple[str, metrics.Test]] = [(CORRECT, metrics.is_correct)]
    if metrics.is_timed(attempts, "graph") and all(result.node.kind == "node" for result in counted):
        tests.append((FASTER, metrics.is_faster(1.0, "graph")))
    finished = max(result.finished_at for result in counted)
    tried = len(metrics.tried(attempts))
    notes = f"{tried} of {len(numbers)} problems tried, expected share with one sample; {setting}; peerlane {__version__}"
    entries = []
    for task, test in tests:
        share = sum(metrics.solved(attempts, numbers, test, 1).values()) / len(numbers)
        entry: dict[str, Any] = {
            "dataset": {"id": dataset, "task_id": task},
            "value": round(100 * share, 2),
            "date": f"{finished:%Y-%m-%d}",
            "notes": notes,
        }
        if source_url is not None:
            entry["source"] = {"url": source_url}
        entries.append(entry)
    return entries
