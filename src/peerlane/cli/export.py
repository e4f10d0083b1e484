"""``peerlane export``: the suite and scores in the formats of the Hugging Face Hub."""

from pathlib import Path
from typing import Annotated

import typer

from peerlane.cli.options import completed, example
from peerlane.cli.output import print_error, read_result_files
from peerlane.cli.prompt import BACKEND_HELP, TRACK_HELP
from peerlane.common.words import counted
from peerlane.errors import UsageError

export = typer.Typer(
    help="Write the suite, or a model's scores, for the Hugging Face Hub.",
    no_args_is_help=True,
    epilog=example("peerlane export hf peerlane-suite"),
)


@export.command(epilog=example("peerlane export hf peerlane-dataset --hardware h100x8"))
@completed
def hf(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is new or empty.")],
    problem: Annotated[str, typer.Option(help="Problems, such as 1-8,13, or all.")] = "all",
    hardware: Annotated[
        str, typer.Option(help="The node that prompts describe and bounds are of, such as h200x8, or a JSON file.")
    ] = "h200x4",
    backend: Annotated[str, typer.Option(help=BACKEND_HELP)] = "cuda",
    track: Annotated[str, typer.Option(help=TRACK_HELP)] = "custom",
    preset: Annotated[str, typer.Option(help="The preset whose first case is timed.")] = "pkb",
) -> None:
    """Write the suite as a data set: a card, a row for each problem, eval.yaml, and a folder of tasks for Harbor.

    Nothing is uploaded. `hf upload OWNER/NAME DIR --repo-type dataset` does that.
    """
    from peerlane import problems
    from peerlane.generate.machine import choose_machine
    from peerlane.generate.prompt import PromptSettings
    from peerlane.publish.dataset import TASKS_FOLDER, write_dataset
    from peerlane.service.adapters.harbor import HarborSettings, export_harbor

    machine = choose_machine(hardware)
    written = write_dataset(folder, problems.select(problem), PromptSettings(machine, backend, track, preset=preset))
    for path in written:
        print(f"written: {path}")
    count = machine.count
    settings = HarborSettings(gpus=count, preset=preset, track=track, world_size=count, hardware=hardware, backend=backend)
    tasks = export_harbor(folder / TASKS_FOLDER, problem, settings)
    print(f"written: {counted(len(tasks), 'task')} of Harbor in {folder / TASKS_FOLDER}")


@export.command(epilog=example("peerlane export results runs/broken --dataset owner/peerlane"))
def results(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A judged run: of `generate`, of `agent`, or a folder of `eval --model`.")],
    dataset: Annotated[str, typer.Option(metavar="OWNER/NAME", help="The repository of the data set on the Hub.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path(".eval_results/peerlane.yaml"),
    source: Annotated[str | None, typer.Option(metavar="URL", help="Where the run, or its page, can be seen.")] = None,
) -> None:
    """Write a run's scores as a file of .eval_results/ in a model's repository on the Hub.

    Scores are per cent of all problems of the suite; problems without a sample count as not solved.
    """
    from peerlane.common.files import write_atomically
    from peerlane.generate.run_folder import RunFolder
    from peerlane.publish.dataset import FASTER, eval_results, to_yaml

    opened = RunFolder.open(run)
    entries = eval_results(opened, read_result_files([run]), dataset, source)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, to_yaml(entries).encode())
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; name a file that can be written with --out") from None
    for entry in entries:
        print(f"{entry['dataset']['task_id']}: {entry['value']} % ({entry['notes']})")
    if all(entry["dataset"]["task_id"] != FASTER for entry in entries):
        print_error(f"{FASTER} is left out: no candidate was timed as a graph on a node with a GPU for each rank")
    print(f"written: {out}")
