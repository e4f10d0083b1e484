"""``peerlane agent``: let a model write, test and time candidates in a loop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peerlane.cli.evaluation import ISOLATION_HELP, choose_device, default_world_sizes
from peerlane.cli.generate import Request, default_folder
from peerlane.cli.options import takes
from peerlane.cli.output import console
from peerlane.errors import UsageError

if TYPE_CHECKING:
    from peerlane.service.client import Client


@takes(Request)
def agent(
    request: Request,
    steps: Annotated[int, typer.Option(min=1, help="Turns of the model in one episode.")] = 20,
    export: Annotated[Path | None, typer.Option(help="Write a task folder for an agent from elsewhere instead; one problem.")] = None,
    device: Annotated[str, typer.Option(help="Of the evaluator: auto, cuda, cpu or emulated.")] = "auto",
    isolation: Annotated[str | None, typer.Option(help=ISOLATION_HELP)] = None,
    episode_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in and out that end an episode.")] = None,
    episode_cost: Annotated[float | None, typer.Option(min=0.0, help="US dollars that end an episode; needs --prices.")] = None,
    episode_seconds: Annotated[float | None, typer.Option(min=1.0, help="Seconds that end an episode.")] = None,
    on: Annotated[str | None, typer.Option(metavar="URL", help="Judge on a service instead of this machine.")] = None,
) -> None:
    """Let a model work on problems with tools: write, compile, race, test, time, trace, lookup, submit. The best attempt counts.

    Candidates run in the evaluator's ranks only. The same command continues a stopped one. Exit codes as of generate.
    """
    from peerlane import problems

    selected = problems.select(request.problem)
    judged_on = choose_device(device, emulated=True)
    service = None if on is None else open_service(on, request.track)
    ranks = request.world_size or (max(default_world_sizes(judged_on)) if service is None else service.node()["world_size"])
    path = request.out or default_folder(f"{request.model}_agent")
    settings = request.prompt_settings(path, ranks)
    if export is not None:
        from peerlane.generate.export import export_task

        if len(selected) != 1:
            raise UsageError(f"--export got {len(selected)} problems: expected one")
        export_task(selected[0], settings, ranks, export)
        console(stderr=True).print(f"the task is in {export}; it begins with TASK.md")
        return
    if request.model is None:
        raise UsageError("missing --model: expected the name of a model, or --export DIR for an agent from elsewhere")
    from peerlane.generate.extra import require_models_extra

    require_models_extra()
    options = request.model_options(episode_cost, connections=request.connections or 4)
    from peerlane.evaluate import Evaluator
    from peerlane.generate.agent import Limits, run_agents
    from peerlane.generate.judging import Judge, Racer

    limits = Limits(steps, episode_tokens, episode_cost, episode_seconds)
    with request.run(path, "agent", options, settings, steps) as (run, prompts, missing, progress):
        if missing:
            opened: Evaluator | Client
            if service is None:
                opened = Evaluator(ranks, judged_on, out=run.path, track=request.track, isolation=isolation)
            else:
                opened = service.storing(run.path)
            with opened as evaluator, Racer(ranks, track=request.track, isolation=isolation) as racer:
                judge = Judge(evaluator, request.preset, request.variant, racer)
                run_agents(run, prompts, missing, options, limits, judge, progress)


def open_service(url: str, track: str) -> Client:
    """Opens a client of the service that ``--on`` names; raises UsageError."""
    from peerlane.service.client import Client

    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--on got {url!r}: expected the URL of a service, such as http://127.0.0.1:8300")
    return Client(url, track=track)
