"""What passes between two calls of a timed block: how much of it is usual, and calls with what is more as part of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal

from peerlane.evaluate.timing.block_times import BlockTimes

Kind = Literal["between", "before_locked", "behind_locked"]
_KINDS: tuple[Kind, ...] = ("between", "before_locked", "behind_locked")


@dataclass(frozen=True)
class Gaps:
    """What passes between two calls on a rank, in microseconds, where neither is locked; before a locked one, where the device waits for
    its key; and behind one, where it digests."""

    between: float
    before_locked: float
    behind_locked: float

    def no_more_than(self, factor: float, other: Gaps) -> Gaps:
        """These, but for what is more than so many times another's."""
        return Gaps(*(min(mine, factor * theirs) for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def limits(self, share: float, margin_us: float, locked_margin_us: float) -> Gaps:
        """How long gaps may be where these are usual."""
        return Gaps((1 + share) * self.between + margin_us, self.before_locked + locked_margin_us, self.behind_locked + locked_margin_us)


def usual_gaps(blocks: Sequence[BlockTimes]) -> list[Gaps]:
    """The usual gaps of every rank in some blocks, or what the host needs there if that is more; infinite beside locked calls where none
    were seen there."""
    host_us, ranks = statistics.median(block.host_gap_us for block in blocks), []
    for found in _by_kind(blocks):
        between = found["between"] or [*found["before_locked"], *found["behind_locked"], 0.0]
        before, behind = (statistics.median(found[kind] or [math.inf]) for kind in _KINDS[1:])
        ranks.append(Gaps(max(host_us, statistics.median(between)), before, behind))
    return ranks


def device_gap_us(blocks: Sequence[BlockTimes]) -> float:
    """What usually passes between two calls that are not locked, on the rank where that is most; 0 where nothing does."""
    return max((statistics.median(found["between"]) for found in _by_kind(blocks) if found["between"]), default=0.0)


def charged(block: BlockTimes, limits: Sequence[Gaps]) -> BlockTimes:
    """The block with gaps as part of calls, as far as they are longer than each rank's ``limits``: of the call before them, or behind them
    where that one is locked, for what locked calls take is known otherwise. A call without such a gap behind it, the last of a part or one
    before a locked call, bears what usual ones do, for its host is as far ahead.
    """
    ranks = []
    for rank, (times, limit) in enumerate(zip(block.ranks_us, limits, strict=True)):
        found, borne = list(_gaps(block, rank)), [0.0] * len(times)
        for place, gap, kind in found:
            forkers = [call for call in (place, place + 1, place - 1) if 0 <= call < len(times) and call not in block.locked]
            if forkers:
                borne[forkers[0]] += max(0.0, gap - getattr(limit, kind))
        followed = {place for place, _, kind in found if kind == "between"}
        usual = statistics.median([us for place, us in enumerate(borne) if place not in block.locked] or [0.0])
        least = [0.0 if place in followed | block.locked else usual for place in range(len(times))]
        ranks.append([us + max(pair) for us, *pair in zip(times, borne, least, strict=True)])
    return replace(block, iterations_us=tuple(map(max, zip(*ranks, strict=True)))) if ranks else block


def _by_kind(blocks: Sequence[BlockTimes]) -> list[dict[Kind, list[float]]]:
    """Of every rank, all gaps of some blocks."""
    ranks = []
    for rank in range(len(blocks[0].gaps_us)):
        found: dict[Kind, list[float]] = {kind: [] for kind in _KINDS}
        for block in blocks:
            for _, gap, kind in _gaps(block, rank):
                found[kind].append(gap)
        ranks.append(found)
    return ranks


def _gaps(block: BlockTimes, rank: int) -> Iterator[tuple[int, float, Kind]]:
    """A rank's gaps, by the call before them, and of which kind they are. Behind the last call of a part there is none."""
    for place, gap in enumerate(block.gaps_us[rank]):
        if gap > 0:
            yield place, gap, "behind_locked" if place in block.locked else "before_locked" if place + 1 in block.locked else "between"
