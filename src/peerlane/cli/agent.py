"""``peerlane agent``: let a model write, test and time candidates in a loop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peerlane.cli.evaluation import ISOLATION_HELP, choose_device, default_world_sizes
from peerlane.cli.generate import (
    MODEL_HELP,
    PRICES_HELP,
    default_folder,
    finish,
    locked,
    model_options,
    new_progress,
    open_run,
    read_arguments,
    read_prices,
    run_machine,
)
from peerlane.cli.options import ProblemFolders
from peerlane.cli.output import console
from peerlane.cli.prompt import BACKEND_HELP, HARDWARE_HELP, TRACK_HELP
from peerlane.errors import UsageError

if TYPE_CHECKING:
    from peerlane.service.client import Client


def agent(
    problem: Annotated[str, typer.Argument(metavar="PROBLEMS", help="Problems, such as 1-87 or 1-8,13, or all.")],
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    problems_folders: ProblemFolders = None,
    steps: Annotated[int, typer.Option(min=1, help="Turns of the model in one episode.")] = 20,
    samples: Annotated[int, typer.Option(min=1, help="Episodes of each problem.")] = 1,
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default peerlane-runs/MODEL_agent.")] = None,
    export: Annotated[Path | None, typer.Option(help="Write a task folder for an agent from elsewhere instead; one problem.")] = None,
    backend: Annotated[str, typer.Option(help=BACKEND_HELP)] = "cuda",
    track: Annotated[str, typer.Option(help=TRACK_HELP)] = "custom",
    hardware: Annotated[str, typer.Option(help=HARDWARE_HELP)] = "auto",
    world_size: Annotated[int | None, typer.Option(min=1, help="Number of ranks.")] = None,
    preset: Annotated[str, typer.Option(help="The preset that is judged; its first case is timed.")] = "pkb",
    variant: Annotated[str, typer.Option(help="default, or pkb: the public benchmark's semantics.")] = "default",
    shots: Annotated[int, typer.Option(help="Worked examples in the prompt, 0 to 3.")] = 1,
    device: Annotated[str, typer.Option(help="Of the evaluator: auto, cuda, cpu or emulated.")] = "auto",
    isolation: Annotated[str | None, typer.Option(help=ISOLATION_HELP)] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="The provider's default if left out.")] = None,
    effort: Annotated[str | None, typer.Option(help="Effort of reasoning.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of one reply.")] = None,
    base_url: Annotated[str | None, typer.Option(help="Of a server that is not the provider's own.")] = None,
    model_arg: Annotated[list[str] | None, typer.Option("--model-arg", "-M", help="NAME=VALUE for the provider; repeatable.")] = None,
    connections: Annotated[int, typer.Option(min=1, help="Episodes at a time; evaluations queue.")] = 4,
    retries: Annotated[int, typer.Option(min=0, help="Of a request that may succeed later.")] = 8,
    prices: Annotated[str | None, typer.Option(help=PRICES_HELP)] = None,
    max_cost: Annotated[float | None, typer.Option(min=0.0, help="US dollars after which no episode begins; needs --prices.")] = None,
    episode_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in and out that end an episode.")] = None,
    episode_cost: Annotated[float | None, typer.Option(min=0.0, help="US dollars that end an episode; needs --prices.")] = None,
    episode_seconds: Annotated[float | None, typer.Option(min=1.0, help="Seconds that end an episode.")] = None,
    on: Annotated[str | None, typer.Option(metavar="URL", help="Judge on a service instead of this machine.")] = None,
) -> None:
    """Let a model work on problems with tools: write, compile, race, test, time, trace, lookup, submit. The best attempt counts.

    Candidates run in the evaluator's ranks only. The same command continues a stopped one. Exit codes as of generate.
    """
    from peerlane import problems
    from peerlane.generate.prompt import PromptSettings, render_prompt

    selected = problems.select(problem)
    judged_on = choose_device(device, emulated=True)
    service = None if on is None else open_service(on, track)
    ranks = world_size or (max(default_world_sizes(judged_on)) if service is None else service.node()["world_size"])
    path = out or default_folder(f"{model}_agent")
    settings = PromptSettings(run_machine(path, hardware), backend, track, ranks, preset, variant, shots)
    if export is not None:
        from peerlane.generate.export import export_task

        if len(selected) != 1:
            raise UsageError(f"--export got {len(selected)} problems: expected one")
        export_task(selected[0], settings, ranks, export)
        console(stderr=True).print(f"the task is in {export}; it begins with TASK.md")
        return
    if model is None:
        raise UsageError("missing --model: expected the name of a model, or --export DIR for an agent from elsewhere")
    from peerlane.generate.extra import require_models_extra

    require_models_extra()
    from peerlane.evaluate import Evaluator
    from peerlane.generate.agent import Limits, run_agents
    from peerlane.generate.judging import Judge, Racer

    options = model_options(
        name=model,
        base_url=base_url,
        temperature=temperature,
        effort=effort,
        max_tokens=max_tokens,
        connections=connections,
        retries=retries,
        prices=read_prices(prices, max_cost if max_cost is not None else episode_cost),
        arguments=read_arguments(model_arg or []),
    )
    prompts = {item.id: render_prompt(item, settings) for item in selected}
    run = open_run(path, "agent", options, settings, steps)
    limits = Limits(steps, episode_tokens, episode_cost, episode_seconds)
    with locked(run):
        missing = run.missing([item.id for item in selected], samples)
        progress = new_progress(len(missing), len(selected) * samples, max_cost)
        if missing:
            opened: Evaluator | Client
            if service is None:
                opened = Evaluator(ranks, judged_on, out=run.path, track=track, isolation=isolation)
            else:
                opened = service.storing(run.path)
            with opened as evaluator, Racer(ranks, track=track, isolation=isolation) as racer:
                run_agents(run, prompts, missing, options, limits, Judge(evaluator, preset, variant, racer), progress)
    finish(run, missing, progress)


def open_service(url: str, track: str) -> Client:
    """Opens a client of the service that ``--on`` names; raises UsageError."""
    from peerlane.service.client import Client

    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--on got {url!r}: expected the URL of a service, such as http://127.0.0.1:8300")
    return Client(url, track=track)
