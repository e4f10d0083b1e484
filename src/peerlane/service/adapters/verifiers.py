"""verifiers 0.4: a module of yours with ``KernelTaskset = taskset_class()`` is an environment for ``vf-eval``; see examples/rl."""

from typing import Any

from peerlane.service.adapters.reward import RewardSettings, reward_of
from peerlane.service.client import ServiceFault

INSTRUCTION = "Write `solution` for problem {number}, {title}. Reply with one fenced Python file."


async def named_rewards(problem: int, reply: Any, settings: RewardSettings) -> dict[str, float]:
    """Two rewards: ``correct``, and ``fast``, the part of log2(1 + speedup) above a correct candidate's 1, where it was measured.

    Raises ServiceFault without a verdict: verifiers records an error then, and no reward.
    """
    reward = await reward_of(problem, reply, settings)
    if reward.value is None:
        raise ServiceFault(f"no verdict: {reward.feedback}")
    speed = reward.result.reward("log_speedup") if reward.result is not None else None
    return {"correct": reward.value, "fast": max(0.0, (speed or 0.0) - 1.0)}


def taskset_class(settings: RewardSettings | None = None, problem_range: str = "1-87") -> type:
    """The taskset; verifiers is imported here. Its v1 API is meant: one task per problem, judged on the service."""
    import verifiers.v1 as vf

    from peerlane import problems as suite

    chosen = settings or RewardSettings()

    class KernelData(vf.TaskData):
        problem: int

    class KernelTask(vf.Task[KernelData]):
        @property
        def key(self) -> str:
            return f"peerlane-{self.data.problem}"

        @vf.reward(weight=1.0)
        async def judged(self, trace: vf.Trace) -> dict[str, float]:
            return await named_rewards(self.data.problem, trace.last_reply or "", chosen)

    class KernelConfig(vf.TasksetConfig):
        problems: str = problem_range

    class KernelTaskset(vf.Taskset[KernelTask, KernelConfig]):
        def load(self) -> Any:
            for problem in suite.select(self.config.problems):
                text = INSTRUCTION.format(number=problem.id, title=problem.title)
                yield KernelTask(KernelData(problem=problem.id, prompt=text, name=f"p{problem.id:03d}"), self.config.task)

    return KernelTaskset
