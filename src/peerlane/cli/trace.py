"""``peerlane trace``: what reference and candidate do when, on all ranks."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, cast

import typer

from peerlane.cli._console import ProblemFolders, console, exit_code, one_of, print_json, table_room
from peerlane.cli._progress import progress
from peerlane.cli.evaluation import Mode, choose_device, default_world_sizes
from peerlane.errors import UsageError


def trace(
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="One file named <id>_<name>_<backend>.py.")],
    problem: Annotated[str | None, typer.Option(help="The problem's number; by default the one that the file name says.")] = None,
    problems_folders: ProblemFolders = None,
    preset: Annotated[str, typer.Option(help="The preset whose timed case is recorded.")] = "pkb",
    world_size: Annotated[int | None, typer.Option(min=1, help="Number of ranks; by default the most that the GPUs allow, or 2.")] = None,
    mode: Annotated[str, typer.Option(help="Launch mode: eager or graph.")] = "graph",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the files.")] = Path("peerlane-trace"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Record reference and candidate on all ranks; say how long each computes, communicates and waits.

    Writes NAME.trace.json, which ui.perfetto.dev opens, and NAME.svg. Both sides are judged and timed first; nothing is added to results.
    On CPU ranks one call is recorded, and its times say nothing about a GPU.

    Exit codes: as those of `peerlane eval`.

    Example: peerlane trace examples/pytorch/13_gemm_allreduce_pytorch.py --device cpu --preset small
    """
    chosen = choose_device(device)
    wanted = cast(Mode, one_of(mode, ("eager", "graph"), "--mode"))

    from peerlane.evaluate import EvaluationPlan, discover, evaluate
    from peerlane.evaluate.audit.timeline import Timeline, perfetto
    from peerlane.evaluate.candidates import reference_candidate
    from peerlane.evaluate.plan import make_jobs
    from peerlane.files import write_atomically
    from peerlane.report.timeline import draw_timelines, shares_table

    found = discover([candidate])
    if len(found) != 1 or found[0].is_reference:
        raise UsageError(f"trace got {len(found)} candidates from {candidate}: expected one file; the reference is traced beside it")
    size = world_size or max(default_world_sizes(chosen)) if chosen == "cuda" else world_size or 2
    with tempfile.TemporaryDirectory(prefix="peerlane-trace-") as folder:
        plan = EvaluationPlan(found, problem, (preset,), (size,), modes=(wanted,), cases="timed", device=chosen)
        jobs = make_jobs(plan)
        if len(jobs) != 1:
            raise UsageError(f"trace got {len(jobs)} evaluations: expected one problem and one preset")
        sides = [reference_candidate(), *found]
        both = replace(plan, candidates=sides, problems=str(jobs[0].problem.id), timelines=Path(folder))
        with progress() as shown:
            results = evaluate(both, shown)
        files = [Path(folder) / f"{result.candidate.name}.{wanted if chosen == 'cuda' else 'call'}.json" for result in results]
        timelines = [Timeline.read(file) for file in files if file.is_file()]
    for result, file in zip(results, files, strict=True):
        if not any(timeline.labels["candidate"] == result.candidate.name for timeline in timelines):
            why = result.verdict.reason if result.verdict.kind != "correct" else f"{file.stem} was not measured"
            console(stderr=True).print(f"no timeline of {result.candidate.name}: {result.verdict.kind}: {why}")
    if timelines:
        out.mkdir(parents=True, exist_ok=True)
        name = out / f"{found[0].name}.{timelines[0].labels['mode']}"
        path, picture = name.with_name(f"{name.name}.trace.json"), name.with_name(f"{name.name}.svg")
        write_atomically(path, json.dumps(perfetto(timelines)).encode())
        draw_timelines(timelines, picture)
        if as_json:
            print_json({"trace": str(path), "picture": str(picture), "sides": [{**t.labels, **asdict(t.shares())} for t in timelines]})
        else:
            terminal = console()
            terminal.print(shares_table(timelines).rich(table_room(terminal)))
            terminal.print(f"{picture}\n{path} (open it in ui.perfetto.dev)")
    raise typer.Exit(exit_code(results))
