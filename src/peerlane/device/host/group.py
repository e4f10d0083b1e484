"""A group: some ranks that can address each other's memory, as one of them sees it.

The kit's host code asks a group, and nothing else, for ranks, exchange, memory and kernels. There are two kinds:

    peerlane.device.host.ipc   processes of one node, joined by a torch.distributed process group
    peerlane.emulator.ranks    threads on CPUs, whose kernels run in the emulator

``group_of(group)`` of ``group_of.py`` gives the group of a process group (default: all ranks), or of the caller's emulated rank.
"""

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from peerlane.device.host.group_cache import GroupCache
from peerlane.device.host.lane import Lane
from peerlane.device.host.layout import Layout
from peerlane.device.host.memory_report import MemoryReport
from peerlane.device.host.tensor_map import TensorMap, TensorMapSpec, TensorPlace
from peerlane.device.host.waits import WaitRecord, Waits
from peerlane.errors import UsageError

Small = Any
"""What ranks exchange: None, bool, int, float, str, and lists of these. Tuples come back as lists."""
Made = TypeVar("Made")
Arguments = ParamSpec("Arguments")

MAX_RANKS = 8


class Memory(Protocol):
    """Zeroed memory of the same size on every rank of a group, which all ranks can address."""

    @property
    def bases(self) -> Sequence[int]:
        """Where every rank's memory lies, as kernels of this rank address it."""
        ...

    @property
    def fault(self) -> int:
        """The address of a wait record that the host shares with kernels."""
        ...

    @property
    def record(self) -> WaitRecord:
        """The wait record as the host has it, also after the device was lost."""
        ...

    @property
    def layout(self) -> Layout:
        """Which parts of it are taken."""
        ...

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """This rank's own bytes at ``offset``."""
        ...

    def close(self) -> None:
        """Give the memory back, once no kernel of any rank uses it."""
        ...


class DeviceLaunch(Protocol):
    """A kernel with its grid and arguments. Calling it starts the kernel on the current stream."""

    @property
    def args(self) -> tuple[Any, ...]:
        """ctypes values, which may be changed between calls."""
        ...

    def __call__(self) -> None: ...


class DeviceKernel(Protocol):
    """A loaded kernel."""

    @property
    def name(self) -> str: ...

    def attributes(self) -> dict[str, int]:
        """``registers`` of a thread, static ``shared_bytes`` of a block."""
        ...

    def bind(
        self, grid: int | Sequence[int], block: int | Sequence[int], args: Sequence[Any], *, shared_bytes: int = 0, cluster: int = 1
    ) -> DeviceLaunch:
        """A launch with these ctypes arguments. ``cluster`` repeats what the source says in ``__cluster_dims__``."""
        ...


class Group(ABC):
    """Some ranks of one node, as one of them sees them. Creating one is collective."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        if not 1 <= world_size <= MAX_RANKS:
            raise UsageError(f"a group spans 1 to {MAX_RANKS} ranks of one node; this one has {world_size}: pass another group")
        self.rank, self.world_size, self.device = rank, world_size, device
        self.sm_count = 0
        """SMs of a rank's share of its device: the smallest number of any rank, the same on all"""
        self.max_threads = 1024
        """threads of a block that host code should not exceed: fewer on emulated ranks, whose barriers cost the square of it"""
        self.ranks_per_device = 1
        """how many ranks share a device: the largest number of any device"""
        self.takes_turns = False
        """whether ranks that share a device run one at a time, for want of SMs of their own"""
        self.runs_together = False
        """whether every rank is a process of its own, so that host code of one may wait for all ranks' kernels"""
        self.waits = Waits()
        """how long its kernels wait for other ranks"""
        self.lane: Lane | None = None
        """the order of its kernels and other groups' on this rank's device; None where streams alone order them"""
        self.check_call: Callable[[str], None] | None = None
        """compares a kernel that is about to be launched with those of the other ranks, if the user asks for it"""
        self.lock = threading.RLock()
        """held while arguments of a launch are set and it is launched, and while memory is taken"""
        self.cache = GroupCache()
        """what host code keeps for later calls of this group, see ``per_group``"""

    @property
    def waiting_blocks(self) -> int:
        """Blocks, each as large as an SM, that may wait on this rank for a rank that runs a library's matrix products before it comes.

        Those launch clusters. Where ranks share a GPU, other ranks' waiting blocks hold its SMs meanwhile. Half a share each leaves pairs
        of neighbouring SMs free."""
        return max(1, self.sm_count // (2 if self.ranks_per_device > 1 else 1))

    def wait_limit_s(self, seconds: float) -> float:
        """The limit of a wait in a kernel that a rank with a device of its own would give ``seconds``: longer where ranks take turns."""
        return seconds * (self.ranks_per_device if self.takes_turns else 1)

    @abstractmethod
    def exchange(self, value: Small) -> list[Small]:
        """Collective: every rank's value, by rank. Goes by the CPU and returns when all ranks have called it."""

    def agree(self, number: int) -> list[int]:
        """Collective: every rank's number (0 to 2^32 - 1), by rank, soon after all hosts have come. For what kernels' sizes depend on."""
        return list(self.exchange(number))

    @abstractmethod
    def allocate(self, nbytes: int, name: str = "") -> Memory:
        """Collective: zeroed memory on every rank, for the kernel ``name``. Raises UsageError on every rank if they differ in the size."""

    def close(self) -> None:
        """Give back the memory of all that ``per_group`` keeps, once no kernel of any rank uses it and all ranks have come here. Graphs
        that were captured are not to be replayed. The group can be used again; what it needs is made anew, collectively."""
        self.cache.clear()

    def free_closed(self) -> None:
        """Collective: free memory of closed arenas that has to be unmapped on all ranks first. Otherwise the next arena does."""
        return

    @abstractmethod
    def memory_report(self) -> MemoryReport:
        """What this rank's arenas take at present, and which kernels use them."""

    @abstractmethod
    def kernel(
        self, source: str | Path, name: str, *, defines: Mapping[str, str | int], on_failure: Callable[[], None] | None = None
    ) -> DeviceKernel:
        """The kernel ``name`` of a source, compiled for this rank's device. ``on_failure`` may raise what explains a failed launch."""

    def nccl_world(self) -> Any:
        """What ``peerlane.device.nccl.world`` returns on these ranks; raises UsageError where nothing stands for NCCL."""
        raise UsageError("these ranks have no NCCL; expected processes of torch.distributed with a GPU each, or emulated ranks")

    def announce(self, call: tuple[Any, ...]) -> None:
        """Tell what the next launch is for: the operation, its bytes, and what else is the same on all ranks. Emulated ranks compare it."""
        return

    def compile_ahead(self, kernels: Sequence[tuple[str | Path, Mapping[str, str | int]]]) -> None:
        """Compile sources with their defines for ``kernel``, where compiled code is kept: every rank begins with another one."""
        return  # emulated ranks compile as one

    @abstractmethod
    def address(self, tensor: torch.Tensor) -> int:
        """Where kernels of this rank find the tensor's first element. Valid while the tensor's memory is kept."""

    @abstractmethod
    def copy(self, target: int, source: torch.Tensor) -> None:
        """Copies a contiguous tensor to an address of any rank's arena on the current stream, by a copy engine. The other rank sees it
        behind a later signal from this stream."""

    def place(self, tensor: torch.Tensor) -> TensorPlace:
        """The tensor as kernels of this group's ranks address it."""
        return TensorPlace(self.address(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride())

    @abstractmethod
    def encode(self, spec: TensorMapSpec) -> TensorMap:
        """A tensor map as kernels of this group want it."""


def one_host(hosts: Sequence[object]) -> None:
    """Raises UsageError unless all ranks of a group, whose hosts these are by rank, are on one host."""
    if elsewhere := [rank for rank, host in enumerate(hosts) if host != hosts[0]]:
        raise UsageError(f"ranks {elsewhere} are on another host than rank 0; a group spans one node: pass a group of one host's ranks")


def is_kept(function: Callable[..., Any], group: Group, *args: Any) -> bool:
    """Whether the group keeps the result of a function of ``per_group`` for these arguments."""
    return (function.__wrapped__, args) in group.cache.entries  # type: ignore[attr-defined]


_current = threading.local()


@contextmanager
def entered(group: Group) -> Iterator[None]:
    """While this lasts, ``group_of(None)`` of this thread is ``group``."""
    before = getattr(_current, "group", None)
    _current.group = group
    try:
        yield
    finally:
        _current.group = before


def current_group() -> Group | None:
    """The group that this thread has entered; None outside emulated and local ranks."""
    found: Group | None = getattr(_current, "group", None)
    return found


def per_group(make: Callable[Concatenate[Group, Arguments], Made]) -> Callable[Concatenate[Group, Arguments], Made]:
    """A function of a group and hashable arguments whose results the group keeps: one for each set of arguments.

    It keeps a bounded number of them, see :mod:`peerlane.device.host.group_cache`. Look a result up in each call: memory of one that was
    evicted is used by others, and its launches raise UsageError."""

    @functools.wraps(make)
    def made(group: Group, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        key = (make, args, tuple(kwargs.items())) if kwargs else (make, args)
        cache = group.cache
        with group.lock:
            entry = cache.entries.get(key)
            if entry is None:
                entry = cache.make(key, functools.partial(make, group, *args, **kwargs), stays=not args and not kwargs)
            found: Made = cache.use(entry)
        return found

    return made
