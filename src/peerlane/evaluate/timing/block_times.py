"""One timed block: how many calls it has, how long they took, and what stands for all of them."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from peerlane.evaluate.processes.protocol import Message
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.timing.statistics import Interval, mean_between, median_interval
from peerlane.evaluate.timing.turnstile import Passage
from peerlane.settings import TimingRules

_LEADING_CALLS = 4
_FOREVER_US = 1e12
_ROUNDED = 0.01  # of a sum of times


@dataclass(frozen=True)
class BlockTimes:
    """One block: the slowest rank's time per call, in their order, and how the clocks agree. Microseconds.

    ``shares``: the calls between these quantiles stand for the block. ``parts``: runs of calls; none: all are one run.
    ``idle_latency_us``: how long a tiny kernel of the trusted ranks took on the slowest GPU when the block was over. ``locked_us``: of each
    locked call its place, and how long it took from the first key to the last commitment, by the outer clock. ``ranks_us`` and
    ``gaps_us``: of every rank its times, and what passes behind each call until the next one of its part starts, without waiting at a
    turnstile for other ranks; ``host_gap_us``: what the slowest rank's host usually needs there.
    """

    iterations_us: tuple[float, ...]
    span_us: float
    outer_us: float
    shares: tuple[float, float] = (0.25, 0.75)
    idle_latency_us: float = 0.0
    parts: tuple[range, ...] = ()
    locked_us: tuple[tuple[int, float], ...] = ()
    ranks_us: tuple[tuple[float, ...], ...] = ()
    gaps_us: tuple[tuple[float, ...], ...] = ()
    host_gap_us: float = 0.0

    @functools.cached_property
    def locked(self) -> set[int]:
        """The places of locked calls."""
        return {place for place, _ in self.locked_us}

    @functools.cached_property
    def counted_us(self) -> tuple[float, ...]:
        """All calls but the locked ones, which find their inputs in the L2 cache."""
        return tuple(us for place, us in enumerate(self.iterations_us) if place not in self.locked)

    @functools.cached_property
    def warm_us(self) -> tuple[float, ...]:
        """Of these, the calls behind the first ones of each part, which find the caches of the host cold."""
        parts = self.parts or (range(len(self.iterations_us)),)
        places = [call for part in parts for call in part[min(_LEADING_CALLS, len(part) // 3) :]]
        return tuple(self.iterations_us[call] for call in places if call not in self.locked) or self.counted_us

    @functools.cached_property
    def usual_us(self) -> float:
        """The time that stands for the block: the mean of its warm calls between two quantiles. Their median would do as well if calls
        were alike; but how fast a graph is launched depends on where the driver put it, and a median jumps between two such places."""
        return mean_between(self.warm_us, self.shares)

    @functools.cached_property
    def mean_us(self) -> float:
        """The time of all calls that count, per call."""
        return statistics.fmean(self.counted_us)

    @functools.cached_property
    def skew(self) -> float:
        """Mean of all over the usual time: far above 1 where a few calls did the work of all."""
        return self.mean_us / self.usual_us

    @property
    def locked_outer_us(self) -> float:
        """The time of the locked calls, by the outer clock, per call, where there are any."""
        return statistics.fmean(us for _, us in self.locked_us)

    @property
    def locked_excess_us(self) -> float:
        """By how much it exceeded the events: unlocking, copying and digesting."""
        return statistics.fmean(us - self.iterations_us[place] for place, us in self.locked_us)

    @property
    def locked_delay_us(self) -> float:
        """By how much the locked calls were slower than the others, by the events: ranks unlock for different times; and who prepares
        others cannot prepare these. Below 0 where they were faster."""
        return self.locked_outer_us - self.locked_excess_us - statistics.median(self.counted_us)

    @property
    def clocks_us(self) -> list[tuple[float, float]]:
        """Of what both clocks have timed, the block and each locked call, what the events say and what the outer clock does."""
        return [(self.span_us, self.outer_us), *((self.iterations_us[place], us) for place, us in self.locked_us)]

    @functools.cached_property
    def locked_around_us(self) -> float:
        """What lies around the locked calls that is not calls as they stand for the block."""
        return max(self.locked_excess_us, self.locked_outer_us - self.usual_us)

    @property
    def slack_us(self) -> float:
        """How much longer the outer clock ran than the events say: the hand-off."""
        return self.outer_us - self.span_us

    @staticmethod
    def of(
        answers: list[Message],
        slots: int,
        outer_us: float,
        shares: tuple[float, float] = (0.25, 0.75),
        parts: tuple[range, ...] = (),
        passages: Sequence[Passage] = (),
    ) -> BlockTimes:
        """From the ranks' answers; raises GroupFailure for anything that is not lists of times, which with the gaps make the span.

        A rank without work in a call may report 0, for nothing lies between its events; the slowest rank may not.
        """
        columns, gaps = list[list[float]](), list[list[float]]()
        for rank, answer in enumerate(answers):
            times, between, span_us = (answer.get(name, []) for name in ("iterations_us", "gaps_us", "span_us"))
            if not (_are_times(times, slots) and _are_times(between, slots) and _are_times([span_us, answer.get("host_gap_us")], 2)):
                raise GroupFailure("garbage", "timing", "a rank reported times that are not numbers of at least 0", rank=rank)
            if span_us > (1 + _ROUNDED) * sum([*times, *between]):
                raise GroupFailure("garbage", "timing", "a rank reported times that do not add up", rank=rank)
            columns.append(times)
            waited = {passage.position - 1: passage.waited_us[rank] for passage in passages}
            gaps.append([max(0.0, gap_us - waited.get(place, 0.0)) for place, gap_us in enumerate(between)])
        slowest = tuple(float(max(values)) for values in zip(*columns, strict=True))
        span_us = float(max(answer["span_us"] for answer in answers))
        if min(*slowest, span_us) <= 0:
            raise GroupFailure("garbage", "timing", "the ranks reported times of 0 for a call: no kernel is that fast")
        return BlockTimes(
            slowest,
            span_us,
            outer_us,
            shares,
            parts=parts,
            locked_us=tuple((p.position, p.us) for p in passages),
            ranks_us=tuple(map(tuple, columns)),
            gaps_us=tuple(map(tuple, gaps)),
            host_gap_us=float(max(answer["host_gap_us"] for answer in answers)),
        )


def _locked(references: Sequence[BlockTimes], others: Sequence[BlockTimes]) -> list[tuple[BlockTimes, BlockTimes]]:
    """The rounds in which both sides had locked calls."""
    return [(known, other) for known, other in zip(references, others, strict=True) if known.locked_us and other.locked_us]


def locked_excess(references: Sequence[BlockTimes], others: Sequence[BlockTimes]) -> Interval | None:
    """By how much more than the reference's of the same round the other side's locked calls exceeded their events, in microseconds; None
    where none were locked."""
    excess = [other.locked_excess_us - known.locked_excess_us for known, other in _locked(references, others)]
    return median_interval(excess) if excess else None


def locked_us(references: Sequence[BlockTimes], others: Sequence[BlockTimes], most_around_us: float = math.inf) -> Interval | None:
    """What a locked call of the other side takes by the outer clock, without what the reference's of the same round says that lies around
    it, or ``most_around_us``, whatever the other side's events say. None where none were locked."""
    pairs = _locked(references, others)
    times = [other.locked_outer_us - min(known.locked_around_us, most_around_us) for known, other in pairs]
    return median_interval(times) if times else None


def prepares(references: Sequence[BlockTimes], others: Sequence[BlockTimes], margin_us: float, share: float) -> bool:
    """Whether the other side's locked calls are slower than its others by its own events, for certain by more than the reference's are, by
    ``margin_us`` and by this share of the others."""
    pairs = _locked(references, others)
    if not pairs:
        return False
    delay_us = median_interval([other.locked_delay_us - known.locked_delay_us for known, other in pairs]).low
    return delay_us > max(margin_us, share * statistics.median(statistics.median(other.counted_us) for _, other in pairs))


def _are_times(values: object, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(map(_is_time, values))


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _FOREVER_US


def choose_slots(call_us: float, shortest_us: float, slot_bytes: float, memory_bytes: float, rules: TimingRules, mode: str) -> int:
    """Calls per block: long enough to time, and within a share of memory.

    ``call_us``: an eager call of the reference; ``shortest_us``: its shortest in the mode. ``slot_bytes``: of a slot's inputs or outputs,
    whichever are larger. ``memory_bytes``: of a GPU.
    """
    wanted = max(rules.min_block_us[mode] / shortest_us, rules.usual_slots)
    longest = rules.max_block_us / call_us
    fitting = rules.arena_share * memory_bytes / max(slot_bytes, 1.0)
    return max(rules.min_slots, int(min(wanted, longest, fitting, rules.max_slots)))
