"""``peerlane prompt``: the text that a model gets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peerlane.cli.options import Disguise, ProblemFolders
from peerlane.cli.output import PIPED_TABLE, print_json, print_table

if TYPE_CHECKING:
    from peerlane.generate.prompt import PromptSettings
    from peerlane.problems import Problem

HARDWARE_HELP = "auto (the GPUs of this machine, or h200x4 without any), a node such as h200x8, or a JSON file."
BACKEND_HELP = "cuda, kit (peerlane's device kit), nvshmem, nccl, triton, pytorch or parallelkittens."
TRACK_HELP = "custom: communication must be the candidate's own; open: anything goes."


def prompt(
    problem_name: Annotated[
        str,
        typer.Argument(metavar="PROBLEM", help="The problem's number or name, such as 13 or gemm_allreduce; or several: 1-8,13 or all."),
    ],
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
    """Print the exact text that a model gets for a problem.

    For several problems it prints a table: tokens with each backend, roofline and tier of difficulty.
    """
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
    if not problem_name.isdecimal() and (problem_name == "all" or re.fullmatch(r"[\d,\- ]+", problem_name)):
        _table(problems.select(problem_name), settings, as_json=as_json)
        return
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


def _table(chosen: Sequence[Problem], settings: PromptSettings, *, as_json: bool) -> None:
    from peerlane.generate.prompt import BACKENDS, render_prompt, timed_world_size
    from peerlane.hardware.profiles import H200_SXM
    from peerlane.report.tables import TextTable
    from peerlane.report.tiers import bound_us, tiers

    known = tiers()
    rows: list[dict[str, Any]] = []
    for problem in chosen:
        tokens = {backend: render_prompt(problem, replace(settings, backend=backend)).tokens for backend in BACKENDS}
        bound = bound_us(problem, settings.preset, timed_world_size(problem, settings), settings.machine.profile or H200_SXM)
        rows.append({"problem": problem.id, "slug": problem.slug, "tokens": tokens, "bound_us": bound, "tier": known.get(problem.id)})
    if as_json:
        print_json({"preset": settings.preset, "prompts": rows})
        return
    columns = ("problem", "name", *(f"{backend} tokens" for backend in BACKENDS), "bound us", "tier")
    table = TextTable(columns, right={*columns} - {"name", "tier"})
    for row in rows:
        table.add(str(row["problem"]), row["slug"], *map(str, row["tokens"].values()), f"{row['bound_us']:.1f}", row["tier"] or "-")
    print_table(table, PIPED_TABLE)
