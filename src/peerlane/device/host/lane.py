"""The order in which kernels that wait for other ranks run on a GPU, whatever streams of this process they come from.

Such a kernel holds its SMs while it waits. Two of them side by side can each hold what the other one needs, on different ranks. So all of a
process's kernels with an arena, those of operators and those of the backend, form one lane: each starts when the one before it has ended.

As long as they come from one stream, that stream is the lane, and a launch pays a comparison. From the second stream on every launch
records an event, and one that follows on another stream waits for it, until many in a row have come from one stream. A graph that is being
captured is a lane of its own: nothing in it waits for what was called outside. A replay is ordered by its stream alone.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from peerlane.device.host import cuda_bindings
from peerlane.errors import DeviceError

ONE_AGAIN = 32
"""Launches in a row from one stream, behind which it counts as the only one again."""


class Lane:
    """The lane of one GPU in this process. ``lock`` is held from the moment that a launch gets its place until it is launched."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.switches = 0
        """how often a kernel had to wait for one of another stream"""
        self._last: int | None = None
        """the stream of the last kernel"""
        self._event: Any = None
        """behind the last kernel, while there are several streams; one for all times"""
        self._several = False
        self._in_a_row = 0
        """launches from one stream behind the last change"""
        self._captured: tuple[int, int] = 0, 0
        """capture and stream of the last captured kernel"""
        self._others: dict[int, tuple[Callable[[], object], int]] = {}
        """the last call of each of another library's groups, whose calls are ordered among themselves; and its capture"""

    def run(self, stream: int, launch: Callable[[], Any]) -> Any:
        """What ``launch`` returns, which puts one kernel on the raw ``stream``."""
        with self.lock:
            if stream == self._last and not self._several and not self._others:
                return launch()
            capture = self.follow(stream)
            result = launch()
            self.note(stream, capture)
            return result

    def follow(self, stream: int) -> int:
        """Make ``stream`` wait for everything in the lane; returns the number of its capture, 0 outside of captures."""
        capture = capture_of(stream)
        self.follow_others(capture, stream)
        if capture:
            known, last = self._captured
            if known != capture and self._last is not None and capture_of(self._last) == capture:
                known, last = capture, self._last  # captured on the stream of the kernels before it, which took the short way
            if known == capture and last != stream:
                self._wait(stream, self._record(_event(), last))
        elif self._last is not None and self._last != stream:
            if not self._several:
                self._several, self._event = True, self._event or _event()
                self._record(self._event, self._last)
            self._wait(stream, self._event)
        return capture

    def note(self, stream: int, capture: int) -> None:
        """The last thing in the lane is what was put on ``stream`` last."""
        if capture:
            self._captured = capture, stream
            return
        self._in_a_row = self._in_a_row + 1 if stream == self._last else 0
        self._last = stream
        self._several = self._several and self._in_a_row < ONE_AGAIN
        if self._several:
            self._record(self._event, stream)

    def note_other(self, key: int, wait: Callable[[], object], capture: int) -> None:
        """Another library has started something in the lane. ``wait`` makes PyTorch's current stream wait for its end."""
        self._others[key] = wait, capture

    def follow_others(self, capture: int | None = None, stream: int | None = None) -> None:
        """Make ``stream``, or the current one, wait for what other libraries have started. ``capture``: its own, if it is known."""
        if not self._others:
            return
        current = torch.cuda.current_stream().cuda_stream
        capture = capture_of(current if stream is None else stream) if capture is None else capture
        with self.lock:
            waits = [wait for wait, known in self._others.values() if known == capture]
            self._others.clear()
        if stream is None or stream == current:
            for wait in waits:
                wait()
            return
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):  # type: ignore[no-untyped-call, unused-ignore]
            for wait in waits:
                wait()

    def _record(self, event: Any, stream: int) -> Any:
        _check(cuda_bindings.driver().cuEventRecord(event, stream))
        return event

    def _wait(self, stream: int, event: Any) -> None:
        self.switches += 1
        _check(cuda_bindings.driver().cuStreamWaitEvent(stream, event, 0))


_lanes: dict[torch.device, Lane] = {}


def lane_of(device: torch.device) -> Lane:
    """The one lane of a GPU in this process."""
    return _lanes.setdefault(device, Lane())


def capture_of(stream: int) -> int:
    """The number of the capture that the raw ``stream`` is in; 0 outside of captures."""
    status, state, capture, *_ = cuda_bindings.driver().cuStreamGetCaptureInfo(stream)
    return 0 if status or not int(state) else int(capture)


def _event() -> Any:
    driver = cuda_bindings.driver()
    status, event = driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    _check((status,))
    return event


def _check(result: tuple[Any, ...]) -> None:
    if result[0]:
        raise DeviceError(f"a stream can not wait for another one: {cuda_bindings.describe(result[0])}")
