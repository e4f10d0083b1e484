"""``peerlane race``: a kernel's protocol under many schedules, without a GPU."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from peerlane.cli.exit_codes import ExitCode
from peerlane.cli.options import ProblemFolders, positive_integers, takes, words
from peerlane.cli.output import print_error, print_json
from peerlane.common.version import own_example
from peerlane.errors import CompileError, DeviceError, LaunchError, PeerlaneError, UsageError

if TYPE_CHECKING:
    from peerlane.emulator import Scenario

Item = TypeVar("Item")
_WATCH_S = 0.3


@dataclass
class _Asked:
    """The options of the command."""

    file: Annotated[Path, typer.Argument(metavar="FILE.py", help="A solution of a problem, or a file with a function race(world_size).")]
    schedules: Annotated[int | None, typer.Option(min=1, help="Schedules for each scenario: 300, or 20 for a solution's case.")] = None
    seed: Annotated[int, typer.Option(min=0, help="What the schedules and a solution's inputs are drawn from.")] = 0
    world_size: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,4"
    case: Annotated[str | None, typer.Option(help="Only cases or scenarios of these names, separated by commas; * fits all.")] = None
    fail_fast: Annotated[bool, typer.Option("--fail-fast", "-x", help="Stop at the first case in which something was found.")] = False
    gpu: Annotated[str | None, typer.Option(help="h100, h200 or b200: compile for it, and give each rank as many SMs.")] = None
    ptx: Annotated[bool, typer.Option("--ptx", help="Run the PTX that NVRTC makes, not the source.")] = False
    strict: Annotated[bool, typer.Option("--strict", help="What is ordered only by the end of a launch is a race, too.")] = False
    fidelity: Annotated[bool, typer.Option("--fidelity", help="Say which instructions of PTX were exact and which approximate.")] = False
    include: Annotated[list[Path] | None, typer.Option("--include", "-I", metavar="FOLDER", help="A folder of headers.")] = None
    problems_folders: ProblemFolders = None
    watch: Annotated[bool, typer.Option("--watch", help="Run again whenever the file changes, until interrupted.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False

    def __post_init__(self) -> None:
        from peerlane.emulator.gpu_code import gpu_named

        self.file = own_example(self.file)
        self.world_sizes = positive_integers(self.world_size, "--world-size")
        self.names = () if self.case is None else words(self.case, "--case")
        """patterns of the cases or scenarios to run; none: all"""
        self.emulated_gpu = None if self.gpu is None else gpu_named(self.gpu)


@takes(_Asked)
def race(asked: _Asked) -> None:
    """Run a file's kernels on emulated ranks under many schedules; say where they race, deadlock or go wrong.

    A file with a function race(world_size) gives scenarios. Of any other file, named like 18_mine_cuda.py, the solution runs whole on the
    problem's small cases, host code included, and its results are judged; its kernels are of the kit (peerlane.device), of Triton, of
    cuda.core or of a CUDA extension (load_inline). Every kernel is also compiled for a GPU, if NVRTC is installed.

    Sees what the protocol orders and what it does not. Does not see how fast anything is, what a GPU's memory does beyond what its
    memory model forbids, or what tensor cores compute.

    Exit codes: 0 nothing found, 2 usage, 3 something found, or a scenario or case that could not be run.
    """
    from peerlane.emulator import job

    job.on_progress = lambda said: print(said, file=sys.stderr, flush=True)
    clean = _race(asked)
    if asked.watch:
        for _ in _changes(asked.file):
            try:
                _race(asked)
            except PeerlaneError as error:  # a half-written file, as a rule
                print_error(str(error))
    raise typer.Exit(ExitCode.OK if clean else ExitCode.NOT_CORRECT)


def _changes(file: Path) -> Iterator[None]:
    """Yields when the file has changed, for ever."""
    known = file.stat().st_mtime_ns
    while True:
        time.sleep(_WATCH_S)
        with contextlib.suppress(FileNotFoundError):  # some editors remove it for a moment
            if (now := file.stat().st_mtime_ns) != known:
                known = now
                yield


def _race(asked: _Asked) -> bool:
    """Runs the file once and prints what was found; returns whether that is nothing."""
    from peerlane.emulator.host_libraries import wants_extension
    from peerlane.emulator.ptx_front_end import fidelity

    text = asked.file.read_text(encoding="utf-8", errors="replace") if asked.file.is_file() else ""
    only_scenarios = "race" in (names := re.findall(r"^def (race|solution)\b", text, re.MULTILINE)) and "solution" not in names
    module = None if wants_extension(text) and not only_scenarios else imported(asked.file)
    if module is None or (not callable(getattr(module, "race", None)) and callable(getattr(module, "solution", None))):
        rows = list(_race_solution(asked))
        kind = "cases"
    else:
        rows = list(_race_scenarios(asked, module))
        kind = "reports"
    clean = all(row["clean"] for row in rows)
    kernels: dict[str, dict[int, None]] = {}  # what the compiler says of each, and for which numbers of ranks
    for row in rows:
        for text in row["kernels"] or ():
            kernels.setdefault(text, {})[row["world_size"]] = None
    compiled = all(row["kernels"] is not None for row in rows)
    told = fidelity() if asked.fidelity else {}
    if asked.as_json:
        print_json({"clean": clean, "compiled": compiled, "kernels": list(kernels), kind: rows} | ({"fidelity": told} if told else {}))
        return clean
    for kernel, item in told.items():
        rounded = ", ".join(f"{count} {name}" for name, count in item["approximate"].items())
        print(f"{kernel}: {item['exact']} instructions are exact, approximate: {rounded or 'none'}")
    if asked.fidelity and not told:
        print("nothing ran from PTX: with --ptx it is known which instructions are exact")
    for text, sizes in kernels.items():
        print(f"{text}, {' or '.join(map(str, sizes))} ranks")
    if not compiled:
        print("not compiled for a GPU: there is no NVRTC here, which needs no GPU: pip install 'peerlane[cuda]'")
    return clean


def _race_scenarios(asked: _Asked, module: ModuleType) -> Iterator[dict[str, Any]]:
    """Runs the scenarios that are asked for, and yields what each showed."""
    from peerlane.emulator import check
    from peerlane.emulator.job import TooManyThreads
    from peerlane.emulator.ptx_front_end import UnknownPtx

    found = [scenario for size in asked.world_sizes for scenario in scenarios(asked.file, module, size)]
    for scenario in _wanted(asked, found, lambda scenario: scenario.name):
        where = f"{scenario.name}, {scenario.world_size} ranks"
        scenario.include_dirs = (*scenario.include_dirs, *(asked.include or ()))
        try:
            report = check(scenario, schedules=asked.schedules or 300, seed=asked.seed, gpu=asked.emulated_gpu, from_ptx=asked.ptx)
        except (CompileError, LaunchError) as error:
            said = f"{where}: build error: {error}"
            row = {"scenario": scenario.name, "world_size": scenario.world_size, "clean": False, "kernels": [], "error": str(error)}
        except (UnknownPtx, TooManyThreads, DeviceError) as error:
            said = f"{where}: not run: {error}"
            row = {"scenario": scenario.name, "world_size": scenario.world_size, "clean": False, "kernels": [], "not_run": str(error)}
        else:
            report = report.strictly() if asked.strict else report
            said = _timed(str(report), report.seconds)
            row = asdict(report) | {"clean": report.clean}
            row["kernels"] = None if report.kernels is None else [str(item) for item in report.kernels]
        if not asked.as_json:
            print(said, flush=True)
        yield row
        if asked.fail_fast and not row["clean"]:
            return


def _race_solution(asked: _Asked) -> Iterator[dict[str, Any]]:
    """Runs the file's solution on small cases of the problem that its name says, and yields what each showed."""
    from peerlane import problems
    from peerlane.evaluate.candidates import candidate_file
    from peerlane.evaluate.correctness.emulated import judge_emulated

    file, number = asked.file, candidate_file(asked.file).problem
    if number is None:
        raise UsageError(f"{file.name} says no problem; name the file like 18_mine_cuda.py, or give it a function race(world_size)")
    problem = problems.get(number)
    said: dict[str, str] = {}
    cases = [case for size in asked.world_sizes for case in problem.cases("small", size)]
    for case in _wanted(asked, cases, lambda case: case.label):
        begin = time.monotonic()
        with contextlib.redirect_stdout(sys.stderr):
            judged = judge_emulated(
                file,
                problem,
                case,
                schedules=asked.schedules or 20,
                seed=asked.seed,
                gpu=asked.emulated_gpu,
                from_ptx=asked.ptx,
                strict=asked.strict,
            )
        seconds = time.monotonic() - begin
        where = f"{case.label}, {case.world_size} ranks"
        first = said.setdefault(str(judged), where)
        kernels = judged.outcome.kernels
        if not asked.as_json:
            what = str(judged) if judged.correct or first == where else f"the same as in {first}"
            print(_timed(f"{file.name}, {where}: {what}", seconds), flush=True)
        yield {
            "case": case.label,
            "world_size": case.world_size,
            "correct": judged.correct,
            "clean": judged.correct,
            "said": str(judged),
            "seconds": round(seconds, 3),
            "kernels": None if kernels is None else [str(item) for item in kernels],
        }
        if asked.fail_fast and not judged.correct:
            return


def _timed(text: str, seconds: float) -> str:
    """Adds the seconds to the first line."""
    first, line_end, rest = text.partition("\n")
    return f"{first} ({seconds:.1f} s){line_end}{rest}"


def _wanted(asked: _Asked, items: Sequence[Item], name: Callable[[Item], str]) -> list[Item]:
    """Returns the items that ``--case`` names; raises UsageError where there is none."""
    wanted = [item for item in items if not asked.names or any(fnmatch.fnmatchcase(name(item), pattern) for pattern in asked.names)]
    if not wanted and asked.names:
        known = ", ".join(dict.fromkeys(map(name, items)))
        raise UsageError(f"--case got {','.join(asked.names)}: expected one or more of {known}")
    return wanted


def imported(file: Path) -> ModuleType:
    """Imports the file as a module; raises UsageError, also for what the file raises."""
    import importlib.util

    from peerlane.emulator.host_libraries import emulated_extensions, wants_extension
    from peerlane.emulator.triton_launches import require_triton, wants_triton

    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    if wants_triton(text):
        require_triton()
    name = f"peerlane_race_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise UsageError(f"{file} is not a Python file; expected the path of one with a function race(world_size), or a solution")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up names of annotations there
    with _running(file), emulated_extensions() if wants_extension(text) else contextlib.nullcontext():
        spec.loader.exec_module(module)
    return module


def scenarios(file: Path, module: ModuleType, world_size: int) -> list[Scenario]:
    """Returns the scenarios of the file's ``race`` for this number of ranks; raises UsageError, also for what the file raises."""
    from peerlane.device.host.declare import written_in
    from peerlane.emulator import Scenario

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
        raise UsageError(f"race({world_size}) of {file} gave {kinds}; expected one or more peerlane.emulator.Scenario")
    for scenario in given:
        if isinstance(source := scenario.source, str) and source and (place := written_in(str(file), source))[0] == file.name:
            scenario.source = f'#line {place[1]} "{place[0]}"\n{source}'
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
