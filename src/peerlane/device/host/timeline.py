"""A ring in device memory in which kernels leave stamps of their spans. ``tools/trace.py`` draws them."""

import struct
from dataclasses import dataclass

import torch

from peerlane.errors import UsageError

EVENT_BYTES = 16


@dataclass(frozen=True)
class Event:
    """One stamp: nanoseconds of the GPU's clock, role and block, the kind of span, and whether it ends there."""

    nanoseconds: int
    role: int
    block: int
    kind: int
    end: bool


class Timeline:
    """Room for the last ``events`` stamps of the kernels that know of it."""

    def __init__(self, events: int, device: torch.device) -> None:
        if events < 1:
            raise UsageError(f"a timeline of {events} events; expected a positive number")
        self._memory = torch.zeros((events + 1) * EVENT_BYTES, dtype=torch.uint8, device=device)
        self.address = self._memory.data_ptr()

    def read(self) -> list[Event]:
        """Every stamp so far, oldest first; waits for the device."""
        return decode(self._memory.cpu().numpy().tobytes())

    def clear(self) -> None:
        """Forget all stamps."""
        self._memory.zero_()


def decode(ring: bytes) -> list[Event]:
    """The stamps of a ring, in the order of their times. The first 16 bytes count how many have been made; older ones were overwritten."""
    (made,) = struct.unpack_from("<I", ring)
    kept = min(made, len(ring) // EVENT_BYTES - 1)
    found = []
    for index in range(1, kept + 1):
        nanoseconds, who, what = struct.unpack_from("<QII", ring, index * EVENT_BYTES)
        found.append(Event(nanoseconds, who >> 24, who & 0xFFFFFF, what >> 1, bool(what & 1)))
    # A span of no length ends after it has begun.
    return sorted(found, key=lambda event: (event.nanoseconds, event.end))
