"""``peerlane prompt``: the text that a model gets."""

from __future__ import annotations

from typing import Annotated

import typer

from peerlane.cli.options import Disguise, ProblemFolders
from peerlane.cli.output import print_json

HARDWARE_HELP = "auto (the GPUs of this machine, or h200x4 without any), a node such as h200x8, or a JSON file."
BACKEND_HELP = "cuda, kit (peerlane's device kit), triton, pytorch or parallelkittens."
TRACK_HELP = "custom: communication must be the candidate's own; open: anything goes."


def prompt(
    problem_name: Annotated[str, typer.Argument(metavar="PROBLEM", help="The problem's number or name, such as 13 or gemm_allreduce.")],
    problems_folders: ProblemFolders = None,
    disguise: Disguise = None,
    backend: Annotated[str, typer.Option(help=BACKEND_HELP)] = "cuda",
    track: Annotated[str, typer.Option(help=TRACK_HELP)] = "custom",
    hardware: Annotated[str, typer.Option(help=HARDWARE_HELP)] = "auto",
    world_size: Annotated[int | None, typer.Option(min=1, help="Number of ranks; the largest that problem and node allow.")] = None,
    preset: Annotated[str, typer.Option(help="The preset whose first case is timed.")] = "pkb",
    variant: Annotated[str, typer.Option(help="default, or pkb: the public benchmark's semantics.")] = "default",
    shots: Annotated[int, typer.Option(help="Worked examples, 0 to 3.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the exact text that a model gets for a problem."""
    from peerlane import problems
    from peerlane.generate.machine import choose_machine
    from peerlane.generate.prompt import PromptSettings, render_prompt

    settings = PromptSettings(
        machine=choose_machine(hardware),
        backend=backend,
        track=track,
        world_size=world_size,
        preset=preset,
        variant=variant,
        shots=shots,
    )
    made = render_prompt(problems.named(problem_name), settings)
    if not as_json:
        print(made.text, end="")
        return
    print_json(
        {
            "problem": made.problem,
            "version": made.version,
            "backend": settings.backend,
            "track": settings.track,
            "shots": settings.shots,
            "tokens_at_most": made.tokens,
            "hardware": settings.machine.model_dump(),
            "text": made.text,
        }
    )
