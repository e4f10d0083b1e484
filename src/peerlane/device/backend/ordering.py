"""The order in which the collectives of a process run on its GPU, and what their callers wait for.

Kernels of the kit wait for other ranks while they hold their SMs. Two such kernels side by side can each hold what the other one needs, so
all collectives of a process form one lane, in the order of their calls, with the kernels of operators (``host/lane.py``). Like in PyTorch's
NCCL backend, a blocking call runs on the caller's stream and an asynchronous one on a stream of the backend's own.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from peerlane.device.host.lane import capture_of, lane_of

NO_TIMEOUT = timedelta(0)
_SIDE_STREAMS = 32
"""Streams for calls outside of the lane: as many different ones as PyTorch has. A call waits for the one that many calls before it."""
_MOST_ENDS = 256


class FinishedWork(Work):
    """A call that is already ordered before whatever its caller does next. ``check`` raises if its group has stopped."""

    check: Callable[[], None] | None = None
    span: Future[None] | None = None
    """Done when a profiler has seen the end of the call."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if self.check is not None:
            self.check()
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def finish(self) -> None:
        """Returns when the call has ended on the device too."""

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        devices: list[Any] = sorted({tensor.device for tensor in self._tensors if tensor.is_cuda}, key=str)
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        future.set_result(self._tensors)
        return future


class StreamWork(FinishedWork):
    """A call that runs on ``stream`` until ``end``. ``wait`` makes the caller's stream wait, not the host. ``spare`` gets ``end``
    when nobody can wait for it any more.

    It holds the call's tensors, as NCCL's work does, so that their memory is not used again too early. One that is dropped before a stream
    has waited for it has the allocator look after them, which costs more and keeps memory for longer."""

    _waited = False

    def __init__(
        self,
        stream: torch.cuda.Stream,
        end: torch.cuda.Event,
        tensors: Sequence[torch.Tensor],
        spare: "deque[torch.cuda.Event] | None" = None,
    ) -> None:
        super().__init__(tensors)
        self._stream, self._end, self._spare = stream, end, spare

    def __del__(self) -> None:
        if self._spare is not None:
            self._spare.append(self._end)
        if not self._waited:
            for tensor in self._tensors:
                tensor.record_stream(self._stream)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        _current(self._stream.device_index).wait_event(self._end)
        self._waited = True
        return super().wait(timeout)

    def finish(self) -> None:
        self._end.synchronize()

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._end.query())  # type: ignore[no-untyped-call]

    def get_future(self) -> torch.futures.Future[Any]:
        with torch.cuda.stream(self._stream):
            return super().get_future()


class JointWork(FinishedWork):
    """Several calls; waiting for it is waiting for all of them."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self.works = list(works)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        for work in self.works:
            work.wait(timeout)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def finish(self) -> None:
        for work in self.works:
            getattr(work, "finish", work.wait)()

    def is_success(self) -> bool:
        return all(work.is_success() for work in self.works)

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self.works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[Any]:
        every = torch.futures.collect_all([work.get_future() for work in self.works])
        return every.then(lambda futures: [tensor for future in futures.value() for tensor in future.value()])


_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def _current(device: int) -> torch.cuda.Stream:
    """Returns the caller's stream on a GPU. What torch has for this makes a new object and takes ten times as long."""
    key = torch._C._cuda_getCurrentStream(device)
    stream = _streams.get(key)
    if stream is None:
        if len(_streams) == _MOST_ENDS:
            _streams.clear()
        stream = _streams[key] = torch.cuda.Stream(stream_id=key[0], device_index=key[1], device_type=key[2])  # type: ignore[no-untyped-call]
    return stream


def _enter(stream: torch.cuda.Stream) -> None:
    """Makes a stream of the current device the current one of this thread."""
    torch._C._cuda_setStream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


class CudaLane:
    """The order of the collectives of this process on one GPU: its part of the lane that all kernels with an arena take.

    A graph that is being captured is an order of its own: nothing in it waits for what was called outside, which has ended by then.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lane = lane_of(device)
        self.lock = self._lane.lock
        """Held from ``before_child`` to ``after_child``, so that no kernel of the kit comes between."""
        self._side: torch.cuda.Stream | None = None
        self._point: Any = None
        """behind what the caller's stream had at the last asynchronous call; one event for all times"""
        self._spare: deque[torch.cuda.Event] = deque(maxlen=_MOST_ENDS)
        """events of works that are gone: a new one costs as much as a launch"""
        self._beside: list[torch.cuda.Stream] = []
        self._turn = 0
        self._ends: dict[Hashable, tuple[torch.cuda.Event, int]] = {}
        """The last call beside the lane with each key: its end, and the capture that it is in."""

    def run(self, call: Callable[[], None], tensors: Sequence[torch.Tensor], *, asynchronous: bool) -> Work:
        """Starts ``call``, which reads and writes ``tensors``, behind everything that ran here before."""
        current_device = torch.cuda.current_device()
        if self.device.index not in (None, current_device):  # rare, and a context costs as much as a launch
            with torch.cuda.device(self.device):
                return self.run(call, tensors, asynchronous=asynchronous)
        # Without the lock: ``call`` takes that of its group first, as operators do.
        # On the caller's stream: works of other libraries release their tensors once a stream has waited, and here they are reused.
        self._lane.follow_others()
        if not asynchronous:
            call()
            return FinishedWork(tensors)
        if self._side is None:
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side, current = self._side, _current(current_device)
        with self.lock:  # another thread may record the same event
            self._point = current.record_event(self._point)
            side.wait_event(self._point)
            end = self._spare.pop() if self._spare else None
        _enter(side)  # torch's context asks for the current stream twice more
        try:
            call()
        finally:
            _enter(current)
        return StreamWork(side, side.record_event(end), tensors, self._spare)

    def run_beside(
        self, call: Callable[[], None], tensors: Sequence[torch.Tensor], keys: Sequence[Hashable], points: Sequence[Any] = ()
    ) -> Work:
        """Starts ``call`` outside of this order, behind ``points``, or else what the caller's stream has now, and earlier calls with one
        of ``keys``."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            capture = capture_of(current.cuda_stream)
            with self.lock:
                if len(self._beside) < _SIDE_STREAMS:
                    self._beside.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
                self._turn = (self._turn + 1) % len(self._beside)
                side = self._beside[self._turn]
                for point in points or (current.record_event(),):
                    side.wait_event(point)
                for key in keys:
                    before, known = self._ends.get(key, (None, 0))
                    if before is not None and known == capture:
                        side.wait_event(before)
                with torch.cuda.stream(side):
                    call()
                    end = side.record_event()
                if not capture and len(self._ends) > _MOST_ENDS:  # tags may count up
                    self._ends = {key: (known, 0) for key, (known, within) in self._ends.items() if not within and not known.query()}  # type: ignore[no-untyped-call]
                self._ends |= dict.fromkeys(keys, (end, capture))
            return StreamWork(side, end, tensors)

    def before_child(self) -> None:
        """Orders a collective of another library, which follows, by the caller's stream."""
        with torch.cuda.device(self.device), self.lock:
            self._lane.follow(torch.cuda.current_stream().cuda_stream)

    def after_child(self, child: object, work: Work | None) -> None:
        """Records the collective that ``child`` has started. ``work`` stands for its end; None if it runs on the caller's stream."""
        with torch.cuda.device(self.device), self.lock:
            stream = torch.cuda.current_stream().cuda_stream
            if work is None:
                self._lane.note(stream, capture_of(stream))
            else:
                self._lane.note_other(id(child), work.wait, capture_of(stream))

    def point(self) -> tuple[int, Any]:
        """Returns the caller's stream, and a point behind what it has now."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            return current.cuda_stream, current.record_event()

    def capture(self, stream: int | None = None) -> int:
        """Returns the number of the graph capture that ``stream``, or else the caller's, is in; 0 outside of captures."""
        with torch.cuda.device(self.device):
            return capture_of(torch.cuda.current_stream().cuda_stream if stream is None else stream)

    def synchronize(self) -> None:
        """Returns when everything that ran here and on the caller's stream has ended."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            with self.lock:
                self._lane.follow(current.cuda_stream)
            current.synchronize()
