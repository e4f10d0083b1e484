"""Choices among ways to run a kernel, measured at first use: which tiles, which stages, how many communicator blocks.

    tiling = choose(group, "gemm_all_reduce", (m, n, k), options, make)      collective
    report()                                                                what was chosen in this process, and how

``options`` come best first by the kernel's model. All ranks time one after the other, for a few launches each, until the budget is used up;
an option counts with its slowest rank's time, so all ranks choose the same. What was chosen is kept in the cache folder, for this kernel,
shape, world size and class of node. The model alone decides without ``PEERLANE_TUNE=1``, while a graph is captured, and where ranks do not
run at the same time on GPUs.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from peerlane import settings
from peerlane.device.group import Group

Option = TypeVar("Option")

BUDGET_S = 2.5
"""for one shape, compiling included; the first option is always timed to its end"""
LAUNCHES = 6
WORTH_IT = 0.97
"""An option has to be that much faster than the model's, as a share of its time: what is less is noise."""


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
            times = _times(group, options, make)
            best = min(times, key=lambda name: times[name])
            chosen = Choice(kernel, shape, best if times[best] < WORTH_IT * times[names[0]] else names[0], "measured", times)
            if group.rank == 0:
                _keep(_file(), key, chosen.option)
    else:
        chosen = first
    _choices[kernel, shape] = chosen
    return options[names.index(chosen.option)]


def node_class(group: Group) -> list[str | int]:
    """What times depend on besides the shape: the GPU, the SMs of a rank's share of it, and how many ranks share it."""
    return [torch.cuda.get_device_name(group.device), group.sm_count, group.ranks_per_device]


def _times(
    group: Group, options: Sequence[Option], make: Callable[[Option], tuple[Callable[[], object], Callable[[], None]]]
) -> dict[str, float]:
    """The slowest rank's microseconds of each option until the budget is used up."""
    begin, times = time.monotonic(), dict[str, float]()
    for option in options:
        call, close = make(option)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call, unused-ignore]
        call()
        torch.cuda.synchronize(group.device)
        group.exchange(None)
        events[0].record()
        for _ in range(LAUNCHES):
            call()
        events[1].record()
        events[1].synchronize()
        spent = group.exchange([events[0].elapsed_time(events[1]) * 1e3 / LAUNCHES, time.monotonic() - begin])
        close()  # all ranks have come here, behind their last launch
        times[str(option)] = max(us for us, _ in spent)
        if max(seconds for _, seconds in spent) > BUDGET_S:
            break
    return times


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
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({**_kept(path), key: option}, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        return
