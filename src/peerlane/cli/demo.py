"""``peerlane demo``: bundled candidates, good and broken, judged on this machine."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peerlane.cli.evaluation import choose_device, print_results, results_json
from peerlane.cli.exit_codes import ExitCode
from peerlane.cli.expectations import BROKEN, Expectation, read_expectation, stated
from peerlane.cli.options import positive_integers
from peerlane.cli.output import console, print_error, print_json, print_table
from peerlane.cli.progress import progress
from peerlane.cli.short_demo import COMPILER, ShortDemo
from peerlane.common.place import Device, Place
from peerlane.common.version import EXAMPLES
from peerlane.errors import UsageError

if TYPE_CHECKING:
    from peerlane.evaluate import CandidateFile
    from peerlane.results.result import Result

USUAL = {"preset": "small", "world_size": "2,4", "device": "cpu"}
BROKEN_DEADLINE_S = 8.0
"""The deadline for calls of broken candidates, some of which never return; good ones get the usual, longer deadlines."""

REASON_LENGTH = 100
TOO_BUSY = "too busy to tell"
AS_EXPECTED = {"yes": True, "no": False, TOO_BUSY: None}


def demo(
    every: Annotated[bool, typer.Option("--all", help="Judge all examples, which takes minutes.")] = False,
    examples: Annotated[
        Path | None,
        typer.Option(
            help="With --all: folder of good candidates, also in subfolders; those in broken/ are made to fail. By default peerlane's own."
        ),
    ] = None,
    preset: Annotated[str, typer.Option(help="With --all: the preset to judge on.")] = USUAL["preset"],
    world_size: Annotated[str, typer.Option(help="With --all: numbers of ranks, separated by commas.")] = USUAL["world_size"],
    device: Annotated[str, typer.Option(help="With --all: auto, cuda or cpu.")] = USUAL["device"],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Judge one right example, four wrong ones and a kernel with a race on two CPU ranks, and say what is wrong with each.

    With --all, judge all examples: the good ones must be correct, the broken ones must get the verdict that they are made for. On CPU,
    kernels of the device kit are judged on emulated ranks.

    Exit codes: 0 if every verdict is the expected one, else 3, or 4 if peerlane itself failed.
    """
    if not every:
        if examples is not None or {"preset": preset, "world_size": world_size, "device": device} != USUAL:
            raise UsageError("--examples, --preset, --world-size and --device choose among all examples: give --all too")
        raise typer.Exit(ShortDemo(EXAMPLES, as_json=as_json).run())
    sizes = positive_integers(world_size, "--world-size")
    rank_device = choose_device(device)

    from peerlane.evaluate import discover
    from peerlane.evaluate.processes.prestart import early_start

    folder = examples or EXAMPLES
    good, broken = discover(good_folders(folder)), discover([str(folder / BROKEN)])
    made_for = {candidate.name: read_expectation(candidate.path) for candidate in broken if candidate.path is not None}
    left_out = {candidate.name for candidate in good if lacks(candidate) or (not Place.of(rank_device).has_gpus and needs_gpu(candidate))}
    emulated = [candidate for candidate in good if candidate.name in left_out and uses_kit(candidate) and shutil.which(COMPILER)]
    left_out -= {candidate.name for candidate in emulated}
    left_out |= {name for name, expectation in made_for.items() if not can_run(expectation, rank_device)}
    if left_out:
        print(f"left out, for this machine or --device {rank_device} lacks what they need: {', '.join(sorted(left_out))}", file=sys.stderr)
    with early_start(rank_device, None):
        good_results = _run([item for item in good if item.name not in left_out and item not in emulated], preset, sizes, rank_device)
        if emulated:
            good_results += _run(emulated, preset, sizes[:1], "emulated")
        broken_results = _run([item for item in broken if item.name not in left_out], preset, sizes, rank_device, BROKEN_DEADLINE_S)
    expected = {name: expectation.on(rank_device) for name, expectation in made_for.items()}
    rows = [comparison(result, expected) for result in broken_results]
    if as_json:
        broken_json = results_json(broken_results)["results"]
        print_json(
            {"good": results_json(good_results)["results"], "broken": broken_json, "as_expected": [AS_EXPECTED[row[-1]] for row in rows]}
        )
    else:
        _print(good_results, rows)
    code = demo_exit_code(good_results, broken_results, rows)
    if code != ExitCode.OK:
        print_error("the demonstration failed: a good candidate is not correct, or a broken one did not get its expected verdict")
    raise typer.Exit(code)


def good_folders(examples: Path) -> list[str]:
    """Returns the folder and its subfolders that hold candidates, but for the broken ones; raises UsageError if there are none."""
    folders = sorted({path.parent for path in examples.rglob("*.py") if re.match(r"\d+_", path.name)} - {examples / BROKEN})
    if not folders:
        raise UsageError(
            f"there are no candidates in {examples}: expected files such as 1_allreduce_pytorch.py, in it or in its subfolders"
        )
    return [str(folder) for folder in folders]


def needs_gpu(candidate: CandidateFile) -> bool:
    """Tells whether a good candidate runs on GPUs only: by its backend, or by a comment ``# needs: gpu`` that it starts with."""
    return candidate.is_cuda or (candidate.path is not None and stated(candidate.path).get("needs") == "gpu")


def uses_kit(candidate: CandidateFile) -> bool:
    """Tells whether a candidate's kernels can run in the emulator."""
    from peerlane.evaluate.candidates import runs_emulated

    return candidate.path is not None and runs_emulated(candidate.path.read_text(encoding="utf-8"))


def lacks(candidate: CandidateFile) -> bool:
    """Tells whether this machine lacks what a candidate needs before it is compiled, such as NVSHMEM."""
    from peerlane.evaluate.requirements import missing_before

    return candidate.path is not None and missing_before(candidate.path.read_text(encoding="utf-8")) is not None


def can_run(expectation: Expectation, device: Device) -> bool:
    """Tells whether this machine can show what the candidate is made for."""
    from peerlane.hardware.doctor import check_cuda_bindings, check_nvrtc

    if not expectation.on(device) or (expectation.needs == "gpu" and not Place.of(device).has_gpus):
        return False
    return expectation.needs != "nvrtc" or (check_nvrtc().status == "ok" and check_cuda_bindings().status == "ok")


def comparison(result: Result, expected: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Returns a row of the table of broken candidates: name, place, expected and actual verdict, the short reason, whether they match."""
    kinds = expected[result.candidate.name]
    return (
        result.candidate.name,
        str(result.problem.id),
        str(result.world_size),
        " or ".join(kinds),
        result.verdict.kind,
        textwrap.shorten(result.verdict.reason, REASON_LENGTH, placeholder=" ..."),
        "yes" if result.verdict.kind in kinds else TOO_BUSY if "overloaded" in result.flags else "no",
    )


def demo_exit_code(good: Sequence[Result], broken: Sequence[Result], rows: Sequence[Sequence[str]]) -> ExitCode:
    """Returns OK if all good candidates are correct and all broken ones got an expected verdict; other programs that keep the cores do not
    matter."""
    if any(result.verdict.kind == "harness_error" for result in (*good, *broken)):
        return ExitCode.HARNESS
    as_expected = all(result.correct or "overloaded" in result.flags for result in good) and all(row[-1] != "no" for row in rows)
    return ExitCode.OK if good and rows and as_expected else ExitCode.NOT_CORRECT


def _run(
    candidates: list[CandidateFile], preset: str, world_sizes: tuple[int, ...], device: Device, deadline_s: float | None = None
) -> list[Result]:
    from peerlane.evaluate import EvaluationPlan, evaluate
    from peerlane.settings import Deadlines

    deadlines = Deadlines() if deadline_s is None else Deadlines().with_calls(deadline_s)
    # Nothing is stored, so that a demonstration always runs.
    plan = EvaluationPlan(
        candidates=candidates,
        problems=None,
        presets=(preset,),
        world_sizes=world_sizes,
        modes=("eager", "graph"),
        device=device,
        out=None,
        deadlines=deadlines,
    )
    with progress() as shown:
        return evaluate(plan, shown)


def _print(good: Sequence[Result], rows: Sequence[tuple[str, ...]]) -> None:
    from peerlane.report.tables import TextTable

    out = console()
    table = TextTable(("candidate", "problem", "W", "expected", "got", "reason", "as expected"), right={"problem", "W"})
    for row in rows:
        table.add(*row)
    out.print("Candidates with something wrong or odd about them, and the verdicts they must get:")
    print_table(table)
    out.print("Candidates made to be right:")
    print_results(good)
