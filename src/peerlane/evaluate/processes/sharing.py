"""Tries whether trusted and candidate ranks can share memory under an isolation, with one rank of each, before anything is judged.

Which of the kernel's boundaries the CUDA driver's sharing passes depends on driver and kernel, and is documented nowhere. Trying takes
seconds, so that it was possible is remembered until the machine starts anew.
"""

import contextlib
import functools
import hashlib
from pathlib import Path

import torch

from peerlane.common.place import Device
from peerlane.common.version import __version__
from peerlane.errors import HarnessError
from peerlane.evaluate.messages import Request
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.processes.session import Session
from peerlane.evaluate.rank_interface import BlockInterface
from peerlane.hardware.virtual_node import VirtualNode
from peerlane.sandbox.isolation import Isolation
from peerlane.settings import Deadlines, PoolSettings, cache_dir

_ONE_ATTEMPT = PoolSettings(warm_groups=1, start_attempts=1)
_MACHINE = (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/driver/nvidia/version"))


@functools.cache
def sharing_failure(isolation: Isolation, device: Device, deadlines: Deadlines, mps: bool = False) -> str:
    """Returns why a candidate rank could not start or map a trusted rank's arena; empty if it could. ``mps``: through MPS."""
    mark = _mark(isolation, f"{device} mps" if mps else device)
    if mark.exists():
        return ""
    failure = _try(isolation, device, deadlines, VirtualNode(1, 1, "mps") if mps else None)
    if not failure:
        with contextlib.suppress(OSError):  # it is tried again next time
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    return failure


def _mark(isolation: Isolation, device: str) -> Path:
    """The file that stands for success under this isolation, with this software, on this machine since its start."""
    parts = [__version__, torch.__version__, device, isolation.tier, *isolation.measures, *isolation.sandbox]
    for path in _MACHINE:
        with contextlib.suppress(OSError):
            parts.append(path.read_text())
    return cache_dir() / "sharing" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _try(isolation: Isolation, device: Device, deadlines: Deadlines, node: VirtualNode | None) -> str:
    try:
        with Session(device, 1, deadlines, _ONE_ATTEMPT, isolation, node=node) as session:
            session.start_warm_groups(1)
            (exported,) = session.trusted.ask(Request(BlockInterface.export_arena), "spawn", deadlines.spawn)
            group = session.take_group()
            (byte,) = group.ask(Request(BlockInterface.import_arena, exported.arena), "spawn", deadlines.spawn)
            return "" if byte == exported.byte else "what one rank wrote, the other could not read"
    except (GroupFailure, HarnessError) as error:
        return str(error).strip()
