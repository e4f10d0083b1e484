"""Messages of a graph that is being captured: they are gathered, and launched together when the first of them is waited for.

A long send waits on the device for its receive. Branches of a graph share few hardware queues. Sends that are kernels of their own can
therefore keep the receives from starting, on every rank. Inside one kernel the blocks of sends and receives are resident together.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from peerlane.device.backend.ordering import NO_TIMEOUT, CudaLane, FinishedWork
from peerlane.device.collectives.point_to_point import MOST_TRANSFERS, Transfer
from peerlane.errors import UsageError

Start = Callable[[Sequence[Transfer], Sequence[torch.Tensor], Sequence[Any]], Work]
"""Launches messages of these tensors behind these points of streams."""
NOT_WAITED_FOR = (
    "a captured graph lacks messages ({count}): nothing waited for them before its capture ended or failed; "
    "do not replay it, and call wait() on the work of every isend and irecv inside the capture"
)


@dataclass(eq=False)
class _Gathered:
    """Messages of one capture and group. ``work`` stands for their launch."""

    start: Start
    transfers: list[Transfer] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    points: dict[int, Any] = field(default_factory=dict)
    """by stream: behind the last call from there"""
    work: Work | None = None


class CapturedMessages:
    """The messages of one lane that are gathered now, by the number of their capture."""

    def __init__(self, lane: CudaLane) -> None:
        self._lane = lane
        self._lock = threading.RLock()
        self._gathered: dict[int, _Gathered] = {}

    def add(self, transfer: Transfer, tensor: torch.Tensor, start: Start) -> Work:
        """Keeps a message for the next launch by ``start``; the caller's stream is captured."""
        with self._lock:
            self.check()
            capture = self._lane.capture()
            gathered = self._gathered.get(capture)
            if gathered is not None and (gathered.start != start or len(gathered.transfers) == MOST_TRANSFERS):
                self.launch()
                gathered = None
            if gathered is None:
                gathered = self._gathered[capture] = _Gathered(start)
            stream, point = self._lane.point()
            gathered.transfers.append(transfer)
            gathered.tensors.append(tensor)
            gathered.points[stream] = point
            return _CapturedWork(self, gathered, tensor)

    def launch(self) -> None:
        """Launches the messages of the caller's capture. Raises UsageError if another capture has ended with messages left."""
        if not self._gathered:
            return
        with self._lock:
            self.check()
            gathered = self._gathered.pop(self._lane.capture(), None)
            if gathered is not None:
                gathered.work = gathered.start(gathered.transfers, gathered.tensors, list(gathered.points.values()))

    def check(self) -> None:
        """Forgets the messages of captures that have ended, and raises UsageError if there are any."""
        ended = [
            capture
            for capture, gathered in self._gathered.items()
            if all(self._lane.capture(stream) != capture for stream in gathered.points)
        ]
        lost = sum(len(self._gathered.pop(capture).transfers) for capture in ended)
        if lost:
            raise UsageError(NOT_WAITED_FOR.format(count=lost))


class _CapturedWork(FinishedWork):
    """A message that may not be launched yet."""

    def __init__(self, messages: CapturedMessages, gathered: _Gathered, tensor: torch.Tensor) -> None:
        super().__init__([tensor])
        self._messages, self._gathered = messages, gathered

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if self._gathered.work is None:
            self._messages.launch()
        if self._gathered.work is None:
            raise UsageError(NOT_WAITED_FOR.format(count=len(self._gathered.transfers)))
        return self._gathered.work.wait(timeout)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._gathered.work is not None and self._gathered.work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        return super().get_future()


_of_lanes: dict[CudaLane, CapturedMessages] = {}


def captured_messages(lane: CudaLane) -> CapturedMessages:
    """Returns the gathered messages of ``lane``."""
    if lane not in _of_lanes:
        _of_lanes[lane] = CapturedMessages(lane)
    return _of_lanes[lane]


def check_captured_messages() -> None:
    """Raises UsageError if a capture has ended while messages in it were not waited for. It raises once, and nothing is left behind.

    A program that goes on after a failed capture calls this, and ignores the error: else its next call of the backend raises it.
    """
    for messages in _of_lanes.values():
        messages.check()
