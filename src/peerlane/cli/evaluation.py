"""``peerlane eval``: judge candidates."""

from __future__ import annotations

import contextlib
import importlib.util
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, cast

import typer

from peerlane.cli.exit_codes import exit_code
from peerlane.cli.options import Disguise, ProblemFolders, one_of, positive_integers, words
from peerlane.cli.output import PIPED_TABLE, console, print_json, print_refused, print_table
from peerlane.cli.progress import progress
from peerlane.cli.runs import run_to_judge
from peerlane.common.place import Device, Place
from peerlane.common.words import counted
from peerlane.errors import RunStopped, UsageError

if TYPE_CHECKING:
    from peerlane.results.result import Result

Mode: TypeAlias = Literal["eager", "graph"]
Track: TypeAlias = Literal["open", "custom"]
Tier: TypeAlias = Literal["L0", "L1", "L2"]
Baseline: TypeAlias = Literal["peerlane", "nccl"]
Protocol: TypeAlias = Literal["peerlane", "kittens"]

CANDIDATES_HELP = (
    "Files named <id>_<name>_<backend>.py, folders of them, the words reference and solutions (peerlane's own), or a run of "
    "`peerlane generate` or `peerlane agent`."
)
ISOLATION_HELP = "L0 (own processes), L1 (confined by the kernel) or L2 (in a bubblewrap sandbox); by default L1 if the machine can."
ON_HELP = "Where to judge: local, the URL of a service, ray, ray:ADDRESS, slurm or slurm:PARTITION."
TRACK_HELP = (
    "open (the default): anything goes; custom: communication must be the candidate's own, no NCCL, gloo or torch.distributed. "
    "A run has its own."
)
WORLD_SIZES_HELP = "Numbers of ranks, separated by commas; by default 2,4 on CPU, and those of 2,4,8 that the GPUs allow on CUDA."
NODES_HELP = "Number of nodes that the ranks are in. Several are a virtual cluster on this machine, where no speed is measured."
RANKS_PER_GPU_HELP = (
    "How many ranks may share a GPU: a number, or auto: as many as needed. Ranks that share GPUs are a virtual node, whose times are not a "
    "node's."
)
PROTOCOL_HELP = (
    "How speed is timed: peerlane, or kittens, the public protocol of ParallelKittens: 500 warm-up calls, then 100 back to back. Timed "
    "calls are not checked then, and results stay apart."
)
BASELINE_HELP = "What serves torch.distributed: nccl, or on virtual nodes peerlane, the kit's collectives (there the default)."


def evaluate_candidates(
    candidates: Annotated[list[str], typer.Argument(metavar="CANDIDATE", help=CANDIDATES_HELP)],
    problem: Annotated[str | None, typer.Option(help="Problems, such as 1-8,13; by default those that the file names say.")] = None,
    problems_folders: ProblemFolders = None,
    disguise: Disguise = None,
    preset: Annotated[
        str,
        typer.Option(
            help="Presets, separated by commas: small, pkb, production, sweep (all of those), production_first, bandwidth, or one by name."
        ),
    ] = "pkb",
    world_size: Annotated[str | None, typer.Option(help=WORLD_SIZES_HELP)] = None,
    nodes: Annotated[int, typer.Option(min=1, help=NODES_HELP)] = 1,
    variant: Annotated[
        str, typer.Option(help="default, or pkb: the public benchmark's semantics, for problems where those are not the right ones.")
    ] = "default",
    track: Annotated[str | None, typer.Option(help=TRACK_HELP)] = None,
    mode: Annotated[str, typer.Option(help="Launch modes to time, separated by commas.")] = "eager,graph",
    device: Annotated[
        str, typer.Option(help="auto, cuda, cpu, or emulated: kernels of the kit, Triton, cuda.core or extensions, without a GPU.")
    ] = "auto",
    ranks_per_gpu: Annotated[str, typer.Option(metavar="NUMBER", help=RANKS_PER_GPU_HELP)] = "auto",
    baseline: Annotated[str | None, typer.Option(help=BASELINE_HELP)] = None,
    protocol: Annotated[str, typer.Option(help=PROTOCOL_HELP)] = "peerlane",
    isolation: Annotated[str | None, typer.Option(help=ISOLATION_HELP)] = None,
    model: Annotated[
        str | None, typer.Option(help="The author of a folder PROBLEM/SAMPLE/candidate.py, or of numbered files; makes it a run.")
    ] = None,
    cases: Annotated[str, typer.Option(help="all, or timed: the timed case alone, for candidates that know one shape.")] = "all",
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="Limit for one evaluation as a whole; by default none.")] = None,
    rerun: Annotated[bool, typer.Option("--rerun", help="Judge again what the folder already holds.")] = False,
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder that results are added to; by default peerlane-results, or the run's.")
    ] = None,
    on: Annotated[str, typer.Option(metavar="PLACE", help=ON_HELP)] = "local",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Judge candidates: right or wrong and why, and how fast.

    Files that are links, no regular files, too large or unreadable are named and not judged; the others are.

    Exit codes: 0 all correct; 2 the request cannot be carried out; 3 a candidate was not shown to be correct (not_run and files that were
    not judged included); 4 peerlane itself failed; 130 interrupted.
    """
    modes = tuple(cast(Mode, one_of(item, ("eager", "graph"), "--mode")) for item in words(mode, "--mode"))
    presets = words(preset, "--preset")
    if out == "":
        raise UsageError("--out got '': expected a folder; '.' is the current one")
    sizes = None if world_size is None else positive_integers(world_size, "--world-size")
    rank_device = choose_device(device if on == "local" or device != "auto" else "cuda", emulated=on == "local")

    from peerlane.evaluate import discover
    from peerlane.evaluate.processes.prestart import early_start
    from peerlane.service.dispatch import choose_dispatcher

    dispatcher = choose_dispatcher(on)
    notes: list[str] = []
    refused: list[str] = []
    asked = None if track is None else cast(Track, one_of(track, ("open", "custom"), "--track"))
    run = run_to_judge(candidates, model, asked)
    candidate_files = discover(candidates, notes.append, refused.append) if run is None else run.candidates
    refused += [] if run is None else run.refused
    notes += [] if run is None else run.notes
    for note in notes:
        console(stderr=True).print(note, highlight=False)
    print_refused(refused)
    folder = Path(out) if out is not None else Path("peerlane-results") if run is None else run.folder
    shared = parse_ranks_per_gpu(ranks_per_gpu)
    if nodes > 1 and on != "local":
        raise UsageError(f"--nodes {nodes} with --on {on}: a virtual cluster is judged on this machine; leave out --on")
    sizes = sizes or dispatcher.world_sizes() or default_world_sizes(rank_device, shared, nodes)
    variant = one_of(variant, ("default", "pkb"), "--variant")
    tier = None if isolation is None else cast(Tier, one_of(isolation, ("L0", "L1", "L2"), "--isolation"))
    with early_start(rank_device, tier) if on == "local" else contextlib.nullcontext():
        from peerlane.evaluate import EvaluationPlan  # torch, which takes seconds

        plan = EvaluationPlan(
            candidates=candidate_files,
            problems=problem,
            presets=presets,
            world_sizes=sizes,
            nodes=nodes,
            modes=modes,
            device=rank_device,
            ranks_per_gpu=shared,
            baseline=None if baseline is None else cast(Baseline, one_of(baseline, ("peerlane", "nccl"), "--baseline")),
            protocol=cast(Protocol, one_of(protocol, ("peerlane", "kittens"), "--protocol")),
            out=folder,
            timeout=timeout,
            rerun=rerun,
            cases=cast(Literal["all", "timed"], one_of(cases, ("all", "timed"), "--cases")),
            variant=variant,
            track=asked or cast(Track, "open" if run is None else run.track),
            isolation=tier,
        )
        try:
            with progress() as shown:
                results = dispatcher.run(plan, shown)
        except RunStopped as stopped:
            if not as_json:
                print_results(stopped.results)
            raise
    if as_json:
        print_json(results_json(results))
    else:
        print_results(results)
        console(stderr=True).print(f"results are in {folder}")
    if refused:
        console(stderr=True).print(f"{counted(len(refused), 'file')} {'was' if len(refused) == 1 else 'were'} refused and not judged")
    raise typer.Exit(exit_code(results, complete=not refused))


def choose_device(text: str, *, emulated: bool = False) -> Device:
    """Returns the device that ``--device`` means here (auto: CUDA if torch is built for it and there is a GPU); raises UsageError.

    ``emulated``: whether that is a choice too.
    """
    if one_of(text, ("auto", "cuda", "cpu", *(("emulated",) if emulated else ())), "--device") == "auto":
        return "cuda" if torch_has_cuda() and gpu_count() > 0 else "cpu"
    return cast(Device, text)


def parse_ranks_per_gpu(text: str) -> int:
    """Parses ``--ranks-per-gpu``; returns 0 for auto, as in a plan. Raises UsageError."""
    if text == "auto":
        return 0
    if not text.isdecimal() or not 1 <= int(text) <= 8:
        raise UsageError(f"--ranks-per-gpu got {text!r}: expected 1 to 8, or auto for as many as needed")
    return int(text)


def torch_has_cuda() -> bool:
    """Tells whether torch is built for CUDA, from its ``version.py``: importing all of it takes seconds."""
    torch_spec = importlib.util.find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    return runpy.run_path(str(Path(torch_spec.origin).with_name("version.py")))["cuda"] is not None


def gpu_count() -> int:
    """Counts the GPUs that a process started here would see. Does not initialise CUDA: rank processes may be forked from this one."""
    from peerlane.hardware.topology import discover

    return len(discover().gpus)


def default_world_sizes(device: Device, ranks_per_gpu: int = 1, nodes: int = 1) -> tuple[int, ...]:
    """2 and 4 on CPU and emulated ranks; of 2, 4 and 8 what the GPUs allow, else 2: a virtual node, or the verdict says so. On several
    nodes, two ranks on each."""
    if nodes > 1:
        return (2 * nodes,)
    if not Place.of(device).has_gpus:
        return (2, 4)
    available = gpu_count() * max(ranks_per_gpu, 1)
    return tuple(size for size in (2, 4, 8) if size <= available) or (2,)


def results_json(results: Sequence[Result]) -> dict[str, object]:
    """Returns the document that ``--json`` prints."""
    from peerlane.results.reader import as_document

    return as_document(results)


def print_results(results: Sequence[Result]) -> None:
    """Prints the table on stdout, then a line for every result that is not correct or was not timed."""
    from peerlane.report.tables import reasons, result_table

    out = console()
    print_table(result_table(results), PIPED_TABLE)
    for line in reasons(results):
        out.print(line)
