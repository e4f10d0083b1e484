"""``peerlane new``: a candidate file to begin with."""

import shlex
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from peerlane.cli.options import ProblemFolders
from peerlane.cli.output import console, print_json
from peerlane.errors import UsageError


def new(
    problem_name: Annotated[str, typer.Argument(metavar="PROBLEM", help="The problem's number or name, such as 36.")],
    backend: Annotated[str, typer.Option(help="kit (the device kit, also without a GPU), cuda, nvshmem, nccl, triton or pytorch.")] = "kit",
    problems_folders: ProblemFolders = None,
    variant: Annotated[str, typer.Option(help="default, or pkb: the public benchmark's semantics.")] = "default",
    out: Annotated[Path | None, typer.Option(help="The file; by default <id>_<name>_<backend>.py here.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a candidate with the problem's signature, which is right as it comes: the reference, with one kernel that moves all data."""
    from peerlane import problems
    from peerlane.evaluate.candidates import candidate_file
    from peerlane.problems.scaffolds import scaffold, scaffold_name

    problem = problems.named(problem_name)
    text, file = scaffold(problem, backend, variant), out or Path(scaffold_name(problem, backend))
    if file.suffix != ".py":
        raise UsageError(f"--out got {file}; expected the name of a Python file, such as {scaffold_name(problem, backend)}")
    if (there := file.exists()) and not force:
        raise UsageError(f"{file} exists; choose another file with --out, or replace it with --force")
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        if not there:  # on a full disk an empty file would stay, and be in the way of the next attempt
            with suppress(OSError):
                file.unlink()
        raise UsageError(f"cannot write {file}: {error.strerror}; choose another file with --out") from None
    device = {"kit": "emulated", "nccl": "emulated", "cuda": "emulated", "nvshmem": "cuda"}.get(backend, "cpu")
    place = f"--device {device}" if problem.nodes[0] == 1 else f"--nodes {problem.nodes[0]} --device {device}"
    numbered = candidate_file(file).problem == problem.id
    own = "".join(f" --problems {shlex.quote(str(folder))}" for folder in problems_folders or ())
    commands = [f"peerlane eval {file}{'' if numbered else f' --problem {problem.id}'}{own} {place} --preset small"]
    if device == "emulated" and numbered:
        commands.append(f"peerlane race {file}{own}")
    if as_json:
        print_json({"problem": problem.id, "backend": backend, "file": str(file), "commands": commands})
        return
    out_console = console()
    out_console.print(f"wrote {file} ({len(text.splitlines())} lines); next:", highlight=False)
    for command in commands:
        out_console.print(f"  {command}", highlight=False)
