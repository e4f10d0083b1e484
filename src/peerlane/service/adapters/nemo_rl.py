"""NeMo-RL: :func:`environment_class` makes the class that its registry wants, as a Ray actor; nemo_rl and torch are imported then."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from peerlane.service.adapters.reward import Reward, RewardSettings, reward_of


class KernelSteps:
    """The part without nemo_rl: rewards and observations of a batch of conversations."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.settings = RewardSettings(**(config or {}))

    def judge(self, logs: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[Mapping[str, Any]]) -> list[Reward]:
        """One reward for the last message of each conversation; the metadata's ``problem`` is the problem's number."""

        async def all_of() -> list[Reward]:
            return await asyncio.gather(
                *[reward_of(int(item["problem"]), log, self.settings) for log, item in zip(logs, metadata, strict=True)]
            )

        return asyncio.run(all_of())


def noted(metadata: Sequence[Mapping[str, Any]], rewards: Sequence[Reward]) -> list[dict[str, Any]]:
    """The metadata with verdicts, and a flag where a reward of 0 is none: mask those samples in the loss."""
    flags = [{"verdict": reward.verdict, "harness_fault": reward.value is None} for reward in rewards]
    return [{**item, **flag} for item, flag in zip(metadata, flags, strict=True)]


def environment_class() -> type:
    """The environment; register it with ``nemo_rl.environments.utils.register_env``, and make it an actor with ``ray.remote``."""
    import torch
    from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn

    class PeerlaneEnvironment(EnvironmentInterface):
        """One turn: the reply is judged, and the episode ends."""

        def __init__(self, config: Mapping[str, Any] | None = None) -> None:
            self.steps = KernelSteps(config)

        def step(self, message_log_batch: list[list[dict[str, Any]]], metadata: list[dict[str, Any]]) -> Any:
            """See EnvironmentInterface."""
            rewards = self.steps.judge(message_log_batch, metadata)
            return EnvironmentReturn(
                observations=[{"role": "environment", "content": reward.feedback} for reward in rewards],
                metadata=noted(metadata, rewards),
                next_stop_strings=[None] * len(rewards),
                rewards=torch.tensor([reward.value or 0.0 for reward in rewards]),
                terminateds=torch.ones(len(rewards)),
                answers=None,
            )

        def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
            """See EnvironmentInterface."""
            return batch, {"mean_reward": float(batch["total_reward"].float().mean())}

    return PeerlaneEnvironment
