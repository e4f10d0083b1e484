"""Choices among ways to run a kernel, measured at first use: which tiles, which stages, how many communicator blocks.

    tiling = choose(group, "gemm_all_reduce", (m, n, k), options, make)      collective
    report()                                                                what was chosen in this process, and how

``options`` come best first by the kernel's model. Each one is timed beside the best before it, in short stretches that take turns, until
the budget is used up. An option counts with its slowest rank's time, so all ranks choose the same. What was chosen is kept in the cache
folder, for this kernel, shape, world size and class of node. The model alone decides without ``PEERLANE_TUNE=1``, while a graph is
captured, and where ranks do not run at the same time on GPUs.
"""

import json
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from peerlane import settings
from peerlane.common.files import write_atomically
from peerlane.device.host.group import Group

Option = TypeVar("Option")

BUDGET_S = 2.7
"""for one shape, compiling included; the first two options are always timed"""
STRETCHES, LAUNCHES = 5, 4
WORTH_IT = 0.97
"""An option has to take less than this share of the best one's time before it: a smaller gain is noise."""


@dataclass(frozen=True)
class Choice:
    """One decision: the option, how it came (``measured``, ``cache`` or ``model``), and the slowest rank's microseconds of those timed."""

    kernel: str
    shape: tuple[Hashable, ...]
    option: str
    by: str
    microseconds: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        times = "; ".join(f"{option} {us:.1f} us" for option, us in self.microseconds.items() if option != self.option)
        own = f" {self.microseconds[self.option]:.1f} us" if self.option in self.microseconds else ""
        return f"{self.kernel} {self.shape}: {self.option}{own}, {self.by}{f' ({times})' if times else ''}"


_choices: dict[tuple[str, tuple[Hashable, ...]], Choice] = {}


def report() -> list[Choice]:
    """The choices of this process so far, in order."""
    return list(_choices.values())


def choose(
    group: Group,
    kernel: str,
    shape: tuple[Hashable, ...],
    options: Sequence[Option],
    make: Callable[[Option], tuple[Callable[[], object], Callable[[], None]]],
) -> Option:
    """Collective: the best of the options, the same on all ranks, which pass the same ones in the same order.

    ``make(option)`` is collective and gives a call that launches the kernel once, and one that gives its memory back."""
    names = [str(option) for option in options]
    first = Choice(kernel, shape, names[0], "model")
    if len(options) > 1 and settings.tunes() and group.runs_together and not torch.cuda.is_current_stream_capturing():
        key = json.dumps([kernel, [str(part) for part in shape], group.world_size, node_class(group), names])
        # One rank looks, so that all see the same.
        (known, *_) = group.exchange(_kept(_file()).get(key) if group.rank == 0 else None)
        if known in names:
            chosen = Choice(kernel, shape, known, "cache")
        else:
            best, times = _best(group, options, make)
            chosen = Choice(kernel, shape, str(best), "measured", times)
            if group.rank == 0:
                _keep(_file(), key, chosen.option)
    else:
        chosen = first
    _choices[kernel, shape] = chosen
    return options[names.index(chosen.option)]


def node_class(group: Group) -> list[str | int]:
    """What times depend on besides the shape: the GPU, the SMs of a rank's share of it, and how many ranks share it."""
    return [torch.cuda.get_device_name(group.device), group.sm_count, group.ranks_per_device]


def _best(
    group: Group, options: Sequence[Option], make: Callable[[Option], tuple[Callable[[], object], Callable[[], None]]]
) -> tuple[Option, dict[str, float]]:
    """The best option, and the microseconds of those that were timed before the budget was used up. Two of them have memory at a time."""

    def ready(option: Option) -> tuple[Callable[[], object], Callable[[], None]]:
        call, close = make(option)
        call()
        torch.cuda.synchronize(group.device)
        return call, close

    begin, times, best = time.monotonic(), dict[str, float](), options[0]
    call, close = ready(best)
    for option in options[1:]:
        started = time.monotonic()
        other, close_other = ready(option)
        times[str(best)], times[str(option)] = _in_turns(group, (call, other))
        if times[str(option)] < WORTH_IT * times[str(best)]:
            best, call, other, close, close_other = option, other, call, close_other, close
        close_other()  # all ranks are behind their last launch
        now = time.monotonic()
        if max(group.exchange(now - begin + now - started)) > BUDGET_S:  # another option takes about as long as this one
            break
    close()
    return best, times


def _in_turns(group: Group, calls: Sequence[Callable[[], object]]) -> list[float]:
    """The slowest rank's microseconds of each call: the median of stretches that take turns."""
    own: list[list[float]] = [[] for _ in calls]
    for _ in range(STRETCHES):
        for call, known in zip(calls, own, strict=True):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call, unused-ignore]
            group.exchange(None)
            call()  # ranks wait for each other in it
            events[0].record()
            for _ in range(LAUNCHES):
                call()
            events[1].record()
            events[1].synchronize()
            known.append(events[0].elapsed_time(events[1]) * 1e3 / LAUNCHES)
    of_ranks = group.exchange(own)
    return [statistics.median(map(max, zip(*(rank[i] for rank in of_ranks), strict=True))) for i in range(len(calls))]


def _file() -> Path:
    return settings.cache_dir() / "tuned.json"


def _kept(path: Path) -> dict[str, str]:
    """What the file holds; nothing where it cannot be read, and no entry that is not a string."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}


def _keep(path: Path, key: str, option: str) -> None:
    """Adds an entry, by a new file that takes the old one's place. A folder that cannot be written keeps nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({**_kept(path), key: option}, indent=1).encode())
    except OSError:
        return
