"""``peerlane race``: a kernel's protocol under many schedules, without a GPU."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from peerlane.cli.exit_codes import ExitCode
from peerlane.cli.options import positive_integers
from peerlane.cli.output import print_json
from peerlane.errors import PeerlaneError, UsageError

if TYPE_CHECKING:
    from peerlane.device.emulator import Scenario


def race(
    file: Annotated[Path, typer.Argument(metavar="FILE.py", help="A solution of a problem, or a file with a function race(world_size).")],
    schedules: Annotated[int | None, typer.Option(min=1, help="Schedules for each scenario: 300, or 20 for a solution's case.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="What the schedules and a solution's inputs are drawn from.")] = 0,
    world_size: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,4",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a file's kernels on emulated ranks under many schedules; say where they race, deadlock or go wrong.

    A file with a function race(world_size) gives scenarios. Of any other file, named like 18_mine_cuda.py, the solution runs whole on the
    problem's small cases, host code included, and its results are judged; its host code must use the kit (peerlane.device).

    Sees what the protocol orders and what it does not. Does not see how fast anything is, what a GPU's memory does beyond what its
    memory model forbids, or what tensor cores compute.

    Exit codes: 0 nothing found, 2 usage, 3 something found.
    """
    from peerlane.device.emulator import check

    module = _imported(file)
    sizes = positive_integers(world_size, "--world-size")
    if not callable(getattr(module, "race", None)) and callable(getattr(module, "solution", None)):
        clean = _race_solution(file, sizes, schedules or 20, seed, as_json)
    else:
        reports = []
        for scenario in (scenario for size in sizes for scenario in scenarios(file, module, size)):
            reports.append(check(scenario, schedules=schedules or 300, seed=seed))
            if not as_json:
                print(reports[-1], flush=True)
        clean = all(report.clean for report in reports)
        if as_json:
            print_json({"clean": clean, "reports": [asdict(report) for report in reports]})
    raise typer.Exit(ExitCode.OK if clean else ExitCode.NOT_CORRECT)


def _race_solution(file: Path, world_sizes: Iterable[int], schedules: int, seed: int, as_json: bool) -> bool:
    """Runs the file's solution on all small cases of the problem that its name says."""
    from peerlane import problems
    from peerlane.evaluate.candidates import candidate_file
    from peerlane.evaluate.correctness.emulated import judge_emulated

    number = candidate_file(file).problem
    if number is None:
        raise UsageError(f"{file.name} says no problem; name the file like 18_mine_cuda.py, or give it a function race(world_size)")
    problem, rows = problems.get(number), []
    said: dict[str, str] = {}
    for case in (case for size in world_sizes for case in problem.cases("small", size)):
        with contextlib.redirect_stdout(sys.stderr):
            judged = judge_emulated(file, problem, case, schedules=schedules, seed=seed)
        where = f"{case.label}, {case.world_size} ranks"
        first = said.setdefault(str(judged), where)
        rows.append({"case": case.label, "world_size": case.world_size, "correct": judged.correct, "said": str(judged)})
        if not as_json:
            print(f"{file.name}, {where}: {judged if judged.correct or first == where else f'the same as in {first}'}", flush=True)
    clean = all(row["correct"] for row in rows)
    if as_json:
        print_json({"clean": clean, "cases": rows})
    return clean


def _imported(file: Path) -> ModuleType:
    """Imports the file as a module; raises UsageError, also for what the file raises."""
    import importlib.util

    name = f"peerlane_race_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise UsageError(f"{file} is not a Python file; expected the path of one with a function race(world_size), or a solution")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up names of annotations there
    with _running(file):
        spec.loader.exec_module(module)
    return module


def scenarios(file: Path, module: ModuleType, world_size: int) -> list[Scenario]:
    """Returns the scenarios of the file's ``race`` for this number of ranks; raises UsageError, also for what the file raises."""
    from peerlane.device.emulator import Scenario

    describe = getattr(module, "race", None)
    if not callable(describe):
        raise UsageError(
            f"{file} has no function race(world_size) and no solution; write one of them, as docs/device/emulator.md and declare.md show"
        )
    with _running(file):
        described = describe(world_size)
        given = list(described) if isinstance(described, Iterable) else [described]
    if not given or not all(isinstance(scenario, Scenario) for scenario in given):
        kinds = [type(item).__name__ for item in given]
        raise UsageError(f"race({world_size}) of {file} gave {kinds}; expected one or more peerlane.device.emulator.Scenario")
    return given


@contextlib.contextmanager
def _running(file: Path) -> Iterator[None]:
    """Redirects what the user's file prints to stderr, and turns what it raises into a UsageError that says where."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except PeerlaneError:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file.absolute()]
        where = f", line {lines[-1]}" if lines else ""  # a SyntaxError names its line itself
        raise UsageError(
            f"{file}{where} raised {type(error).__name__}: {error}; the file must run without an error before it is judged"
        ) from None
