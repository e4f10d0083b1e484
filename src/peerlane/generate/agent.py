"""An agent that writes, tests and times candidates until it submits or a limit ends its episode. The best attempt so far counts."""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, execute_tools, get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver

from peerlane.generate.judging import Judge, Judged
from peerlane.generate.models import ModelOptions, usage_of
from peerlane.generate.prompt import Prompt
from peerlane.generate.reply import Status, extract, extract_code
from peerlane.generate.run_folder import RunFolder, SampleKey, SampleRecord, StepRecord, make_folder
from peerlane.generate.samples import MODES, Usage, best_sample
from peerlane.generate.single_shot import Progress, check_fits, run_inspect, stop_reason_of
from peerlane.generate.tools import Workbench, workbench_tools

INSTRUCTIONS = """
# How to work

You have tools. Call `write` with a whole file, then `compile`, `test` (right or wrong, and why) and `time` (how fast, in both modes).
`race` runs a file on emulated ranks, with the device kit, Triton or a CUDA extension.
It finds races and deadlocks, each with its source lines.
`trace` shows what every rank does when. `lookup` has notes on the hardware, the device kit and common mistakes.
Revise until the file is right and fast, then call `submit`.
You may take {steps} turns. Your best judged candidate counts, also if you run out of turns.
"""
NUDGE = "Use the tools: `write` a file, `test` it, and `submit` when it is right and fast."


@dataclass(frozen=True)
class Limits:
    """The limits of an episode: turns of the model, tokens in and out, US dollars, seconds of work. None: no limit."""

    steps: int = 20
    tokens: int | None = None
    cost_usd: float | None = None
    seconds: float | None = None

    def reached(self, turns: int, usage: Usage, seconds: float) -> str | None:
        """Returns the first limit that was reached, by name."""
        spent = usage.input_tokens + usage.output_tokens
        reached = {
            "steps": turns >= self.steps,
            "tokens": self.tokens is not None and spent >= self.tokens,
            "cost": self.cost_usd is not None and (usage.cost_usd or 0.0) >= self.cost_usd,
            "time": self.seconds is not None and seconds >= self.seconds,
        }
        return next((name for name, is_reached in reached.items() if is_reached), None)


@dataclass
class Episode:
    """The work of an agent so far; keeps every judged candidate in the run's folder."""

    run: RunFolder
    key: SampleKey
    steps: list[tuple[StepRecord, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shutil.rmtree(make_folder(self.run.path, self.key.folder) / "steps", ignore_errors=True)  # of an episode that was killed

    def keep(self, tool: str, source: str, judged: Judged) -> None:
        """Keeps a judged candidate."""
        record = StepRecord(
            step=len(self.steps) + 1,
            tool=tool,
            verdict=judged.verdict,
            sha256=judged.sha256,
            speedups={mode: tuple(speedup) for mode, speedup in judged.speedups.items()},  # type: ignore[misc]
            feedback=judged.feedback,
        )
        self.run.write_step(self.key, record, source)
        self.steps.append((record, source))

    def best(self) -> str | None:
        """Returns the source of the best judged candidate that is correct; None if none is."""
        samples = [record.as_sample(self.key) for record, _ in self.steps]
        best = best_sample(samples)
        return self.steps[samples.index(best)][1] if best is not None and best.correct else None


def run_agents(
    run: RunFolder,
    prompts: Mapping[int, Prompt],
    keys: Sequence[SampleKey],
    options: ModelOptions,
    limits: Limits,
    judge: Judge,
    progress: Progress,
) -> None:
    """Runs one episode for each of these samples; those that fail stay missing, and ``progress`` says why."""
    text = {number: prompt.text + INSTRUCTIONS.format(steps=limits.steps) for number, prompt in prompts.items()}
    for number in {key.problem for key in keys}:
        run.write_prompt(number, text[number])
    samples = [Sample(id=key.folder, input=text[key.problem], metadata=key._asdict()) for key in keys]
    run_inspect(run, samples, _episode(run, options, limits, judge, progress), options, progress)


@solver
def _episode(run: RunFolder, options: ModelOptions, limits: Limits, judge: Judge, progress: Progress) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        key = SampleKey(state.metadata["problem"], state.metadata["sample"])
        began, usage, turns, limit = time.monotonic(), Usage(), 0, None
        try:
            progress.check()
            episode = Episode(run, key)
            bench = Workbench(key.problem, judge, episode.keep)
            tools = workbench_tools(bench)
            while not bench.submitted and limit is None:
                output = await get_model().generate(state.messages, tools)
                if turns == 0:
                    check_fits(output)
                turns += 1
                reply_usage = usage_of(output, options.prices)
                usage += reply_usage
                progress.spent(reply_usage.cost_usd)
                state.messages.append(output.message)
                state.output = output
                if output.message.tool_calls:
                    state.messages += (await execute_tools(state.messages, tools)).messages
                elif (source := extract_code(output.completion)) is not None and source != bench.source:
                    bench.source = source
                    state.messages.append(ChatMessageUser(content=f"The file in your reply was written. {NUDGE}"))
                else:
                    state.messages.append(ChatMessageUser(content=NUDGE))
                limit = limits.reached(turns, usage, time.monotonic() - began)
            if bench.source is not None and bench.source not in [source for _, source in episode.steps]:
                await bench.measure("submit", MODES)  # the last file counts, judged or not
            bench.source = episode.best() or bench.source
            if bench.source is not None and bench.source not in [source for record, source in episode.steps if record.tool != "test"]:
                await bench.measure("submit", MODES)  # the attempt that counts is timed
        except Exception as error:
            progress.failed(key, error)
            raise
        source = bench.source
        ending = ("submitted", None) if bench.submitted else ("limit", limit)
        status: Status = "code" if source is not None else extract(state.output.completion, stop_reason_of(state.output)).status
        record = SampleRecord.of(key, status, usage, seconds=time.monotonic() - began, stop_reason=ending[0], limit=ending[1])
        progress.keep(run, record, state.output.completion, source)
        return state

    return solve
