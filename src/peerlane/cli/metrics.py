"""``peerlane metrics``: metrics of runs of models."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peerlane.cli.options import Disguise, ProblemFolders, one_of, positive_integers, words
from peerlane.cli.output import console, print_json, print_table, read_result_files
from peerlane.errors import UsageError

if TYPE_CHECKING:
    from peerlane.generate.board import Board
    from peerlane.generate.run_folder import RunFolder
    from peerlane.generate.samples import Setting
    from peerlane.results.result import Result


def metrics(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of `peerlane generate` or `peerlane agent`, judged.")],
    problems_folders: ProblemFolders = None,
    disguise: Disguise = None,
    k: Annotated[str, typer.Option("--k", help="Numbers of samples, separated by commas; by default 1 and all that every model has.")] = "",
    p: Annotated[str, typer.Option("--p", help="Speedups to exceed, separated by commas.")] = "1",
    mode: Annotated[str, typer.Option(help="Launch mode of the table by category: eager or graph.")] = "graph",
    problem: Annotated[
        str | None, typer.Option(help="The problems that count, such as 1-8,13, or all; by default those that a run has samples of.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Only results of this preset.")] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Only results of so many ranks.")] = None,
    track: Annotated[str | None, typer.Option(help="Only results of this track; by default the run's.")] = None,
    results: Annotated[list[Path] | None, typer.Option(help="results.jsonl from elsewhere; by default the run's own. Repeatable.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare the first run with every other, problem by problem.")] = False,
    problems_too: Annotated[bool, typer.Option("--by-problem", help="One row for every problem, too.")] = False,
    published: Annotated[bool, typer.Option("--published", help="Show published figures of others below, labelled.")] = False,
    csv_folder: Annotated[
        Path | None, typer.Option("--csv", metavar="FOLDER", help="Write long tables with raw numbers there, a CSV file each.")
    ] = None,
    as_latex: Annotated[bool, typer.Option("--latex", help="Print two tables for a paper (booktabs).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count what models solved: correct@k, fast_p@k, speedups, failures, tokens and cost.

    Results of different tracks, nodes, presets or numbers of ranks are never counted together. Speedups count by the lower end of their
    interval.
    """
    from peerlane.generate import paper, summary
    from peerlane.generate.run_folder import RunFolder
    from peerlane.generate.samples import MODES
    from peerlane.results.reader import FILE

    one_of(mode, MODES, "--mode")
    if (csv_folder is not None) + as_latex + as_json > 1:
        raise UsageError("got several of --csv, --latex and --json: expected one of them")
    ps = [_number(text) for text in words(p, "--p")]
    opened = [RunFolder.open(path) for path in runs]
    judged = {run.path: read_result_files(results or ([run.path] if os.path.lexists(run.path / FILE) else [])) for run in opened}
    settings = {run.path: run.settings_judged(judged[run.path]) for run in opened}
    chosen = {
        run.path: [
            setting
            for setting in settings[run.path]
            if setting.track == (track or run.settings.track)
            and preset in (None, setting.preset)
            and world_size in (None, setting.world_size)
        ]
        for run in opened
    }
    shared = _the_setting(chosen)
    for run in opened:
        if not chosen[run.path] and settings[run.path]:
            listed = "\n".join(f"  {setting}" for setting in settings[run.path])
            raise UsageError(
                f"{run.path} has no results of what was asked for; it has these:\n{listed}\nchoose with --track, --preset or --world-size"
            )
    board = _board(opened, judged, shared, problem)
    largest = min(entry.samples_per_task for entry in board.entries) or 1
    ks = list(positive_integers(k, "--k")) if k else sorted({1, largest})
    if too_many := [value for value in ks if value > largest]:
        raise UsageError(f"--k got {too_many[0]}: one run has only {largest} samples of a problem; generate more")
    if as_json:
        print_json({"models": [summary.summary(board, entry, ks, ps) for entry in board.entries]})
        return
    _print_counts(board, on_stderr=as_latex or csv_folder is not None)
    if csv_folder is not None:
        for file in paper.write_csv(csv_folder, board, ks, ps):
            print(file)
        return
    if as_latex:
        print(paper.latex_tables(board, ks, ps[0], mode))
        return
    tables = [summary.category_table(board, ks, ps[0], mode), summary.model_table(board, ks, ps)]
    tables += [summary.regime_table(board, ks[-1], ps[0], mode), summary.verdict_table(board), summary.usage_table(board)]
    tables += [summary.step_table(board)] if any(sample.steps for sample in board.samples) else []
    tables += [summary.problem_table(board)] if problems_too else []
    for table in tables:
        print_table(table)
    for other in board.entries[1:] if compare else ():
        for line in summary.comparison_lines(board.entries[0], other, ks, ps[0]):
            console().print(line)
    if published:
        label, table = summary.published_table()
        console().print(f"\n{label}")
        print_table(table)


def _board(opened: Sequence[RunFolder], judged: Mapping[Path, list[Result]], setting: Setting | None, problem: str | None) -> Board:
    """Returns the board of these runs, over the chosen problems, or those that a run has samples of."""
    from peerlane import problems
    from peerlane.generate.board import Board
    from peerlane.generate.samples import Names, Task

    with_samples = sorted({key.problem for run in opened for key in run.sample_keys()})
    counted = [problems.get(number) for number in with_samples] if problem is None and with_samples else problems.select(problem or "all")
    numbered = Names()
    names = [numbered.new(run.settings.model) for run in opened]
    samples = [
        replace(sample, author=name) for run, name in zip(opened, names, strict=True) for sample in run.samples(judged[run.path], setting)
    ]
    preset = "" if setting is None else setting.preset
    return Board(setting, samples, {Task(item.id, preset): item.category for item in counted}, names)


def _print_counts(board: Board, *, on_stderr: bool) -> None:
    """Says under which setting the samples were judged, and what is missing."""
    out = console(stderr=on_stderr)
    out.print(str(board.key) if board.key is not None else "nothing was judged yet: run `peerlane eval RUN`")
    for entry in board.entries:
        name, samples = entry.author, len(entry.samples)
        out.print(f"{name}: {len(entry.tried)} of {len(entry.tasks)} tasks tried")
        if entry.unjudged:
            out.print(f"{name}: {entry.unjudged} of {samples} samples are not judged: counts go from all of them wrong to all right")
        if entry.needs_multicast:
            out.print(f"{name}: {entry.needs_multicast} of {samples} samples need NVLink multicast, which was off")


def _the_setting(settings: dict[Path, list[Setting]]) -> Setting | None:
    """Returns the one setting under which all runs were judged; raises UsageError if there are several, or none in common."""
    everything = list(dict.fromkeys(setting for of_model in settings.values() for setting in of_model))
    if len(everything) > 1:
        listed = "\n".join(f"  {setting}" for setting in everything)
        raise UsageError(
            f"the runs were judged under {len(everything)} settings, which are not counted together:\n{listed}\n"
            "choose one with --preset, --world-size or --track"
        )
    return everything[0] if everything else None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"--p got {text!r}: expected speedups such as 1 or 1,1.5,2")
    return value
