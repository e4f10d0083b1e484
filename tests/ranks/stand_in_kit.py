"""The kit's collectives on CPU tensors, through shared memory: what the backend is tested with where there is no GPU.

Every call says what it is, and every rank compares what the others said: ranks that disagree about the next call get an error at once.
"""

import contextlib
import ctypes
import mmap
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from peerlane.device.backend import routing
from peerlane.device.backend.neighbours import Seat
from peerlane.device.backend.ordering import NO_TIMEOUT, FinishedWork
from peerlane.device.collectives.checks import part_bytes, require_contiguous, require_fit, require_part, require_parts, require_root
from peerlane.device.collectives.point_to_point import Transfer
from peerlane.device.collectives.reductions import SUM, Reduction
from peerlane.errors import DeviceError, DeviceTimeout
from ranks.pool import RankPool

WAIT_S = 10.0
SLOT_BYTES, TITLE_BYTES = 1 << 18, 128


class SharedMemoryKit:
    """What ``Communicator`` does, for CPU tensors of at most 256 KiB a rank. ``calls`` holds the names of the calls so far."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self._path, size = path, world_size * (8 + TITLE_BYTES + SLOT_BYTES)
        with path.open("a+b") as file:
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        whole = np.frombuffer(self._memory, dtype=np.uint8)
        self._progress = whole[: 8 * world_size].view(np.int64)
        self._titles = whole[8 * world_size :][: TITLE_BYTES * world_size].reshape(world_size, TITLE_BYTES)
        self._slots = whole[(8 + TITLE_BYTES) * world_size :].reshape(world_size, SLOT_BYTES)
        self._rank, self._world_size, self._step = rank, world_size, 0
        self.calls: list[str] = []
        self.closed = False

    def _exchange(self, title: str, own: torch.Tensor | None) -> list[torch.Tensor]:
        """Every rank's bytes; ``own`` may be shorter than other ranks'."""
        self.calls.append(title.split()[0])
        text = title.encode().ljust(TITLE_BYTES)
        self._reach(2 * self._step)
        if own is not None and own.nbytes:
            self._slots[self._rank, : own.nbytes] = own.view(-1).view(torch.uint8).numpy()
        self._titles[self._rank] = np.frombuffer(text, dtype=np.uint8)
        self._progress[self._rank] = 2 * self._step + 1
        self._reach(2 * self._step + 1)
        titles = {bytes(title).decode().strip() for title in self._titles}
        if len(titles) > 1:
            raise DeviceError(f"the ranks disagree about the next call: {sorted(titles)}")
        copies = [torch.from_numpy(slot.copy()) for slot in self._slots]
        self._step += 1
        self._progress[self._rank] = 2 * self._step
        return copies

    def _reach(self, progress: int) -> None:
        end = time.monotonic() + WAIT_S
        while int(self._progress.min()) < progress:
            if time.monotonic() > end:
                raise DeviceTimeout(f"rank {self._rank} waited {WAIT_S} s for step {progress}; seen {self._progress.tolist()}")
            time.sleep(0.0002)

    def _check(self, output: torch.Tensor, input: torch.Tensor, outputs: int = 1, inputs: int = 1, root: int = 0) -> None:
        """Refuses what the kit refuses."""
        require_fit(output, input, outputs, inputs)
        require_contiguous(output, input)
        require_root(root, self._world_size)

    def _reduced(self, title: str, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        named = f"{title} {tensor.dtype} {reduction.name} {reduction.factor}"
        parts = [copy[: tensor.nbytes].view(tensor.dtype) for copy in self._exchange(named, tensor)]
        wide = torch.stack([part.to(torch.float32 if tensor.is_floating_point() else torch.int64) for part in parts])
        if reduction.name in ("max", "min"):
            return getattr(wide, f"a{reduction.name}")(0).to(tensor.dtype)  # type: ignore[no-any-return]
        total = wide.sum(0)
        if reduction.name == "avg":
            total = total / self._world_size
        return (total * reduction.factor if reduction.name == "premul_sum" else total).to(tensor.dtype)

    def all_reduce(self, tensor: torch.Tensor, *, reduction: Reduction = SUM) -> None:
        self._check(tensor, tensor)
        tensor.view(-1).copy_(self._reduced(f"all_reduce {tensor.nbytes}", tensor, reduction))

    def reduce(self, tensor: torch.Tensor, dst: int, *, reduction: Reduction = SUM) -> None:
        self._check(tensor, tensor, root=dst)
        total = self._reduced(f"reduce {tensor.nbytes} {dst}", tensor, reduction)
        if self._rank == dst:
            tensor.view(-1).copy_(total)

    def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor, *, reduction: Reduction = SUM) -> None:
        self._check(output, input, self._world_size)
        total = self._reduced(f"reduce_scatter {input.nbytes}", input, reduction)
        output.view(-1).copy_(total.view(self._world_size, -1)[self._rank])

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self._check(tensor, tensor, root=src)
        seen = self._exchange(f"broadcast {tensor.nbytes} {src}", tensor if self._rank == src else None)
        tensor.view(-1).copy_(seen[src][: tensor.nbytes].view(tensor.dtype))

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self._check(output, input, 1, self._world_size)
        seen = self._exchange(f"all_gather {input.nbytes}", input)
        output.view(-1).copy_(torch.cat([copy[: input.nbytes].view(input.dtype) for copy in seen]))

    def gather(self, tensor: torch.Tensor, output: torch.Tensor | None, dst: int) -> None:
        self._check(tensor, tensor, root=dst)
        if self._rank == dst:
            self._check(require_parts(output, "gathers", dst, self._world_size), tensor, 1, self._world_size)
        seen = self._exchange(f"gather {tensor.nbytes} {dst}", tensor)
        if output is not None:
            output.view(-1).copy_(torch.cat([copy[: tensor.nbytes].view(tensor.dtype) for copy in seen]))

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None, src: int) -> None:
        self._check(output, output, root=src)
        if self._rank == src:
            self._check(output, require_parts(input, "scatters", src, self._world_size), self._world_size)
        seen = self._exchange(f"scatter {output.nbytes} {src}", input)
        output.view(-1).copy_(seen[src][self._rank * output.nbytes :][: output.nbytes].view(output.dtype))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
    ) -> None:
        even = output_split_sizes is None and input_split_sizes is None
        self._check(output, input) if even else require_contiguous(output, input)
        part_bytes(output, output_split_sizes, self._world_size)
        lengths = torch.tensor(part_bytes(input, input_split_sizes, self._world_size), dtype=torch.int64)
        packed = torch.cat([lengths.view(torch.uint8), input.contiguous().view(-1).view(torch.uint8)])
        seen = self._exchange(f"all_to_all {input.nbytes}" if even else "uneven_all_to_all", packed)
        parts = []
        for copy in seen:
            sizes = copy[: 8 * self._world_size].view(torch.int64)
            begin = 8 * self._world_size + int(sizes[: self._rank].sum())
            parts.append(copy[begin : begin + int(sizes[self._rank])])
        output.view(-1).copy_(torch.cat(parts).view(output.dtype))

    def all_gather_parts(self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int]) -> None:
        parts = part_bytes(output, sizes, self._world_size)
        require_part(input, output, sizes[self._rank])
        seen = self._exchange(f"all_gather_parts {parts}", input)
        output.view(-1).copy_(torch.cat([copy[:nbytes].view(input.dtype) for copy, nbytes in zip(seen, parts, strict=True)]))

    def reduce_scatter_parts(self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int], *, reduction: Reduction = SUM) -> None:
        require_part(output, input, sizes[self._rank])
        total = self._reduced(f"reduce_scatter_parts {part_bytes(input, sizes, self._world_size)}", input, reduction)
        output.view(-1).copy_(total.view(input.shape).split(list(sizes))[self._rank].reshape(-1))

    def close(self) -> None:
        """All ranks are done: a later group of this name begins anew."""
        self.closed = True
        self._path.unlink(missing_ok=True)


class FileMessages:
    """Messages between processes as files: one each, named by its ends, label, size and number."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._numbers: Counter[tuple[int, bool, tuple[int, int]]] = Counter()

    def start(self, transfers: Sequence[Transfer]) -> None:
        for transfer in sorted(transfers, key=lambda transfer: transfer.receives):
            same = (transfer.peer, transfer.receives, transfer.key)
            ends = (transfer.peer, self._rank) if transfer.receives else (self._rank, transfer.peer)
            path = self._folder / "-".join(map(str, (*ends, *transfer.key, self._numbers[same])))
            self._numbers[same] += 1
            memory = (ctypes.c_char * transfer.nbytes).from_address(transfer.address) if transfer.nbytes else bytearray()
            if not transfer.receives:
                path.with_suffix(".part").write_bytes(bytes(memory))
                path.with_suffix(".part").rename(path)
                continue
            end = time.monotonic() + WAIT_S
            while not path.exists():
                if time.monotonic() > end:
                    raise DeviceTimeout(f"rank {self._rank} waited {WAIT_S} s for {path.name}")
                time.sleep(0.001)
            memory[:] = path.read_bytes()


class ThreadWork(FinishedWork):
    """A call in the lane's thread."""

    def __init__(self, future: Future[None], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._future = future

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self.finish()
        if self.span is not None:
            self.span.result()
        return True

    def finish(self) -> None:
        self._future.result(2 * WAIT_S)

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        return super().get_future()


def _as_a_kernel(call: Callable[[], None]) -> None:
    """Like a kernel, ``call`` writes Parameters and inference tensors too."""
    with torch.inference_mode():
        call()


class ThreadLane:
    """One thread in the place of a GPU's streams."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.lock = threading.RLock()
        self._last: list[Any] = []
        self._beside = ThreadPoolExecutor(32)
        self._ends: dict[Hashable, Future[None]] = {}
        self.batches: list[int] = []
        """how many tensors each call beside this order had"""
        self.captured = 0
        """the capture that the caller is in"""

    def run(self, call: Callable[[], None], tensors: Sequence[torch.Tensor], *, asynchronous: bool) -> dist.Work:
        self.synchronize() if not asynchronous else None
        work = ThreadWork(self._thread.submit(_as_a_kernel, call), tensors)
        if not asynchronous:
            work.wait()
        self._last.append(work)
        return work

    def run_beside(
        self, call: Callable[[], None], tensors: Sequence[torch.Tensor], keys: Sequence[Hashable], points: Sequence[Any] = ()
    ) -> dist.Work:
        self.synchronize()
        self.batches.append(len(tensors))
        before = [self._ends[key] for key in keys if key in self._ends]

        def run() -> None:
            for future in before:
                future.result(2 * WAIT_S)
            _as_a_kernel(call)

        future = self._beside.submit(run)
        self._ends |= dict.fromkeys(keys, future)
        return ThreadWork(future, tensors)

    def before_child(self) -> None:
        self.synchronize()

    def after_child(self, child: object, work: dist.Work | None) -> None:
        if work is not None:
            work.wait()

    def point(self) -> tuple[int, Any]:
        return 0, None

    def capture(self, stream: int | None = None) -> int:
        return self.captured

    def synchronize(self) -> None:
        last, self._last = self._last, []
        for work in last:
            work.wait()


class StandInProvider:
    """Serves CPU tensors. ``broken_ranks`` can not open the kit. ``messages``: serves those too."""

    device_type = "cpu"

    def __init__(self, folder: Path, broken_ranks: Sequence[int] = (), *, messages: bool = False) -> None:
        self._folder, self._broken_ranks, self._messages = folder, broken_ranks, messages
        self._lane: ThreadLane | None = None
        self.opened: dict[str, SharedMemoryKit] = {}

    def open(self, group: dist.ProcessGroup, device: torch.device) -> SharedMemoryKit:
        if group.rank() in self._broken_ranks:
            raise DeviceError("no such memory")
        kit = SharedMemoryKit(self._folder / f"group-{group.common_name}", group.rank(), group.size())
        self.opened[group.group_name] = kit
        return kit

    def serves_messages(self, seats: Sequence[Seat]) -> bool:
        return self._messages

    def messages(self, group: dist.ProcessGroup, device: torch.device) -> FileMessages:
        folder = self._folder / f"messages-{group.common_name}"
        folder.mkdir(exist_ok=True)
        return FileMessages(folder, group.rank())

    def close(self, group: dist.ProcessGroup) -> None:
        self.opened[group.group_name].close()

    def device_of(self, group: dist.ProcessGroup) -> torch.device | None:
        return torch.device("cpu") if group.group_name in self.opened else None

    def lane(self, device: torch.device) -> ThreadLane:
        self._lane = self._lane or ThreadLane()  # not before the fork
        return self._lane


@contextlib.contextmanager
def provided(provider: StandInProvider) -> Iterator[None]:
    """Groups that are made meanwhile get this provider's kit."""
    before = routing.use_provider(provider)
    try:
        yield
    finally:
        routing.use_provider(before)


@contextlib.contextmanager
def ranks_with_the_kit(count: int, **options: Any) -> Iterator[RankPool]:
    """Ranks of the backend whose kit is a stand-in."""
    with tempfile.TemporaryDirectory() as folder:
        with provided(StandInProvider(Path(folder), **options)):
            pool = RankPool(count, "peerlane")
        with pool:
            yield pool
