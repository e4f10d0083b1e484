"""TRL: ``GRPOTrainer(reward_funcs=[reward_function()], ...)``. The data set has a column ``problem`` with numbers of problems."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from peerlane.service.adapters.reward import RewardSettings, reward_of

RewardFunction = Callable[..., Awaitable[list[float | None]]]


def reward_function(settings: RewardSettings | None = None) -> RewardFunction:
    """An asynchronous reward function, as TRL calls it: one number per completion, or None, which leaves the sample out."""
    chosen = settings or RewardSettings()

    async def peerlane_reward(prompts: Sequence[Any], completions: Sequence[Any], problem: Sequence[int], **_: Any) -> list[float | None]:
        rewards = await asyncio.gather(*[reward_of(int(n), reply, chosen) for n, reply in zip(problem, completions, strict=True)])
        return [reward.value for reward in rewards]

    return peerlane_reward
