"""The public protocol of the authors of ParallelKittens: warm-up calls, then calls back to back between two events, nothing between them.

Groups of inputs, larger together than the L2 cache, are used in turn. Timed calls are not watched: no slot is swapped, and no output is
copied or compared. So the time has no copies in it, and a candidate could skip work. Its other calls were judged as ever.
"""

from dataclasses import dataclass

from peerlane.evaluate import wire
from peerlane.evaluate.timing.paired_rounds import PairedRounds

WARM_UP_CALLS, CALLS = 500, 100
LONGEST_BLOCK_S = 30.0
"""A block with its warm-up may take the reference so long. Longer ones are not timed."""
_MOST_GROUPS = 128
_UNKNOWN_L2_MIB = 128.0  # of a GPU without a profile: more than those of today have


def input_groups(group_bytes: float, l2_mib: float | None) -> int:
    """Returns how many groups of inputs are used in turn: two at least, and more until they exceed the L2 cache or there are 128."""
    cache_bytes = (l2_mib or _UNKNOWN_L2_MIB) * 2**20
    return max(2, min(_MOST_GROUPS, int(cache_bytes // max(1.0, group_bytes)) + 1))


@dataclass(kw_only=True)
class BackToBackRounds(PairedRounds):
    """Rounds whose blocks use all slots of the runner."""

    calls: int = CALLS

    @property
    def slots(self) -> int:
        return self.runner.slots

    def prepare(self) -> None:
        """Has both sides build their blocks; there are no copies whose time would have to be known."""
        self._plan, self._rounds_since = wire.BlockPlan(self.calls, (), WARM_UP_CALLS), 0
        self._build()

    def _compare(self, ended: float) -> None:
        """Compares nothing, for no output was copied."""
