"""``peerlane generate``: ask a model for candidates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peerlane.cli.exit_codes import ExitCode
from peerlane.cli.options import Disguise, ProblemFolders, one_of
from peerlane.cli.output import console
from peerlane.cli.prompt import BACKEND_HELP, HARDWARE_HELP, TRACK_HELP
from peerlane.errors import UsageError

if TYPE_CHECKING:
    from peerlane.generate.machine import Machine
    from peerlane.generate.models import ModelOptions, Prices
    from peerlane.generate.prompt import PromptSettings
    from peerlane.generate.run_folder import Kind, RunFolder, SampleKey
    from peerlane.generate.single_shot import Progress

MODEL_HELP = (
    "As inspect_ai names it: openai/..., anthropic/..., google/..., openrouter/..., vllm/..., openai-api/NAME/MODEL for any server that "
    "speaks OpenAI's protocol; or peerlane/expert, peerlane/reference, peerlane/broken, which need no network."
)
PRICES_HELP = "US dollars for a million tokens: INPUT,OUTPUT or INPUT,OUTPUT,CACHED."
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def generate(
    problem: Annotated[str, typer.Argument(metavar="PROBLEMS", help="Problems, such as 1-87 or 1-8,13, or all.")],
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    problems_folders: ProblemFolders = None,
    disguise: Disguise = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each problem; more than before asks for the missing ones.")] = 1,
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default peerlane-runs/MODEL.")] = None,
    backend: Annotated[str, typer.Option(help=BACKEND_HELP)] = "cuda",
    track: Annotated[str, typer.Option(help=TRACK_HELP)] = "custom",
    hardware: Annotated[str, typer.Option(help=HARDWARE_HELP)] = "auto",
    world_size: Annotated[int | None, typer.Option(min=1, help="Number of ranks in the prompt.")] = None,
    preset: Annotated[str, typer.Option(help="The preset whose first case is timed.")] = "pkb",
    variant: Annotated[str, typer.Option(help="default, or pkb: the public benchmark's semantics.")] = "default",
    shots: Annotated[int, typer.Option(help="Worked examples in the prompt, 0 to 3.")] = 1,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="The provider's default if left out.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="The provider's default if left out.")] = None,
    effort: Annotated[str | None, typer.Option(help=f"Effort of reasoning: {', '.join(EFFORTS)}.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of a reply, reasoning included.")] = None,
    base_url: Annotated[str | None, typer.Option(help="Of a server that is not the provider's own.")] = None,
    model_arg: Annotated[list[str] | None, typer.Option("--model-arg", "-M", help="NAME=VALUE for the provider; repeatable.")] = None,
    connections: Annotated[int | None, typer.Option(min=1, help="Requests at a time; adapts to rate limits if left out.")] = None,
    retries: Annotated[int, typer.Option(min=0, help="Of a request that may succeed later.")] = 8,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds for one request with all its retries.")] = 3600,
    batch: Annotated[bool, typer.Option("--batch", help="Use the provider's batch interface, which is cheaper and slower.")] = False,
    prices: Annotated[str | None, typer.Option(help=PRICES_HELP)] = None,
    max_cost: Annotated[float | None, typer.Option(min=0.0, help="US dollars after which nothing more is asked; needs --prices.")] = None,
) -> None:
    """Ask a model for candidates, one reply each. Needs no GPU; `peerlane eval RUN` judges them.

    The same command continues a stopped one. Exit codes: 0 all samples are there; 1 some are missing; 2 the request cannot be
    carried out; 130 interrupted.
    """
    from peerlane.generate.extra import require_models_extra

    require_models_extra()
    from peerlane import problems
    from peerlane.generate.prompt import PromptSettings, render_prompt
    from peerlane.generate.single_shot import generate_samples

    selected = problems.select(problem)
    options = model_options(
        name=model,
        base_url=base_url,
        temperature=temperature,
        top_p=top_p,
        effort=effort,
        max_tokens=max_tokens,
        connections=connections,
        retries=retries,
        timeout_s=timeout,
        batch=batch,
        prices=read_prices(prices, max_cost),
        arguments=read_arguments(model_arg or []),
    )
    path = out or default_folder(model)
    settings = PromptSettings(run_machine(path, hardware), backend, track, world_size, preset, variant, shots)
    prompts = {item.id: render_prompt(item, settings) for item in selected}
    run = open_run(path, "generate", options, settings)
    with locked(run):
        missing = run.missing([item.id for item in selected], samples)
        progress = new_progress(len(missing), len(selected) * samples, max_cost)
        if missing:
            generate_samples(run, prompts, missing, options, progress)
    finish(run, missing, progress)


def model_options(**values: Any) -> ModelOptions:
    """Checks the options of a model; raises UsageError."""
    from peerlane.generate.models import ModelOptions

    if values.get("effort") is not None:
        one_of(values["effort"], EFFORTS, "--effort")
    return ModelOptions(**values)


def run_machine(path: Path, hardware: str) -> Machine:
    """Returns the node that prompts of a run describe. A run that goes on keeps its node, if none is named."""
    from peerlane.generate.machine import choose_machine
    from peerlane.generate.run_folder import RunFolder, is_run

    kept = RunFolder.open(path).settings.machine if is_run(path) and hardware == "auto" else None
    return kept or choose_machine(hardware)


def open_run(path: Path, kind: Kind, options: ModelOptions, settings: PromptSettings, steps: int | None = None) -> RunFolder:
    """Opens the run in a folder, a new one or one to continue; raises UsageError if it has other settings. The model is opened first, to
    fail early."""
    from peerlane.generate.models import open_model
    from peerlane.generate.prompt import template_version
    from peerlane.generate.run_folder import RunFolder, RunSettings

    open_model(options)
    wanted = RunSettings(
        kind=kind,
        model=options.name,
        backend=settings.backend,
        track=settings.track,  # type: ignore[arg-type]  # which PromptSettings has checked
        preset=settings.preset,
        variant=settings.variant,
        world_size=settings.world_size,
        shots=settings.shots,
        prompt_version=template_version(),
        machine=settings.machine,
        temperature=options.temperature,
        top_p=options.top_p,
        effort=options.effort,
        max_tokens=options.max_tokens,
        steps=steps,
    )
    return RunFolder.open_or_create(path, wanted)


def default_folder(model: str) -> Path:
    """Returns the folder of a model's run, such as ``peerlane-runs/openai_gpt-5``."""
    return Path("peerlane-runs") / model.replace("/", "_").replace(":", "_")


@contextmanager
def locked(run: RunFolder) -> Iterator[None]:
    """Holds the run for this process; raises UsageError if another one is at it."""
    from peerlane.common.files import lock, open_appendable

    with open_appendable(run.path / ".lock") as file:
        if not lock(file, 1.0):
            raise UsageError(f"another process is working on {run.path}: wait for it, or use another --out")
        yield


def new_progress(missing: int, wanted: int, max_cost: float | None) -> Progress:
    """Progress whose lines go to stderr."""
    from peerlane.generate.single_shot import Progress

    error = console(stderr=True)
    error.print(f"asking for {missing} of {wanted} samples; {wanted - missing} are there")
    return Progress(missing, max_cost, error.print)


def finish(run: RunFolder, asked: list[SampleKey], progress: Progress) -> None:
    """Says where everything is and what is missing, and ends the command."""
    if progress.unreachable is not None:
        raise UsageError(f"{progress.unreachable}: is a server running there? Check --base-url; the same command asks again")
    lacking = [key for key in asked if not run.is_done(key)]
    if not lacking:
        console(stderr=True).print(f"all samples are in {run.path}; judge them with: peerlane eval {run.path}")
        raise typer.Exit(ExitCode.OK)
    why = progress.failures[0] if progress.failures else "the run was stopped"
    console(stderr=True).print(f"{len(lacking)} of {len(asked)} samples are missing: {why}\nThe same command asks for them again.")
    raise typer.Exit(ExitCode.CHECK_FAILED)


def read_prices(text: str | None, max_cost: float | None) -> Prices | None:
    """Reads the prices that ``--prices`` gives; raises UsageError."""
    from peerlane.generate.models import Prices

    if text is None:
        if max_cost is not None:
            raise UsageError("--max-cost needs --prices: no prices are built in, because they change")
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (2, 3) or any(value < 0 for value in values):
        raise UsageError(f"--prices got {text!r}: expected two or three numbers such as 1.25,10 or 1.25,10,0.125")
    return Prices(values[0], values[1], values[2] if len(values) == 3 else values[0])


def read_arguments(items: list[str]) -> dict[str, Any]:
    """Parses NAME=VALUE pairs, whose values are read as JSON where possible; raises UsageError."""
    import json

    arguments: dict[str, Any] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise UsageError(f"--model-arg got {item!r}: expected NAME=VALUE")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments
