"""Rewards for training: numbers that a result stands for, from the low end of a speedup's interval."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from peerlane.errors import UsageError

if TYPE_CHECKING:
    from peerlane.evaluate.results.result import Result

RewardKind = Literal["correct", "log_speedup", "fast_p"]
_KINDS = ("correct", "log_speedup", "fast_p")
_NO_VERDICT = ("harness_error", "not_run")


def reward(result: Result, kind: str, p: float, mode: str | None) -> float | None:
    """See :meth:`.Result.reward`."""
    if kind not in _KINDS:
        raise UsageError(f"reward {kind!r}: expected one of {', '.join(_KINDS)}")
    if not (math.isfinite(p) and p >= 0):
        raise UsageError(f"p={p!r}: expected a speedup, such as 1.0")
    if result.verdict.kind in _NO_VERDICT:
        return None
    if not result.correct or kind == "correct":
        return float(result.correct)
    modes = result.modes if mode is None else (mode,)
    measured = [speedup.low for name in modes if (speedup := result.speedup(name)) is not None]
    if not measured:
        return None
    return math.log2(1.0 + max(measured)) if kind == "log_speedup" else float(max(measured) > p)
