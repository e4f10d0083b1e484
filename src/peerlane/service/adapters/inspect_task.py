"""Inspect: ``inspect eval peerlane/kernels -T problems=1-8 --model NAME`` judges replies on a service. Found by an entry point."""

from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState, generate

from peerlane import problems as suite
from peerlane.generate.machine import choose_machine
from peerlane.generate.prompt import PromptSettings, render_prompt
from peerlane.service.adapters.reward import RewardSettings, reward_of
from peerlane.service.client import ServiceFault

FAST = (1.0, 1.5, 2.0)


@scorer(metrics={"*": [mean(), stderr()]}, name="peerlane")
def kernel_scorer(settings: RewardSettings) -> Scorer:
    """1 or 0 for ``correct`` and each ``fast_p``, so that reducers such as pass_at_5 apply. A sample without a verdict is an error."""

    async def score(state: TaskState, target: Target) -> Score:
        reward = await reward_of(int(state.metadata["problem"]), state.output.completion, settings)
        if reward.value is None:
            raise ServiceFault(f"no verdict: {reward.feedback}")
        fast = {f"fast_{p:g}": reward.result.reward("fast_p", p=p) if reward.result is not None else 0.0 for p in FAST}
        values: dict[str, Any] = {"correct": reward.value, **{name: value for name, value in fast.items() if value is not None}}
        return Score(value=values, explanation=reward.feedback, metadata={"verdict": reward.verdict})

    return score


@task
def kernels(problems: str = "1-87", preset: str = "pkb", track: str = "custom", backend: str = "cuda", shots: int = 1) -> Task:
    """One sample per problem, on as many ranks as the service has. More samples: ``--epochs``, so that an eval set can be extended."""
    settings = RewardSettings(options={"presets": (preset,), "track": track})
    ranks = int(settings.client().node()["world_size"])
    prompts = PromptSettings(choose_machine("auto"), backend, track, ranks, preset, "default", shots)
    samples = [
        Sample(id=f"{problem.id:03d}", input=render_prompt(problem, prompts).text, metadata={"problem": problem.id})
        for problem in suite.select(problems)
    ]
    return Task(dataset=MemoryDataset(samples, name="peerlane"), solver=generate(), scorer=kernel_scorer(settings), version=1)
