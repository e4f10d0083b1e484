"""verl: ``reward.custom_reward_function.path=pkg://peerlane.service.adapters.verl`` and ``.name=compute_score``; or the path of this file.

``ground_truth`` of the data set is the problem's number. PEERLANE_URL says where the service is.
"""

from typing import Any

from peerlane.service.adapters.reward import RewardSettings, reward_of


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | int,
    extra_info: dict[str, Any] | None = None,
    reward_router_address: str | None = None,
    reward_model_tokenizer: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """``score`` is the reward; all other entries are logged. ``settings``, verl's ``reward_kwargs``: fields of :class:`.RewardSettings`.

    Problem and reply alone count; verl gives the other arguments to every reward function.

    verl must have a number. Where there is no verdict, ``score`` is 0.0 and ``harness_fault`` 1.0: mask such samples, as docs/rl.md shows.
    """
    reward = await reward_of(int(ground_truth), solution_str, RewardSettings(**settings))
    fault = reward.value is None
    return {"score": 0.0 if reward.value is None else reward.value, "harness_fault": float(fault), "verdict": reward.verdict}
