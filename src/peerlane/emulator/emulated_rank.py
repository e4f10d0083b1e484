"""A group of emulated ranks, as the libraries see it that stand for Triton, cuda.core and torch.distributed."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peerlane.device.host.group import Group, current_group
from peerlane.emulator.ptx_front_end import Ptx
from peerlane.errors import LaunchError


@dataclass(frozen=True)
class PtxLaunch:
    """A launch of a kernel of a PTX module."""

    module: Ptx
    kernel: str
    grid: Sequence[int]
    block: Sequence[int]
    args: Sequence[Any]
    """ctypes values"""
    shared_bytes: int = 0
    cluster: int = 1
    dependent: bool = False
    """whether it may begin before the launch before it has ended"""


class EmulatedRank(Group):
    """One rank of an emulated group; ``member`` is its number among all ranks."""

    member: int
    team: Any
    """the state that the ranks of the group share"""

    @abstractmethod
    def launch_ptx(self, launch: PtxLaunch) -> None:
        """Launches on every rank of the group: waits until all have come here."""


def emulated_rank(kernel: str) -> EmulatedRank:
    """Returns the group of the calling thread. Raises LaunchError, which names the kernel, where that is no emulated rank."""
    group = current_group()
    if not isinstance(group, EmulatedRank):
        raise LaunchError(f"kernel {kernel} was launched outside of emulated ranks, and there is no GPU")
    return group
