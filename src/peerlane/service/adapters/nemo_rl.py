"""NeMo-RL: :func:`environment_class` makes the class of an environment; nemo_rl and torch are imported then. docs/rl.md registers it."""

import asyncio
from collections.abc import Mapping
from typing import Any

from peerlane.service.adapters.reward import Reward, RewardSettings, reward_of


def environment_class() -> type:
    """The environment; make it an actor with ``ray.remote``. Its configuration has the fields of :class:`.RewardSettings`."""
    import torch
    from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn

    class PeerlaneEnvironment(EnvironmentInterface):
        """One turn: the last message of each conversation is judged, and the episode ends."""

        def __init__(self, config: Mapping[str, Any] | None = None) -> None:
            self.settings = RewardSettings(**(config or {}))

        def step(self, message_log_batch: list[list[dict[str, Any]]], metadata: list[dict[str, Any]]) -> Any:
            """See EnvironmentInterface. ``problem`` of the metadata is the problem's number.

            The new metadata has the verdict, and ``harness_fault`` where a reward of 0 is none: mask those samples in the loss.
            """

            async def all_of() -> list[Reward]:
                pairs = zip(message_log_batch, metadata, strict=True)
                return await asyncio.gather(*[reward_of(int(item["problem"]), log, self.settings) for log, item in pairs])

            rewards = asyncio.run(all_of())
            flags = [{"verdict": reward.verdict, "harness_fault": reward.value is None} for reward in rewards]
            return EnvironmentReturn(
                observations=[{"role": "environment", "content": reward.feedback} for reward in rewards],
                metadata=[{**item, **flag} for item, flag in zip(metadata, flags, strict=True)],
                next_stop_strings=[None] * len(rewards),
                rewards=torch.tensor([reward.value or 0.0 for reward in rewards]),
                terminateds=torch.ones(len(rewards)),
                answers=None,
            )

        def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
            """See EnvironmentInterface."""
            return batch, {"mean_reward": float(batch["total_reward"].float().mean())}

    return PeerlaneEnvironment
