"""Samples of authors at tasks: each joins a result with who wrote the candidate and what that cost. Metrics and boards count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

from peerlane.evaluate.candidates import REFERENCE
from peerlane.results.identity import NodeClass
from peerlane.results.result import NEEDS_MULTICAST, Result
from peerlane.results.verdict import SAYS_NOTHING

MODES = ("eager", "graph")

CORRECT = "correct"
NO_CODE = "no_code"
"""The reply held no complete candidate."""
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
    """Tokens and cost of replies. ``input_tokens`` counts those read from a cache too; ``cost_usd`` is None where prices are not costs."""

    input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None
    calls: int = 0

    def __add__(self, other: Usage) -> Usage:
        costs = [cost for cost in (self.cost_usd, other.cost_usd) if cost is not None]
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.cached_tokens + other.cached_tokens,
            sum(costs) if costs else None,
            self.calls + other.calls,
        )


class Task(NamedTuple):
    """The unit of counting: a problem at a preset."""

    problem: int
    preset: str = ""


@dataclass(frozen=True)
class Setting:
    """The conditions that samples must share to be counted together. On a board the presets of one family count as one."""

    track: str
    node_class: NodeClass
    preset: str
    world_size: int
    variant: str = "default"
    cases: str = "all"
    other_protocol: int | str | None = None
    """version or name of the timing protocol, where it is not the current one"""

    @classmethod
    def of(cls, result: Result) -> Self:
        """Returns the setting under which a candidate was judged."""
        variant, cases = result.problem.variant, result.cases
        return cls(result.track, result.node, result.preset, result.world_size, variant, cases, result.other_protocol)

    def __str__(self) -> str:
        variant = "" if self.variant == "default" else f", variant {self.variant}"
        cases = "" if self.cases == "all" else f", {self.cases} case only"
        timing = "" if self.other_protocol is None else f", timing protocol {self.other_protocol}"
        return f"track {self.track}, preset {self.preset}, {self.world_size} ranks, {self.node_class}{variant}{cases}{timing}"


Standing = Literal["own", "verified", "unverified", "differs"]
"""Trust in a result: judged by the page's author, judged anew from a bundle, only claimed in one, or found to differ.

Figures of ``own`` and ``verified`` samples were measured by the keeper, who makes the page; the others are claims."""


@dataclass(frozen=True)
class Sample:
    """One sample of an author at one task, as it was judged.

    Attributes:
        verdict: the evaluator's, one of the words above, or why there is no candidate, see :func:`peerlane.generate.reply.extract`.
        speedups: by launch mode, of a correct sample that was timed.
        mechanisms: those that the evaluator saw in a call.
        seconds: of wall time that the model's reply or the agent's episode took.
        steps: of an agent: what it had judged on the way, in order; the sample itself is the best of them.
        needs_multicast: it is not correct, and asks for NVLink multicast, which was off.
        author: a model, or the folder that the candidate lay in; ``reference`` for the reference as its own candidate.
        setting: the conditions under which it counts; None where nothing was judged.
        result: None where there was no code to judge, or no evaluation yet.
        code: the candidate's file, if it is at hand; its contents may have changed since.
        traces: name and contents of the pictures of `peerlane trace` in the sample's folder ``trace``.
        asked: how the run asked the model, with the version of its prompts; empty for a file that was judged by itself.
        signer: the key that signed the bundle which the sample comes from.
    """

    problem: int
    number: int
    verdict: str
    speedups: Mapping[str, Speedup] = field(default_factory=dict)
    mechanisms: tuple[str, ...] = ()
    usage: Usage = Usage()
    seconds: float = 0.0
    steps: tuple[Sample, ...] = ()
    needs_multicast: bool = False
    author: str = ""
    setting: Setting | None = None
    result: Result | None = field(default=None, repr=False)
    code: bytes | None = field(default=None, repr=False)
    standing: Standing = "own"
    traces: tuple[tuple[str, bytes], ...] = field(default=(), repr=False)
    asked: str = field(default="", repr=False)
    signer: str | None = None

    @classmethod
    def of(cls, result: Result, number: int, **more: Any) -> Self:
        """Returns a candidate's result as the sample of that number."""
        verdict = NOT_JUDGED if result.says_nothing and result.verdict.kind not in SAYS_NOTHING else result.verdict.kind
        return cls(
            result.problem.id,
            number,
            verdict,
            speedups_of(result),
            tuple(item.name for item in result.mechanisms if item.confidence == "seen"),
            needs_multicast=NEEDS_MULTICAST in result.flags,
            setting=Setting.of(result),
            result=result,
            **more,
        )

    @property
    def task(self) -> Task:
        """The problem and the preset."""
        return Task(self.problem, "" if self.setting is None else self.setting.preset)

    @property
    def name(self) -> str:
        """The candidate's own name; of a sample without a candidate, where it lies in its run."""
        return self.result.candidate.name if self.result is not None else f"{self.problem:03d}/{self.number}"

    @property
    def correct(self) -> bool:
        """True for a correct verdict and nothing else."""
        return self.verdict == CORRECT

    @property
    def judged(self) -> bool:
        """True unless the verdict says nothing about the model."""
        return self.verdict not in UNJUDGED

    @property
    def is_trusted(self) -> bool:
        """True if the keeper of the page measured the figures."""
        return self.standing in ("own", "verified")

    @property
    def is_reference(self) -> bool:
        """True for the built-in reference."""
        return self.is_trusted and self.result is not None and self.result.candidate.backend == REFERENCE

    def after(self, steps: int) -> Sample:
        """Returns the sample as it would have been if the episode had ended after so many steps: the best of them."""
        return best_sample(self.steps[:steps]) or replace(self, verdict=NO_CODE, speedups={}, mechanisms=(), steps=())


def best_sample(samples: Sequence[Sample]) -> Sample | None:
    """Returns the correct sample with the largest lower end of a speedup in any mode; without a correct one the last; None of none."""

    def rank(index: int) -> tuple[bool, float, int]:
        sample = samples[index]
        return sample.correct, max((speedup.low for speedup in sample.speedups.values()), default=0.0), index

    return samples[max(range(len(samples)), key=rank)] if samples else None


def speedups_of(result: Result) -> dict[str, Speedup]:
    """Returns the speedup by launch mode, where one was measured."""
    speeds = {mode: speedup for mode in MODES if (speedup := result.speedup(mode)) is not None}
    return {mode: Speedup(speedup.low, speedup.median, speedup.high) for mode, speedup in speeds.items()}


class Names(Counter[str]):
    """Names of authors, numbered where one comes twice."""

    def new(self, name: str) -> str:
        """Returns the name, or the name and its number."""
        self[name] += 1
        return name if self[name] == 1 else f"{name} ({self[name]})"
