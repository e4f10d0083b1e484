"""``peerlane race``: a kernel's protocol under many schedules, without a GPU."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peerlane.cli._console import ExitCode, positive_integers, print_json
from peerlane.errors import PeerlaneError, UsageError

if TYPE_CHECKING:
    from peerlane.device.emulator import Scenario


def race(
    file: Annotated[Path, typer.Argument(metavar="FILE.py", help="A file with a function race(world_size) that gives scenarios.")],
    schedules: Annotated[int, typer.Option(min=1, help="How many schedules each scenario is run under.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="What the schedules are drawn from.")] = 0,
    world_size: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,4",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a file's kernels on emulated ranks under many schedules; say where they race, deadlock or go wrong.

    Sees what the protocol orders and what it does not. Does not see how fast anything is, what a GPU's memory does beyond what its
    memory model forbids, or what tensor cores compute.

    Exit codes: 0 nothing found, 2 usage, 3 something found.
    """
    from peerlane.device.emulator import check

    reports = []
    for size in positive_integers(world_size, "--world-size"):
        for scenario in scenarios(file, size):
            reports.append(check(scenario, schedules=schedules, seed=seed))
            if not as_json:
                print(reports[-1], flush=True)
    if as_json:
        print_json({"clean": all(report.clean for report in reports), "reports": [asdict(report) for report in reports]})
    raise typer.Exit(ExitCode.OK if all(report.clean for report in reports) else ExitCode.NOT_CORRECT)


def scenarios(file: Path, world_size: int) -> list[Scenario]:
    """What the file's ``race`` gives for this number of ranks; raises UsageError, also for what the file raises."""
    import importlib.util

    from peerlane.device.emulator import Scenario

    spec = importlib.util.spec_from_file_location(f"peerlane_race_{file.stem}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise UsageError(f"{file} is not a Python file; expected the path of one with a function race(world_size)")
    module = importlib.util.module_from_spec(spec)
    with _running(file):
        spec.loader.exec_module(module)
    describe = getattr(module, "race", None)
    if not callable(describe):
        raise UsageError(f"{file} has no function race(world_size); write one that yields scenarios, as docs/device/emulator.md shows")
    with _running(file):
        described = describe(world_size)
        given = list(described) if isinstance(described, Iterable) else [described]
    if not given or not all(isinstance(scenario, Scenario) for scenario in given):
        kinds = [type(item).__name__ for item in given]
        raise UsageError(f"race({world_size}) of {file} gave {kinds}; expected one or more peerlane.device.emulator.Scenario")
    return given


@contextlib.contextmanager
def _running(file: Path) -> Iterator[None]:
    """While the user's file runs: what it prints goes to stderr, and what it raises becomes a UsageError that says where."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except PeerlaneError:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file.absolute()]
        where = f", line {lines[-1]}" if lines else ""  # a SyntaxError says it itself
        raise UsageError(
            f"{file}{where} raised {type(error).__name__}: {error}; expected a file with a function race(world_size) that gives scenarios"
        ) from None
