"""What the rounds of a race say: a ratio, times, and what of it is believed.

Events in a candidate's ranks claim what its calls take. Locked calls, which the supervisor's clock times, and the middle round, with what
passes between calls, say what they take at least.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from peerlane.evaluate.timing.block_times import BlockTimes, locked_us, prepares
from peerlane.evaluate.timing.gaps import charged, device_gap_us, usual_gaps
from peerlane.evaluate.timing.statistics import Interval, mean_between, median_interval, paired_interval, pooled_interval, quantile
from peerlane.settings import TimingRules

ScoredBy = Literal["quantile", "mean", "locked", "middle_round", "graph"]


@dataclass(frozen=True)
class Score:
    """What is believed of the other side: the ratio of reference over other, its time per call, and that of every block, in microseconds.

    ``by``: what stands for it: a quantile of its calls, or their mean where they are unequal. Or, where it is more, what locked calls take
    at least: others were prepared then, or put off, or are not what they are said to be; or what calls take in the middle round, with what
    passes between them; or what the device needs of an eager call, by its graph.
    """

    by: ScoredBy
    ratio: Interval
    times_us: Interval
    blocks_us: list[float]


@dataclass(kw_only=True)
class Rounds:
    """Paired blocks of the trusted reference and of another side, in one mode.

    ``side`` is ``reference`` (in the candidate's ranks, before candidate code is loaded) or ``candidate``. ``before``: the reference's own
    rounds, which say what is usual here. ``outputs``: tensors that a call returns. ``captures``: how often graphs were captured for these
    rounds. ``replayed_us``: what the other side's call takes as a graph, where these are of eager ones and that is known.
    """

    mode: str
    side: str
    rules: TimingRules
    before: Rounds | None = None
    outputs: int = 1
    captures: int = 1
    replayed_us: float = 0.0
    references: list[BlockTimes] = field(default_factory=list)
    others: list[BlockTimes] = field(default_factory=list)

    @property
    def _shares(self) -> tuple[float, float]:
        return self.rules.usual_shares[self.mode]

    @property
    def skew(self) -> float:
        """How unequal the other side's calls are: mean over usual time, in the middle block."""
        return statistics.median(block.skew for block in self.others)

    @property
    def usual_skew(self) -> float:
        """How unequal the calls of the reference's blocks are at most, in their middle, with a margin. Never below the margin."""
        return self._skew_limit([*self.before.references, *self.before.others] if self.before else self.references)

    def _skew_limit(self, blocks: Sequence[BlockTimes]) -> float:
        return self.rules.skew_margin * max(1.0, median_interval([*(block.skew for block in blocks), 1.0]).high)

    @property
    def _unequal(self) -> bool:
        """Whether the other side's calls are more unequal than the reference's, so that a quantile would leave out work."""
        return self.side == "candidate" and self.skew > self.usual_skew

    @property
    def _locked_limit_us(self) -> float:
        """By how much the locked calls of an honest candidate may seem longer than they are. Long calls vary by more; nobody gains by
        claiming that they are long."""
        rules, further = self.rules, max(0, self.outputs - 1)
        usual_us = max(self._shorter_us, self._middle_us(self.others))
        return rules.locked_slack_us[self.mode] + rules.locked_slack_share * usual_us + rules.locked_output_slack_us[self.mode] * further

    @property
    def _least_us(self) -> float | None:
        """The least that a candidate's calls can take, by the outer clock around locked ones; None where there are none. Who prepares other
        calls is allowed nothing. Who disturbs some rounds of the reference makes them no less certain."""
        rules, both = self.rules, (self.references, self.others)
        taken = locked_us(*both, self.usual_around_us() + self._varies_us) if self.side == "candidate" else None
        if taken is None:
            return None
        prepared = prepares(*both, rules.prepared_us[self.mode], rules.prepared_share)
        return taken.median if prepared else taken.low - self._locked_limit_us

    @property
    def _usual_us(self) -> float:
        """The reference's call, before the candidate was loaded."""
        return statistics.fmean(block.mean_us for block in (self.before or self).references)

    @property
    def _varies_us(self) -> float:
        """By how much what lies around the reference's locked calls may vary."""
        return self.rules.around_us[self.mode] + self.rules.around_share[self.mode] * self._shorter_us

    @property
    def _shorter_us(self) -> float:
        """The reference's call, or the candidate's where that is shorter, by its locked ones: a share of a long call would be all of one
        that is ten times as fast."""
        taken = locked_us(self.references, self.others, self.usual_around_us() + self.rules.around_us[self.mode])
        return self._usual_us if taken is None else max(0.0, min(self._usual_us, taken.median))

    def _most_in_rounds(self) -> tuple[float, float]:
        """The largest ratio that is believed of a candidate, by the middle round, which a few rounds, or some calls of each, cannot raise.
        And the same where the reference's usual call counts as no longer than it may be beside a candidate.

        Events see only the device's part of an eager call whose host is ahead, and it is ahead where something keeps the device waiting
        between calls; nor do they see work that is done there. So what passes between calls, beyond what must between the reference's, is
        part of them here. Blocks whose calls are more unequal than the reference's count by their mean.
        """
        if self.side != "candidate":
            return math.inf, math.inf
        rules, before = self.rules, self.before or self
        usual = zip(usual_gaps(self.references), usual_gaps(before.references), strict=True)
        known = [now.no_more_than(1 + rules.drift_share[self.mode], then) for now, then in usual]
        limits = [gaps.limits(rules.gap_share, rules.gap_us[self.mode], rules.around_us[self.mode]) for gaps in known]
        most_skew = self._skew_limit([charged(block, limits) for block in before.references])
        usual_us = statistics.median(block.usual_us for block in self.before.references) if self.before else math.inf
        ratios, most = list[float](), list[float]()
        for reference, other in zip(self.references, (charged(block, limits) for block in self.others), strict=True):
            unequal = other.skew > most_skew
            reference_us, other_us = (block.mean_us if unequal else block.usual_us for block in (reference, other))
            ratios.append(reference_us / other_us)
            most.append(min(reference_us, (most_skew if unequal else 1.0) * self._longest_us(usual_us)) / other_us)
        slack = 1 + rules.middle_slack[self.mode]
        return slack * statistics.median(ratios), slack * statistics.median(most)

    def _middle_us(self, blocks: Sequence[BlockTimes]) -> float:
        """The time per call of blocks, as the race is scored."""
        if self._pools:
            return mean_between([us for block in blocks for us in block.warm_us], self._shares)
        return statistics.median(self._blocks_us(blocks))

    def around_us(self) -> float:
        """What usually lies around the reference's locked calls; infinite where there are none."""
        return statistics.median([block.locked_around_us for block in self.references if block.locked_us] or [math.inf])

    def usual_around_us(self) -> float:
        """What did before the candidate was loaded."""
        return self.before.around_us() if self.before else math.inf

    @property
    def unexplained_us(self) -> float:
        """How much more lies around the reference's locked calls than before the candidate was loaded, beyond what varies anyway, whoever
        disturbs them. 0 where the candidate claims no less than is believed."""
        if (least_us := self._least_us) is None:
            return 0.0
        more_us = max(0.0, self.around_us() - self.usual_around_us() - self._varies_us)
        return more_us if self._middle_us(self.others) < least_us else 0.0

    def excess_us(self) -> Interval:
        """How much longer the hand-off of the other side's blocks was than that of the reference's of the same round."""
        return median_interval([other.slack_us - reference.slack_us for reference, other in zip(self.references, self.others, strict=True)])

    def _blocks_us(self, blocks: Sequence[BlockTimes]) -> list[float]:
        unequal = self._unequal
        return [block.mean_us if unequal else block.usual_us for block in blocks]

    @property
    def _pools(self) -> bool:
        """Whether the calls of all blocks count together. What disturbs eager calls comes from the host and only ever adds to their time,
        on either side of a round; what disturbs replays is drift, which both sides of a round share."""
        return self.mode == "eager" and not self._unequal

    def score(self) -> Score:
        """What is believed. Rounds have a middle of their own, so that their ratio may claim less time than blocks do; where not all of a
        claim is believed, both count."""
        claimed, reference_us, other_us = self._claimed_ratio(), self._middle_us(self.references), self._middle_us(self.others)
        most, most_beside = self._most_in_rounds()
        least_us: dict[ScoredBy, float] = {
            "locked": self._least_us or 0.0,
            "graph": self.rules.replayed_share * self.replayed_us,
            "middle_round": reference_us / most,
        }
        by, longest_us = max(least_us.items(), key=lambda item: item[1])
        of_blocks, of_ratio = (min(1.0, us / max(longest_us, 1e-9)) for us in (other_us, reference_us / claimed.median))
        if min(of_blocks, of_ratio) < 1.0:
            of_ratio = min(of_ratio, of_blocks * reference_us / other_us / claimed.median)
        else:
            by = "mean" if self._unequal else "quantile"
        ratio = claimed.scaled(min(of_ratio * self.counted, most_beside / claimed.median))
        blocks_us = [us / of_blocks for us in self._blocks_us(self.others)]
        return Score(by, ratio, self._claimed_us().scaled(1 / of_blocks), blocks_us)

    @property
    def drift(self) -> float:
        """The reference's time per call, over what it took in its own rounds; 1 where there are none."""
        return self._middle_us(self.references) / self._middle_us(self.before.references) if self.before else 1.0

    @property
    def counted(self) -> float:
        """The share of the reference's time that counts. It is taken to be no slower than in its own rounds, but for what varies anyway:
        nobody is to be faster by keeping the machine busy beside it. What slows down both sides counts against the candidate then, since
        that cannot be told apart."""
        if self.before is None:
            return 1.0
        return min(1.0, self._longest_us(self._middle_us(self.before.references)) / self._middle_us(self.references))

    def _longest_us(self, usual_us: float) -> float:
        """How long the reference's call may take beside a candidate where it usually takes so long."""
        return (1 + self.rules.drift_share[self.mode]) * usual_us + self.rules.drift_us[self.mode]

    def graphs_apart(self) -> Interval:
        """What a ratio is uncertain by besides, since the race has seen few of the places that the driver may put graphs in."""
        both = (self.references, self.others)
        spread_us = self.rules.place_spread_us[self.mode] / math.sqrt(self.captures)
        spreads = [spread_us / statistics.median(self._blocks_us(blocks)) for blocks in both]
        return Interval.about_one(math.hypot(*spreads))

    def _claimed_ratio(self) -> Interval:
        """Reference over other by events alone: of the usual calls of all rounds, or round by round."""
        if self._pools:
            references, others = ([block.warm_us for block in blocks] for blocks in (self.references, self.others))
            return pooled_interval(references, self._shares, over=others)
        return paired_interval(self._blocks_us(self.references), over=self._blocks_us(self.others))

    def gaps_us(self) -> tuple[float, float]:
        """What usually passes between two calls, of the reference and of the other side."""
        return round(device_gap_us(self.references), 3), round(device_gap_us(self.others), 3)

    @property
    def idle_latency_us(self) -> float:
        """The longest that a tiny kernel took when a block was over."""
        return max(block.idle_latency_us for block in self.others)

    @property
    def slack_us(self) -> float:
        """The largest hand-off that was seen."""
        return max(block.slack_us for block in [*self.references, *self.others])

    def _claimed_us(self) -> Interval:
        """The other side's time per call, by its events alone."""
        if self._pools:
            return pooled_interval([block.warm_us for block in self.others], self._shares)
        return median_interval(self._blocks_us(self.others))

    def quantile_us(self, share: float) -> float:
        """A quantile of all the other side's calls that count."""
        return quantile([value for block in self.others for value in block.counted_us], share)
