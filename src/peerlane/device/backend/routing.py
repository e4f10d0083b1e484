"""A process group that sends every call to the kit, to NCCL or to gloo, by its device, operation, dtype and group."""

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store, Work
from torch.distributed import distributed_c10d

from peerlane import settings
from peerlane.device.backend import kit
from peerlane.device.backend.captured_messages import captured_messages
from peerlane.device.backend.kit import Collectives, KitProvider
from peerlane.device.backend.neighbours import Seat, prepare_shared_gpus
from peerlane.device.backend.ordering import CudaLane, FinishedWork, JointWork
from peerlane.device.backend.spans import profiled, spanned
from peerlane.device.backend.symmetric import forget_symmetric_memory, serve_symmetric_memory
from peerlane.device.collectives.point_to_point import MOST_TRANSFERS, PointToPoint, Transfer
from peerlane.device.host.call_order import call_order
from peerlane.device.host.ipc import StoreExchange, leave
from peerlane.device.host.tally import count
from peerlane.device.host.waits import LONGEST_LIMIT_S, Waits
from peerlane.errors import DeviceTimeout, PeerlaneError, UsageError

c10d: Any = distributed_c10d
CLOSE_LIMIT = timedelta(seconds=10)
"""How long a rank waits for the others before it frees memory that they can write to."""
STOPPED_CLOSE_LIMIT = timedelta(seconds=3)
"""The same where the group has stopped: a rank that is late may never come."""
LIBRARIES = {"cpu": "gloo", "cuda": "nccl"}
"""The library that serves a device's tensors where the kit does not."""

_provider = KitProvider()


def use_provider(provider: KitProvider) -> KitProvider:
    """Makes groups that are created from now on use ``provider`` in the kit's place; returns the one before. For tests."""
    global _provider
    before, _provider = _provider, provider
    return before


@dataclass
class _Coalescing:
    """The calls since ``_start_coalescing``."""

    works: list[Work] = field(default_factory=list)
    collectives: bool = False
    """True if a child has collectives among its calls, not only messages."""


_Untyped: Any = ProcessGroup  # its overloads are those of every PyTorch before this one


class RoutedGroup(_Untyped):  # type: ignore[misc]
    """The part that knows no operation: children, the kit, routes, coalescing and the end."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta, *, name: str, ranks: Sequence[int]) -> None:
        super().__init__(rank, world_size)
        self._provider, self._timeout = _provider, timeout
        self._ranks = list(ranks) or list(range(world_size))
        self.waits = Waits(min(timeout.total_seconds(), LONGEST_LIMIT_S))
        """The waits of the kit's kernels for this group."""
        self._kit: Collectives | None = None
        self._messages: PointToPoint | None = None
        self._kit_device: torch.device | None = None
        self._lane: CudaLane | None = None
        self._coalescing: _Coalescing | None = None
        self._in_span, self._splits, self._connected = False, 0, False
        self._store = PrefixStore("peerlane", store)
        self._exchange = StoreExchange(PrefixStore("backend", store), rank, world_size)
        own = Seat.own()
        met = self._exchange([own.host, list(own.gpus), name])
        seats = [Seat(host, tuple(gpus)) for host, gpus, _ in met]
        self.common_name = met[0][2]
        """The name on all ranks. PyTorch counts a rank's groups in the names of split groups, so that they differ."""
        self._serves_messages = self._provider.serves_messages(seats)
        self._refusal = kit.refused_group(world_size, [seat.host for seat in seats])
        prepare_shared_gpus(seats, f"rank{ranks[rank] if ranks else rank}")  # before gloo, which reads its variables when it starts
        self._children: dict[str, Any] = {"cpu": c10d.ProcessGroupGloo(PrefixStore("gloo", store), rank, world_size, timeout=timeout)}
        kind = ProcessGroup.BackendType
        self._register_backend(torch.device("cpu"), kind.GLOO, self._children["cpu"])
        self._set_default_backend(kind.GLOO)
        if torch.cuda.is_available() and distributed_c10d.is_nccl_available():
            self._children["cuda"] = _nccl(PrefixStore("nccl", store), rank, world_size, timeout, name, ranks)
            self._register_backend(torch.device("cuda"), kind.NCCL, self._children["cuda"])
            self._set_default_backend(kind.NCCL)
        self._child_timeouts = dict.fromkeys(self._children, timeout)
        self._name = name
        serve_symmetric_memory(name, rank, world_size, PrefixStore("symmetric_memory", store))

    def _served(self, operation: str, tensor: torch.Tensor, refusal: str = "") -> Collectives | None:
        """Returns the kit, if it serves this call; counts where the call goes. All ranks of a call decide alike."""
        device = tensor.device
        if device.type != self._provider.device_type:
            if settings.checks_calls():
                what = f"{operation} of {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
                call_order().enter(self.common_name, self._ranks, what, self._timeout.total_seconds())
            count(operation, device.type, LIBRARIES.get(device.type, "nothing"))
            return None
        refusal = refusal or self._refusal or ("" if tensor.layout is torch.strided else "a sparse tensor; the kit serves dense ones")
        if not refusal and (self._kit is None or self._kit.closed):
            self._open_kit(device)
            refusal = self._refusal
        if not refusal and device != self._kit_device:
            refusal = f"a tensor on {device}; the group's kit works on {self._kit_device}, where its first call was"
        count(operation, device.type, LIBRARIES[device.type] if refusal else "kit", refusal)
        return None if refusal else self._kit

    def _open_kit(self, device: torch.device) -> None:
        """Opens the kit on all ranks, or on none. NCCL connects too: messages between some of the ranks may follow, which can not do it."""
        if self._provider.lane(device).capture():
            raise UsageError("the group's first collective came while a graph was captured; call it once before, on every rank")
        opened, messages, problem = None, None, ""
        try:
            opened = self._provider.open(self, device)
            if self._serves_messages and _whole(device) is None:
                messages = self._provider.messages(self, device)
        except (PeerlaneError, ImportError, RuntimeError) as error:
            problem = f"{type(error).__name__}: {error}"
        failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(self._exchange(problem)) if answer]
        if failed:
            self._refusal = f"the kit could not be opened on {'; '.join(failed)}"
            if opened is not None:
                opened.close()
            return
        self._kit, self._messages, self._kit_device, self._lane = opened, messages, device, self._provider.lane(device)
        if device.type == "cuda":
            self._child(device).eager_connect_single_device(device)

    def _on_kit(
        self, operation: str, call: Callable[[], None], tensors: Sequence[torch.Tensor], opts: Any, inputs: Sequence[torch.Tensor] = ()
    ) -> Work:
        """Starts ``call``, which reads and writes ``tensors``: those that it returns first. Profilers see the shapes of ``inputs``."""
        if profiled() and not self._in_span:
            return self._spanned(operation, inputs or tensors, lambda: self._on_kit(operation, call, tensors, opts))
        lane = self._lane
        assert lane is not None
        if self.waits.stopped:
            self._check()
        captured_messages(lane).launch()
        try:
            work = lane.run(call, tensors, asynchronous=opts.asyncOp)
        except DeviceTimeout as error:
            raise dist.DistBackendError(str(error)) from error
        if isinstance(work, FinishedWork):
            work.check = self._check
        return self._noted(work)

    def _spanned(self, operation: str, inputs: Sequence[torch.Tensor], start: Callable[[], Work]) -> Work:
        """Returns ``start()``, all calls of which are one span of a profiler."""
        if self._in_span or not profiled() or not inputs or inputs[0].device.type != self._provider.device_type:
            return start()
        self._in_span = True
        try:
            return spanned(operation, inputs, start, captured=bool(self._provider.lane(inputs[0].device).capture()))
        finally:
            self._in_span = False

    def _messenger(self, device: torch.device) -> "RoutedGroup | None":
        """Returns the group whose kit takes this group's messages; None if NCCL or gloo does.

        This is the group of all ranks, if its kit is open: then the ranks of a message need not wait for other ranks to open one."""
        if (whole := _whole(device)) is not None:
            return whole
        if device.type != self._provider.device_type or self._refusal or not self._serves_messages:
            return None
        if self._kit is None or self._kit.closed:
            self._open_kit(device)
        return self if self._messages is not None and self._kit_device == device else None

    def _start_messages(self, transfers: Sequence[Transfer], tensors: Sequence[torch.Tensor]) -> Work:
        device = self._kit_device
        assert device is not None
        self._check()
        lane = self._provider.lane(device)
        if len(transfers) == 1 and lane.capture():
            return captured_messages(lane).add(transfers[0], tensors[0], self._launch_messages)
        captured_messages(lane).launch()
        chunks = [slice(first, first + MOST_TRANSFERS) for first in range(0, len(transfers), MOST_TRANSFERS)]
        works = [self._launch_messages(transfers[chunk], tensors[chunk]) for chunk in chunks]
        return works[0] if len(works) == 1 else JointWork(works)

    def _launch_messages(self, transfers: Sequence[Transfer], tensors: Sequence[torch.Tensor], points: Sequence[Any] = ()) -> Work:
        messages, device = self._messages, self._kit_device
        assert messages is not None and device is not None
        keys = {(transfer.peer, transfer.receives, transfer.label): None for transfer in transfers}
        call = functools.partial(messages.start, transfers)
        try:
            work = self._provider.lane(device).run_beside(call, tensors, list(keys), points)
        except DeviceTimeout as error:
            raise dist.DistBackendError(str(error)) from error
        if isinstance(work, FinishedWork):
            work.check = self._check
        return work

    def _check(self) -> None:
        """Raises DistBackendError if waits of this group have ended early: what its last calls have returned is of no use."""
        try:
            self.waits.check()
        except DeviceTimeout as error:
            raise dist.DistBackendError(str(error)) from error

    def _on_child(self, tensor: torch.Tensor, issue: Callable[[Any], Work | None]) -> Work:
        child = self._child(tensor.device)
        if tensor.device.type != self._provider.device_type:
            return self._noted(issue(child))
        lane = self._provider.lane(tensor.device)
        captured_messages(lane).launch()
        with lane.lock:
            lane.before_child()
            work = issue(child)
            if self._coalescing is None:
                lane.after_child(child, work)
            else:
                self._coalescing.collectives = True
        return self._noted(work)

    def _noted(self, work: Work | None) -> Work:
        """Returns the work of a call, also where PyTorch gives none because the call runs on the caller's stream."""
        work = FinishedWork() if work is None else work
        if self._coalescing is not None:
            self._coalescing.works.append(work)
        return work

    def _child(self, device: torch.device) -> Any:
        if device.type in self._children:
            return self._children[device.type]
        raise UsageError(
            f"a tensor on {device}: this process group serves {' and '.join(self._children)} tensors; "
            "CUDA tensors need a GPU and a PyTorch with NCCL"
        )

    def barrier(self, opts: Any = None) -> Work:
        """Waits until all ranks have come and the work of their current streams has ended. A captured barrier orders the device only."""
        opts = options(opts, c10d.BarrierOptions)
        device = self._barrier_device(opts)
        if device is not None:
            lane = self._provider.lane(device)
            captured_messages(lane).launch()
            if lane.capture():
                work: Work = self.allreduce([torch.zeros(1, dtype=torch.int32, device=device)])
                return work
            lane.synchronize()
            self._check()
        self._connect_once(device)
        count("barrier", "cpu", "gloo")
        waiting = c10d.BarrierOptions()
        waiting.timeout = opts.timeout
        return self._noted(self._children["cpu"].barrier(waiting))

    def _connect_once(self, device: torch.device | None) -> None:
        """Connects NCCL at the first barrier, as NCCL's own does: messages between some of the ranks may follow, which can not do it."""
        if self._connected or "cuda" not in self._children or self._serves_messages:
            return
        self._connected = True
        if self._kit is None and all(self._exchange(device is not None)) and device is not None:
            self._child(device).eager_connect_single_device(device)

    def _barrier_device(self, opts: Any) -> torch.device | None:
        """Returns the GPU whose work has to end too; None if this process has not used one."""
        if "cuda" not in self._children or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return self._kit_device
        if opts.device_ids:
            return torch.device("cuda", opts.device_ids[0])
        return self._kit_device or self.bound_device_id or torch.device("cuda", torch.cuda.current_device())

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = _Coalescing()
        if (child := self._child(device)).supports_coalescing:
            child._start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Work:
        coalesced, self._coalescing = self._coalescing or _Coalescing(), None
        child = self._child(device)
        if not child.supports_coalescing:
            return JointWork(coalesced.works)
        work = child._end_coalescing()
        if coalesced.collectives:
            self._provider.lane(device).after_child(child, work)
        own = [known for known in coalesced.works if isinstance(known, FinishedWork)]
        return JointWork(own if work is None else [*own, work])

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> "RoutedGroup | None":
        """Returns a group of some of this group's ranks, in their order here; None on the others. All ranks of this group call it.

        The new group serves all types of devices and has children of its own, so ``opts`` and ``device_types`` have no effect."""
        members, self._splits = sorted(ranks), self._splits + 1
        if not members or len(set(members)) < len(members) or not 0 <= members[0] <= members[-1] < self.size():
            raise UsageError(f"split_group got the ranks {members}: expected different numbers within this group of {self.size()}")
        if self.rank() not in members:
            return None
        split = f"split/{self._splits}/{'-'.join(map(str, members))}"
        name, store, timeout = group_name or f"{self._name}/{split}", PrefixStore(split, self._store), timeout or self._timeout
        place, seats = members.index(self.rank()), [self._ranks[member] for member in members]
        group = type(self)(store, place, len(members), timeout, name=name, ranks=seats)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        if self.bound_device_id is not None:
            group.bound_device_id = self.bound_device_id
        return group

    def _get_backend(self, device: torch.device) -> Any:
        """Returns the child for a type of device; None to torch's search for a communicator that new groups could split off: all ranks
        would have to take part, and those of a new group of this backend do not."""
        return None if sys._getframe(1).f_code is _SPLIT_SOURCE else super()._get_backend(device)

    def get_group_store(self) -> Store:
        """Returns the store where the ranks of this group leave each other messages; the C++ class holds none for a group written in
        Python."""
        return self._store

    def getBackendName(self) -> str:
        return "peerlane"

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._child_timeouts = dict.fromkeys(self._children, timeout)
        self.waits.set_limit(min(timeout.total_seconds(), LONGEST_LIMIT_S))
        for child in self._children.values():
            child.set_timeout(timeout)

    def current_timeout(self) -> timedelta:
        """Returns the timeout that was set last, be it on a child alone, as ``torch.distributed``'s own function does."""
        for name, child in self._children.items():
            there = child.options._timeout
            if there != self._child_timeouts.setdefault(name, self._timeout):
                self._timeout = self._child_timeouts[name] = there
        return self._timeout

    def shutdown(self) -> None:
        self._close_kit(waits=True)
        for child in self._children.values():
            child.shutdown()

    def abort(self) -> None:
        self._close_kit(waits=False)
        for child in self._children.values():
            child.abort()

    def _close_kit(self, *, waits: bool) -> None:
        """Frees the kit's memory once no rank can write to it; where that can not be known, the end of the process frees it.

        Nobody waits long for ranks of a group that has stopped, and an aborted group stops here."""
        forget_symmetric_memory(self._name)
        opened, self._kit, self._messages = self._kit, None, None
        device = self._provider.device_of(self)  # also where operators alone have used the group
        if not waits and opened is not None:
            self.waits.stop("this rank has aborted the group")
        if device is None or not waits or self._refusal:  # what opened on some of the ranks only is closed there
            leave(self)
            return
        with contextlib.suppress(RuntimeError):
            try:
                self._provider.lane(device).synchronize()
            finally:
                leave(self)  # not before: a rank may die while this one's kernels wait for it
            opts = c10d.BarrierOptions()
            opts.timeout = STOPPED_CLOSE_LIMIT if self.waits.stopped else CLOSE_LIMIT
            self._children["cpu"].barrier(opts).wait(opts.timeout)
            self._provider.close(self)


def options(given: Any, kind: Any) -> Any:
    """Returns the options of a call, the usual ones if none are ``given``. Raises UsageError for anything else, such as an operation."""
    if given is None:
        return kind()
    if isinstance(given, kind):
        return given
    raise UsageError(f"a group of the backend peerlane got {given!r}: expected {kind.__name__}, as torch.distributed's functions give it")


_SPLIT_SOURCE = getattr(getattr(c10d, "_get_split_source", None), "__code__", None)


def _whole(device: torch.device) -> RoutedGroup | None:
    """Returns the group of all ranks, if its kit takes messages of tensors on ``device``."""
    whole = dist.GroupMember.WORLD
    return whole if isinstance(whole, RoutedGroup) and whole._messages is not None and whole._kit_device == device else None


def _nccl(store: Store, rank: int, world_size: int, timeout: timedelta, name: str, ranks: Sequence[int]) -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group = list(ranks)
    options.group_name = name
    return c10d.ProcessGroupNCCL(store, rank, world_size, options)
