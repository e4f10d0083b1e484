"""``peerlane generate``: ask a model for candidates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from peerlane.cli.exit_codes import ExitCode
from peerlane.cli.options import Disguise, ProblemFolders, one_of, takes
from peerlane.cli.output import console
from peerlane.cli.prompt import BACKEND_HELP, HARDWARE_HELP, TRACK_HELP
from peerlane.errors import UsageError

if TYPE_CHECKING:
    from peerlane.generate.models import ModelOptions, Prices
    from peerlane.generate.prompt import Prompt, PromptSettings
    from peerlane.generate.run_folder import Kind, RunFolder, SampleKey
    from peerlane.generate.single_shot import Progress

MODEL_HELP = (
    "As inspect_ai names it: openai/..., anthropic/..., google/..., openrouter/..., vllm/..., openai-api/NAME/MODEL for any server that "
    "speaks OpenAI's protocol; or peerlane/expert, peerlane/reference, peerlane/broken, which need no network."
)
PRICES_HELP = "US dollars for a million tokens: INPUT,OUTPUT or INPUT,OUTPUT,CACHED."
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass
class Request:
    """The options of verbs that ask a model for candidates."""

    problem: Annotated[str, typer.Argument(metavar="PROBLEMS", help="Problems, such as 1-87 or 1-8,13, or all.")]
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None
    problems_folders: ProblemFolders = None
    samples: Annotated[int, typer.Option(min=1, help="Samples, or episodes, of each problem; a larger number adds the missing ones.")] = 1
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default peerlane-runs/MODEL, for agents MODEL_agent.")] = None
    backend: Annotated[str, typer.Option(help=BACKEND_HELP)] = "cuda"
    track: Annotated[str, typer.Option(help=TRACK_HELP)] = "custom"
    hardware: Annotated[str, typer.Option(help=HARDWARE_HELP)] = "auto"
    world_size: Annotated[int | None, typer.Option(min=1, help="Number of ranks.")] = None
    preset: Annotated[str, typer.Option(help="The preset whose first case is timed.")] = "pkb"
    variant: Annotated[str, typer.Option(help="default, or pkb: the public benchmark's semantics.")] = "default"
    shots: Annotated[int, typer.Option(help="Worked examples in the prompt, 0 to 3.")] = 1
    temperature: Annotated[float | None, typer.Option(min=0.0, help="The provider's default if left out.")] = None
    effort: Annotated[str | None, typer.Option(help=f"Effort of reasoning: {', '.join(EFFORTS)}.")] = None
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of a reply, reasoning included.")] = None
    base_url: Annotated[str | None, typer.Option(help="Of a server that is not the provider's own.")] = None
    model_arg: Annotated[list[str] | None, typer.Option("--model-arg", "-M", help="NAME=VALUE for the provider; repeatable.")] = None
    connections: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time, adapted to rate limits if left out; or episodes of agents, by default 4.")
    ] = None
    retries: Annotated[int, typer.Option(min=0, help="Of a request that may succeed later.")] = 8
    prices: Annotated[str | None, typer.Option(help=PRICES_HELP)] = None
    max_cost: Annotated[float | None, typer.Option(min=0.0, help="US dollars after which nothing more is asked; needs --prices.")] = None

    def model_options(self, max_cost: float | None = None, **more: Any) -> ModelOptions:
        """Returns the options of the model; raises UsageError. ``max_cost``: another limit that needs prices."""
        from peerlane.generate.models import ModelOptions

        if self.model is None:
            raise UsageError("missing --model: expected the name of a model, such as openai/gpt-5")
        if self.effort is not None:
            one_of(self.effort, EFFORTS, "--effort")
        same = {name: getattr(self, name) for name in ("base_url", "temperature", "effort", "max_tokens", "connections", "retries")}
        prices = read_prices(self.prices, self.max_cost if self.max_cost is not None else max_cost)
        return ModelOptions(name=self.model, prices=prices, arguments=read_arguments(self.model_arg or []), **{**same, **more})

    def prompt_settings(self, path: Path, world_size: int | None) -> PromptSettings:
        """Returns the settings of the prompts. A run in this folder that goes on describes the same node, if none is named."""
        from peerlane.generate.machine import choose_machine
        from peerlane.generate.prompt import PromptSettings
        from peerlane.generate.run_folder import RunFolder, is_run

        machine = RunFolder.open(path).settings.machine if is_run(path) and self.hardware == "auto" else None
        machine = machine or choose_machine(self.hardware)
        return PromptSettings(machine, self.backend, self.track, world_size, self.preset, self.variant, self.shots)

    @contextmanager
    def run(self, path: Path, kind: Kind, options: ModelOptions, settings: PromptSettings, steps: int | None = None) -> Iterator[Asked]:
        """Opens the run for this process alone; in the end says what is missing, and ends the command."""
        from peerlane import problems
        from peerlane.common.files import lock, open_appendable
        from peerlane.generate.prompt import render_prompt
        from peerlane.generate.single_shot import Progress

        selected = problems.select(self.problem)
        prompts = {item.id: render_prompt(item, settings) for item in selected}
        run = open_run(path, kind, options, settings, steps)
        with open_appendable(run.path / ".lock") as file:
            if not lock(file, 1.0):
                raise UsageError(f"another process is working on {run.path}: wait for it, or use another --out")
            missing, wanted = run.missing([item.id for item in selected], self.samples), len(selected) * self.samples
            error = console(stderr=True)
            error.print(f"asking for {len(missing)} of {wanted} samples; {wanted - len(missing)} are there")
            progress = Progress(len(missing), self.max_cost, error.print)
            yield Asked(run, prompts, missing, progress)
        finish(run, missing, progress)


class Asked(NamedTuple):
    """An open run, the prompts of its problems, and the samples that it lacks."""

    run: RunFolder
    prompts: dict[int, Prompt]
    missing: list[SampleKey]
    progress: Progress


@takes(Request)
def generate(
    request: Request,
    disguise: Disguise = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="The provider's default if left out.")] = None,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds for one request with all its retries.")] = 3600,
    batch: Annotated[bool, typer.Option("--batch", help="Use the provider's batch interface, which is cheaper and slower.")] = False,
) -> None:
    """Ask a model for candidates, one reply each. Needs no GPU; `peerlane eval RUN` judges them.

    The same command continues a stopped one. Exit codes: 0 all samples are there; 1 some are missing; 2 the request cannot be
    carried out; 130 interrupted.
    """
    from peerlane.generate.extra import require_models_extra

    require_models_extra()
    from peerlane.generate.single_shot import generate_samples

    options = request.model_options(top_p=top_p, timeout_s=timeout, batch=batch)
    path = request.out or default_folder(options.name)
    with request.run(path, "generate", options, request.prompt_settings(path, request.world_size)) as (run, prompts, missing, progress):
        if missing:
            generate_samples(run, prompts, missing, options, progress)


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
