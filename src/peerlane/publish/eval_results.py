"""Scores of a judged run as a file of ``.eval_results/``, from which the Hugging Face Hub fills a model's page and a leaderboard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peerlane.common.version import __version__
from peerlane.errors import UsageError
from peerlane.generate import metrics
from peerlane.generate.board import Entry
from peerlane.generate.run_folder import RunFolder
from peerlane.generate.samples import Setting, Task
from peerlane.problems import suite
from peerlane.publish.dataset import CORRECT, FASTER
from peerlane.results.result import Result


def eval_results(run: RunFolder, results: Sequence[Result], dataset: str, source_url: str | None = None) -> list[dict[str, Any]]:
    """Returns an entry for each score of the run, in per cent of all problems of the suite: those not tried count as not solved.

    ``dataset``: the benchmark's repository, such as ``owner/peerlane``. The score for speed is left out unless candidates were
    timed as graphs on a node.
    Raises UsageError for a run that was not judged, or under several settings.
    """
    settings = [setting for setting in run.settings_judged(results) if setting.track == run.settings.track]
    if len(settings) != 1:
        listed = "; ".join(map(str, settings)) or "none"
        raise UsageError(
            f"{run.path} was judged under {len(settings)} settings: {listed}. Expected one; judge a fresh folder with one preset"
        )
    (setting,) = settings
    counted = [result for result in results if Setting.of(result) == setting]
    author = Entry(run.settings.model, run.samples(counted, setting), [Task(problem.id, setting.preset) for problem in suite()])
    if author.unjudged:
        raise UsageError(
            f"{author.unjudged} of {len(author.samples)} samples of {run.path} are not judged: run `peerlane eval {run.path}` first"
        )
    tests = {CORRECT: metrics.CORRECT}
    if "graph" in author.modes and setting.node_class.kind == "node":
        tests[FASTER] = metrics.Metric("graph", 1.0)
    finished = max(result.finished_at for result in counted)
    tried, size = len(author.tried), len(author.tasks)
    notes = f"{tried} of {size} problems tried, expected share with one sample; {setting}; peerlane {__version__}"
    entries = []
    for task, metric in tests.items():
        share = author.count(metric).solved / size
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
