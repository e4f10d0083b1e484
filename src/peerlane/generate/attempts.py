"""Attempts of a model at problems, each with its verdict and speed: the unit that metrics count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from peerlane.results.verdict import SAYS_NOTHING

CORRECT = "correct"
NO_CODE = "no_code"
"""The reply held no complete candidate."""
TRUNCATED = "truncated"
"""The reply was cut, by the limit of tokens or of the model, before it held a complete candidate."""
REFUSED = "refused"
"""The model or its provider declined to answer."""
EMPTY = "empty"
"""The reply said nothing outside of thoughts."""
NO_REPLY = "no_reply"
"""The provider gave no reply, or a limit ended the sample before one."""
NOT_JUDGED = "not_judged"
"""A candidate that no evaluation has looked at yet."""
UNJUDGED = (NOT_JUDGED, NO_REPLY, *SAYS_NOTHING)
"""Verdicts that say nothing about the model."""


class Speedup(NamedTuple):
    """Time of the reference over that of the candidate: the median and its 95 % interval."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Usage:
    """Tokens and cost of replies. ``input_tokens`` counts those read from a cache too; ``cost_usd`` is None where prices are not known."""

    input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None
    calls: int = 0

    def __add__(self, other: Usage) -> Usage:
        known = [cost for cost in (self.cost_usd, other.cost_usd) if cost is not None]
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.cached_tokens + other.cached_tokens,
            sum(known) if known else None,
            self.calls + other.calls,
        )


@dataclass(frozen=True)
class Setting:
    """The conditions that attempts must share to be counted together."""

    track: str
    node_class: str
    preset: str
    world_size: int
    variant: str = "default"
    cases: str = "all"
    superseded_protocol: int | None = None
    """version of the timing protocol, where it is not the current one"""

    def __str__(self) -> str:
        variant = "" if self.variant == "default" else f", variant {self.variant}"
        cases = "" if self.cases == "all" else f", {self.cases} case only"
        timing = "" if self.superseded_protocol is None else f", timing protocol {self.superseded_protocol}"
        return f"track {self.track}, preset {self.preset}, {self.world_size} ranks, {self.node_class}{variant}{cases}{timing}"


@dataclass(frozen=True)
class Attempt:
    """One sample of a model at one problem.

    Attributes:
        verdict: the evaluator's, or one of the words above.
        speedups: by launch mode, of a correct attempt that was timed.
        mechanisms: those that the evaluator saw in a call.
        seconds: of wall time that the model's reply or the agent's episode took.
        steps: of an agent: what it had judged on the way, in order; the attempt itself is the best of them.
        needs_multicast: it is not correct, and asks for NVLink multicast, which was off.
    """

    problem: int
    sample: int
    verdict: str
    speedups: Mapping[str, Speedup] = field(default_factory=dict)
    mechanisms: tuple[str, ...] = ()
    usage: Usage = Usage()
    seconds: float = 0.0
    steps: tuple[Attempt, ...] = ()
    needs_multicast: bool = False

    @property
    def correct(self) -> bool:
        """True for a correct verdict and nothing else."""
        return self.verdict == CORRECT

    @property
    def judged(self) -> bool:
        """True unless the verdict says nothing about the model."""
        return self.verdict not in UNJUDGED

    def after(self, steps: int) -> Attempt:
        """Returns the attempt as it would have been if the episode had ended after so many steps: the best of them."""
        return best_attempt(self.steps[:steps]) or replace(self, verdict=NO_CODE, speedups={}, mechanisms=(), steps=())


def best_attempt(attempts: Sequence[Attempt]) -> Attempt | None:
    """Returns the correct attempt with the largest lower end of a speedup in any mode; without a correct one the last; None of none."""
    return max(enumerate(attempts), key=lambda item: (*_rank(item[1]), item[0]))[1] if attempts else None


def _rank(attempt: Attempt) -> tuple[bool, float]:
    return attempt.correct, max((speedup.low for speedup in attempt.speedups.values()), default=0.0)
