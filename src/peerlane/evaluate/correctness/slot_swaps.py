"""Late changes: two slots of a block exchange their contents, in stream order, right before the call of one of them.

Nobody who used a slot's contents before its call, to prefetch it or to do the work of many calls at once, used what its input turned out to
be. The answers change places with the inputs, so every call still has a right one, and no call is more work than another.
"""

import json
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from peerlane.evaluate import wire
from peerlane.evaluate.memory.slots import unplaced

MOST_BYTES = 64 << 20
"""The most bytes of a slot's inputs that are exchanged. Larger calls are bound by memory, so nothing is gained by merging them."""

_dice = random.SystemRandom()


@dataclass(frozen=True)
class SlotSwaps:
    """``steps``: (position of a call in the block's order, its slot, the slot of a later call). ``contents``: for every slot, the slot that
    its contents at its own call, the last one if there are more, were generated for."""

    steps: tuple[tuple[int, int, int], ...]
    contents: list[int]

    @staticmethod
    def draw(order: Sequence[int], alike: Sequence[int], positions: Collection[int]) -> "SlotSwaps":
        """Exchanges before the calls at ``positions``, each with a random later call of the same kind, where there is one.

        ``alike``: the kind of every slot; negative for those that take no part."""
        steps = []
        for position in sorted(positions):
            slot = order[position]
            later = [other for other in order[position + 1 :] if other != slot and alike[other] == alike[slot] >= 0]
            if later:
                steps.append((position, slot, _dice.choice(later)))
        return SlotSwaps(tuple(steps), contents_at_calls(steps, len(alike)))


def contents_at_calls(steps: Iterable[tuple[int, int, int]], slots: int) -> list[int]:
    """The ``contents`` of :class:`SlotSwaps` that follow from its steps."""
    contents = list(range(slots))
    for _, slot, other in steps:
        contents[slot], contents[other] = contents[other], contents[slot]
    return contents


def kinds_of_slots(layouts: Sequence[wire.CaseLayout]) -> list[int]:
    """A number for every slot, the same for slots whose inputs and outputs have the same structure, shapes and values on every rank.

    ``layouts``: those of every rank. All are -1 where a slot's inputs are empty, or larger than ``MOST_BYTES``."""
    slots = len(layouts[0].arguments)
    largest = max(layout.input_bytes for layout in layouts) / max(slots, 1)
    if not 0 < largest <= MOST_BYTES:
        return [-1] * slots
    numbers: dict[str, int] = {}
    kinds = []
    for slot in range(slots):
        described = [[unplaced(layout.arguments[slot]), unplaced(layout.outputs[slot])] for layout in layouts]
        kinds.append(numbers.setdefault(json.dumps(described, sort_keys=True), len(numbers)))
    return kinds
