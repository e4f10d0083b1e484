"""How many calls ran on the kit, on NCCL and on gloo, and why a call did not run on the kit."""

import logging
from collections import Counter
from dataclasses import dataclass

_log = logging.getLogger("peerlane.device.backend")


@dataclass(frozen=True, order=True)
class Count:
    """Calls of one operation of this process that ran at one place for one reason."""

    operation: str
    device: str
    """``cuda`` or ``cpu``: where the tensors lie."""
    ran_on: str
    """``kit``, ``nccl`` or ``gloo``."""
    reason: str
    """Why the kit did not serve the call; empty where it did, and for CPU tensors."""
    calls: int


_calls: Counter[tuple[str, str, str, str]] = Counter()


def count(operation: str, device: str, ran_on: str, reason: str = "") -> None:
    """Count one call. A reason is logged as a warning the first time that an operation has it."""
    key = (operation, device, ran_on, reason)
    _calls[key] += 1
    if reason and _calls[key] == 1:
        _log.warning("%s runs on %s: %s", operation, ran_on, reason)


def counts() -> list[Count]:
    """All calls of this process since its start or the last ``reset_counts``, sorted by operation."""
    return sorted(Count(*key, calls) for key, calls in _calls.items())


def total() -> int:
    """How many calls ``counts()`` has, without sorting them."""
    return _calls.total()


def reset_counts() -> None:
    """Forget all calls so far."""
    _calls.clear()


def report() -> str:
    """``counts()`` as a table of text, one line an entry."""
    found = counts()
    if not found:
        return "no collective has been called"
    rows = [
        ("operation", "tensors", "ran on", "calls", "reason"),
        *((c.operation, c.device, c.ran_on, str(c.calls), c.reason) for c in found),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in rows)
    return "\n".join(lines)
