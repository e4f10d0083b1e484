"""The scores of paired rounds: the time of every block by both clocks, and the ratio of the two sides. No ranks here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from peerlane.evaluate import wire
from peerlane.results.speed_record import Estimate

HAND_OFF_QUANTILE = 0.9
_RESAMPLES = 1000
_CONTRADICTION_US = 1_000.0  # the hand-off of a very short block may vary by more than the block takes
_LEAST_SHARE = 0.1  # of a block's time, that is left when swaps and copies are taken off


def median_interval(values: Sequence[float]) -> Estimate:
    """The median, with a percentile bootstrap over the values (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13)."""
    data = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(0).integers(0, len(data), size=(_RESAMPLES, len(data)))
    low, high = np.quantile(np.median(data[drawn], axis=1), [0.025, 0.975])
    middle = float(np.median(data))
    return Estimate(median=middle, low=min(middle, float(low)), high=max(middle, float(high)), n=len(data))


@dataclass(frozen=True)
class BlockTimes:
    """One block of one side: the longest event time of a rank, the supervisor's time until all ranks' devices were idle, and the longest
    time that a rank's host took to launch the calls."""

    events_us: float
    clock_us: float
    launch_us: float = 0.0

    @staticmethod
    def of(answers: Sequence[wire.BlockRun], clock_us: float) -> BlockTimes:
        """Returns the times of a block from the ranks' answers."""
        return BlockTimes(max(answer.events_us for answer in answers), clock_us, max(answer.launch_us for answer in answers))


@dataclass(kw_only=True)
class Rounds:
    """Paired blocks of ``calls`` calls: of the trusted reference, and of the other side.

    ``copies_us``: what slot swaps and output copies of a block take alone, taken off every block of both sides. ``copies_launch_us``: what
    the host takes to launch these copies one by one.
    """

    calls: int
    copies_us: float = 0.0
    copies_launch_us: float = 0.0
    references: list[BlockTimes] = field(default_factory=list)
    others: list[BlockTimes] = field(default_factory=list)

    @property
    def hand_off_us(self) -> float:
        """Returns the time that the supervisor's clock has on top of the events in nine of ten blocks of the reference."""
        return max(0.0, float(np.quantile([block.clock_us - block.events_us for block in self.references], HAND_OFF_QUANTILE)))

    def counted_us(self, blocks: list[BlockTimes]) -> list[float]:
        """Per call: the larger of the event time and the clock's time without the hand-off, less swaps and copies.

        A block cannot have been quicker without copies than the host was in launching its calls. So where the device waits for the host,
        its time for copies is not taken off in full: most of it passed while it waited.
        """
        hand_off_us = self.hand_off_us
        times = []
        for block in blocks:
            whole_us = max(block.events_us, block.clock_us - hand_off_us)
            launches_us = min(block.launch_us - self.copies_launch_us, whole_us)
            times.append(max(whole_us - self.copies_us, launches_us, _LEAST_SHARE * whole_us) / self.calls)
        return times

    def ratio(self) -> Estimate:
        """Reference over other, round by round: the median and its interval."""
        pairs = zip(self.counted_us(self.references), self.counted_us(self.others), strict=True)
        return median_interval([reference / max(other, 1e-6) for reference, other in pairs])

    def reference_us(self) -> float:
        """The reference's usual time per call."""
        return statistics.median(self.counted_us(self.references))

    def other_us(self) -> Estimate:
        return median_interval([max(us, 1e-6) for us in self.counted_us(self.others)])

    def contradiction(self) -> str | None:
        """Returns a sentence if the events of most blocks claim less than half of what the clock says; else None."""
        hand_off_us = self.hand_off_us
        false = [
            block for block in self.others if block.clock_us - hand_off_us > max(2 * block.events_us, block.events_us + _CONTRADICTION_US)
        ]
        if 2 * len(false) <= len(self.others):
            return None
        claimed, taken = (statistics.median(times) for times in zip(*((b.events_us, b.clock_us) for b in false), strict=True))
        return (
            f"in {len(false)} of {len(self.others)} blocks the events claim less than half of the time that passed: "
            f"{claimed:.0f} us, and the supervisor saw {taken:.0f} us, {hand_off_us:.0f} us of them hand-off"
        )


def choose_calls(call_us: float, least_us: float, most: int, fewest: int) -> int:
    """Calls per block, such that it lasts ``least_us``, within these bounds."""
    return max(fewest, min(most, -(-int(least_us) // max(1, int(call_us)))))
