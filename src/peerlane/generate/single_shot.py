"""Asks a model once for every missing sample of a run, and keeps each reply as it comes."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from inspect_ai import Task, eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ModelOutput
from inspect_ai.solver import Generate, Solver, TaskState, solver

from peerlane.errors import PeerlaneError
from peerlane.generate.models import ModelOptions, open_model, usage_of
from peerlane.generate.prompt import Prompt
from peerlane.generate.provider_faults import first_line, tell_of_retries, unreachable
from peerlane.generate.reply import extract
from peerlane.generate.run_folder import RunFolder, SampleKey, SampleRecord, make_folder

FAILURES_IN_A_ROW = 20
"""After so many samples without a reply, the provider is taken to be down, and nothing more is asked."""
TOO_LONG = "model_length"


class ProviderDown(PeerlaneError):
    """A sample was not asked for, because those before it failed or the money is spent."""


class PromptTooLong(PeerlaneError):
    """The provider says that the prompt does not fit the model's context."""


@dataclass
class Progress:
    """The progress of a run; ``tell`` hears of every sample that ends, and of every request that is tried again.

    ``unreachable`` says why the first request reached no server, and ``unwritable`` why a sample could not be kept; either ends the run.
    """

    total: int
    max_cost_usd: float | None = None
    tell: Callable[[str], None] = lambda line: None
    finished: int = 0
    failures: list[str] = field(default_factory=list)
    cost_usd: float = 0.0
    unreachable: str | None = None
    unwritable: str | None = None
    _in_a_row: int = 0
    _answered: bool = False

    def check(self) -> None:
        """Raises ProviderDown where asking on makes no sense."""
        if (why := self.unreachable or self.unwritable) is not None:
            raise ProviderDown(f"not asked: {why}")
        if self._in_a_row >= FAILURES_IN_A_ROW:
            raise ProviderDown(f"not asked: {self._in_a_row} samples in a row got no reply")
        if self.max_cost_usd is not None and self.cost_usd >= self.max_cost_usd:
            raise ProviderDown(f"not asked: the run has cost {self.cost_usd:.2f} USD, and --max-cost is {self.max_cost_usd:g}")

    def may_retry(self, error: BaseException) -> bool:
        """Tells whether a failed request may be tried again: not if no server was ever there."""
        reached = unreachable(error) is None
        self._answered = self._answered or reached
        return self._answered

    def spent(self, cost_usd: float | None) -> None:
        """Counts the cost of a reply."""
        self.cost_usd += cost_usd or 0.0

    def keep(self, run: RunFolder, record: SampleRecord, reply: str, source: str | None) -> None:
        """Writes a sample and counts it; after one that cannot be written nothing is asked, for its reply would be lost."""
        key = SampleKey(record.problem, record.sample).folder
        try:
            run.write_sample(record, reply, source)
        except PeerlaneError as error:
            self.failed(SampleKey(record.problem, record.sample), error)
            self.unwritable = first_line(error)
            raise
        self.finished += 1
        self._in_a_row, self._answered = 0, True
        cost = f", {record.cost_usd:.4f} USD" if record.cost_usd is not None else ""
        what = record.status.replace("_", " ")
        self.tell(f"{self.finished}/{self.total} {key}: {what}, {record.output_tokens} tokens{cost}, {record.seconds:.0f} s")

    def failed(self, key: SampleKey, error: BaseException) -> None:
        """Counts a sample without a reply."""
        self.failures.append(first_line(error))
        if not isinstance(error, ProviderDown):
            self._in_a_row += 1
            self.tell(f"{key.folder}: {first_line(error)}")
            self.unreachable = self.unreachable or (None if self._answered else unreachable(error))


def generate_samples(
    run: RunFolder, prompts: Mapping[int, Prompt], keys: Sequence[SampleKey], options: ModelOptions, progress: Progress
) -> None:
    """Asks for these samples; those without a reply stay missing, and ``progress`` says why."""
    for number in {key.problem for key in keys}:
        run.write_prompt(number, prompts[number].text)
    samples = [Sample(id=key.folder, input=prompts[key.problem].text, metadata=key._asdict()) for key in keys]
    run_inspect(run, samples, _ask_once(run, options, progress), options, progress)


def run_inspect(run: RunFolder, samples: Sequence[Sample], solver: Solver, options: ModelOptions, progress: Progress) -> None:
    """Runs a solver, which keeps what it gets, on all samples; one that fails does not stop the others. The transcript is in RUN/logs."""
    logs = make_folder(run.path, "logs")
    model = open_model(options)
    tell_of_retries(model, progress.tell, progress.may_retry)
    eval(
        Task(dataset=MemoryDataset(list(samples), name="peerlane"), solver=solver, name=f"peerlane_{run.settings.kind}"),
        model=model,
        display="none",
        log_level="error",
        log_dir=str(logs),
        fail_on_error=False,
        score=False,
        acp_server=False,
        ctl_server=False,
        max_samples=options.connections,
    )


@solver
def _ask_once(run: RunFolder, options: ModelOptions, progress: Progress) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        key = SampleKey(state.metadata["problem"], state.metadata["sample"])
        began = time.monotonic()
        try:
            progress.check()
            state = await generate(state, tool_calls="none")
            output = state.output
            check_fits(output)
        except Exception as error:
            progress.failed(key, error)
            raise
        stop_reason, reply = stop_reason_of(output), output.completion
        calls = (output.message.tool_calls or []) if output.choices else []
        arguments = [value for call in calls for value in call.arguments.values() if isinstance(value, str)]
        source, status = extract(reply, stop_reason, arguments)
        usage = usage_of(output, options.prices)
        record = SampleRecord.of(key, status, usage, seconds=time.monotonic() - began, stop_reason=stop_reason)
        told = [f"{call.function}({json.dumps(call.arguments)})" for call in calls]
        progress.spent(usage.cost_usd)
        progress.keep(run, record, "\n\n".join(filter(None, [reply, *told])), source)
        return state

    return solve


def stop_reason_of(output: ModelOutput) -> str:
    """Returns why a model stopped; ``refusal`` if its message says that it is one."""
    content = output.message.content if output.choices else ""
    refused = not isinstance(content, str) and any(getattr(part, "refusal", None) for part in content)
    return "refusal" if refused else str(output.stop_reason)


def check_fits(output: ModelOutput) -> None:
    """Raises PromptTooLong for an output that holds the provider's message instead of a reply."""
    if output.stop_reason == TOO_LONG and not (output.usage is not None and output.usage.output_tokens):
        raise PromptTooLong("the prompt does not fit the model's context; use a model with a longer one, or fewer --shots")
