"""``peerlane trace``: what reference and candidate do when, on all ranks."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from peerlane.cli.evaluation import (
    BASELINE_HELP,
    ISOLATION_HELP,
    RANKS_PER_GPU_HELP,
    Baseline,
    Mode,
    Tier,
    choose_device,
    default_world_sizes,
    parse_ranks_per_gpu,
)
from peerlane.cli.exit_codes import exit_code
from peerlane.cli.options import ProblemFolders, one_of
from peerlane.cli.output import PIPED_TABLE, console, print_json, print_table
from peerlane.cli.progress import progress
from peerlane.common.place import Place
from peerlane.errors import MissingDependency, UsageError

if TYPE_CHECKING:
    from peerlane.evaluate.audit.timeline import Timeline
    from peerlane.results.result import Result

_RACE_S = 2.0  # enough for a time beside the picture; `eval` measures the speedups to quote


def trace(
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="One file named <id>_<name>_<backend>.py.")],
    problem: Annotated[str | None, typer.Option(help="The problem's number; by default the one that the file name says.")] = None,
    problems_folders: ProblemFolders = None,
    preset: Annotated[str, typer.Option(help="The preset whose timed case is recorded.")] = "pkb",
    world_size: Annotated[int | None, typer.Option(min=1, help="Number of ranks; by default the most that the GPUs allow, or 2.")] = None,
    mode: Annotated[str, typer.Option(help="Launch mode: eager or graph.")] = "graph",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    ranks_per_gpu: Annotated[str, typer.Option(metavar="NUMBER", help=RANKS_PER_GPU_HELP)] = "auto",
    baseline: Annotated[str | None, typer.Option(help=BASELINE_HELP)] = None,
    isolation: Annotated[str | None, typer.Option(help=ISOLATION_HELP)] = None,
    roles: Annotated[bool, typer.Option(help="Record what the roles of the kit's kernels do too, on GPUs, in a run of its own.")] = True,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Limit for each side.")] = 120.0,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the files.")] = Path("peerlane-trace"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Record reference and candidate on all ranks; say how long each computes, communicates and waits.

    Writes NAME.trace.json, which ui.perfetto.dev opens, and NAME.svg. Both sides are judged and timed first; nothing is added to results.
    The files are written after each side: if the candidate fails or the command is stopped, they hold the reference.
    Kernels of the kit are run once more to record their roles: that side is called "NAME, stamped".
    On CPU ranks one call is recorded, and its times say nothing about a GPU.

    Exit codes: as those of `peerlane eval`.
    """
    rank_device = choose_device(device)
    on_gpus = Place.of(rank_device).has_gpus
    wanted = cast(Mode, one_of(mode, ("eager", "graph"), "--mode"))
    tier = None if isolation is None else cast(Tier, one_of(isolation, ("L0", "L1", "L2"), "--isolation"))
    served = None if baseline is None else cast(Baseline, one_of(baseline, ("peerlane", "nccl"), "--baseline"))
    shared = parse_ranks_per_gpu(ranks_per_gpu)
    size = world_size or (max(default_world_sizes(rank_device, shared)) if on_gpus else 2)

    from peerlane.evaluate import EvaluationPlan, discover, evaluate
    from peerlane.evaluate.candidates import reference_candidate
    from peerlane.evaluate.plan import make_jobs
    from peerlane.settings import TimingRules, recorded_roles

    candidate_files = discover([candidate])
    if len(candidate_files) != 1 or candidate_files[0].is_reference:
        raise UsageError(
            f"trace got {len(candidate_files)} candidates from {candidate}: expected one file; the reference is traced beside it"
        )
    plan = EvaluationPlan(
        candidate_files,
        problem,
        (preset,),
        (size,),
        modes=(wanted,),
        cases="timed",
        device=rank_device,
        ranks_per_gpu=shared,
        baseline=served,
        isolation=tier,
        timeout=timeout,
        rules=TimingRules(budget_s=_RACE_S),
    )
    jobs = make_jobs(plan)
    if len(jobs) != 1:
        raise UsageError(f"trace got {len(jobs)} evaluations: expected one problem and one preset")
    both = replace(plan, candidates=[reference_candidate(), *candidate_files], problems=str(jobs[0].problem.id))
    with tempfile.TemporaryDirectory(prefix="peerlane-trace-") as folder, progress() as shown:
        files = _Files(Path(folder), out, candidate_files[0].name, wanted if on_gpus else "call")
        try:
            results = evaluate(replace(both, timelines=Path(folder)), _Writing(shown, files))
            if roles and on_gpus and files.has_kit_kernels:
                files.suffix = ", stamped"
                with recorded_roles():
                    evaluate(replace(both, candidates=candidate_files, timelines=Path(folder)), _Writing(shown, files))
        except BaseException:
            if files.timelines:
                shown.note(f"stopped; {files.trace} holds {' and '.join(item.labels['candidate'] for item in files.timelines)} alone")
            raise
    if as_json:
        sides = [{**timeline.labels, **asdict(timeline.shares())} for timeline in files.timelines]
        picture = None if files.no_picture else str(files.picture)
        print_json({"trace": str(files.trace), "picture": picture, "sides": sides} if sides else {"sides": []})
    elif files.timelines:
        from peerlane.report.timeline import shares_table

        terminal = console()
        print_table(shares_table(files.timelines), PIPED_TABLE)
        if not files.no_picture:
            terminal.print(files.picture)
        terminal.print(f"{files.trace} (open it in ui.perfetto.dev)")
        if not on_gpus:
            terminal.print(
                "CPU ranks: the times are the profiler's and say nothing about GPUs. A collective is shown until its call returns;"
            )
            terminal.print("gloo may finish it later, in a thread of its own.")
    raise typer.Exit(exit_code(results))


class _Files:
    """The trace and the picture of the sides that have a timeline so far."""

    def __init__(self, recorded: Path, out: Path, name: str, mode: str) -> None:
        self.recorded, self.mode = recorded, mode
        self.trace, self.picture = out / f"{name}.{mode}.trace.json", out / f"{name}.{mode}.svg"
        self.timelines: list[Timeline] = []
        self.no_picture: str | None = None
        self.suffix = ""
        """The suffix of the name of a side that is recorded again."""

    @property
    def has_kit_kernels(self) -> bool:
        """True if the latest side has kernels that reach other GPUs' memory: those of the kit stamp their roles."""
        return bool(self.timelines) and any(span.kind == "both" for span in self.timelines[-1].spans)

    def add(self, result: Result) -> list[str]:
        """Adds a side and writes both files; says what is lacking, such as why a side has no timeline."""
        from peerlane.common.files import write_atomically
        from peerlane.evaluate.audit.timeline import Timeline, perfetto
        from peerlane.report.timeline import draw_timelines

        recorded = {mode: self.recorded / f"{result.candidate.name}.{mode}.json" for mode in (self.mode, "call")}
        mode = next((mode for mode, file in recorded.items() if file.is_file() and not Timeline.read(file).empty), None)
        name, lacking = result.candidate.name, []
        if mode is None:
            lacking.append(f"no timeline of {name}: {_reason(result)}")
        elif mode != self.mode:
            lacking.append(f"one eager call of {name} was recorded, and no {self.mode} block: {_reason(result)}")
        if mode is not None:
            timeline = Timeline.read(recorded[mode])
            recorded[mode].unlink()
            timeline.labels["candidate"] += self.suffix
            if self.suffix and not timeline.roles:
                return [f"no roles of {name}: its kernels stamp none"]
            self.timelines.append(timeline)
            self.trace.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.trace, json.dumps(perfetto(self.timelines)).encode())
            try:
                draw_timelines(self.timelines, self.picture)
            except MissingDependency as error:
                lacking += [] if self.no_picture else [f"no picture: {error}"]
                self.no_picture = str(error)
        return lacking


def _reason(result: Result) -> str:
    if result.verdict.kind != "correct":
        return f"{result.verdict.kind}: {result.verdict.reason}"
    why = [getattr(item, "why", "") or getattr(item, "reason", "") for item in result.speed]
    return "; ".join(filter(None, why)) or "the profiler recorded nothing"


class _Writing:
    """Progress that also writes the files whenever a side is finished."""

    def __init__(self, shown: Any, files: _Files) -> None:
        self._shown, self._files = shown, files
        self.started, self.phase, self.note = shown.started, shown.phase, shown.note

    def finished(self, result: Result) -> None:
        self._shown.finished(result)
        for lacking in self._files.add(result):
            self.note(lacking)
